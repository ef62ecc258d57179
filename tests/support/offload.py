"""Tiers that fail on purpose, for tests of what the engine makes of it."""

import threading
from collections.abc import Callable, Iterator, Sequence

from tamis.kv import KVLayout
from tamis.kv.offload import OffloadConfig
from tamis.kv.tiers.base import Blob, Key, ReadPart, Tier, TierEntry, TierStat
from tamis.kv.tiers.host import HostTier

IMPATIENT = OffloadConfig(lookup_seconds=0.1, stall_seconds=0.1, load_seconds=2.0, rest_seconds=0.2, flush_seconds=0.3)
"""Faults are given up on soon, so that tests are over soon."""


def nothing(*_: object) -> None:
    """No fault."""


class FaultyTier:
    """Host memory behind hooks, which may raise or wait; it outlasts the engines that close it, as a disk would."""

    name = "faulty"

    def __init__(self, inner: Tier | None = None) -> None:
        self.inner = inner or HostTier(1 << 30)
        self.on_contains: Callable[[], None] = nothing
        self.on_write: Callable[[], None] = nothing
        self.on_pin: Callable[[], None] = nothing
        self.on_delete: Callable[[], None] = nothing
        self.on_part: Callable[[int, ReadPart], ReadPart | None] = lambda _, part: part
        """Of each part of a read, by its number: what is given instead; None: the read ends."""
        self.reads = self.parts = self.pages_written = 0

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self.on_contains()
        return self.inner.contains(keys)

    def read(self, keys: Sequence[Key], layout: KVLayout, layers: Sequence[int] | None = None) -> Iterator[ReadPart]:
        self.reads += 1
        for number, part in enumerate(self.inner.read(keys, layout, layers)):
            given = self.on_part(number, part)
            if given is None:
                return
            self.parts += 1
            yield given

    def write(self, items: Sequence[tuple[Key, Blob]]) -> None:
        self.on_write()
        self.pages_written += len(items)
        self.inner.write(items)

    def delete(self, keys: Sequence[Key]) -> int:
        self.on_delete()
        return self.inner.delete(keys)

    def scan(self) -> Iterator[TierEntry]:
        return self.inner.scan()

    def stat(self) -> TierStat:
        return self.inner.stat()

    def pin(self, keys: Sequence[Key], owner: str, *, replace: bool = False) -> None:
        self.on_pin()
        self.inner.pin(keys, owner, replace=replace)

    def unpin(self, owner: str) -> None:
        self.inner.unpin(owner)

    def owners(self) -> dict[str, list[Key]]:
        return self.inner.owners()

    def close(self) -> None:
        """Stay."""

    @property
    def keys(self) -> set[Key]:
        """Of everything that is there."""
        return {entry.key for entry in self.inner.scan()}


class Gate:
    """A place where a tier's thread waits until it is let through."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self.open.wait(60)

    def part(self, _: int, part: ReadPart) -> ReadPart:
        """As a hook of parts."""
        self()
        return part
