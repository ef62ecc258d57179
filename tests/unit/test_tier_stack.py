from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from support.kv import small_layout
from support.tiers import make_items, make_pages
from tamis.errors import TierError, TierReadError
from tamis.kv import KVLayout
from tamis.kv.tiers.base import Blob, Key, ReadPart
from tamis.kv.tiers.breaker import LONGEST, Breaker
from tamis.kv.tiers.disk import DiskTier
from tamis.kv.tiers.format import page_format
from tamis.kv.tiers.host import HostTier
from tamis.kv.tiers.stack import TierStack

LAYOUT = small_layout()
SIZE = page_format(LAYOUT).blob_bytes
ITEMS = make_items(LAYOUT, 6)
KEYS = [key for key, _ in ITEMS]
PAGES = make_pages(LAYOUT, 6)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Faulty(HostTier):
    """A tier that fails when told to."""

    def __init__(self, name: str, clock: Clock | None = None) -> None:
        super().__init__(1 << 30)
        self.name = name
        self.broken = False
        self.fails_after: int | None = None
        """Parts of a read that it still gives."""
        self.takes = 0.0
        self.asked: list[str] = []
        self._clock = clock

    def _fail(self, verb: str) -> None:
        self.asked.append(verb)
        if self._clock is not None:
            self._clock.now += self.takes
        if self.broken:
            raise TierError(f"{self.name} is broken")

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self._fail("contains")
        return super().contains(keys)

    def read(self, keys: Sequence[Key], layout: KVLayout, layers: Sequence[int] | None = None) -> Iterator[ReadPart]:
        self._fail("read")
        for number, part in enumerate(super().read(keys, layout, layers)):
            if number == self.fails_after:
                raise TierError(f"{self.name} fails")
            yield part

    def write(self, items: Sequence[tuple[Key, Blob]]) -> None:
        self._fail("write")
        super().write(items)

    def pin(self, keys: Sequence[Key], owner: str, *, replace: bool = False) -> None:
        self._fail("pin")
        super().pin(keys, owner, replace=replace)

    def unpin(self, owner: str) -> None:
        self._fail("unpin")
        super().unpin(owner)

    def delete(self, keys: Sequence[Key]) -> int:
        self._fail("delete")
        return super().delete(keys)


def check_read(stack: TierStack, places: list[int], layers: list[int] | None = None) -> None:
    """Every part once, in order, with the right bytes."""
    expected = [(place.layer, place.part) for place in page_format(LAYOUT).places_of(layers)]
    parts = list(stack.read([KEYS[place] for place in places], LAYOUT, layers))
    assert [(part.layer, part.part) for part in parts] == expected
    for part in parts:
        for name, tensor in part.tensors.items():
            assert torch.equal(tensor, PAGES.tensors[name][places])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pair(clock: Clock) -> tuple[Faulty, Faulty, TierStack]:
    first, second = Faulty("first", clock), Faulty("second", clock)
    return first, second, TierStack([first, second], clock=clock)


def test_what_is_written_is_in_every_tier_and_read_from_the_first(pair: tuple[Faulty, Faulty, TierStack]) -> None:
    first, second, stack = pair
    stack.write(ITEMS)
    assert first.contains(KEYS) == second.contains(KEYS) == stack.contains(KEYS) == [True] * 6
    check_read(stack, [4, 0, 2])
    check_read(stack, [1], [5, 2])
    assert (first.stat().hits, second.stat().hits) == (4, 0)


def test_pages_of_different_tiers_come_as_one(pair: tuple[Faulty, Faulty, TierStack]) -> None:
    first, second, stack = pair
    first.write([ITEMS[0], ITEMS[3]])
    second.write([ITEMS[1], ITEMS[2], ITEMS[3]])
    assert stack.contains(KEYS) == [True] * 4 + [False] * 2
    check_read(stack, [3, 2, 1, 0])
    assert (first.stat().hits, second.stat().hits) == (2, 2)
    with pytest.raises(TierReadError, match="no tier has it") as caught:
        check_read(stack, [0, 4])
    assert caught.value.key == KEYS[4]


def test_a_look_up_and_a_read_ask_each_tier_once(pair: tuple[Faulty, Faulty, TierStack]) -> None:
    first, second, stack = pair
    second.write(ITEMS)
    stack.contains(KEYS)
    check_read(stack, [0, 1, 2, 3, 4, 5])
    assert (first.stat().misses, second.stat().misses) == (6, 0)


def test_a_page_read_from_a_slow_tier_is_in_the_fast_one_afterwards(pair: tuple[Faulty, Faulty, TierStack]) -> None:
    first, second, stack = pair
    second.write(ITEMS)
    check_read(stack, [0, 1], [0])
    assert stack.settle(10)
    assert first.contains(KEYS) == [False] * 6, "a part of a page is no page"
    check_read(stack, [0, 1, 2])
    assert stack.settle(10)
    assert first.contains(KEYS) == [True] * 3 + [False] * 3
    check_read(stack, [2, 1, 0])
    assert (first.stat().hits, second.stat().hits) == (3, 5)
    assert all(first._blobs[key] == blob for key, blob in ITEMS[:3])


def test_what_the_reader_does_with_its_tensors_is_not_copied(pair: tuple[Faulty, Faulty, TierStack]) -> None:
    first, second, stack = pair
    second.write(ITEMS)
    for part in stack.read(KEYS, LAYOUT):
        for tensor in part.tensors.values():
            tensor.zero_()
    assert stack.settle(10)
    assert first.contains(KEYS) == [True] * 6
    check_read(stack, [0, 1, 2, 3, 4, 5])


def test_no_more_is_copied_than_half_of_what_the_fast_tier_holds() -> None:
    first, second = HostTier(4 * SIZE), HostTier(1 << 30)
    stack = TierStack([first, second])
    second.write(ITEMS)
    check_read(stack, [0, 1, 2, 3, 4])
    assert stack.settle(10)
    assert first.contains(KEYS) == [True, True, False, False, False, False]
    stack.close()


def test_a_copy_that_fails_harms_nobody(
    pair: tuple[Faulty, Faulty, TierStack], caplog: pytest.LogCaptureFixture
) -> None:
    first, second, stack = pair
    second.write(ITEMS)
    stack.contains(KEYS)
    first.broken = True
    check_read(stack, [0, 1])
    assert stack.settle(10)
    assert "pages were not copied to a faster tier: first is broken" in caplog.messages
    first.broken = False
    check_read(stack, [2])
    assert stack.settle(10)
    assert first.contains(KEYS[2:3]) == [True]


@pytest.mark.parametrize("given", range(10))
def test_where_a_tier_fails_at_a_part_the_next_one_goes_on(given: int, pair: tuple[Faulty, Faulty, TierStack]) -> None:
    first, second, stack = pair
    stack.write(ITEMS)
    first.fails_after = given
    check_read(stack, [0, 1, 2])
    assert second.stat().hits == 3
    assert first.asked.count("read") == 1


def test_a_corrupt_page_is_read_from_the_next_tier(tmp_path: Path) -> None:
    for place in page_format(LAYOUT).places:
        first, second = HostTier(1 << 30), DiskTier(tmp_path)
        stack = TierStack([first, second])
        stack.write(ITEMS)
        spoiled = bytearray(ITEMS[1][1])
        spoiled[place.offset] ^= 1
        first._blobs[KEYS[1]] = bytes(spoiled)
        check_read(stack, [0, 1, 2])
        assert first.stat().corrupt == 1
        stack.close()


def test_a_corrupt_page_without_another_copy_is_an_error(pair: tuple[Faulty, Faulty, TierStack]) -> None:
    first, second, stack = pair
    first.write(ITEMS)
    second.write(ITEMS[:1])
    first._blobs[KEYS[1]] = ITEMS[1][1][:100]
    with pytest.raises(TierReadError) as caught:
        check_read(stack, [0, 1])
    assert caught.value.key == KEYS[1]


def test_a_tier_that_leaves_parts_out_has_failed(
    pair: tuple[Faulty, Faulty, TierStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, stack = pair
    stack.write(ITEMS)
    monkeypatch.setattr(first, "read", lambda *_: iter(()))
    check_read(stack, [0])
    monkeypatch.setattr(second, "read", lambda *_: iter(()))
    with pytest.raises(TierError, match=r"^kv tier second left out the main part of layer 0$"):
        check_read(stack, [1])


def test_a_tier_that_fails_is_left_alone_for_a_while(
    pair: tuple[Faulty, Faulty, TierStack], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, stack = pair
    second.write(ITEMS)
    first.broken = True
    assert stack.contains(KEYS) == [True] * 6
    assert stack.contains(KEYS) == [True] * 6
    assert first.asked == ["contains"]
    assert caplog.messages == ["first is broken"]
    stack.write(ITEMS)  # that it cannot be read says nothing of this
    stack.write(ITEMS)
    assert first.asked == ["contains", "write"]
    clock.now += 1.5
    first.broken = False
    assert stack.contains(KEYS) == [True] * 6
    stack.write(ITEMS)
    assert first.asked == ["contains", "write", "contains", "write"]
    check_read(stack, [0])


def test_a_tier_that_takes_too_long_to_answer_is_left_alone(
    pair: tuple[Faulty, Faulty, TierStack], clock: Clock
) -> None:
    first, _, stack = pair
    stack.write(ITEMS)
    first.takes = 10.0
    assert stack.contains(KEYS) == [True] * 6, "the answer counts all the same"
    stack.contains(KEYS)
    assert first.asked == ["write", "contains"]


def test_missing_and_corrupt_pages_do_not_stop_a_tier(pair: tuple[Faulty, Faulty, TierStack]) -> None:
    first, _, stack = pair
    stack.write(ITEMS)
    for number in range(5):
        first._blobs[KEYS[number]] = b""
        check_read(stack, [number])
    assert first.asked.count("read") == 5


def test_a_breaker_rests_longer_each_time_and_forgets(clock: Clock) -> None:
    breaker = Breaker(clock)
    rests = []
    for _ in range(1100):
        breaker.record(failed=True)
        begun = clock.now
        while breaker.is_open:
            clock.now += 0.5
        rests.append(clock.now - begun)
    assert rests[:7] == [1, 2, 4, 8, 16, 32, LONGEST]
    assert set(rests[7:]) == {LONGEST}
    breaker.record(failed=False)
    assert not breaker.is_open
    breaker.record(failed=True)
    clock.now += 1
    assert not breaker.is_open


def test_writing_fails_where_no_tier_takes_it(pair: tuple[Faulty, Faulty, TierStack]) -> None:
    first, second, stack = pair
    first.broken = second.broken = True
    with pytest.raises(TierError, match=r"^first is broken$"):
        stack.write(ITEMS)
    with pytest.raises(TierError, match=r"^kv tier first is left alone after it failed$"):
        stack.write(ITEMS)


def test_who_deletes_or_lets_go_must_reach_every_tier(pair: tuple[Faulty, Faulty, TierStack], clock: Clock) -> None:
    first, second, stack = pair
    stack.write(ITEMS)
    second.delete(KEYS[:2])
    assert stack.delete(KEYS[:3]) == 3
    assert first.contains(KEYS) == second.contains(KEYS) == [False] * 3 + [True] * 3
    first.broken = True
    uses: list[Callable[[], object]] = [lambda: stack.delete(KEYS), lambda: stack.unpin("a")]
    for use in uses:
        for _ in range(2):
            with pytest.raises(TierError, match="first is broken"):
                use()
    assert second.contains(KEYS) == [False] * 6
    assert second.asked[-1] == "contains"
    assert second.asked.count("unpin") == 2


def test_pins_are_where_they_last(tmp_path: Path) -> None:
    host, disk = HostTier(1 << 30), DiskTier(tmp_path)
    stack = TierStack([host, disk])
    stack.pin(KEYS[:2], "a")
    stack.pin(KEYS[2:3], "a")
    assert (host.owners(), disk.owners()) == ({}, {"a": KEYS[:3]})
    assert stack.owners() == {"a": KEYS[:3]}
    stack.unpin("a")
    assert disk.owners() == {}
    stack.close()
    alone = HostTier(1 << 30)
    TierStack([alone]).pin(KEYS[:1], "a")
    assert alone.owners() == {"a": KEYS[:1]}


def test_counts_are_summed_and_pages_listed_once(pair: tuple[Faulty, Faulty, TierStack], tmp_path: Path) -> None:
    first, second, stack = pair
    stack.write(ITEMS)
    second.delete(KEYS[:1])
    stat = stack.stat()
    assert (stat.name, stat.entries, stat.bytes, stat.capacity) == ("first > second", 11, 11 * SIZE, 2 << 30)
    assert [one.name for one in stack.stats()] == ["first", "second"]
    assert sorted(entry.key for entry in stack.scan()) == sorted(KEYS)
    assert TierStack([first, DiskTier(tmp_path)]).stat().capacity is None


def test_no_tier_at_all_holds_nothing() -> None:
    stack = TierStack([])
    stack.write(ITEMS)
    assert stack.contains(KEYS) == [False] * 6
    assert stack.delete(KEYS) == 0
    assert stack.owners() == {}
    assert list(stack.scan()) == []
    with pytest.raises(TierReadError):
        check_read(stack, [0])
    stack.close()


def test_closing_closes_all_tiers(pair: tuple[Faulty, Faulty, TierStack]) -> None:
    first, second, stack = pair
    second.write(ITEMS)
    check_read(stack, [0])
    stack.close()
    for tier in (first, second):
        with pytest.raises(TierError, match="is closed"):
            tier.contains(KEYS)
