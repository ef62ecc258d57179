"""The command as a process of its own, with the built-in model."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.cli import invoke
from tamis.names import DEFAULT_MODEL

TAMIS = [sys.executable, "-m", "tamis.cli"]
SMALL = ["--kv-budget", "64MiB", "--threads", "1"]
STORY = ["generate", "--prompt", "Tell me a long story about a drum sieve.", "--max-tokens", "600", *SMALL]


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    # A parent that ignores Ctrl-C (nohup, some CI) hands that down to its children; a handler is not handed down.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen([*TAMIS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def drain(descriptor: int, into: list[bytes]) -> None:
    try:
        while block := os.read(descriptor, 4096):
            into.append(block)
    except OSError:  # Linux: the other side of a terminal is gone
        return


def test_the_built_in_model_knows_the_capital_of_france_and_bars_stay_on_the_terminal() -> None:
    ours, theirs = pty.openpty()
    shown: list[bytes] = []
    reader = threading.Thread(target=drain, args=(ours, shown))
    reader.start()
    try:
        result = subprocess.run(
            [*TAMIS, "generate", "--prompt", "What is the capital of France?", "--max-tokens", "32", *SMALL],
            stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=100, check=False,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    screen = b"".join(shown).decode()
    assert result.returncode == 0, screen
    assert "Paris" in result.stdout
    assert "\x1b" not in result.stdout
    assert "\x1b[" in screen
    assert "tokens/s" in screen
    assert "Warning" not in screen


def test_ctrl_c_ends_a_reply_cleanly() -> None:
    with running(*STORY) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert len(first + out) > 1
    assert b"(abort)" in err
    assert b"Traceback" not in err
    assert b"\x1b" not in err


def test_a_reader_that_leaves_ends_the_command_cleanly() -> None:
    with running(*STORY, "--quiet") as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 141, err.decode()
    assert err == b""


def test_generate_as_json() -> None:
    prompt = ["--raw", "--prompt", "One, two, three,", "--max-tokens", "4", "--stop", "six"]
    result = invoke("generate", *prompt, "--kv-budget", "64MiB", "--json", "--logprobs", "2", "--quiet")
    assert (result.code, result.err) == (0, "")
    answer = json.loads(result.out)
    assert answer["text"].startswith(" four")
    assert (answer["finish_reason"], len(answer["token_ids"])) == ("length", 4)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["pool"]["tokens_used"] == answer["usage"]["total_tokens"] - 1
    assert answer["pool"]["bytes_total"] <= 64 * 2**20 < answer["pool"]["bytes_total"] * 1.1
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    best = answer["logprobs"][0]
    assert best["logprob"] == max(best["top"].values())
    assert len(best["top"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "0"], "page_size=0"),
        (["--dtype", "int8"], "dtype='int8'"),
        (["--kv-dtype", "int8"], "kv_dtype='int8'"),
        (["--kv-budget", "lots"], "'lots'"),
        (["--max-batch-tokens", "0"], "max_batch_tokens=0"),
        (["--threads", "0"], "threads=0"),
    ],
)
def test_settings_that_cannot_work_are_one_line(arguments: list[str], message: str) -> None:
    result = invoke("generate", "--prompt", "x", "--quiet", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert message in result.err
    assert result.told.count("\n") == 1


def test_a_broken_model_is_one_line_and_debug_shows_where(tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    result = invoke("generate", str(model), "--prompt", "x")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert "broken.gguf" in result.err
    assert result.told.count("\n") == 1
    assert "Traceback" in invoke("generate", str(model), "--prompt", "x", "--debug").err


def test_inspect_and_plan_know_the_built_in_model() -> None:
    layers = json.loads(invoke("inspect", "smollm2-135m", "--json").out)["layers"]
    assert [layer["kind"] for layer in layers] == ["dense"] * 30
    assert json.loads(invoke("inspect", "--json").out)["model"] == DEFAULT_MODEL
    facts = json.loads(invoke("plan", "smollm2-135m", "--memory", "64MiB", "--json").out)
    assert facts["model"] == "smollm2-135m"
    assert facts["bytes_per_token"]["total"] == 30 * 2 * 3 * 64 * 2
    assert facts["tokens"] == 64 * 2**20 // (32 * 23_040) * 32


def test_pull_names_the_file_that_is_used() -> None:
    result = invoke("pull", "--quiet")
    assert (result.code, result.err) == (0, "")
    path = Path(result.out.strip())
    assert path.is_file()
    assert json.loads(invoke("pull", "--json").out) == {"model": DEFAULT_MODEL, "path": str(path)}
