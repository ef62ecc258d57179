from collections.abc import Sequence

import pytest
import torch

from tamis.config import LayerKind
from tamis.errors import OutOfPagesError, PageError, SlotError
from tamis.kv import KVLayout, KVManager, KVSequence, PageTable, PageUsage, SparseKVPool, Tokens

SIZE = 4


def make_manager(pages: int) -> KVManager:
    layout = KVLayout((LayerKind.DENSE,), kv_heads=1, head_dim=2, page_size=SIZE, dtype=torch.float32)
    return KVManager(SparseKVPool(layout, pages))


def at(ids: Sequence[int]) -> Tokens:
    return lambda start, end: tuple(ids[start:end])


def compute(manager: KVManager, ids: Sequence[int], salt: str = "") -> KVSequence:
    """A sequence of these tokens, read from the cache as far as a prompt may be, the rest computed."""
    sequence = KVSequence(manager, salt)
    sequence.adopt(at(ids), len(ids) - 1)
    sequence.append(len(ids) - sequence.length)
    sequence.commit(at(ids))
    return sequence


def test_what_was_computed_stays_for_others_until_its_room_is_needed() -> None:
    manager = make_manager(pages=6)
    first = compute(manager, range(10))
    assert manager.usage == PageUsage(total=6, free=3, held=3, cached=0)
    first.release()
    assert manager.usage == PageUsage(total=6, free=4, held=0, cached=2)
    again = KVSequence(manager, "")
    assert again.adopt(at(range(10)), 9) == 8
    assert manager.usage == PageUsage(total=6, free=4, held=2, cached=0)
    again.release()
    other = compute(manager, range(100, 124))
    assert manager.usage == PageUsage(total=6, free=0, held=6, cached=0)
    assert KVSequence(manager, "").find(at(range(10)), 9) == []
    other.release()
    manager.check([])


def test_what_is_in_use_is_never_evicted_and_nothing_is_where_it_would_not_do() -> None:
    manager = make_manager(pages=4)
    used, unused = compute(manager, range(8)), compute(manager, range(50, 54))
    unused.release()
    fresh = KVSequence(manager, "")
    with pytest.raises(OutOfPagesError) as caught:
        fresh.append(12)
    assert str(caught.value) == "3 pages were asked for, 1 of 4 are free and 1 can be evicted"
    assert manager.usage == PageUsage(total=4, free=1, held=2, cached=1)
    fresh.append(8)
    manager.check([used, fresh])


def test_of_two_pages_that_say_the_same_one_stays() -> None:
    manager = make_manager(pages=8)
    one, two = KVSequence(manager, ""), KVSequence(manager, "")
    for sequence in (one, two):
        sequence.append(10)
    assert manager.usage.held == 6
    one.commit(at(range(10)))
    two.commit(at(range(10)))
    manager.check([one, two])
    assert manager.usage.held == 4
    assert one.table.pages[:2] == two.table.pages[:2]
    assert one.table.pages[2] != two.table.pages[2]


def test_a_fork_shares_the_tree_and_copies_what_both_write_to() -> None:
    manager = make_manager(pages=8)
    one = compute(manager, range(6))
    two = one.fork()
    manager.check([one, two])
    for sequence, token in ((one, 7), (two, 8)):
        sequence.append(2)
        sequence.commit(at([*range(6), token, 9]))
    manager.check([one, two])
    assert one.table.pages[0] == two.table.pages[0]
    assert one.table.pages[1] != two.table.pages[1]
    assert manager.usage.held == 3


def test_what_was_not_computed_after_all_is_taken_back() -> None:
    manager = make_manager(pages=4)
    sequence = compute(manager, range(6))
    sequence.append(7)
    sequence.undo(7)
    manager.check([sequence])
    assert (sequence.length, manager.usage.held) == (6, 2)


def test_a_salt_is_forgotten_whole_but_for_what_is_in_use() -> None:
    manager = make_manager(pages=8)
    compute(manager, range(8), "a").release()
    kept = compute(manager, [*range(4), 60], "a")
    compute(manager, range(8), "b").release()
    manager.forget("a")
    manager.check([kept])
    assert manager.usage == PageUsage(total=8, free=4, held=2, cached=2)


def test_a_sequence_that_may_be_wrong_leaves_nothing_of_its_own() -> None:
    manager = make_manager(pages=8)
    good, bad = compute(manager, range(4)), compute(manager, [*range(4), *range(20, 29)])
    bad.discard()
    manager.check([good])
    assert manager.usage == PageUsage(total=8, free=7, held=1, cached=0)


def test_check_finds_a_count_that_is_wrong() -> None:
    manager = make_manager(pages=4)
    sequence = compute(manager, range(8))
    with pytest.raises(AssertionError, match="page 1 has 1 users, 0 named it"):
        manager.check([])
    sequence.path[0].users += 1
    with pytest.raises(AssertionError):
        manager.check([sequence])
    sequence.path[0].users -= 1
    manager.allocator.share([2])
    with pytest.raises(AssertionError, match="page 2 has 3 holders, 2 name it"):
        manager.check([sequence])


def test_pages_are_adopted_and_replaced_only_where_that_makes_sense() -> None:
    manager = make_manager(pages=4)
    table = PageTable(manager.pool, manager.allocator)
    table.append(2)
    with pytest.raises(SlotError, match="2 tokens do not end with a page of 4: none can be adopted"):
        table.adopt([1])
    with pytest.raises(PageError, match="place=1 is not one of the 1 pages of the table"):
        table.replace(1, 1)
    with pytest.raises(PageError, match="page=2 is free and cannot be shared"):
        table.replace(0, 2)
    assert (table.pages, table.length) == ([1], 2)


class Load:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_pages_that_only_a_transfer_holds_are_neither_free_nor_held_nor_cached() -> None:
    manager, load = make_manager(pages=8), Load()
    cached = compute(manager, range(50, 58))
    reading = manager.hold(path=cached.path)
    cached.release()
    sequence = KVSequence(manager, "")
    filling = manager.hold(sequence.expect(3))
    sequence.incoming = load
    manager.check([sequence])
    assert manager.usage == PageUsage(total=8, free=3, held=3, cached=0, in_transfer=2)
    sequence.release()
    assert load.cancelled
    manager.check([])
    assert manager.usage == PageUsage(total=8, free=3, held=0, cached=0, in_transfer=5)
    with pytest.raises(OutOfPagesError, match="4 pages were asked for, 3 of 8 are free and 0 can be evicted"):
        KVSequence(manager, "").append(13)
    manager.let_go(filling)
    manager.let_go(reading)
    manager.check([])
    assert manager.usage == PageUsage(total=8, free=6, held=0, cached=2)


def test_what_comes_in_enters_the_tree_and_what_does_not_is_forgone() -> None:
    manager = make_manager(pages=8)
    compute(manager, range(4)).release()
    sequence = KVSequence(manager, "")
    assert sequence.adopt(at(range(20)), 19) == 4
    for comes in (False, True):
        sequence.expect(3)
        sequence.incoming = Load()
        if comes:
            sequence.receive(at(range(20)), 3)
        else:
            sequence.forgo()
        manager.check([sequence])
        assert sequence.length == (16 if comes else 4)
    sequence.release()
    assert [node.stored.name for node in manager.tree.nodes()] == ["NO", "LOADED", "LOADED", "LOADED"]


def test_what_may_be_wrong_leaves_the_tree_once_it_is_not_being_read_any_more() -> None:
    manager = make_manager(pages=4)
    bad = compute(manager, range(8))
    hold = manager.hold(path=bad.path)
    bad.discard()
    assert manager.usage.in_transfer == 2
    manager.let_go(hold)
    manager.check([])
    assert manager.usage.free == 4
