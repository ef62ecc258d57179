"""`tamis serve` as a process of its own, with the built-in model."""

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from support.cli import invoke
from support.server_process import running
from support.serving import eventually, write_byte_model
from tamis.engine.memory import resolve_page_size
from tamis.kv import KVLayout
from tamis.models import load_config, resolve
from tamis.names import DEFAULT_MODEL


@pytest.fixture(scope="module")
def builtin() -> Iterator[str]:
    """The URL of a server with the built-in model."""
    with running("--kv-budget", "64MiB", "--quiet") as (_, ready):
        config = load_config(resolve(None))
        kinds = Counter(kind.value for kind in config.layer_kinds)
        assert (ready[1], ready[3]) == (DEFAULT_MODEL, ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
        page_size = resolve_page_size(None, config)
        a_token = KVLayout.from_model(config, page_size=page_size, dtype=torch.bfloat16).bytes_per_token["total"]
        assert int(ready[4].replace(",", "")) == (64 << 20) // (a_token * page_size) * page_size
        yield ready[2]


def test_it_ends_on_sigterm_with_a_log_line_for_each_request(tmp_path: Path) -> None:
    path = write_byte_model(tmp_path / "model")
    with running(str(path), "--kv-budget", "4MiB", "--name", "tiny", env=_environment("k")) as (process, ready):
        assert (ready[1], ready[3]) == ("tiny", "2 dense")
        assert httpx.get(f"{ready[2]}/v1/models").status_code == 401
        headers = {"authorization": "Bearer k", "x-request-id": "mine-1"}
        assert httpx.get(f"{ready[2]}/v1/models", headers=headers).json()["data"][0]["id"] == "tiny"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out == ""
    assert re.search(r"GET /v1/models 401 [\d.]+s req-\w+$", err, re.MULTILINE)
    assert re.search(r"GET /v1/models 200 [\d.]+s mine-1$", err, re.MULTILINE)
    assert re.search(r"stopping$", err.splitlines()[-1])


def test_a_second_ctrl_c_does_not_wait_for_replies(tmp_path: Path) -> None:
    path = write_byte_model(tmp_path / "model", context=200_000)
    body = {"prompt": "x", "max_tokens": 150_000, "ignore_eos": True, "stream": True}
    with running(str(path), "--kv-budget", "64MiB", "--drain", "1000") as (process, ready):
        with httpx.stream("POST", f"{ready[2]}/v1/completions", json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGINT)
            eventually(lambda: _refuses(ready[2]))
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
        assert process.returncode == 0
    told = [line.partition(" WARNING ")[2] for line in err.splitlines() if "stopping" in line]
    assert told == [
        "stopping: waiting for 1 running request, at most 1000 s; Ctrl-C again to stop at once",
        "stopping at once: 1 running request broken off",
    ]


def _refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=5)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it was taken, and dropped when the socket was closed
        return False
    return False


def _environment(key: str) -> dict[str, str]:
    return {**os.environ, "TAMIS_API_KEY": key}


def test_a_port_in_use_is_an_error_in_one_line_before_anything_is_loaded(builtin: str) -> None:
    port = builtin.rpartition(":")[2]
    result = invoke("serve", "nowhere/at-all", "--port", port)
    assert (result.code, result.out) == (2, "")
    assert (
        result.told == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use (--port takes another)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "no such host"], "host='no such host' is not an address of this machine"),
        (["--max-body", "lots"], "size 'lots'"),
        (["--api-key", " "], "API key"),
        (["--cors-origin", "x"], "cors_origin='x'"),
        (["--drain", "-1"], "drain=-1.0"),
        (["--port", "70000"], "port=70000"),
    ],
)
def test_settings_out_of_range_are_one_line(arguments: list[str], words: str) -> None:
    result = invoke("serve", *arguments)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert result.told.count("\n") == 1
