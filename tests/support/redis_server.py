"""A real redis-server on a port that is free."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis


class RedisServer:
    """A server that keeps nothing on disk; can be stopped and started again on its port."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder, self._options = folder, options
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                   "--dir", str(self._folder), *self._options]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        with redis.Redis(port=self.port) as client:
            while True:
                try:
                    client.ping()
                except redis.RedisError:
                    if time.monotonic() > deadline or self._process.poll() is not None:
                        raise
                    time.sleep(0.01)
                else:
                    return

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside, it takes what is sent and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A running server. Where redis-server is not installed the test is skipped; with TAMIS_NEED_REDIS it fails."""
    if shutil.which("redis-server") is None:
        if os.environ.get("TAMIS_NEED_REDIS"):
            pytest.fail("redis-server is not installed")
        pytest.skip("redis-server is not installed: the Redis tier is not tested")
    server = RedisServer(folder, *options)
    try:
        for attempt in range(3):
            try:
                server.start()
                break
            except redis.RedisError:  # somebody else took the port in between
                server.stop()
                server.port = _free_port()
                if attempt == 2:
                    raise
        yield server
    finally:
        server.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
