"""Who owns which page: sequences that run, a tree of prefixes that may be read again, and the free list."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tamis.errors import OutOfPagesError
from tamis.kv.allocator import PageAllocator
from tamis.kv.page_table import PageTable
from tamis.kv.pool import SparseKVPool
from tamis.kv.prefix import PrefixNode, PrefixTree, Stored, Tokens

_EVICT_SHARE = 64
"""Room is made for at least one page in so many at a time: pages that come free together lie together more often."""


@dataclass(frozen=True)
class PageUsage:
    """Pages by owner. free + held + cached + in_transfer = total."""

    total: int
    """Usable pages of the pool."""
    free: int
    held: int
    """Requests hold them, perhaps several the same one."""
    cached: int
    """Only the prefix cache holds them: they are given up as soon as their room is needed."""
    in_transfer: int = 0
    """Only a transfer holds them: it reads them, or writes to them, and has outlived its request."""


@dataclass(eq=False)
class PageHold:
    """Pages that a transfer reads or writes. They stay until it ends, whatever becomes of the sequences."""

    pages: tuple[int, ...] = ()
    """Outside the tree: they are being filled."""
    path: tuple[PrefixNode, ...] = ()
    """In the tree, from its root down: they are being read."""
    spoiled: bool = False
    """What is in the path may be wrong: it leaves the tree with the hold."""


class PathWatcher(Protocol):
    """Who is told what becomes of a sequence's pages in the tree; `path` begins at the root."""

    def committed(self, path: Sequence[PrefixNode]) -> None:
        """Pages were computed and have entered the tree, at the end of `path`."""

    def released(self, path: Sequence[PrefixNode]) -> None:
        """A sequence ends, or gives its pages up: they may be evicted from now on."""

    def discarded(self, path: Sequence[PrefixNode]) -> None:
        """What is in these pages may be wrong. Those that nobody else uses have left the tree."""


class Incoming(Protocol):
    """A load into a sequence's last pages."""

    def cancel(self) -> None:
        """Nobody waits for it any more. Whoever holds the pages for it lets them go when it has ended."""


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
        self.holds: list[PageHold] = []
        """One for each transfer."""
        self.watcher: PathWatcher | None = None

    @property
    def available(self) -> int:
        """Pages that can be had: free ones and those that only the tree holds."""
        return self.allocator.num_free + self.tree.num_unused

    @property
    def usage(self) -> PageUsage:
        """Pages by owner, as it stands."""
        total, free, cached = self.allocator.num_pages, self.allocator.num_free, self.tree.num_unused
        moving = self._only_in_transfer() if self.holds else 0
        return PageUsage(total, free, total - free - cached - moving, cached, moving)

    def _only_in_transfer(self) -> int:
        filling = Counter(page for hold in self.holds for page in hold.pages)
        reading = Counter(node for hold in self.holds for node in hold.path)
        unused = sum(self.allocator.holders(page) == count for page, count in filling.items())
        return unused + sum(node.users == count for node, count in reading.items())

    def hold(self, pages: Iterable[int] = (), path: Iterable[PrefixNode] = ()) -> PageHold:
        """Keep pages for a transfer, and whole paths from the root; `let_go` must follow."""
        hold = PageHold(tuple(pages), tuple(path))
        self.allocator.share(hold.pages)
        self.tree.lock(hold.path)
        self.holds.append(hold)
        return hold

    def let_go(self, hold: PageHold) -> None:
        """The transfer has ended."""
        self.holds.remove(hold)
        self.allocator.free(hold.pages)
        self.tree.unlock(hold.path)
        if hold.spoiled:
            self.allocator.free(self.tree.discard(hold.path))

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
        filling = Counter(page for hold in self.holds for page in hold.pages)
        paths = [*(sequence.path for sequence in sequences), *(hold.path for hold in self.holds)]
        users = Counter(id(node) for path in paths for node in path)
        self.tree.check()
        nodes = list(self.tree.nodes())
        for node in nodes:
            assert node.users == users[id(node)], f"page {node.page} has {node.users} users, {users[id(node)]} named it"
        in_tree = {node.page for node in nodes}
        for sequence in sequences:
            sequence.check()
        for page in tables.keys() | in_tree | filling.keys():
            holders, named = self.allocator.holders(page), tables[page] + (page in in_tree) + filling[page]
            assert holders == named, f"page {page} has {holders} holders, {named} name it"
        usage = self.usage
        held = len(tables)
        moving = len((filling.keys() | {node.page for node in nodes if node.users}) - tables.keys())
        cached = len(in_tree - tables.keys()) - sum(node.users > 0 and node.page not in tables for node in nodes)
        found = (usage.held, usage.cached, usage.in_transfer)
        assert found == (held, cached, moving), f"{usage} is not {held} held + {cached} cached + {moving} in transfer"
        summed = usage.free + held + cached + moving
        assert summed == usage.total, (
            f"{usage.free} free + {held} held + {cached} cached + {moving} in transfer is not {usage.total} pages"
        )


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
        self.incoming: Incoming | None = None
        """A load that fills all pages behind the path; nothing is computed behind them before a step waits for it."""
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
        end = self.length // self._manager.page_size
        if len(self.path) == end:
            return
        self._enter(tokens, end, Stored.NO)
        if self._manager.watcher is not None:
            self._manager.watcher.committed(self.path)

    def receive(self, tokens: Tokens, pages: int) -> None:
        """So many pages behind the path have come in whole, and enter the tree: `incoming` is no more."""
        self.incoming = None
        self._enter(tokens, len(self.path) + pages, Stored.LOADED)

    def _enter(self, tokens: Tokens, end: int, stored: Stored) -> None:
        manager, size = self._manager, self._manager.page_size
        for place, page in list(enumerate(self.table.pages[:end]))[len(self.path) :]:
            above = self.path[-1] if self.path else None
            node = manager.tree.insert(self.salt, above, tokens(place * size, (place + 1) * size), page)
            if node.page == page:
                manager.allocator.share([page])
                node.stored = stored
            else:
                self.table.replace(place, node.page)
            self.path.append(node)

    def expect(self, pages: int) -> list[int]:
        """Room for so many pages that a load fills, behind a path that ends with the last token.

        `incoming` is to be set next. Raises OutOfPagesError.
        """
        assert self.incoming is None and self.length == len(self.path) * self._manager.page_size
        self.append(pages * self._manager.page_size)
        return self.table.pages[len(self.path) :]

    def forgo(self) -> None:
        """What was expected does not come: go on from the end of the path. Tokens behind it are dropped as well."""
        if self.incoming is not None:
            self.incoming.cancel()
            self.incoming = None
            self.table.trim(self.length - len(self.path) * self._manager.page_size)

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
        assert self.incoming is None, "what is still on its way cannot be shared"
        twin = KVSequence(self._manager, self.salt)
        twin.table = self.table.fork()
        twin.path = list(self.path)
        self._manager.tree.lock(twin.path)
        return twin

    def release(self) -> None:
        """Drop all tokens; what is in the tree stays there for others."""
        if self.path and self._manager.watcher is not None:
            self._manager.watcher.released(self.path)
        self._let_go()

    def discard(self) -> None:
        """Drop all tokens, and what nobody else uses of them from the tree: they may be wrong."""
        path, manager = self.path, self._manager
        self._let_go()
        for hold in manager.holds:
            hold.spoiled = hold.spoiled or not set(path).isdisjoint(hold.path)
        manager.allocator.free(manager.tree.discard(path))
        if path and manager.watcher is not None:
            manager.watcher.discarded(path)

    def _let_go(self) -> None:
        self.forgo()
        self._manager.tree.unlock(self.path)
        self.path = []
        self.table.reset()

    def check(self) -> None:
        """Assert that table and path agree."""
        pages = self.table.pages[: len(self.path)]
        assert pages == [node.page for node in self.path], f"pages {pages} are not those of the path in the tree"
        assert len(self.path) <= self.length // self._manager.page_size, "the tree has a page that is not full"
