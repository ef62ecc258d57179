"""Pages in this process's own memory, outside the pool: the fastest tier, gone when the process ends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np

from tamis.errors import TierReadError
from tamis.kv.tiers.base import Blob, Key
from tamis.kv.tiers.format import Rows
from tamis.kv.tiers.reader import Fetch
from tamis.kv.tiers.stored import Listed, StoredTier


class HostTier(StoredTier):
    """Blobs in a dict. A blob that is being read stays until it is read, whatever is evicted meanwhile."""

    is_shared: ClassVar[bool] = False

    def __init__(self, capacity: int) -> None:
        """Up to `capacity` bytes of blobs."""
        super().__init__("host", capacity)
        self._blobs: dict[Key, bytes] = {}

    def _list(self) -> Iterator[Listed]:
        with self._lock:
            found = [(key, note.bytes, note.used) for key, note in self._ledger.notes.items()]
        yield from found

    def _has(self, keys: Sequence[Key]) -> list[bool]:
        return [key in self._blobs for key in keys]

    @contextmanager
    def _open(self, keys: Sequence[Key]) -> Iterator[Fetch]:
        blobs = [self._blobs.get(key) for key in keys]

        def fetch(offset: int, rows: Rows) -> None:
            length = rows.shape[1]
            for key, blob, row in zip(keys, blobs, rows, strict=True):
                if blob is None:
                    raise TierReadError(key, "it is not there")
                if len(blob) < offset + length:
                    raise TierReadError(key, f"it ends after {len(blob)} bytes", corrupt=True)
                row[:] = np.frombuffer(blob, np.uint8, length, offset)

        yield fetch

    def _put(self, blobs: dict[Key, tuple[Blob, float]]) -> None:
        # A copy, unless it is one that nobody can change.
        self._blobs.update({key: bytes(blob) for key, (blob, _) in blobs.items()})

    def _drop(self, keys: Sequence[Key]) -> int:
        return sum(self._blobs.pop(key, None) is not None for key in keys)

    def _shut(self) -> None:
        self._blobs.clear()
