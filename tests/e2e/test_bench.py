"""`tamis bench` against a server over a tiny model."""

import json
from collections.abc import Iterator

import pytest

from support.cli import invoke
from support.serving import Running, serving, write_byte_model
from tamis.engine.async_engine import AsyncEngine
from tamis.server.config import ServerConfig

SMALL = ["--clients", "3", "--requests", "6", "--prompt-tokens", "120", "--max-tokens", "6", "--quiet"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = AsyncEngine(write_byte_model(tmp_path_factory.mktemp("model")), kv_budget="8MiB", kernels="reference")
    with serving(engine, ServerConfig(port=0, drain=10, api_keys=("secret",))) as running:
        yield running


def test_a_server_is_measured(server: Running) -> None:
    result = invoke("bench", "--url", server.url, "--api-key", "secret", *SMALL, "--spread", "0", "--json")
    assert (result.code, result.err) == (0, "")
    facts = json.loads(result.out)
    assert (facts["requests"], facts["failed"], facts["errors"]) == (6, 0, {})
    assert facts["output_tokens"] == 36, "replies have just the length that was asked for"
    assert 6 * 100 < facts["prompt_tokens"] < 6 * 140
    assert facts["output_tokens_per_second"] == pytest.approx(36 / facts["seconds"])
    assert 0 < facts["first_token"]["p50"] <= facts["request"]["p50"] <= facts["request"]["max"] <= facts["seconds"]


def test_a_shared_prefix_is_seen_in_the_cached_tokens(server: Running) -> None:
    arguments = ["--url", server.url, "--api-key", "secret", *SMALL, "--prefix-tokens", "100", "--seed", "5", "--json"]
    assert json.loads(invoke("bench", *arguments).out)["cached_tokens"] >= 3 * 64


def test_the_table_says_what_was_measured(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMIS_API_KEY", "secret")
    out = invoke("bench", "--url", f"{server.url}/v1", *SMALL).out
    for words in ("3 clients", "to the first token", "between tokens", "p95", "6 of 6 requests", "output tokens/s"):
        assert words in out


def test_refused_requests_are_counted_and_the_exit_code_says_so(server: Running) -> None:
    too_long = ["--prompt-tokens", "3000", "--spread", "0", "--model", "tiny"]
    result = invoke("bench", "--url", server.url, "--api-key", "secret", *SMALL, *too_long)
    assert result.code == 2
    assert "0 of 6 requests" in result.out
    assert "times: 400 the prompt has " in result.out


def test_a_wrong_key_is_one_line(server: Running) -> None:
    result = invoke("bench", "--url", server.url, "--api-key", "guess", *SMALL)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {server.url} answers 401: ")
