"""Pages that may be read again: a tree in which every path from a root spells the tokens that lie in its pages.

A node is one full page of tokens below the pages before it. Whoever uses a page locks its whole path, so that a node
never has more users than its parent. What nobody uses is kept until its room is needed, the least recently used leaf
first. Prefixes of different salts never meet: each salt has a root of its own.
"""

import enum
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence

Tokens = Callable[[int, int], tuple[int, ...]]
"""`tokens(start, end)`: the tokens of a sequence at these positions."""
Key = tuple[int, ...]
_SPARE = 64
"""Nodes that have left the tree may stand in its queue: as many as there are pages, and so many more."""


class Stored(enum.Enum):
    """Whether a page is in the tiers as well, as far as this process knows."""

    NO = enum.auto()
    WAITS = enum.auto()
    """It is to be written, or being written."""
    SAVED = enum.auto()
    """Written by this process."""
    LOADED = enum.auto()
    """It came from there."""


class PrefixNode:
    """One page of tokens, after the pages of the nodes above it. Only its tree changes it, but for `stored`."""

    __slots__ = ("children", "key", "last_used", "page", "parent", "queued", "salt", "stored", "users")

    def __init__(self, parent: "PrefixNode | None", key: Key, page: int, salt: Hashable) -> None:
        self.parent = parent
        """None: a root, or a node that has left the tree."""
        self.key, self.page, self.salt = key, page, salt
        self.children: dict[Key, PrefixNode] = {}
        self.users = 0
        """Sequences that hold the page."""
        self.last_used = 0
        self.queued = False
        """Whether it stands in the tree's queue of leaves to evict."""
        self.stored = Stored.NO
        """Kept by whoever moves pages to the tiers."""


class PrefixTree:
    """The tree of all salts. Hands out page ids and knows nothing of what is in the pages. Not thread-safe."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        """Pages in the tree."""
        self.num_unused = 0
        """Of these, pages that no sequence uses: all of them can be evicted."""
        self._roots: dict[Hashable, PrefixNode] = {}
        # Every unused leaf stands here, perhaps under the time of an earlier use, beside nodes that no longer are one.
        self._queue: list[tuple[int, int, PrefixNode]] = []
        self._clock = itertools.count(1)
        self._order = itertools.count()

    def find(self, salt: Hashable, above: PrefixNode | None, tokens: Tokens, start: int, end: int) -> list[PrefixNode]:
        """The path below `above` (None: from the root) that spells tokens `start` to `end`, as far as it goes.

        Full pages only: of 33 tokens and pages of 16, at most two. Changes nothing.
        """
        node = self._roots.get(salt) if above is None else above
        path: list[PrefixNode] = []
        while node is not None and start + self.page_size <= end:
            node = node.children.get(tokens(start, start + self.page_size))
            if node is not None:
                path.append(node)
                start += self.page_size
        return path

    def insert(self, salt: Hashable, above: PrefixNode | None, key: Key, page: int) -> PrefixNode:
        """The node of the tokens `key` below `above`, locked: a new one for `page`, or the one that is there."""
        parent = above or self._roots.setdefault(salt, PrefixNode(None, (), 0, salt))
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = PrefixNode(parent, key, page, salt)
            self.num_pages += 1
            self.num_unused += 1
        self.lock([node])
        return node

    def lock(self, path: Sequence[PrefixNode]) -> None:
        """One more user of each node; those above them must be in use by the same one."""
        now = next(self._clock)
        for node in path:
            self.num_unused -= not node.users
            node.users += 1
            node.last_used = now

    def unlock(self, path: Sequence[PrefixNode]) -> None:
        """One user less of each node of a whole path, first to last."""
        now = next(self._clock)
        for node in path:
            node.users -= 1
            node.last_used = now
            self.num_unused += not node.users
        if path:
            self._enqueue(path[-1])

    def evict(self, count: int) -> list[int]:
        """Take up to `count` unused pages out, the least recently used leaves first; they are the caller's now."""
        pages: list[int] = []
        while len(pages) < count and self._queue:
            used, _, node = heapq.heappop(self._queue)
            node.queued = False
            if node.last_used != used:
                self._enqueue(node)
            elif _is_unused_leaf(node):
                pages.append(self._remove(node))
        return pages

    def discard(self, path: Sequence[PrefixNode]) -> list[int]:
        """Take out what nobody else uses of a path that its user has unlocked; the pages are the caller's now."""
        return [self._remove(node) for node in reversed(path) if _is_unused_leaf(node)]

    def forget(self, salt: Hashable) -> list[int]:
        """Take out every unused page of a salt; they are the caller's now."""
        below = list(self._below(self._roots[salt])) if salt in self._roots else []
        return self.discard(below)

    def nodes(self) -> Iterator[PrefixNode]:
        """All nodes, parents before children."""
        for root in list(self._roots.values()):
            yield from self._below(root)

    def check(self) -> None:
        """Assert that counts and links agree, and that every unused leaf can be found for eviction."""
        nodes = list(self.nodes())
        assert len(nodes) == self.num_pages, f"{len(nodes)} nodes, {self.num_pages} counted"
        assert len({node.page for node in nodes}) == len(nodes), "a page stands in two nodes"
        unused = sum(not node.users for node in nodes)
        assert unused == self.num_unused, f"{unused} unused nodes, {self.num_unused} counted"
        assert all(root.children for root in self._roots.values()), "a root is left without pages"
        queued = {id(node) for _, _, node in self._queue}
        for node in nodes:
            parent = node.parent
            assert parent is not None and parent.children.get(node.key) is node, f"page {node.page} is not linked"
            assert len(node.key) == self.page_size, f"page {node.page} stands for {len(node.key)} tokens"
            assert parent.parent is None or parent.users >= node.users, f"page {node.page} has more users than above"
            assert node.queued == (id(node) in queued), f"page {node.page} is queued or not"
            assert node.queued or not _is_unused_leaf(node), f"page {node.page} can never be evicted"

    def _below(self, top: PrefixNode) -> Iterator[PrefixNode]:
        rest = list(top.children.values())
        while rest:
            node = rest.pop()
            yield node
            rest += node.children.values()

    def _enqueue(self, node: PrefixNode) -> None:
        if not node.queued and node.parent is not None:
            node.queued = True
            heapq.heappush(self._queue, (node.last_used, next(self._order), node))
            if len(self._queue) > 2 * self.num_pages + _SPARE:
                self._queue = [entry for entry in self._queue if entry[2].parent is not None]
                heapq.heapify(self._queue)

    def _remove(self, node: PrefixNode) -> int:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        self.num_pages -= 1
        self.num_unused -= 1
        if parent.parent is None:
            if not parent.children:
                del self._roots[parent.salt]
        elif _is_unused_leaf(parent):
            self._enqueue(parent)
        return node.page


def _is_unused_leaf(node: PrefixNode) -> bool:
    return node.parent is not None and not node.users and not node.children
