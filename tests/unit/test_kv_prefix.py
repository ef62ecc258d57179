import random
from collections.abc import Sequence

import pytest

from tamis.kv import PrefixNode, PrefixTree


class Cache:
    """A tree whose sequences are lists of tokens; pages are numbered as they come."""

    def __init__(self, page_size: int) -> None:
        self.tree = PrefixTree(page_size)
        self.pages = iter(range(1, 10_000))

    def add(self, ids: Sequence[int], salt: str = "") -> list[PrefixNode]:
        """Compute `ids` and let them go."""
        path = self.hold(ids, salt)
        self.tree.unlock(path)
        self.tree.check()
        return path

    def hold(self, ids: Sequence[int], salt: str = "") -> list[PrefixNode]:
        """Compute `ids`, as far as the tree has not got them, and go on using them."""
        size = self.tree.page_size
        path = self.find(ids, salt)
        self.tree.lock(path)
        for start in range(len(path) * size, len(ids) - size + 1, size):
            above = path[-1] if path else None
            path.append(self.tree.insert(salt, above, tuple(ids[start : start + size]), next(self.pages)))
        self.tree.check()
        return path

    def find(self, ids: Sequence[int], salt: str = "", limit: int | None = None) -> list[PrefixNode]:
        return self.tree.find(salt, None, lambda a, b: tuple(ids[a:b]), 0, len(ids) if limit is None else limit)

    def hit(self, ids: Sequence[int], salt: str = "") -> int:
        """Tokens that a prompt does not compute: its last one it always does."""
        return len(self.find(ids, salt, len(ids) - 1)) * self.tree.page_size


def test_less_than_a_page_leaves_no_node_and_only_full_pages_can_be_evicted() -> None:
    """C2: an empty key after the cut to pages, a wrong count of what can be evicted."""
    cache = Cache(page_size=4)
    assert cache.add([1, 2, 3]) == []
    assert cache.hit([1, 2, 3, 4]) == 0
    assert (cache.tree.num_pages, list(cache.tree.nodes())) == (0, [])
    cache.add(range(10))
    assert cache.tree.num_unused * 4 == 8
    assert sorted(cache.tree.evict(100)) == [1, 2]
    assert (cache.tree.num_pages, cache.tree.num_unused) == (0, 0)
    cache.tree.check()


@pytest.mark.parametrize(("again", "hit"), [(32, 16), (48, 32), (33, 32), (16, 0), (17, 16), (15, 0)])
def test_a_prompt_of_whole_pages_hits_all_but_its_last_page(again: int, hit: int) -> None:
    """C8."""
    cache = Cache(page_size=16)
    cache.add(range(32))
    assert cache.hit(range(again)) == hit


def test_paths_part_where_tokens_do() -> None:
    cache = Cache(page_size=2)
    first, second = cache.add([1, 2, 3, 4, 5, 6]), cache.add([1, 2, 3, 4, 7, 8])
    assert [node.page for node in first] == [1, 2, 3]
    assert [node.page for node in second] == [1, 2, 4]
    assert cache.hit([1, 2, 9, 9, 5, 6, 0]) == 2


def test_salts_never_meet() -> None:
    cache = Cache(page_size=2)
    cache.add([1, 2, 3, 4], "a")
    assert (cache.hit([1, 2, 3], "a"), cache.hit([1, 2, 3], "b"), cache.hit([1, 2, 3])) == (2, 0, 0)
    cache.add([1, 2, 3, 4], "b")
    assert cache.tree.forget("a") == [2, 1]
    assert (cache.hit([1, 2, 3], "a"), cache.hit([1, 2, 3], "b")) == (0, 2)
    assert cache.tree.forget("nobody") == []


def test_what_is_in_use_is_not_evicted_and_neither_is_what_stands_above_it() -> None:
    cache = Cache(page_size=2)
    path = cache.hold([1, 2, 3, 4])
    cache.add([1, 2, 3, 4, 5, 6])
    cache.add([7, 8])
    assert cache.tree.num_unused == 2
    assert sorted(cache.tree.evict(100)) == [3, 4]
    cache.tree.check()
    cache.tree.unlock(path)
    assert cache.tree.evict(100) == [2, 1]


def test_the_least_recently_used_leaf_goes_first_and_a_path_from_its_end() -> None:
    cache = Cache(page_size=2)
    cache.add([1, 1, 2, 2])  # pages 1, 2
    cache.add([3, 3, 4, 4])  # pages 3, 4
    cache.add([1, 1, 5, 5])  # pages 1, 5
    assert cache.tree.evict(2) == [2, 4]
    assert cache.tree.evict(3) == [3, 5, 1]


def test_to_use_a_leaf_again_saves_it() -> None:
    cache = Cache(page_size=2)
    cache.add([1, 1])
    cache.add([2, 2])
    cache.tree.unlock(cache.hold([1, 1]))
    assert cache.tree.evict(1) == [2]


def test_a_path_that_may_be_wrong_goes_as_far_as_nobody_else_uses_it() -> None:
    cache = Cache(page_size=2)
    good = cache.hold([1, 1, 2, 2])
    bad = cache.hold([1, 1, 2, 2, 3, 3, 4, 4])
    cache.tree.unlock(bad)
    assert cache.tree.discard(bad) == [4, 3]
    cache.tree.check()
    cache.tree.unlock(good)
    assert cache.tree.num_unused == 2


def test_the_queue_of_leaves_does_not_grow_with_what_has_left() -> None:
    cache = Cache(page_size=1)
    for salt in range(2000):
        cache.add([1, 2, 3], str(salt))
        cache.tree.forget(str(salt))
    assert len(cache.tree._queue) <= 100


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_use_and_eviction_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    cache, held = Cache(page_size=rng.choice([1, 2, 3])), list[list[PrefixNode]]()
    for _ in range(300):
        action = rng.random()
        if action < 0.5:
            held.append(cache.hold([rng.randrange(2) for _ in range(rng.randrange(12))], rng.choice("ab")))
        elif held and action < 0.8:
            cache.tree.unlock(held.pop(rng.randrange(len(held))))
        elif action < 0.9:
            wanted = rng.randrange(6)
            unused = cache.tree.num_unused
            assert len(cache.tree.evict(wanted)) == min(wanted, unused)
        else:
            cache.tree.forget(rng.choice("ab"))
        cache.tree.check()
    for path in held:
        cache.tree.unlock(path)
    pages = cache.tree.num_pages
    assert len(cache.tree.evict(10_000)) == pages, "what nobody uses can all be evicted"
    assert cache.tree.num_pages == 0
