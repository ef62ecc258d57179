"""Servers to be measured, each a process of its own that is gone afterwards."""

import asyncio
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import httpx

from tamis.cli.traffic import Job, Outcome, Target, ask

GREEDY = {"temperature": 0, "ignore_eos": True}
START_S = 300
"""That loading a model may take, kernels compiled for the first time included."""


@contextmanager
def tamis_server(model: Path | None, threads: int, slots: int, options: Sequence[str] = ()) -> Iterator[Target]:
    """`tamis serve` of `model` (None: the built-in one), with room for `slots` replies at once."""
    command = [sys.executable, "-m", "tamis.cli", "serve", *([str(model)] if model else []), "--port", "0", "--quiet",
               "--threads", str(threads), "--max-seqs", str(slots), "--name", "model", *options]  # fmt: skip
    with TemporaryFile() as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            found = re.search(r" at (http://\S+):", ready)
            if found is None:
                raise SystemExit(f"tamis serve did not start: {_end_of(log)}")
            print(ready.strip())
            yield Target(found[1], "model", timeout_s=3600)
        finally:
            process.terminate()


@contextmanager
def llama_server(binary: Path, gguf: Path, threads: int, slots: int, context: int) -> Iterator[tuple[str, Target]]:
    """llama.cpp's server with `slots` slots of `context` tokens each: flash attention on, no unified cache.

    Prompts are not copied to host memory, which would only cost it time here. Where it dies while it loads, it is
    started again without repacked weights, and its name says so.
    """
    for options in ([], ["--no-repack"]):
        port = _free_port()
        command = [str(binary), "-m", str(gguf), "-np", str(slots), "-c", str(slots * context), "-fa", "on",
                   "--no-kv-unified", "--cache-ram", "0", "-t", str(threads), "-tb", str(threads),
                   "--host", "127.0.0.1", "--port", str(port), *options]  # fmt: skip
        with TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                if _answers(process, f"http://127.0.0.1:{port}/health"):
                    yield " ".join(["llama.cpp", *options]), Target(f"http://127.0.0.1:{port}", "model", timeout_s=3600)
                    return
                print(f"llama.cpp's server ended with {process.returncode}: {_end_of(log)}")
            finally:
                process.terminate()
    raise SystemExit(f"{binary} does not start")


def one(target: Target, job: Job) -> Outcome:
    """One request, alone; ends the program where it fails."""

    async def only() -> Outcome:
        async with target.client(1) as client:
            return await ask(client, target.model, job)

    outcome = asyncio.run(only())
    check_replies([outcome], [job])
    return outcome


def check_replies(outcomes: list[Outcome], jobs: list[Job]) -> None:
    """Nothing that is timed may have failed or ended early."""
    for outcome, job in zip(outcomes, jobs, strict=True):
        if outcome.error is not None or outcome.completion_tokens != job.max_tokens:
            raise SystemExit(f"asked for {job.max_tokens} tokens: {outcome.error or outcome.completion_tokens}")


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until the server is ready; False where it ends instead."""
    deadline = time.monotonic() + START_S
    while process.poll() is None:
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return True
        except httpx.TransportError:
            pass  # it does not listen yet
        if time.monotonic() > deadline:
            raise SystemExit(f"{url} was not ready after {START_S} s")
        time.sleep(0.1)
    return False


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _end_of(log: object) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"
