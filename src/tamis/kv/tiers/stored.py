"""What all tiers do alike: which blobs stay when room runs out, pins, counts, checks, and errors of other libraries.

A store below (`host`, `disk`, `remote_redis`, `remote_fsspec`) only lists, fetches, puts and drops blobs.
"""

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

from tamis.errors import TamisError, TierError, TierReadError
from tamis.kv.layout import KVLayout
from tamis.kv.tiers.base import Blob, Key, ReadPart, TierEntry, TierStat
from tamis.kv.tiers.format import check_blob
from tamis.kv.tiers.ledger import Ledger
from tamis.kv.tiers.reader import Fetch, read_parts, verify_blob

logger = logging.getLogger(__name__)

Item = tuple[Key, Blob]
Listed = tuple[Key, int, float]
"""Key, bytes, last used (seconds since 1970; 0 where the store does not know)."""
_SLACK = 64
"""Room is made for at least one byte in so many, and what others wrote is looked up as often: both cost a listing."""
_GROUP = 16
"""Blobs that are put at once."""
_STEP = 1e-6
"""Seconds between the last uses of neighbours: a page is of no use without those before it, so that they go later."""


class StoredTier(ABC):
    """A tier over a store of blobs. Uses are known to the microsecond; the least recently used entry goes first."""

    is_shared: ClassVar[bool] = True
    """Whether other processes may write to the store."""
    foreign_errors: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """What the store's library raises."""
    least_fetch: ClassVar[int] = 0
    """Bytes of a page that are worth a request."""

    def __init__(self, name: str, capacity: int | None) -> None:
        """`name` for logs and metrics; `capacity` in bytes of blobs, None: as many as the store takes."""
        self.name = name
        self.capacity = capacity
        self._ledger = Ledger()
        self._pins: dict[str, list[Key]] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._pinning = threading.Lock()
        """Held, inside `_exclusive`, from reading all pins to keeping what has become of them."""
        self._unseen = 0
        self._closed = False

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        return (TierError, MemoryError, *self.foreign_errors)

    # The verbs

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """See Tier."""
        with self._verb("look up pages"):
            found = self._has(keys)
        self._count(misses=found.count(False))
        return found

    def read(self, keys: Sequence[Key], layout: KVLayout, layers: Sequence[int] | None = None) -> Iterator[ReadPart]:
        """See Tier."""
        keys = list(keys)
        with self._verb("read"):
            try:
                with self._open(keys) as fetch:
                    yield from read_parts(fetch, keys, layout, layers, self.least_fetch)
            except TierReadError as error:
                self._refuse(error)
                raise
            self._count(hits=len(keys))
            self._use(keys)

    def write(self, items: Sequence[Item]) -> None:
        """See Tier."""
        with self._verb("write"), self._writing:
            fits = self._make_room(self._fresh(items), {key for key, _ in items})
            now = time.time()
            for start in range(0, len(fits), _GROUP):
                group = {key: (blob, now - (start + i) * _STEP) for i, (key, blob) in enumerate(fits[start:][:_GROUP])}
                self._unseen += sum(len(blob) for blob, _ in group.values())
                self._put(group)
                with self._lock:
                    for key, (blob, used) in group.items():
                        self._ledger.add(key, len(blob), used)

    def delete(self, keys: Sequence[Key]) -> int:
        """See Tier."""
        with self._verb("delete"):
            return self._remove(list(dict.fromkeys(keys)))

    def scan(self) -> Iterator[TierEntry]:
        """See Tier."""
        with self._verb("list pages"):
            pinned = self._pinned(self._load_pins())
            for key, size, used in self._list():
                yield TierEntry(key, size, used or None, key in pinned)

    def stat(self) -> TierStat:
        """See Tier."""
        with self._lock:
            return TierStat(
                self.name, len(self._ledger), self._ledger.bytes, self.capacity,
                len(self._pinned(self._pins)), **self._counts,
            )  # fmt: skip

    def pin(self, keys: Sequence[Key], owner: str, *, replace: bool = False) -> None:
        """See Tier."""
        with self._verb("pin"), self._exclusive(), self._pinning:
            pins = self._load_pins()
            before = [] if replace else pins.get(owner, [])
            pins[owner] = list(dict.fromkeys([*before, *keys]))
            self._save_pins(owner, pins[owner])
            with self._lock:
                self._pins = pins

    def unpin(self, owner: str) -> None:
        """See Tier."""
        with self._verb("unpin"), self._exclusive(), self._pinning:
            pins = self._load_pins()
            if pins.pop(owner, None) is not None:
                self._save_pins(owner, [])
            with self._lock:
                self._pins = pins

    def owners(self) -> dict[str, list[Key]]:
        """See Tier."""
        with self._verb("list pins"):
            return self._load_pins()

    def close(self) -> None:
        """See Tier."""
        if not self._closed:
            self._closed = True
            try:
                self._shut()
            except self.foreign_errors as error:
                logger.warning("kv tier %s could not be closed: %s", self.name, describe(error))

    # For whoever looks after a store

    def verify(self, entry: TierEntry) -> str:
        """Read all of an entry and check it; the fingerprint of its layout. Raises TierError, TierReadError."""
        with self._verb("verify"), self._open([entry.key]) as fetch:
            return verify_blob(fetch, entry.key, entry.bytes)

    def clean(self) -> int:
        """Remove what is of no use to anybody: blobs set aside, files left over; how many."""
        return 0

    def set_aside(self) -> int:
        """How many blobs are kept that were found to be corrupt."""
        return 0

    def shrink(self, capacity: int) -> int:
        """Evict the least recently used entries, pinned ones never, until `capacity` bytes are left; how many."""
        with self._verb("evict"), self._exclusive():
            self._rescan()
            return self._evict(self._ledger.bytes - capacity, set())

    # What a store does; each may raise `foreign_errors`, TierError, TierReadError

    @abstractmethod
    def _list(self) -> Iterator[Listed]:
        """All blobs of the store."""

    @abstractmethod
    def _has(self, keys: Sequence[Key]) -> list[bool]:
        """Which of these are there."""

    @abstractmethod
    def _open(self, keys: Sequence[Key]) -> AbstractContextManager[Fetch]:
        """What fetches from these blobs."""

    @abstractmethod
    def _put(self, blobs: dict[Key, tuple[Blob, float]]) -> None:
        """Keep these, each whole or not at all; a blob and when it was last used."""

    @abstractmethod
    def _drop(self, keys: Sequence[Key]) -> int:
        """Take these out; how many were there."""

    def _discard(self, key: Key) -> None:
        """Have a corrupt blob never be found again."""
        self._drop([key])

    def _touch(self, uses: dict[Key, float]) -> None:  # noqa: B027
        """Remember these uses beyond this process, where the store can."""

    def _exclusive(self) -> AbstractContextManager[object]:
        """Keep other processes from changing pins, and from making room, at the same time."""
        return nullcontext()

    def _load_pins(self) -> dict[str, list[Key]]:
        """All pins by owner: a copy."""
        return dict(self._pins)

    def _save_pins(self, owner: str, keys: list[Key]) -> None:  # noqa: B027
        """Remember what an owner has pinned beyond this process, where the store can; nothing: forget the owner."""

    def _shut(self) -> None:  # noqa: B027
        """Let go of files and connections."""

    # Room

    def _rescan(self) -> None:
        """See what is there now, whoever wrote it."""
        begun = time.monotonic()
        found = list(self._list())
        with self._pinning:
            pins = self._load_pins()
            with self._lock:
                self._ledger.replace(found, begun)
                self._pins = pins
        self._unseen = 0

    def _fresh(self, items: Sequence[Item]) -> list[Item]:
        """What of this is not there yet. Raises TierError for what is not the blob of its key."""
        blobs = dict(items)
        for key, blob in blobs.items():
            try:
                check_blob(key, blob)
            except TierReadError as error:
                raise TierError(f"kv tier {self.name} was given no blob of page {key.hex()}: {error.why}") from error
        there = [key for key, found in zip(blobs, self._has(list(blobs)), strict=True) if found]
        self._use(there)
        for key in there:
            del blobs[key]
        return list(blobs.items())

    def _make_room(self, fresh: list[Item], spared: set[Key]) -> list[Item]:
        """Evict what was used longest ago, but for `spared`; what of `fresh` fits then, from the first on."""
        if self.capacity is None or not fresh:
            return fresh
        need = sum(len(blob) for _, blob in fresh)
        if self._ledger.bytes + need > self.capacity or self._unseen + need > self.capacity // _SLACK:
            with self._exclusive():
                if self.is_shared:
                    self._rescan()
                excess = self._ledger.bytes + need - self.capacity
                if excess > 0:
                    self._evict(max(excess, self.capacity // _SLACK), spared)
        ends = itertools.accumulate((len(blob) for _, blob in fresh), initial=self._ledger.bytes)
        fits = [item for item, end in zip(fresh, itertools.islice(ends, 1, None), strict=True) if end <= self.capacity]
        self._count(evictions=len(fresh) - len(fits))
        return fits

    def _evict(self, room: int, spared: set[Key]) -> int:
        with self._lock:
            spared = spared | self._pinned(self._pins)
            victims = self._ledger.victims(room, spared.__contains__)
        if not victims:
            return 0
        self._count(evictions=len(victims))
        return self._remove(victims)

    def _remove(self, keys: Sequence[Key]) -> int:
        removed = self._drop(keys)
        with self._lock:
            for key in keys:
                self._ledger.remove(key)
        return removed

    # Counts and errors

    def _use(self, keys: Sequence[Key]) -> None:
        now = time.time()
        uses = {key: now - place * _STEP for place, key in enumerate(keys)}
        with self._lock:
            for key, used in uses.items():
                self._ledger.touch(key, used)
        try:
            self._touch(uses)
        except self._failures as error:  # the pages were served all the same
            self._count(errors=1)
            logger.warning("kv tier %s could not note uses: %s", self.name, error)

    def _refuse(self, error: TierReadError) -> None:
        """Count and log a page that cannot be read, and take it out of the way."""
        with self._lock:
            self._ledger.remove(error.key)
        if not error.corrupt:
            self._count(misses=1)
            logger.info("kv tier %s: %s", self.name, error)
            return
        self._count(corrupt=1)
        logger.warning("kv tier %s: %s; it is taken out", self.name, error)
        try:
            self._discard(error.key)
        except self._failures as failure:  # it will be refused the next time as well
            self._count(errors=1)
            logger.warning("kv tier %s could not take page %s out: %s", self.name, error.key.hex(), failure)

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    @contextmanager
    def _verb(self, verb: str) -> Iterator[None]:
        """Have errors of the store counted, and raised as TierError."""
        if self._closed:
            raise TierError(f"kv tier {self.name} is closed")
        try:
            yield
        except TierReadError:  # counted where it was met
            raise
        except TierError:
            self._count(errors=1)
            raise
        except TamisError:  # the caller's
            raise
        except self._failures as error:
            self._count(errors=1)
            raise TierError(f"kv tier {self.name} could not {verb}: {describe(error)}") from error

    @staticmethod
    def _pinned(pins: dict[str, list[Key]]) -> set[Key]:
        return {key for keys in pins.values() for key in keys}


def describe(error: BaseException) -> str:
    """One line that says what went wrong, also where the error has no message."""
    return " ".join(str(error).split()) or type(error).__name__
