"""How fast transfers have been so far."""

import time

_KEPT = 0.8
"""What older measurements count for, each time a new one comes."""


class Rate:
    """A moving measurement of bytes a second, what it takes to begin included."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._measured = 0.0

    def observe(self, nbytes: float, seconds: float) -> None:
        """So many bytes took so long."""
        self._bytes = _KEPT * self._bytes + nbytes
        self._seconds = _KEPT * self._seconds + seconds
        self._measured = time.monotonic()

    @property
    def known(self) -> bool:
        """Whether anything was measured yet."""
        return self._seconds > 0

    @property
    def age(self) -> float:
        """Seconds since the last measurement."""
        return time.monotonic() - self._measured

    @property
    def bytes_per_second(self) -> float:
        """0 where nothing is known."""
        return self._bytes / self._seconds if self.known else 0.0

    def seconds(self, nbytes: int) -> float:
        """What so many bytes will take; 0 where nothing is known."""
        if not self.known:
            return 0.0
        # A rate of nothing at all: whatever was tried last did not work.
        return nbytes / max(self.bytes_per_second, 1e-9)
