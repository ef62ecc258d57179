"""What is on its way from one pool into the tiers, as the engine's thread sees it."""

import time
from collections import deque
from collections.abc import Hashable, Sequence
from itertools import chain

from tamis.errors import TierError
from tamis.kv.offload.between import Between
from tamis.kv.offload.rates import Rate
from tamis.kv.offload.saving import MakeKeys, PageDelete, PagePin, PageSave, SavePath, SaveTicket
from tamis.kv.offload.workers import Workers
from tamis.kv.prefix import PrefixNode, Stored, Tokens

_BATCH_BYTES = 64 << 20
"""Pages that are written at a time take about this much, twice, beside the pool."""
_MAX_PATHS = 1024
"""Sequences that wait to be written; beyond that the oldest are not."""


class PageSaver:
    """Writes pages, some at a time; a PathWatcher. For the manager's own thread alone; nothing waits for a tier."""

    def __init__(self, between: Between) -> None:
        manager = between.manager
        self.config, self.rate = between.config, Rate()
        manager.watcher = self
        self.writers = Workers("save", 1, between.news)
        self._manager, self._tier, self._make_keys = manager, between.tier, between.make_keys
        self._stats, self._failures = between.stats, between.failures
        self._batch = max(1, _BATCH_BYTES // manager.pool.layout.bytes_per_page)
        self._paths: deque[SavePath] = deque()
        self._save: PageSave | None = None

    def committed(self, path: Sequence[PrefixNode]) -> None:
        """Write-through: what is new, at once."""
        if self.config.write_through:
            self._queue(path)

    def released(self, path: Sequence[PrefixNode]) -> None:
        """Write-back: what is new, before it can be evicted."""
        self._queue(path)

    def discarded(self, path: Sequence[PrefixNode]) -> None:
        """Take back what this engine wrote of it; what came from the tiers was right when it was written."""
        self._take_back(path, [node for node in path if node.parent is None and node.stored is Stored.SAVED])
        if self._save is not None and not set(path).isdisjoint(self._save.nodes):
            self._save.spoiled = True

    def save(self, tokens: Tokens, pages: int, salt: Hashable, owner: str) -> SaveTicket:
        """Write what the tree has of the first `pages` pages, before all else, and pin those that the tiers have."""
        size = self._manager.page_size
        nodes = self._manager.tree.find(salt, None, tokens, 0, pages * size)
        ticket = SaveTicket(owner)
        self._paths.appendleft(SavePath(tuple(nodes), self._make_keys(tokens(0, pages * size), salt), ticket))
        return ticket

    @property
    def waiting_pages(self) -> int:
        """Pages that are being written, or may still have to be."""
        under_way = 0 if self._save is None else len(self._save.nodes)
        return under_way + sum(len(path.nodes) - path.begun for path in self._paths)

    @property
    def is_busy(self) -> bool:
        """Whether pages are being written, or wait for that, and it gets on."""
        if self.writers.is_idle:
            return bool(self._save or self._paths)
        return time.monotonic() <= self.writers.last_news + self.config.flush_seconds

    def poll(self) -> None:
        """See what has become of the pages that are being written, and go on with the next."""
        self.writers.revive()
        save = self._save
        if save is not None and save.copied and save.hold is not None:
            self._manager.let_go(save.hold)
            save.hold = None
        if save is not None and save.has_ended:
            self._account(save)
            self._save = None
        # Pages are held until they are copied: not behind a pin or a delete, which may take for ever.
        while self._save is None and self._paths and self.writers.is_idle:
            self._begin(self._paths[0])

    def give_up(self) -> None:
        """Whoever waits for pages to be written is told that they will not be."""
        if self.waiting_pages:
            self._failures.add("save", f"{self.waiting_pages} pages were not written before the engine was closed")
        for path in self._paths:
            if path.ticket is not None:
                path.ticket.fail(TierError("the engine was closed"))
        self._paths.clear()

    def _queue(self, path: Sequence[PrefixNode]) -> None:
        fresh = [node for node in path if node.stored is Stored.NO]
        if not fresh:
            return
        for node in fresh:
            node.stored = Stored.WAITS
        self._paths.append(SavePath(tuple(path), self._keys_of(path)))
        if len(self._paths) > _MAX_PATHS:
            # Never one that somebody waits for; those stand first.
            dropped = next(each for each in self._paths if each.ticket is None)
            self._paths.remove(dropped)
            left = [node for node in dropped.nodes[dropped.begun :] if node.stored is Stored.WAITS]
            for node in left:
                node.stored = Stored.NO
            self._stats.dropped_pages += len(left)

    def _begin(self, path: SavePath) -> None:
        """Write the next pages of a path, or be done with it."""
        places = path.next_batch(self._batch)
        if places:
            hold = self._manager.hold(path=path.nodes[: places[-1] + 1])
            self._save = PageSave(self._tier, self._manager.pool, path, places, hold)
            self.writers.submit(self._save)
            return
        self._paths.popleft()
        if path.ticket is not None:
            self.writers.submit(PagePin(self._tier, path, path.ticket, self._failures))

    def _account(self, save: PageSave) -> None:
        kept = save.error is None and not save.spoiled
        for node in save.nodes:
            node.stored = Stored.SAVED if kept else Stored.NO
        if save.error is not None:
            self._failures.add("save", save.error)
            if save.path.ticket is not None:
                save.path.ticket.error = save.error
            return
        self.rate.observe(save.nbytes, save.seconds)
        self._stats.saved_pages += len(save.nodes)
        self._stats.saved_bytes += save.nbytes
        if save.spoiled:
            # Pages before these were in the tree until now, for the sake of this write.
            before = [n for n in save.path.nodes if n.parent is None and n.stored is Stored.SAVED]
            self._take_back(save.path.nodes, [*before, *save.nodes])

    def _take_back(self, path: Sequence[PrefixNode], nodes: Sequence[PrefixNode]) -> None:
        """Delete what was written of `nodes`, behind the writing of them."""
        among = set(nodes)
        places = [place for place, node in enumerate(path) if node in among]
        if places:
            self.writers.submit(PageDelete(self._tier, self._keys_of(path), places, self._failures))

    def _keys_of(self, path: Sequence[PrefixNode]) -> MakeKeys:
        return self._make_keys(list(chain.from_iterable(node.key for node in path)), path[0].salt)
