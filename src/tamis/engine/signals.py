"""Signal handlers wait while the engine's books are being written.

Python runs the handler of a signal in the main thread between any two instructions, and what it raises comes out there:
KeyboardInterrupt in the middle of handing out a page, or while the threads of a kernel are at work, leaves a state that
nobody can set right. So handlers run at chosen places only: between two layers of the model, while a call waits, and at
a call's end.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self, TypeVar

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], Any]

WAIT_S = 0.05
"""How long the main thread waits at a time with its gate shut: what Ctrl-C is late by at most."""
# SIGINT first: what is replaced first is put back last.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2")


class SignalGate:
    """`with gate:` keeps the program's own signal handlers waiting until the block ends.

    Blocks may be nested. Other threads than the main one run no handlers: there the gate does nothing.
    """

    def __init__(self) -> None:
        # Only the main thread reads and writes these. A change of the counters is no call, so no handler comes between.
        self._handlers: dict[int, Handler] = {}
        self._waiting: dict[int, tuple[Handler, FrameType | None]] = {}
        self._blocks = 0
        self._shut = 0

    def __enter__(self) -> Self:
        if _in_main_thread():
            self._blocks += 1
            self._shut += 1
            if self._blocks == 1:
                try:
                    self._install()
                except BaseException:
                    self._leave()
                    raise
        return self

    def __exit__(self, *_: object) -> None:
        if _in_main_thread():
            self._leave()

    @property
    def waiting(self) -> bool:
        """Whether this thread has handlers to run."""
        return bool(self._waiting) and _in_main_thread()

    @property
    def wait_s(self) -> float | None:
        """How long this thread may block at a time before it looks at `waiting`; None: for ever."""
        return WAIT_S if _in_main_thread() else None

    def deliver(self) -> None:
        """Run the handlers that wait; what they raise comes out here."""
        if self.waiting:
            self.open_for(_nothing)

    def open_for(self, call: Callable[[], T]) -> T:
        """`call()`, with handlers running whenever their signals come."""
        if not _in_main_thread():
            return call()
        shut, self._shut = self._shut, 0
        try:
            self._run_waiting()
            return call()
        finally:
            self._shut = shut

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers[number]
        if self._shut:
            self._waiting[number] = handler, frame
        else:
            handler(number, frame)

    def _install(self) -> None:
        for name in _NAMES:
            if not hasattr(signal, name):  # not on this system
                continue
            number = int(getattr(signal, name))
            handler = signal.getsignal(number)
            # Not callable: the system's own default, ignored, or not set from Python.
            if callable(handler) and handler != self._on_signal:
                self._handlers[number] = handler
                signal.signal(number, self._on_signal)

    def _restore(self) -> None:
        try:
            while self._handlers:
                number, handler = next(reversed(self._handlers.items()))
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
                del self._handlers[number]
        except BaseException:  # what a handler raises that was just put back
            self._restore()
            raise

    def _leave(self) -> None:
        try:
            if self._blocks == 1:
                self._restore()
        finally:
            self._blocks -= 1
            self._shut -= 1
            if not self._shut:
                self._run_waiting()

    def _run_waiting(self) -> None:
        if self._waiting:
            number, (handler, frame) = self._waiting.popitem()
            try:
                handler(number, frame)
            finally:
                self._run_waiting()


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _nothing() -> None:
    """Opening the gate is all that is wanted."""
