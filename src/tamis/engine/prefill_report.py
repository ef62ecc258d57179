"""How far the prompts of one call are, told to a `Progress`."""

import threading
from collections.abc import Sequence

from tamis.engine.signals import SignalGate
from tamis.progress import Progress
from tamis.request import Request


class PrefillReport:
    """Shows how far the prompts of one call are, and is done as soon as they are.

    A Progress hears of one task at a time: while one call holds `reporting`, the prompts of others are not shown.
    """

    def __init__(
        self, progress: Progress, reporting: threading.Lock, signals: SignalGate, requests: Sequence[Request]
    ) -> None:
        self._progress, self._reporting, self._signals = progress, reporting, signals
        self._left = sum(len(request.prompt_token_ids) for request in requests)
        self._shown = False

    def start(self) -> None:
        """Begin; raises what the Progress raises. `finish` must follow, whatever happens."""
        with self._signals:
            if self._reporting.acquire(blocking=False):
                self._shown = True
                self._signals.open_for(lambda: self._progress.start("reading the prompt", self._left, "tokens"))

    def advance(self, tokens: int) -> None:
        """`tokens` more are in the pool."""
        if self._shown:
            self._progress.advance(tokens)
            self._left -= tokens
            if not self._left:
                self.finish()

    def finish(self) -> None:
        """The end; only the first call does anything."""
        with self._signals:
            if self._shown:
                self._shown = False
                try:
                    self._progress.finish()
                finally:
                    # Only now: the next task must not begin before this one's end was told.
                    self._reporting.release()
