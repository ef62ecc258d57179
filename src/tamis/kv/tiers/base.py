"""What a tier is: a place outside the pool that keeps pages, each as one blob under one key, for as long as it can.

Whatever is wrong with a tier, the worst it may do is to miss: it never raises anything but TierError, and never hands
out bytes that are not those that were written under the key.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tamis.kv.layout import KVLayout

Key = bytes
"""32 bytes that stand for the tokens of a page and all before it, under one model and layout (`keys.page_keys`)."""
KEY_BYTES = 32
Blob = bytes | bytearray | memoryview
"""One page as it is stored (`format.encode_page`)."""


@dataclass(frozen=True, eq=False)
class ReadPart:
    """A part of one layer of several pages, in the order of the keys; every byte of it has been verified."""

    layer: int
    """Global id."""
    part: str
    """ "index" (absent in dense layers) or "main"."""
    tensors: Mapping[tuple[int, str], Tensor]
    """(layer, plane) -> [num_keys, heads, page_size, dim] as stored, fp8 as uint8; the reader's own."""


@dataclass(frozen=True)
class TierEntry:
    """One blob in a tier."""

    key: Key
    bytes: int
    last_used: float | None
    """Seconds since 1970, where the store knows."""
    pinned: bool


@dataclass(frozen=True)
class TierStat:
    """What a tier holds, as far as this process knows, and what this process has asked of it since it was opened."""

    name: str
    entries: int
    bytes: int
    """Of all entries."""
    capacity: int | None
    """Bytes it may hold; None: as many as the store takes."""
    pinned: int = 0
    """Keys that an owner has pinned."""
    hits: int = 0
    """Pages read."""
    misses: int = 0
    """Pages looked for in vain."""
    errors: int = 0
    """Verbs that failed because the store did: down, slow, full."""
    corrupt: int = 0
    """Blobs that were not as they had been written; each is a miss, and taken out of the way."""
    evictions: int = 0
    """Blobs that made room for others, or found none."""


class Tier(Protocol):
    """The verbs of a tier. All may be called from several threads; all raise TierError and nothing else.

    Several processes may share what is behind a tier, except for host memory.
    """

    @property
    def name(self) -> str:
        """Short, for logs and metrics; never a password."""

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Which of these are there. True is no promise: another process may evict it before it is read."""

    def read(self, keys: Sequence[Key], layout: KVLayout, layers: Sequence[int] | None = None) -> Iterator[ReadPart]:
        """Yield pages layer by layer (global ids; None: all of the stage), of each layer the index part first.

        A part is yielded once it is verified for every key. Raises TierReadError at the first key that is missing,
        foreign or corrupt, TierError where the store fails; LayerError for a bad layer id.
        """

    def write(self, items: Sequence[tuple[Key, Blob]]) -> None:
        """Keep these blobs, each whole or not at all. A key that is there already stays as it is.

        Where room runs out the least recently used entries go; an item for which none can be made is left out.
        Raises TierError where the store fails, or for an item that is not the blob of its key.
        """

    def delete(self, keys: Sequence[Key]) -> int:
        """Take these out, pinned or not; how many were there."""

    def scan(self) -> Iterator[TierEntry]:
        """Everything that is there, in no order."""

    def stat(self) -> TierStat:
        """Counts and sizes; asks nothing of the store."""

    def pin(self, keys: Sequence[Key], owner: str, *, replace: bool = False) -> None:
        """Keep these from eviction in the name of `owner`, there yet or not: in addition to what it has pinned.

        With `replace` instead of that, at once: it has pinned the one or the other at any moment. A pin survives a
        restart wherever the entries do.
        """

    def unpin(self, owner: str) -> None:
        """Let go of all that `owner` has pinned."""

    def owners(self) -> dict[str, list[Key]]:
        """Who has pinned what."""

    def close(self) -> None:
        """Let go of files, connections and threads. Everything but `close` raises TierError afterwards."""
