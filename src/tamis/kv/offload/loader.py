"""What is on its way from the tiers into one pool, as the engine's thread sees it."""

import time
from collections.abc import Hashable, Sequence

from tamis.errors import TierReadError, TransferError
from tamis.kv.manager import KVSequence
from tamis.kv.offload.between import Between
from tamis.kv.offload.loading import Lookup, PageLoad
from tamis.kv.offload.rates import Rate
from tamis.kv.offload.workers import Workers
from tamis.kv.prefix import Tokens
from tamis.kv.tiers.base import Key
from tamis.kv.transfer import LayerTransferCounter, TransferTicket

_RETRY_SECONDS = 30.0
"""A load that is estimated to be slow is tried all the same when none was for so long: things may have changed."""
_PATIENCE = 3.0
"""A load may take so many times as long as computing would, and `stall_seconds`; an answer so many times as long as
it should, where others come in."""
_MOST_LOADS = 2
"""Loads for one lookup: after a page that could not be read, once more up to that page."""


class PageLoader:
    """Looks up and loads pages. For the manager's own thread alone; nothing here waits for a tier."""

    def __init__(self, between: Between) -> None:
        manager, config = between.manager, between.config
        self.config, self.rate = config, Rate()
        self.layout = manager.pool.layout
        self.counter = LayerTransferCounter(len(self.layout.local_layers), config.slots, config.load_seconds)
        manager.pool.register_layer_transfer_counter(self.counter)
        self._manager, self._tier, self._make_keys = manager, between.tier, between.make_keys
        self._stats, self._failures = between.stats, between.failures
        self.lookers = Workers("lookup", 1, between.news)
        self.loaders = Workers("load", config.slots, between.news)
        self._loads: list[PageLoad] = []
        self._rest_until = 0.0

    def look_up(self, tokens: Tokens, pages: int, salt: Hashable) -> Lookup | None:
        """Ask in the background what the tiers have of the first `pages` pages; None: there is no use in asking."""
        if not pages or self.is_resting:
            return None
        keys = self._make_keys(tokens(0, pages * self.layout.page_size), salt)
        lookup = Lookup(self._tier, keys, tokens)
        self._stats.lookups += 1
        self.lookers.submit(lookup)
        return lookup

    def note(self, lookup: Lookup) -> None:
        """Take note of an answer, which may be that there is none; only the first time counts."""
        if lookup.noted:
            return
        lookup.noted = True
        self._stats.lookup_hits += bool(lookup.hits)
        if lookup.error is not None:
            self._failures.add("lookup", lookup.error)

    def is_late(self, lookup: Lookup) -> bool:
        """Whether an answer has taken too long; the tiers are left alone then for a while."""
        now, most = time.monotonic(), self.config.lookup_seconds
        late = now > self.lookers.last_news + most or now > lookup.asked + _PATIENCE * most
        if late:
            self._failures.add("lookup", f"no answer within {now - lookup.asked:.1f} s")
            self._rest()
        return late

    @property
    def is_resting(self) -> bool:
        """Whether tiers are not asked just now."""
        return time.monotonic() < self._rest_until

    @property
    def is_busy(self) -> bool:
        """Whether pages are held for a load."""
        return bool(self._loads)

    @property
    def has_slot(self) -> bool:
        """Whether one more load can begin."""
        return len(self._loads) < self.config.slots

    @property
    def room(self) -> int:
        """Pages that can be loaded into just now."""
        return self._manager.available

    def is_loading(self, key: Key) -> bool:
        """Whether a page is being loaded for some sequence."""
        return any(key in load.keys for load in self._loads)

    def pays(self, pages: int, compute_seconds: float) -> bool:
        """Whether loading so many pages is estimated to be faster than computing them; 0 seconds: not known."""
        if self.is_resting:
            return False
        seconds = self.rate.seconds(pages * self.layout.bytes_per_page)
        if not compute_seconds or seconds < compute_seconds or self.rate.age > _RETRY_SECONDS:
            return True
        self._stats.recomputed_tokens += pages * self.layout.page_size
        return False

    def begin(self, sequence: KVSequence, lookup: Lookup, end: int, compute_seconds: float) -> None:
        """Load pages up to `end` into a sequence, behind its path; there must be a slot, and room for them."""
        start = len(sequence.path)
        pages = sequence.expect(end - start)
        stall = self.config.stall_seconds
        most = stall + _PATIENCE * compute_seconds if compute_seconds else self.config.load_seconds
        load = PageLoad(
            self._tier, lookup, lookup.keys[start:end], self._manager.pool, self.counter,
            self.counter.begin(most, stall), sequence, self._manager.hold(pages),
        )  # fmt: skip
        lookup.loads += 1
        sequence.incoming = load
        self._loads.append(load)
        self.loaders.submit(load)

    def expected(self, sequences: Sequence[KVSequence]) -> list[PageLoad]:
        """The loads that these sequences wait for."""
        return [load for load in self._loads if load.sequence in sequences and load.sequence.incoming is load]

    def tickets(self, sequences: Sequence[KVSequence]) -> list[TransferTicket]:
        """What a step over these sequences has to wait for, layer by layer."""
        return [load.ticket for load in self.expected(sequences)]

    def finish(self, sequences: Sequence[KVSequence]) -> None:
        """A step has seen every layer of the loads of these sequences come in."""
        for load in self.expected(sequences):
            self._receive(load)

    def drop(self, sequences: Sequence[KVSequence], error: BaseException) -> bool:
        """A step could not go on for `error`: the loads that are at fault end, all of them where none can be told.

        False where there are none.
        """
        loads = self.expected(sequences)
        for load in [load for load in loads if load.error is not None or load.is_late] or loads:
            self._drop(load, error)
        return bool(loads)

    def poll(self) -> None:
        """See what has become of the loads."""
        for workers in (self.lookers, self.loaders):
            workers.revive()
        for load in list(self._loads):
            waited_for = load.sequence.incoming is load
            if waited_for and load.seconds is not None:
                self._receive(load)
            elif waited_for and (load.error is not None or load.is_late):
                self._drop(load, TransferError(f"{len(load.keys)} pages did not come in time"))
            elif not waited_for:
                self._end(load)

    def _receive(self, load: PageLoad) -> None:
        """All is in: the pages are as good as computed ones."""
        self._end(load, wait=True)
        load.sequence.receive(load.lookup.tokens, len(load.keys))
        self.rate.observe(load.nbytes, load.seconds or load.elapsed)
        self._stats.loads += 1
        self._stats.loaded_tokens += len(load.keys) * self.layout.page_size
        self._stats.loaded_bytes += load.nbytes

    def _drop(self, load: PageLoad, error: BaseException) -> None:
        """The sequence goes on without; what stands before a page that could not be read may be loaded once more."""
        load.sequence.forgo()
        lookup, cause = load.lookup, load.error or error
        self._failures.add("load", cause)
        lookup.hits = 0
        if isinstance(cause, TierReadError):
            if lookup.loads < _MOST_LOADS and cause.key in load.keys:
                lookup.hits = lookup.keys.index(cause.key)
        elif load.error is None:
            self.rate.observe(load.nbytes * load.share, load.elapsed)
            self._rest()
        self._end(load)

    def _end(self, load: PageLoad, *, wait: bool = False) -> None:
        """Give slot and pages back, unless just now something is being written to them; then `poll` will."""
        if load.stop(wait=wait):
            self._loads.remove(load)
            self.counter.release(load.ticket)
            self._manager.let_go(load.hold)

    def _rest(self) -> None:
        self._rest_until = time.monotonic() + self.config.rest_seconds
