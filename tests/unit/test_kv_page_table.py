import pytest
import torch
from torch import Tensor

from support.kv import Planes, contents, rows, same, small_layout, write_random
from tamis.errors import ConfigError, OutOfPagesError, SlotError, TransferError
from tamis.kv import LayerTransferCounter, PageAllocator, PageTable, SparseKVPool


class Setup:
    """A pool with its allocator, and tables that write random tokens to all planes."""

    def __init__(self, num_pages: int = 32, page_size: int = 4) -> None:
        self.pool = SparseKVPool(small_layout(page_size=page_size), num_pages)
        self.allocator = PageAllocator(num_pages)

    def table(self, tokens: int = 0, seed: int = 0) -> PageTable:
        table = PageTable(self.pool, self.allocator)
        self.write(table, tokens, seed)
        return table

    def write(self, table: PageTable, tokens: int, seed: int) -> None:
        write_random(self.pool, table.append(tokens), seed)

    def read(self, table: PageTable) -> Planes:
        return rows(contents(self.pool), slots_of(table, self.pool.layout.page_size))


def slots_of(table: PageTable, page_size: int) -> Tensor:
    every = [page * page_size + offset for page in table.pages for offset in range(page_size)]
    return torch.tensor(every[: table.length], dtype=torch.int64)


def cut(planes: Planes, tokens: int) -> Planes:
    return {key: rows[:tokens] for key, rows in planes.items()}


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_appended_slots_are_consecutive_tokens_of_the_pages(page_size: int) -> None:
    setup = Setup(page_size=page_size)
    table = setup.table()
    given = [table.append(n) for n in (1, 3, 0, 7, 5)]
    assert [len(slots) for slots in given] == [1, 3, 0, 7, 5]
    assert all(slots.dtype is torch.int64 for slots in given)
    assert torch.equal(torch.cat(given), slots_of(table, page_size))
    assert table.length == 16
    assert len(table.pages) == 16 // page_size
    assert table.pages == list(range(1, 16 // page_size + 1))


def test_a_copy_and_a_trim_reach_every_plane() -> None:
    """Case A4."""
    setup = Setup()
    original = setup.table(37, seed=1)
    before = setup.read(original)
    copy = original.fork()
    copy.trim(5)
    assert (copy.length, original.length) == (32, 37)
    assert same(setup.read(copy), cut(before, 32))
    assert {len(plane) for plane in setup.read(copy).values()} == {32}
    setup.write(copy, 9, seed=2)
    assert same(setup.read(original), before)
    assert {len(plane) for plane in setup.read(original).values()} == {37}
    assert same(cut(setup.read(copy), 32), cut(before, 32))


@pytest.mark.parametrize("tokens", range(1, 10))
def test_forks_never_see_what_the_other_appends(tokens: int) -> None:
    setup = Setup()
    first = setup.table(tokens, seed=1)
    before = setup.read(first)
    second, third = first.fork(), first.fork()
    for seed, table in enumerate((second, first, third), 2):
        setup.write(table, 3, seed)
    tails = []
    for table in (first, second, third):
        read = setup.read(table)
        assert same(cut(read, tokens), before)
        tails.append(read[0, "k"][tokens:])
    assert not torch.equal(tails[0], tails[1])
    assert not torch.equal(tails[1], tails[2])
    full = tokens // 4
    assert first.pages[:full] == second.pages[:full] == third.pages[:full]
    assert len({table.pages[full] for table in (first, second, third)}) == 3


def test_a_token_appended_after_a_trim_into_shared_pages_is_a_copy() -> None:
    setup = Setup()
    original = setup.table(12, seed=1)
    before = setup.read(original)
    fork = original.fork()
    fork.trim(6)
    assert len(fork.pages) == 2
    setup.write(fork, 1, seed=2)
    assert same(setup.read(original), before)
    assert same(cut(setup.read(fork), 6), cut(before, 6))
    assert fork.pages[0] == original.pages[0]
    assert fork.pages[1] != original.pages[1]


def test_reorder_swaps_every_plane_and_trim_and_reset_follow() -> None:
    """Case A18."""
    setup = Setup()
    tables = [setup.table(6, seed=1), setup.table(9, seed=2)]
    zero, one = (setup.read(table) for table in tables)
    tables = PageTable.reorder(tables, [1, 0])
    assert same(setup.read(tables[0]), one)
    assert same(setup.read(tables[1]), zero)
    tables[0].trim(4)
    assert {len(plane) for plane in setup.read(tables[0]).values()} == {5}
    assert same(setup.read(tables[0]), cut(one, 5))
    tables[0].reset()
    assert tables[0].length == 0
    assert {len(plane) for plane in setup.read(tables[0]).values()} == {0}
    assert same(setup.read(tables[1]), zero)


def test_reorder_forks_rows_used_twice_and_resets_unused_ones() -> None:
    setup = Setup()
    tables = [setup.table(6, seed=seed) for seed in range(3)]
    beams = PageTable.reorder(tables, [1, 1, 0])
    assert [beam.length for beam in beams] == [6, 6, 6]
    assert beams[0].pages == beams[1].pages
    assert tables[2].length == 0
    assert setup.allocator.num_free == 32 - 4
    before = setup.read(beams[1])
    setup.write(beams[0], 1, seed=9)
    assert same(setup.read(beams[1]), before)
    for beam in beams:
        beam.reset()
    assert setup.allocator.num_free == 32


@pytest.mark.parametrize("row", [-1, 2, True])
def test_reorder_refuses_rows_that_do_not_exist(row: int) -> None:
    setup = Setup()
    tables = [setup.table(6, seed=seed) for seed in range(2)]
    with pytest.raises(SlotError, match=rf"^row={row} is not one of the 2 page tables$"):
        PageTable.reorder(tables, [0, row])
    assert [table.length for table in tables] == [6, 6]


def test_pages_come_back() -> None:
    setup = Setup(num_pages=8)
    table = setup.table(17)
    fork = table.fork()
    assert setup.allocator.num_free == 3
    table.trim(13)
    assert setup.allocator.num_free == 3
    fork.reset()
    assert setup.allocator.num_free == 7
    table.reset()
    assert setup.allocator.num_free == 8


def test_running_out_of_pages_changes_nothing() -> None:
    setup = Setup(num_pages=3)
    table = setup.table(6)
    before = (table.pages, table.length, setup.allocator.num_free)
    with pytest.raises(OutOfPagesError, match=r"^2 pages were asked for, 1 of 3 are free$"):
        table.append(10)
    assert (table.pages, table.length, setup.allocator.num_free) == before
    fork = table.fork()
    with pytest.raises(OutOfPagesError):
        fork.append(3)
    assert (fork.pages, fork.length) == before[:2]
    assert len(fork.append(2)) == 2


def test_a_copy_that_fails_gives_its_pages_back() -> None:
    setup = Setup(num_pages=8)
    table = setup.table(6)
    fork = table.fork()
    counter = LayerTransferCounter(6)
    setup.pool.register_layer_transfer_counter(counter)
    ticket = counter.begin()
    counter.fail(ticket, OSError("gone"))
    counter.consume([ticket])
    before = (fork.pages, fork.length, setup.allocator.num_free)
    with pytest.raises(TransferError):
        fork.append(7)
    assert (fork.pages, fork.length, setup.allocator.num_free) == before
    assert [setup.allocator.holders(page) for page in fork.pages] == [2, 2]


def test_bad_counts_are_refused() -> None:
    setup = Setup()
    table = setup.table(3)
    for bad in (-1, 1.0, True):
        with pytest.raises(SlotError, match=rf"^cannot append {bad} tokens: a whole number is needed$"):
            table.append(bad)  # type: ignore[arg-type]
        with pytest.raises(SlotError, match=rf"^cannot trim {bad} tokens: a whole number is needed$"):
            table.trim(bad)  # type: ignore[arg-type]
    with pytest.raises(SlotError, match=r"^cannot trim 4 tokens of a sequence of 3$"):
        table.trim(4)
    assert (table.length, len(table.pages)) == (3, 1)


def test_a_table_grows_in_one_run_where_it_can() -> None:
    setup = Setup(num_pages=12)
    table, other = setup.table(4), setup.table(4)
    other.reset()
    table.append(16)
    assert table.pages == [1, 2, 3, 4, 5]


def test_an_allocator_of_another_size_is_refused() -> None:
    setup = Setup(num_pages=4)
    with pytest.raises(ConfigError, match=r"^the allocator has 5 pages, the pool 4$"):
        PageTable(setup.pool, PageAllocator(5))
