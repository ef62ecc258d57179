import random
import time

import pytest

from tamis.errors import ConfigError, DoubleFreeError, ForeignPageError, OutOfPagesError, PageError
from tamis.kv import PageAllocator


def state(allocator: PageAllocator) -> tuple[int, list[int]]:
    return allocator.num_free, [allocator.holders(page) for page in range(1, allocator.num_pages + 1)]


def test_pages_are_handed_out_in_one_run_without_page_0() -> None:
    allocator = PageAllocator(8)
    assert allocator.allocate(3) == [1, 2, 3]
    assert allocator.allocate(5) == [4, 5, 6, 7, 8]
    assert (allocator.num_pages, allocator.num_free) == (8, 0)
    assert allocator.allocate(0) == []


def test_an_allocation_grows_the_run_it_continues() -> None:
    allocator = PageAllocator(12)
    allocator.allocate(12)
    allocator.free([2, 3, 7, 8, 9])
    assert allocator.allocate(2, after=6) == [7, 8]
    assert allocator.allocate(3, after=8) == [9, 2, 3]
    allocator.free([2, 3])
    assert allocator.allocate(1, after=4) == [2]


def test_the_smallest_run_that_fits_is_taken() -> None:
    allocator = PageAllocator(20)
    allocator.allocate(20)
    allocator.free([*range(2, 8), 10, 11, 12, 15, 16])
    assert allocator.allocate(3) == [10, 11, 12]
    assert allocator.allocate(2) == [15, 16]
    assert allocator.allocate(2) == [2, 3]


def test_the_rest_is_pieced_together_from_the_largest_runs() -> None:
    allocator = PageAllocator(10)
    allocator.allocate(10)
    allocator.free([1, 3, 4, 5, 8, 9])
    assert allocator.allocate(5) == [3, 4, 5, 8, 9]


def test_freed_neighbours_become_one_run_again() -> None:
    allocator = PageAllocator(9)
    allocator.allocate(9)
    for page in (2, 6, 4, 8, 5, 3, 1, 9, 7):
        allocator.free([page])
    assert allocator.allocate(9) == list(range(1, 10))


def test_running_out_names_both_numbers_and_takes_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(3)
    before = state(allocator)
    with pytest.raises(OutOfPagesError, match=r"^2 pages were asked for, 1 of 4 are free$"):
        allocator.allocate(2)
    assert state(allocator) == before


@pytest.mark.parametrize("n", [-1, 1.0, True, "2"])
def test_an_allocation_is_a_whole_number(n: int) -> None:
    with pytest.raises(PageError, match=r"^cannot allocate .* pages: a whole number is needed$"):
        PageAllocator(4).allocate(n)


def test_iterators_are_read_whole() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.share(page for page in pages)
    assert state(allocator) == (2, [2, 2, 0, 0])
    allocator.free(iter(pages))
    assert state(allocator) == (2, [1, 1, 0, 0])


def test_pages_are_named_by_ints_in_a_sequence() -> None:
    allocator = PageAllocator(4)
    with pytest.raises(PageError, match=r"^after='x' is not a page id: an int is needed$"):
        allocator.allocate(1, "x")  # type: ignore[arg-type]
    with pytest.raises(PageError, match=r"^pages=None is not a sequence$"):
        allocator.free(None)  # type: ignore[arg-type]
    with pytest.raises(PageError, match=r"^page=\[1\] is not a page id: an int is needed$"):
        allocator.free([[1]])  # type: ignore[list-item]
    assert allocator.num_free == 4


def test_a_shared_page_is_free_when_its_last_holder_lets_go() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.share(pages)
    allocator.share([1])
    assert state(allocator) == (2, [3, 2, 0, 0])
    allocator.free(pages)
    assert state(allocator) == (2, [2, 1, 0, 0])
    allocator.free([1, 2])
    allocator.free([1])
    assert state(allocator) == (4, [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("pages", "error", "message"),
    [
        ([1, 3], DoubleFreeError, "page=3 is freed 1 times, but has 0 holders"),
        ([1, 1], DoubleFreeError, "page=1 is freed 2 times, but has 1 holders"),
        ([1, 0], ForeignPageError, "page=0 is not a page of this pool, whose pages are 1 <= id <= 4"),
        ([1, 5], ForeignPageError, "page=5 is not a page of this pool, whose pages are 1 <= id <= 4"),
        ([1, -1], ForeignPageError, "page=-1 is not a page of this pool, whose pages are 1 <= id <= 4"),
        ([1, 2.0], PageError, "page=2.0 is not a page id: an int is needed"),
    ],
)
def test_a_bad_free_changes_nothing(pages: list[int], error: type[Exception], message: str) -> None:
    allocator = PageAllocator(4)
    allocator.allocate(2)
    before = state(allocator)
    with pytest.raises(error) as caught:
        allocator.free(pages)
    assert str(caught.value) == message
    assert state(allocator) == before


def test_a_bad_share_changes_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(2)
    before = state(allocator)
    with pytest.raises(PageError, match=r"^page=3 is free and cannot be shared$"):
        allocator.share([1, 3])
    with pytest.raises(ForeignPageError):
        allocator.share([1, 0])
    with pytest.raises(ForeignPageError):
        allocator.holders(0)
    assert state(allocator) == before


@pytest.mark.parametrize("num_pages", [0, -3, True])
def test_an_allocator_has_pages(num_pages: int) -> None:
    with pytest.raises(ConfigError):
        PageAllocator(num_pages)


@pytest.mark.parametrize("seed", range(5))
def test_every_page_has_one_place_whatever_happens(seed: int) -> None:
    """Free and held pages add up to all, and nothing is handed out twice, against a plain list of counts."""
    choose = random.Random(seed)
    allocator = PageAllocator(50)
    counts = [0] * 51
    for _ in range(400):
        held = [page for page in range(1, 51) if counts[page]]
        free = 50 - len(held)
        action = choose.random()
        if action < 0.45:
            wanted = choose.randint(0, min(free, 12))
            pages = allocator.allocate(wanted, choose.choice([None, choose.randint(1, 50)]))
            assert len(set(pages)) == wanted
            assert not any(counts[page] for page in pages)
            for page in pages:
                counts[page] = 1
        elif held:
            pages = choose.sample(held, choose.randint(1, len(held)) if action > 0.9 else min(len(held), 3))
            step = 1 if action < 0.6 else -1
            (allocator.share if step == 1 else allocator.free)(pages)
            for page in pages:
                counts[page] += step
        assert state(allocator) == (counts[1:].count(0), counts[1:])
    allocator.free([page for page in range(1, 51) for _ in range(counts[page])])
    assert allocator.allocate(50) == list(range(1, 51))


def test_a_million_pages_cost_what_is_asked_for() -> None:
    start = time.process_time()
    for _ in range(100):
        allocator = PageAllocator(1_000_000)
        allocator.free(allocator.allocate(10))
    assert time.process_time() - start < 1.0


def test_a_fragmented_million_is_still_quick() -> None:
    allocator = PageAllocator(1_000_000)
    allocator.allocate(1_000_000)
    allocator.free(range(1, 1_000_000, 50))
    start = time.process_time()
    for page in range(2, 20_000, 50):
        allocator.free([page])
        allocator.allocate(2)
    assert time.process_time() - start < 1.0
