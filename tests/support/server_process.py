"""`tamis serve` as a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SERVE = [sys.executable, "-m", "tamis.cli", "serve", "--port", "0", "--threads", "1"]
READY = re.compile(r"tamis serves (\S+) at (http://127\.0\.0\.1:\d+): layers (.+); ([\d,]+) tokens fit\n")
Command = tuple[subprocess.Popen[str], re.Match[str]]
"""A process and its ready line."""


@contextmanager
def running(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Command]:
    """A server with these arguments once it is ready; killed at the end."""
    process = subprocess.Popen([*SERVE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = READY.fullmatch(line)
        assert ready is not None, line or process.communicate()[1]
        yield process, ready
    finally:
        process.kill()
        process.communicate()
