"""Who owns which page: sequences that run, a tree of prefixes that may be read again, and the free list."""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from torch import Tensor

from tamis.errors import OutOfPagesError
from tamis.kv.allocator import PageAllocator
from tamis.kv.page_table import PageTable
from tamis.kv.pool import SparseKVPool
from tamis.kv.prefix import PrefixNode, PrefixTree, Tokens

_EVICT_SHARE = 64
"""Room is made for at least one page in so many at a time: pages that come free together lie together more often."""


@dataclass(frozen=True)
class PageUsage:
    """Pages by owner. free + held + cached + in_transfer = total."""

    total: int
    """Usable pages of the pool."""
    free: int
    held: int
    """Running requests hold them, perhaps several the same one."""
    cached: int
    """Only the prefix cache holds them: they are given up as soon as their room is needed."""
    in_transfer: int = 0
    """Held by a transfer that outlived its request. Nothing transfers pages yet."""


class KVManager:
    """Hands out the pages of one pool and keeps what was computed for whoever asks for the same tokens again.

    A page has one owner at a time: the free list; the sequences that hold it, whether or not it stands in the tree;
    or the tree alone. Not thread-safe: one thread owns it.
    """

    def __init__(self, pool: SparseKVPool) -> None:
        """All pages are free."""
        self.pool = pool
        self.page_size = pool.layout.page_size
        self.allocator = PageAllocator(pool.num_pages)
        self.tree = PrefixTree(self.page_size)

    @property
    def available(self) -> int:
        """Pages that can be had: free ones and those that only the tree holds."""
        return self.allocator.num_free + self.tree.num_unused

    @property
    def usage(self) -> PageUsage:
        """Pages by owner, as it stands."""
        total, free, cached = self.allocator.num_pages, self.allocator.num_free, self.tree.num_unused
        return PageUsage(total, free, total - free - cached, cached)

    def make_room(self, pages: int) -> None:
        """Evict from the tree until so many pages are free. Raises OutOfPagesError, evicting none, where it cannot."""
        if pages > self.available:
            raise OutOfPagesError(
                f"{pages} pages were asked for, {self.allocator.num_free} of {self.allocator.num_pages} are free and "
                f"{self.tree.num_unused} can be evicted"
            )
        missing = pages - self.allocator.num_free
        if missing > 0:
            self.allocator.free(self.tree.evict(max(missing, self.allocator.num_pages // _EVICT_SHARE)))

    def forget(self, salt: Hashable) -> None:
        """Give up every page of a salt that no sequence holds."""
        self.allocator.free(self.tree.forget(salt))

    def check(self, sequences: "Iterable[KVSequence]") -> None:
        """Assert that the books are right where these are all sequences: every count, and that the sum is the total."""
        sequences = list(sequences)
        tables = Counter(page for sequence in sequences for page in sequence.table.pages)
        users = Counter(id(node) for sequence in sequences for node in sequence.path)
        self.tree.check()
        nodes = list(self.tree.nodes())
        for node in nodes:
            assert node.users == users[id(node)], f"page {node.page} has {node.users} users, {users[id(node)]} named it"
        in_tree = {node.page for node in nodes}
        for sequence in sequences:
            sequence.check()
        for page in tables.keys() | in_tree:
            holders, named = self.allocator.holders(page), tables[page] + (page in in_tree)
            assert holders == named, f"page {page} has {holders} holders, {named} name it"
        usage = self.usage
        held, cached = len(tables), len(in_tree - tables.keys())
        assert (usage.held, usage.cached) == (held, cached), f"{usage} is not {held} held + {cached} cached"
        summed = usage.free + held + cached + usage.in_transfer
        assert summed == usage.total, f"{usage.free} free + {held} held + {cached} cached is not {usage.total} pages"


class KVSequence:
    """One sequence's pages: those that the tree knows come first, then those whose last token is missing.

    Tokens are appended before they are computed and committed afterwards; in between, `undo` takes them back.
    """

    def __init__(self, manager: KVManager, salt: Hashable) -> None:
        """An empty one. Any thread may make it; only the manager's may use it."""
        self.table = PageTable(manager.pool, manager.allocator)
        self.path: list[PrefixNode] = []
        """The nodes of its first pages, one a page."""
        self.salt = salt
        self._manager = manager

    @property
    def length(self) -> int:
        """Tokens."""
        return self.table.length

    def append(self, n: int) -> Tensor:
        """Slots of `n` more tokens, int64 [n]; what nobody uses is evicted for them. Raises OutOfPagesError."""
        self._manager.make_room(self.table.pages_needed(n))
        return self.table.append(n)

    def undo(self, n: int) -> None:
        """Take the last `n` tokens back, which were never committed."""
        self.table.trim(n)

    def commit(self, tokens: Tokens) -> None:
        """All tokens are computed: full pages enter the tree, and of two that say the same the tree's stays."""
        manager, size = self._manager, self._manager.page_size
        if len(self.path) == self.length // size:
            return
        for place, page in list(enumerate(self.table.pages[: self.length // size]))[len(self.path) :]:
            above = self.path[-1] if self.path else None
            node = manager.tree.insert(self.salt, above, tokens(place * size, (place + 1) * size), page)
            if node.page == page:
                manager.allocator.share([page])
            else:
                self.table.replace(place, node.page)
            self.path.append(node)

    def find(self, tokens: Tokens, limit: int) -> list[PrefixNode]:
        """What the tree has of this sequence beyond its own path, of its first `limit` tokens. Changes nothing."""
        above = self.path[-1] if self.path else None
        start = len(self.path) * self._manager.page_size
        return self._manager.tree.find(self.salt, above, tokens, start, limit)

    def adopt(self, tokens: Tokens, limit: int) -> int:
        """Go on from what the tree has of its first `limit` tokens; how many tokens that saves."""
        found = self.find(tokens, limit)
        if not found:
            return 0
        before = self.length
        # A page that was begun here is complete there.
        self.table.trim(before - len(self.path) * self._manager.page_size)
        self.table.adopt([node.page for node in found])
        self._manager.tree.lock(found)
        self.path += found
        return self.length - before

    def fork(self) -> "KVSequence":
        """The same sequence once more; a page that both would write to is copied first."""
        twin = KVSequence(self._manager, self.salt)
        twin.table = self.table.fork()
        twin.path = list(self.path)
        self._manager.tree.lock(twin.path)
        return twin

    def release(self) -> None:
        """Drop all tokens; what is in the tree stays there for others."""
        self._manager.tree.unlock(self.path)
        self.path = []
        self.table.reset()

    def discard(self) -> None:
        """Drop all tokens, and what nobody else uses of them from the tree: they may be wrong."""
        path = self.path
        self.release()
        self._manager.allocator.free(self._manager.tree.discard(path))

    def check(self) -> None:
        """Assert that table and path agree."""
        pages = self.table.pages[: len(self.path)]
        assert pages == [node.page for node in self.path], f"pages {pages} are not those of the path in the tree"
        assert len(self.path) <= self.length // self._manager.page_size, "the tree has a page that is not full"
