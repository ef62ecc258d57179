"""What transfers to and from the tiers have done so far."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

_LOG_SECONDS = 10.0
"""A kind of failure is logged once in so many seconds: a store that is down fails with every request."""


class Failures:
    """Counts failures by what failed. Any thread may add one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, float] = {}

    def add(self, kind: str, error: BaseException | str) -> None:
        """A "lookup", "load", "save", "delete" or "pin" did not work out."""
        with self._lock:
            self._counts[kind] += 1
            now = time.monotonic()
            fresh = now >= self._logged.get(kind, -_LOG_SECONDS) + _LOG_SECONDS
            if fresh:
                self._logged[kind] = now
        if fresh:
            logger.warning("KV tiers: a %s failed, and counts as a miss: %s", kind, error)

    @property
    def counts(self) -> Mapping[str, int]:
        """By kind; a copy."""
        with self._lock:
            return dict(self._counts)


@dataclass
class OffloadStats:
    """Counters of one engine's transfers; what the engine hands out is a copy."""

    lookups: int = 0
    """Sequences that the tiers were asked about."""
    lookup_hits: int = 0
    """Of these, sequences of which a page or more was found."""
    loads: int = 0
    """Loads that came in whole."""
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    load_bytes_per_second: float = 0.0
    """As measured lately; 0: nothing was."""
    recomputed_tokens: int = 0
    """Tokens that the tiers had, and that were estimated to be computed faster than loaded."""
    saved_pages: int = 0
    saved_bytes: int = 0
    save_bytes_per_second: float = 0.0
    """As measured lately; 0: nothing was."""
    dropped_pages: int = 0
    """Pages that were never written, because the tiers could not keep up."""
    waiting_pages: int = 0
    """Pages that are still to be written."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """By what failed: "lookup", "load", "save", "delete", "pin"."""
    worker_deaths: int = 0
    """Threads that ended on an error, and were replaced."""
    resting: bool = False
    """Whether the tiers are left alone for a while, because they did not answer in time."""
