"""A server with KV tiers: restarts, sessions, metrics, and tiers that cannot be used."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cli import invoke
from support.serving import Running, byte_ids, eventually, serving, write_byte_model
from tamis.engine.async_engine import AsyncEngine
from tamis.engine.llm import LLM
from tamis.errors import ConfigError
from tamis.server.config import ServerConfig

DOCUMENT = "".join(f"Line {number} of the report says {number * 37 % 101}.\n" for number in range(200))
QUESTION = f"{DOCUMENT}What does line 7 say?"
OTHER = f"Another report altogether.\n{QUESTION}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("model"), context=8192, num_hidden_layers=4, hidden_size=32,
                            num_attention_heads=4)  # fmt: skip


@contextmanager
def served(model: Path, *tiers: str, keys: tuple[str, ...] = (), **options: Any) -> Iterator[Running]:
    engine = AsyncEngine(model, kv_budget="16MiB", kv_tiers=list(tiers), threads=1, **options)
    with serving(engine, ServerConfig(port=0, api_keys=keys, drain=20)) as running:
        yield running


def ask(server: Running, prompt: str, **fields: Any) -> tuple[str, int, float]:
    """The reply, how many of the prompt's tokens were cached, and the seconds to its only token."""
    began = time.perf_counter()
    with server.http() as client:
        reply = client.post("/v1/completions", json={
            "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields})  # fmt: skip
    assert reply.status_code == 200, reply.text
    body = reply.json()
    return (
        body["choices"][0]["text"],
        body["usage"]["prompt_tokens_details"]["cached_tokens"],
        time.perf_counter() - began,
    )


def metric(server: Running, name: str) -> float:
    """The sum over all labels."""
    with server.http() as client:
        text = client.get("/metrics").text
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert found, f"no metric {name}"
    return sum(map(float, found))


def test_a_long_document_survives_a_restart(model: Path, tmp_path: Path) -> None:
    """The answer is the cold run's; time to the first token falls; a document that begins otherwise gains nothing."""
    tier = f"disk:{tmp_path}?size=1GiB"
    tokens = len(byte_ids(QUESTION))
    assert tokens > 6000
    with served(model, tier) as server:
        ask(server, "warm up")
        cold, cached, _ = ask(server, QUESTION)
        assert cached == 0
        _, _, cold_seconds = ask(server, f"Cold. {QUESTION}", max_tokens=1)
    with served(model, tier) as server:
        ask(server, "warm up")
        _, cached, warm_seconds = ask(server, QUESTION, max_tokens=1)
        assert cached == (tokens - 1) // 32 * 32
        assert metric(server, "tamis_kv_tier_loaded_tokens_total") == cached
        assert metric(server, "tamis_kv_tier_failures_total") == 0
        assert ask(server, QUESTION)[0] == cold
        _, cached, control_seconds = ask(server, OTHER, max_tokens=1)
        assert cached == 0
    print(
        f"time to first token: cold {cold_seconds:.3f} s, from disk {warm_seconds:.3f} s, other {control_seconds:.3f}"
    )
    assert warm_seconds * 5 < min(cold_seconds, control_seconds)


def test_named_sessions_over_http(model: Path, tmp_path: Path) -> None:
    tier = f"disk:{tmp_path}?size=1GiB"
    with served(model, "host:8MiB", tier, keys=("one", "two")) as server:
        mine = {"Authorization": "Bearer one"}
        with server.http(headers=mine) as client, server.http(headers={"Authorization": "Bearer two"}) as other:
            kept = client.post("/v1/kv/sessions/report", json={"prompt": DOCUMENT[:2000]})
            pages = len(byte_ids(DOCUMENT[:2000])) // 32
            assert kept.status_code == 200, kept.text
            assert kept.json() == {
                "name": "report", "tokens": pages * 32, "pages": pages, "bytes": kept.json()["bytes"]
            }  # fmt: skip
            chat = {"messages": [{"role": "user", "content": "A" * 100}]}
            reply = client.post("/v1/chat/completions", json={**chat, "max_tokens": 70, "ignore_eos": True})
            asked = client.post(
                "/v1/kv/sessions/chat.1", json={"request_id": reply.headers["x-request-id"]}
            )  # fmt: skip
            total = reply.json()["usage"]["total_tokens"]
            assert asked.json()["tokens"] == total // 32 * 32
            assert client.post("/v1/kv/sessions/chat.2", json=chat).json()["tokens"] == 96
            names = [session["name"] for session in client.get("/v1/kv/sessions").json()["data"]]
            assert names == ["chat.1", "chat.2", "report"]
            assert other.get("/v1/kv/sessions").json()["data"] == []
            assert other.delete("/v1/kv/sessions/report").status_code == 404
            unknown = other.post("/v1/kv/sessions/x", json={"request_id": reply.headers["x-request-id"]})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")
            assert metric_of(client, "tamis_kv_tier_pinned", tier="disk") >= pages
            assert client.delete("/v1/kv/sessions/chat.1").json() == {"name": "chat.1", "deleted": True}
    with served(model, tier, keys=("one",)) as server, server.http(headers=mine) as client:
        names = [session["name"] for session in client.get("/v1/kv/sessions").json()["data"]]
        assert names == ["chat.2", "report"]


def test_a_request_that_filled_the_context_can_be_kept(tmp_path: Path) -> None:
    model = write_byte_model(tmp_path, context=128, num_hidden_layers=1, hidden_size=32, num_attention_heads=4)
    with served(model, "host:8MiB") as server, server.http() as client:
        reply = client.post("/v1/completions", json={"prompt": "A" * 100, "max_tokens": 100, "ignore_eos": True})
        assert reply.json()["usage"]["total_tokens"] == 128
        kept = client.post("/v1/kv/sessions/all", json={"request_id": reply.headers["x-request-id"]})
        assert (kept.status_code, kept.json().get("tokens")) == (200, 96)


def metric_of(client: httpx.Client, name: str, *, tier: str) -> float:
    text = client.get("/metrics").text
    (found,) = re.findall(rf'^{name}\{{tier="{tier}[^"]*"\}} (\S+)$', text, re.MULTILINE)
    return float(found)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give one of prompt, messages and request_id"),
        ({"prompt": "a", "request_id": "b"}, "give one of prompt, messages and request_id"),
        ({"request_id": "b", "cache_salt": "c"}, "cache_salt cannot be given with request_id, which has its own"),
        ({"request_id": "b"}, "request_id='b' is none of the last requests'"),
        ({"prompt": "a"}, "session 'x': the prompt has 1 tokens, less than a page of 32"),
    ],
)
def test_what_cannot_be_kept_is_refused(host: Running, body: dict[str, Any], message: str) -> None:
    with host.http() as client:
        reply = client.post("/v1/kv/sessions/x", json=body)
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["message"] == message


@pytest.fixture(scope="module")
def host(model: Path) -> Iterator[Running]:
    with served(model, "host:8MiB") as running:
        yield running


def test_host_memory_serves_what_the_pool_has_evicted(model: Path) -> None:
    engine = AsyncEngine(model, kv_budget="2MiB", kv_tiers=["host:64MiB"], threads=1)
    with serving(engine) as server:
        text = DOCUMENT[:1000]
        cold, _, _ = ask(server, text)
        for seed in range(6):
            ask(server, f"{seed}{DOCUMENT[:1500]}")
        eventually(lambda: metric(server, "tamis_kv_tier_waiting_pages") == 0)
        again, cached, _ = ask(server, text)
        assert (again, cached) == (cold, 992)
        assert metric(server, "tamis_kv_tier_loads_total") >= 1


def test_a_tier_that_cannot_be_used_is_an_error_or_if_optional_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    tier = f"disk:{blocked}/kv?size=1GiB"
    with pytest.raises(ConfigError, match=str(blocked)):
        LLM(model, kv_tiers=[tier], kv_budget="1MiB")
    with LLM(model, kv_tiers=[tier], kv_tiers_optional=True, kv_budget="1MiB", threads=1) as llm:
        assert llm.stats.offload is None
    assert any(str(blocked) in record.message for record in caplog.records)
    result = invoke("serve", str(model), "--port", "0", "--kv-tier", tier, "--kv-budget", "1MiB")
    assert result.code == 2
    assert str(blocked) in result.err


def test_write_through_reaches_the_disk_before_the_request_ends(model: Path, tmp_path: Path) -> None:
    tier = f"disk:{tmp_path}?size=1GiB"
    with LLM(model, kv_tiers=[tier], kv_write_through=True, kv_budget="4MiB", threads=1) as llm:
        for event in llm.stream(byte_ids(DOCUMENT[:700]), llm.default_sampling(max_tokens=400, ignore_eos=True)):
            assert event.finish_reason is None, "the reply was over before anything was written"
            if llm.stats.offload is not None and llm.stats.offload.saved_pages > 20:
                break
