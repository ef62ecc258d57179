"""A command in a terminal of its own, typed at as a person would."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

# The terminal becomes the child's own, so that Ctrl-C reaches it; a parent that ignores SIGINT must not hand that down.
_IN_A_TERMINAL = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """The screen of a running command, as far as it was read, and its keyboard."""

    def __init__(self, descriptor: int, process: "subprocess.Popen[bytes]") -> None:
        self._descriptor, self.process = descriptor, process
        self.screen = ""
        self._seen = 0

    def wait_for(self, text: str, timeout_s: float = 60) -> str:
        """What is printed from the last text waited for up to `text`."""
        before = self._find(text, timeout_s)
        assert before is not None, f"{text!r} does not come: {self.screen!r}"
        return before

    def press_until(self, keys: str, text: str) -> None:
        """Press `keys`, again where nothing comes of it, and wait for `text`.

        A signal that comes just before the line editor waits for keys is heard with the next key only.
        """
        for _ in range(20):
            self.type(keys)
            if self._find(text, 1) is not None:
                return
        raise AssertionError(f"{text!r} does not come: {self.screen!r}")

    def _find(self, text: str, timeout_s: float) -> str | None:
        deadline = time.monotonic() + timeout_s
        while (found := self.screen.find(text, self._seen)) < 0:
            if not self._read(max(0, deadline - time.monotonic())):
                return None
        before, self._seen = self.screen[self._seen : found], found + len(text)
        return before

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._descriptor, text.encode())

    def end(self, timeout_s: float = 60) -> int:
        """Read until the command ends; its exit code."""
        while self._read(timeout_s):
            pass
        return self.process.wait(timeout_s)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return False
        try:
            block = os.read(self._descriptor, 4096)
        except OSError:  # Linux: nobody has the other side open
            return False
        self.screen += block.decode(errors="replace")
        return bool(block)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    """Run Python with `arguments` in a terminal; it is killed at the end where it still runs."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _IN_A_TERMINAL, *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(ours)
