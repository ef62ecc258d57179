"""Several tiers as one, the fastest first: what one does not have, or cannot give, the next one may."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tamis.errors import TierError, TierReadError
from tamis.kv.layout import KVLayout
from tamis.kv.tiers.base import Blob, Key, ReadPart, Tier, TierEntry, TierStat
from tamis.kv.tiers.breaker import SLOW, Breaker
from tamis.kv.tiers.format import PartPlace, page_format
from tamis.kv.tiers.host import HostTier
from tamis.kv.tiers.promotion import Promoter, Promotion

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SUMMED = ("entries", "bytes", "pinned", "hits", "misses", "errors", "corrupt", "evictions")
_REMEMBERED = 1 << 16
"""Pages of which it is remembered which tier has them, from the look-up to the read."""
_COPIED = 1 << 30
"""Bytes of a read that are copied to faster tiers at most: they stay in memory until they are."""


class Member:
    """One tier of a stack. What it fails at it is not asked for again for a while; a full disk can still be read."""

    def __init__(self, tier: Tier, clock: Callable[[], float]) -> None:
        self.tier = tier
        self.reads, self.writes = Breaker(clock), Breaker(clock)

    def find(self, keys: Sequence[Key]) -> list[bool]:
        """`Tier.contains`; nothing where the tier fails."""
        if self.reads.is_open:
            return [False] * len(keys)
        try:
            with self.reads.watching(slow=SLOW):
                return self.tier.contains(keys)
        except TierError as error:
            logger.warning("%s", error)
            return [False] * len(keys)


class TierStack:
    """Tiers in the order in which they are asked. One that fails is left alone for a while, the others go on."""

    def __init__(self, tiers: Sequence[Tier], *, clock: Callable[[], float] = time.monotonic) -> None:
        """The stack closes `tiers`, fastest first, with itself; `clock` gives seconds."""
        self.name = " > ".join(tier.name for tier in tiers) or "no tier"
        self._members = [Member(tier, clock) for tier in tiers]
        self._where: dict[Key, int] = {}
        self._promoter = Promoter()

    @property
    def tiers(self) -> list[Tier]:
        """The tiers, fastest first."""
        return [member.tier for member in self._members]

    @property
    def lasting(self) -> "TierStack":
        """Those that outlast the process, or host memory where there is no other: where pins are. Not to be closed."""
        some = TierStack([])
        some._members = [member for member in self._members if not isinstance(member.tier, HostTier)] or self._members
        return some

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """See Tier; a tier that fails has nothing."""
        found = self._locate(keys)
        if len(self._where) > _REMEMBERED:
            self._where.clear()
        self._where.update({key: place for key, place in zip(keys, found, strict=True) if place is not None})
        return [place is not None for place in found]

    def _locate(self, keys: Sequence[Key]) -> list[int | None]:
        """The first tier that has each page."""
        found: list[int | None] = [None] * len(keys)
        for number, member in enumerate(self._members):
            missing = [at for at, place in enumerate(found) if place is None]
            if not missing:
                break
            for at, there in zip(missing, member.find([keys[at] for at in missing]), strict=True):
                if there:
                    found[at] = number
        return found

    def read(self, keys: Sequence[Key], layout: KVLayout, layers: Sequence[int] | None = None) -> Iterator[ReadPart]:
        """See Tier. Where a tier fails at a part, the next one that has the pages goes on from there.

        Pages that were read whole are copied to the faster tiers, afterwards and in another thread.
        """
        keys = list(keys)
        places = page_format(layout).places_of(layers)
        sources = self._sources(keys, layout, list(dict.fromkeys(place.layer for place in places)), layers is None)
        for place in places:
            pieces = [source.next(place) for source in sources]
            if pieces:
                yield pieces[0] if len(sources) == 1 else _merged(place, pieces, [s.rows for s in sources], len(keys))
        for source in sources:
            source.finish()
            if source.promotion is not None:
                self._promoter.offer(source.promotion)

    def _sources(self, keys: list[Key], layout: KVLayout, layers: list[int], whole: bool) -> "list[_Source]":
        known = [self._where.pop(key, None) for key in keys]
        if None in known:
            known = self._locate(keys)
        rows: dict[int, list[int]] = {}
        for row, place in enumerate(known):
            if place is None:
                raise TierReadError(keys[row], "no tier has it")
            rows.setdefault(place, []).append(row)
        return [
            _Source(self._members, place, keys, found, layout, layers, promote=whole) for place, found in rows.items()
        ]

    def settle(self, seconds: float) -> bool:
        """Wait until copies to faster tiers are made; False where that takes longer."""
        return self._promoter.settle(seconds)

    def write(self, items: Sequence[tuple[Key, Blob]]) -> None:
        """See Tier: to all tiers. Raises TierError where none took them."""
        self._ask(lambda tier: tier.write(items), self._members, enough=1)

    def delete(self, keys: Sequence[Key]) -> int:
        """See Tier: from all tiers, and the largest count of one. Raises TierError where one failed."""
        return max(self._ask(lambda tier: tier.delete(keys), self._members), default=0)

    def scan(self) -> Iterator[TierEntry]:
        """See Tier: each page once, as the first tier that has it knows it."""
        seen: set[Key] = set()
        for tier in self.tiers:
            for entry in tier.scan():
                if entry.key not in seen:
                    seen.add(entry.key)
                    yield entry

    def stats(self) -> list[TierStat]:
        """Of each tier, fastest first."""
        return [tier.stat() for tier in self.tiers]

    def stat(self) -> TierStat:
        """The sums over all tiers; a page counts in each tier that has it."""
        total = TierStat(self.name, 0, 0, 0)
        for one in self.stats():
            sums = {name: getattr(total, name) + getattr(one, name) for name in _SUMMED}
            whole, more = total.capacity, one.capacity
            total = replace(total, **sums, capacity=None if whole is None or more is None else whole + more)
        return total

    def pin(self, keys: Sequence[Key], owner: str, *, replace: bool = False) -> None:
        """See Tier: in all that are `lasting`. Raises TierError where none could."""
        self._ask(lambda tier: tier.pin(keys, owner, replace=replace), self.lasting._members, enough=1)

    def unpin(self, owner: str) -> None:
        """See Tier: in all tiers. Raises TierError where one failed."""
        self._ask(lambda tier: tier.unpin(owner), self._members)

    def owners(self) -> dict[str, list[Key]]:
        """See Tier: of all tiers. Raises TierError where none answered."""
        found: dict[str, list[Key]] = {}
        for pins in self._ask(lambda tier: tier.owners(), self._members, enough=1):
            for owner, keys in pins.items():
                found[owner] = list(dict.fromkeys([*found.get(owner, []), *keys]))
        return found

    def close(self) -> None:
        """See Tier."""
        self._promoter.close()
        for tier in self.tiers:
            tier.close()

    def _ask(self, verb: Callable[[Tier], T], members: Sequence[Member], enough: int | None = None) -> list[T]:
        """What each tier answers. Raises TierError where fewer than `enough` do (None: all).

        Where not all have to, those that failed a moment ago are not asked.
        """
        answers: list[T] = []
        errors: list[TierError] = []
        for member in members:
            if enough is not None and member.writes.is_open:
                errors.append(TierError(f"kv tier {member.tier.name} is left alone after it failed"))
                continue
            try:
                with member.writes.watching():
                    answers.append(verb(member.tier))
            except TierError as error:
                logger.warning("%s", error)
                errors.append(error)
        if errors and len(answers) < (len(members) if enough is None else enough):
            raise errors[0]
        return answers


class _Source:
    """Pages that one tier reads, and then, where it fails, the next one that has them all."""

    def __init__(
        self,
        members: Sequence[Member],
        first: int,
        keys: Sequence[Key],
        rows: Sequence[int],
        layout: KVLayout,
        layers: list[int],
        *,
        promote: bool,
    ) -> None:
        """`keys[row]` for `rows` from `members[first]` on; `promote`: keep copies for the members before it."""
        self.rows = rows
        self._keys = [keys[row] for row in rows]
        self._members, self._at = members, first
        self._layout, self._layers = layout, layers
        self._parts = members[first].tier.read(self._keys, layout, layers)
        faster = [member.tier for member in members[:first]]
        self.promotion = _promotion(faster, layout, self._keys) if promote else None

    def next(self, place: PartPlace) -> ReadPart:
        """The part at `place`, which comes after all that were asked for before. Raises TierError where none can."""
        while True:
            member = self._members[self._at]
            try:
                with member.reads.watching():
                    part = self._skip_to(place, member.tier.name)
            except TierError as error:
                self._go_on(place.layer, error)
                continue
            if self.promotion is not None:
                self.promotion.take(part)
            return part

    def finish(self) -> None:
        """All parts were read: have the tier count that, and note the use."""
        next(self._parts, None)

    def _skip_to(self, place: PartPlace, name: str) -> ReadPart:
        # After a tier failed in the middle of a layer, the next one begins with the whole layer.
        for part in self._parts:
            if (part.layer, part.part) == (place.layer, place.part):
                return part
        raise TierError(f"kv tier {name} left out the {place.part} part of layer {place.layer}")

    def _go_on(self, layer: int, error: TierError) -> None:
        logger.warning("%s", error)
        for at in range(self._at + 1, len(self._members)):
            if all(self._members[at].find(self._keys)):
                self._at = at
                self._parts = self._members[at].tier.read(
                    self._keys, self._layout, self._layers[self._layers.index(layer) :]
                )
                return
        raise error


def _promotion(tiers: Sequence[Tier], layout: KVLayout, keys: Sequence[Key]) -> Promotion | None:
    """What to copy to `tiers`: the first pages, half of what the smallest of them may hold at most."""
    capacities = [tier.stat().capacity for tier in tiers]
    room = min((size // 2 for size in capacities if size is not None), default=_COPIED)
    count = min(room, _COPIED) // page_format(layout).blob_bytes
    return Promotion(tiers, layout, keys[:count]) if tiers and count and keys else None


def _merged(place: PartPlace, pieces: Sequence[ReadPart], rows: Sequence[Sequence[int]], count: int) -> ReadPart:
    """The same part of different pages, each piece in its rows."""
    tensors = {}
    for name, first in pieces[0].tensors.items():
        whole = first.new_empty((count, *first.shape[1:]))
        for piece, where in zip(pieces, rows, strict=True):
            whole[list(where)] = piece.tensors[name]
        tensors[name] = whole
    return ReadPart(place.layer, place.part, tensors)
