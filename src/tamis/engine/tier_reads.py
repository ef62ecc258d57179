"""What requests may read from the KV tiers: when to ask, whether to load or to compute, and when a step may begin."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tamis.engine.pace import StepPace
from tamis.engine.sequence import RequestState, Sample
from tamis.kv import KVSequence
from tamis.kv.offload import KVOffload, Lookup


class TierReads:
    """Decides for each request of one engine; without tiers it has nothing to decide."""

    def __init__(self, offload: KVOffload | None, pace: StepPace, page_size: int) -> None:
        self._offload, self._pace, self._page_size = offload, pace, page_size

    @property
    def has_tiers(self) -> bool:
        """Whether there is anything to read from."""
        return self._offload is not None

    def ask(self, request: RequestState) -> None:
        """A request was queued: find out what the tiers have of it beyond what the prefix cache has."""
        sample = request.next_to_read
        if self._offload is None or sample is None:
            return
        tokens, limit = request.tokens(sample), request.readable(sample)
        pages = limit // self._page_size
        if len(sample.kv.path) + len(sample.kv.find(tokens, limit)) < pages:
            sample.lookup = self._offload.loader.look_up(tokens, pages, request.salt)

    def may_compute(self, request: RequestState, sample: Sample) -> bool:
        """Whether a step may compute what follows; False: it is still open what is loaded, or nothing has come in yet.

        To be asked once the sequence has adopted all that the prefix cache has. Begins the load where that is worth it.
        """
        if self._offload is None:
            return True
        if sample.lookup is not None and sample.kv.incoming is None:
            if self._must_wait(request, sample, sample.lookup):
                return False
            if sample.kv.incoming is None:
                sample.lookup = None
        return sample.kv.incoming is None or self._may_begin(sample.kv)

    def prefetch(self, request: RequestState) -> None:
        """Begin to load what a request will read that still waits for its turn."""
        sample = request.next_to_read
        if self._offload is None or not self._offload.loader.has_slot or sample is None or sample.kv.length:
            return
        if sample.lookup is None or not sample.lookup.hits:
            return
        sample.kv.adopt(request.tokens(sample), request.readable(sample))
        self.may_compute(request, sample)
        if sample.kv.incoming is None:
            sample.kv.release()

    @contextmanager
    def awaited(self, sequences: Sequence[KVSequence], give_up: Callable[[], None]) -> Iterator[None]:
        """Inside, layers are read only once they have come in; afterwards all have.

        Raises TransferError inside where one does not, and what `give_up` raises, which is called while that waits.
        """
        tickets = [] if self._offload is None else self._offload.loader.tickets(sequences)
        if self._offload is None or not tickets:
            yield
            return
        loader = self._offload.loader
        loader.counter.consume(tickets, give_up)
        try:
            yield
            loader.counter.wait_for_all()
        finally:
            loader.counter.consume(())
        loader.finish(sequences)

    def drop(self, sequences: Sequence[KVSequence], error: BaseException) -> bool:
        """A step over these failed for want of what was to be loaded: it is computed instead. False: nothing was."""
        return self._offload is not None and self._offload.loader.drop(sequences, error)

    @property
    def seconds_waited(self) -> float:
        """By all steps so far, for layers to come in."""
        return 0.0 if self._offload is None else self._offload.loader.counter.waited

    def _must_wait(self, request: RequestState, sample: Sample, lookup: Lookup) -> bool:
        """Whether it is still open what will be loaded; where there is something to load, the load is begun."""
        assert self._offload is not None
        loader = self._offload.loader
        if lookup.hits is None:
            return not loader.is_late(lookup)
        loader.note(lookup)
        start = len(sample.kv.path)
        end = min(lookup.hits, request.readable(sample) // self._page_size)
        if end <= start or sample.kv.length != start * self._page_size:
            return False
        if loader.is_loading(lookup.keys[start]):
            return True  # by somebody whose load ends in bounded time
        seconds = self._compute_seconds(start, end)
        if not loader.pays(end - start, seconds):
            return False
        if not loader.has_slot:
            return True  # until a load ends, which is bounded as well
        end = min(end, start + loader.room)
        if end > start:
            loader.begin(sample.kv, lookup, end, seconds)
        return False

    def _compute_seconds(self, start: int, end: int) -> float:
        """What computing these pages is estimated to take; 0: not known."""
        middle = (start + end) / 2 * self._page_size
        return (end - start) * self._page_size * self._pace.token_seconds(middle)

    def _may_begin(self, sequence: KVSequence) -> bool:
        assert self._offload is not None
        loader = self._offload.loader
        return loader.config.layerwise and any(load.has_begun for load in loader.expected([sequence]))
