"""Which tokens the next step computes, and who has to wait or make room.

Requests run in the order they came and none is overtaken. One is admitted when there are pages for its prompt and a
little more, not for all that it may generate; when pages run out, what nobody uses is evicted first, and then the
youngest request is retracted: its pages go to the prefix cache, and it goes on later from whatever is left of them.
The oldest is never retracted, so that somebody always gets on.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from tamis.engine.limits import Limits
from tamis.engine.pace import StepPace
from tamis.engine.sequence import RequestState, Sample
from tamis.engine.tier_reads import TierReads
from tamis.kv import KVManager

RESERVE_PAGES = 2
"""What a reply must have room to grow by when its request is admitted."""
SHARING_PROMPTS = 4
"""So many prompts at least are computed side by side; more where each gets a page's worth of tokens a step."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence that a step computes."""

    request: RequestState
    sample: Sample
    token_ids: tuple[int, ...]
    start: int
    """Position of the first."""
    num_logits: int
    """The last so many tokens' logits are wanted."""
    receivers: tuple[Sample, ...]
    """Who gets a next token from the last token's logits: all samples at the prompt's end, none within a prompt."""
    is_prefill: bool
    """Not the one token that a running reply is continued from."""

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.token_ids)


Turn = tuple[RequestState, Sample]
"""A sample that can go on."""


class Scheduler:
    """First come, first served: running replies first, then prompts, side by side, under a budget of tokens a step."""

    def __init__(
        self, limits: Limits, kv: KVManager, pace: StepPace, reads: TierReads, *, max_batch_tokens: int
    ) -> None:
        self.limits, self.kv, self.pace, self.reads = limits, kv, pace, reads
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[RequestState] = deque()
        """In the order they came; those that were retracted stand before all others, being older."""
        self.running: list[RequestState] = []
        """Oldest first."""
        self.retractions = 0
        """Requests that had to give their pages up and wait again, so far."""
        self._turn = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: RequestState) -> None:
        """Queue a request, which must be one that fits the pool."""
        self.waiting.append(request)
        self.reads.ask(request)

    def remove(self, request: RequestState) -> None:
        """Forget a request that ended, wherever it stands."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self) -> list[Chunk]:
        """The next step: at most `max_batch_tokens` tokens, and pages for all of them.

        Empty without work, and where all that there is waits for KV tiers.
        """
        # First what running requests find in the cache: it locks pages that could have been evicted for others.
        readers = _Readers(self.kv.page_size, self.reads)
        for request in self.running:
            readers.add(request)
        admit = self._make_room()
        if self.kv.holds and self.running and self._pages_to_go_on() > self.kv.available:
            return []  # transfers are about to give pages back
        readers.keep(self.running)
        replies = self._replies()
        budget = self._prompt_budget(replies, readers)
        if admit and budget > 0:
            self._admit(readers, max(SHARING_PROMPTS, budget // self.kv.page_size))
        self._prefetch()
        readers.separate(bool(replies))
        budget = self._prompt_budget(replies, readers)
        pages = self.kv.available - sum(sample.kv.table.pages_needed(1) for _, sample in replies)
        return [_chunk(*reply, 1) for reply in replies] + self._prompt_chunks(readers.turns, budget, max(0, pages))

    def _prompt_budget(self, replies: list[Turn], readers: "_Readers") -> int:
        """Prompt tokens of this step: what the replies leave of its tokens, and of its time."""
        budget = self.max_batch_tokens - len(replies)
        most = self.pace.prompt_tokens(readers.context) if replies else None
        return budget if most is None else min(budget, most)

    def _make_room(self) -> bool:
        """Retract the youngest until every reply, and the oldest request, can go on; False where some had to.

        What is being loaded for requests that still wait goes first.
        """
        retracted = self.retractions
        while self.running and self._pages_to_go_on() > self.kv.available:
            if not self._drop_prefetch(0):
                if len(self.running) == 1:
                    break
                self._retract(self.running[-1])
        return retracted == self.retractions

    def _pages_to_go_on(self) -> int:
        turns = self._ready()
        oldest = self.running[0].next_to_read
        if oldest is not None:
            turns.append((self.running[0], oldest))
        return sum(sample.kv.table.pages_needed(1) for _, sample in turns)

    def _retract(self, request: RequestState) -> None:
        for sample in request.samples:
            sample.kv.release()
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.reads.ask(request)
        self.retractions += 1

    def _prefetch(self) -> None:
        """Begin to load for requests that wait, in their order, as far as there will be room for them."""
        if not self.reads.has_tiers:
            return
        room = self.kv.available - self._promised()
        for request in self.waiting:
            room -= self._pages_soon(request) - _pages_held(request)
            if room < 0:
                return
            self.reads.prefetch(request)

    def _drop_prefetch(self, first: int) -> bool:
        """Give up what is loaded for the last of the waiting requests from place `first` on; False: for none is."""
        for place in range(len(self.waiting) - 1, first - 1, -1):
            if _pages_held(self.waiting[place]):
                for sample in self.waiting[place].samples:
                    sample.kv.release()
                return True
        return False

    def _ready(self) -> list[Turn]:
        """The running replies."""
        return [(r, s) for r in self.running if r.prefilled for s in _live(r) if r.pending(s) == 1]

    def _replies(self) -> list[Turn]:
        ready = self._ready()
        if len(ready) > self.max_batch_tokens:
            # More replies than tokens a step: take turns, so that none waits for another to end.
            first = self._turn % len(ready)
            ready = (ready[first:] + ready[:first])[: self.max_batch_tokens]
            self._turn = first + len(ready)
        return ready

    def _admit(self, readers: "_Readers", most: int) -> None:
        """Let waiting requests run, in their order, as long as there is room and fewer than `most` prompts are read."""
        while self.waiting and len(readers.turns) < most and self._has_seat(self.waiting[0]):
            while not self._has_room(self.waiting[0]):
                if not self._drop_prefetch(1):
                    return
            request = self.waiting.popleft()
            self.running.append(request)
            readers.add(request)

    def _has_seat(self, request: RequestState) -> bool:
        return not self.running or sum(other.live for other in self.running) + request.live <= self.limits.max_num_seqs

    def _has_room(self, request: RequestState) -> bool:
        if not self.running:
            return True  # it fits the pool, and nobody else holds any of it for long
        sample = next(iter(_live(request)))
        found = sample.kv.find(request.tokens(sample), request.readable(sample))
        taken = self._pages_soon(request) - _pages_held(request) - sum(node.users > 0 for node in found)
        return taken <= self.kv.available - self._promised()

    def _promised(self) -> int:
        """Pages that running requests do not hold yet and will."""
        return sum(max(0, self._pages_soon(other) - _pages_held(other)) for other in self.running)

    def _pages_soon(self, request: RequestState) -> int:
        """Pages of all that is known of a request, and of what its replies must have room for."""
        size = self.kv.page_size
        shared = len(request.prompt) // size
        pages = shared
        for sample in _live(request):
            length = min(request.total(sample) + RESERVE_PAGES * size, request.max_length - 1)
            pages += -(-length // size) - shared
        return pages

    def _prompt_chunks(self, turns: list[Turn], budget: int, pages: int) -> list[Chunk]:
        """Chunks of the prompts whose turn it is, as far as `budget` tokens and `pages` pages go."""
        chunks = []
        shares = fair_shares([request.pending(sample) for request, sample in turns], max(0, budget))
        for (request, sample), share in zip(turns, shares, strict=True):
            table = sample.kv.table
            begun = -table.length % self.kv.page_size
            tokens = min(share, begun + pages * self.kv.page_size)
            if tokens:
                pages -= table.pages_needed(tokens)
                chunks.append(_chunk(request, sample, tokens))
        return chunks


class _Readers:
    """The samples that read on in one step, oldest first."""

    def __init__(self, page_size: int, reads: TierReads) -> None:
        self.turns: list[Turn] = []
        self._page_size, self._reads = page_size, reads
        self._in_work: set[Hashable] = set()

    def add(self, request: RequestState) -> None:
        """Read what the cache has by now; wait where somebody else is just computing, or loading, what comes next."""
        sample = request.next_to_read
        if sample is None:
            return
        tokens, limit = request.tokens(sample), request.readable(sample)
        if sample.kv.incoming is None:
            sample.kv.adopt(tokens, limit)
            request.see_cached(sample.kv.length)
        path = sample.kv.path
        start = len(path) * self._page_size
        page = (path[-1] if path else request.salt, tokens(start, start + self._page_size))
        if start + self._page_size <= limit and page in self._in_work:
            return
        self._in_work.add(page)
        if self._reads.may_compute(request, sample):
            self.turns.append((request, sample))

    def keep(self, running: list[RequestState]) -> None:
        """Forget those that do not run any more, and those for which the cache had all: they are replies again."""
        self.turns = [(r, s) for r, s in self.turns if r in running and r.next_to_read is s]

    def separate(self, replies: bool) -> None:
        """Whoever still waits for layers to be loaded does not hold up those who do not: they go first."""
        ready = [turn for turn in self.turns if turn[1].kv.incoming is None]
        if replies or ready:
            self.turns = ready

    @property
    def context(self) -> float:
        """Tokens that a reader has read so far, on average."""
        return sum(sample.kv.length for _, sample in self.turns) / len(self.turns) if self.turns else 0.0


def fair_shares(wanted: list[int], budget: int) -> list[int]:
    """`budget` divided: to each what it wants, or as much as to anybody else. Of less than 1 each, the first has 1."""
    shares = [0] * len(wanted)
    if not wanted or not budget:
        return shares
    shares[0], left = 1, budget - 1
    # Smallest first: what they leave of an even share is for the others.
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    for done, place in enumerate(order):
        more = min(wanted[place] - shares[place], left // (len(order) - done))
        shares[place] += more
        left -= more
    return shares


def _live(request: RequestState) -> Iterable[Sample]:
    return [sample for sample in request.samples if sample.finish_reason is None]


def _pages_held(request: RequestState) -> int:
    return len({page for sample in request.samples for page in sample.kv.table.pages})


def _chunk(request: RequestState, sample: Sample, size: int) -> Chunk:
    start = sample.kv.length
    end = start + size
    last = end == request.total(sample)
    first_logit = max(start, len(request.prompt_logprobs) - 1) if request.wants_logprobs else end
    receivers = (sample,) if request.prefilled else tuple(request.samples)
    return Chunk(
        request,
        sample,
        request.tokens(sample)(start, end),
        start,
        num_logits=max(end - first_logit, int(last)),
        receivers=receivers if last else (),
        is_prefill=not (request.prefilled and size == 1 and last),
    )
