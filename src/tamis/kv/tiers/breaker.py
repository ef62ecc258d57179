"""Leaving alone for a while what has just failed, so that not every request waits for it to fail again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tamis.errors import TierError, TierReadError

LONGEST = 60.0
"""Seconds."""
SLOW = 2.0
"""A call that takes longer has failed, whatever it answers."""


class Breaker:
    """Closed while things go well; open for 1, 2, 4... up to 60 seconds after each failure in a row."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether nothing should be tried now."""
        return self._clock() < self._until

    def record(self, failed: bool) -> None:
        """How a call went."""
        with self._lock:
            self._failures = self._failures + 1 if failed else 0
            rest = min(LONGEST, 2.0 ** min(self._failures - 1, 6))
            self._until = self._clock() + rest if failed else 0.0

    @contextmanager
    def watching(self, *, slow: float | None = None) -> Iterator[None]:
        """Record how the block goes. A page that is missing or corrupt says nothing of the store."""
        begun = self._clock()
        try:
            yield
        except TierReadError:
            raise
        except TierError:
            self.record(failed=True)
            raise
        self.record(failed=slow is not None and self._clock() - begun > slow)
