"""What a store holds, as far as this process knows: sizes, last uses, and what has to go when room is needed."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tamis.kv.tiers.base import Key


@dataclass
class Note:
    """One entry."""

    bytes: int
    used: float
    """Seconds since 1970; 0 where nobody knows."""
    noted: float
    """When this process noted it, on the monotonic clock."""


class Ledger:
    """Entries by key, and the bytes of all. Not thread-safe."""

    def __init__(self) -> None:
        self.notes: dict[Key, Note] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.notes)

    def __contains__(self, key: Key) -> bool:
        return key in self.notes

    def add(self, key: Key, size: int, used: float) -> None:
        """Note an entry, or note it anew."""
        self.remove(key)
        self.notes[key] = Note(size, used, time.monotonic())
        self.bytes += size

    def remove(self, key: Key) -> int:
        """Forget an entry; its bytes, 0 where there was none."""
        note = self.notes.pop(key, None)
        size = 0 if note is None else note.bytes
        self.bytes -= size
        return size

    def touch(self, key: Key, used: float) -> None:
        """Note a use."""
        if note := self.notes.get(key):
            note.used = max(note.used, used)

    def replace(self, found: Iterable[tuple[Key, int, float]], begun: float) -> None:
        """Start anew from what was in the store after `begun` (monotonic), and what has been noted since."""
        before, self.notes, self.bytes = self.notes, {}, 0
        for key, size, used in found:
            self.add(key, size, used)
        for key, note in before.items():
            if note.noted >= begun and key not in self.notes:
                self.add(key, note.bytes, note.used)

    def victims(self, room: int, spared: Callable[[Key], bool]) -> list[Key]:
        """The least recently used entries that free `room` bytes, or as much of it as can be freed."""
        chosen: list[Key] = []
        for key in sorted(self.notes, key=lambda key: self.notes[key].used):
            if room <= 0:
                break
            if not spared(key):
                chosen.append(key)
                room -= self.notes[key].bytes
        return chosen
