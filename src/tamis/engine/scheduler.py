"""Which tokens the next step computes. Arithmetic only: pages are counted here and handed out in `engine.py`.

Requests wait in the order they came and the first is never overtaken. A request is admitted when the pages it can need
at most are not promised to others, so that a running request never runs out.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tamis.engine.limits import Limits
from tamis.engine.sequence import RequestState, Sample


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
    """Who gets a next token from the last token's logits: none within a prompt, all samples at its end."""

    @property
    def is_prefill(self) -> bool:
        """Whether these are prompt tokens."""
        return self.start < len(self.request.prompt)


class Scheduler:
    """First come, first served: decodes first, then prompt chunks, under a budget of tokens a step."""

    def __init__(self, limits: Limits, *, max_batch_tokens: int) -> None:
        self.limits = limits
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._turn = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def promised_pages(self) -> int:
        """Pages that running requests hold or may still need."""
        return sum(self._pages(request) for request in self.running)

    def _pages(self, request: RequestState) -> int:
        return self.limits.pages_needed(len(request.prompt), request.max_length, request.live)

    def add(self, request: RequestState) -> None:
        """Queue a request, which must be one that fits the pool."""
        self.waiting.append(request)

    def remove(self, request: RequestState) -> None:
        """Forget a request that ended, wherever it stands."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self) -> list[Chunk]:
        """The next step: at most `max_batch_tokens` tokens, decodes first. Empty only where there is no work."""
        chunks = self._decodes()
        budget = self.max_batch_tokens - len(chunks)
        requests = self._prefilling()
        # The budget is looked at first: asking for one more request may admit it.
        while budget > 0 and (request := next(requests, None)) is not None:
            chunk = _prompt_chunk(request, budget)
            budget -= len(chunk.token_ids)
            chunks.append(chunk)
        return chunks

    def _decodes(self) -> list[Chunk]:
        ready = [(r, s) for r in self.running if r.prefilled for s in r.samples if s.finish_reason is None]
        if len(ready) > self.max_batch_tokens:
            # More replies than tokens a step: take turns, so that none waits for another to end.
            first = self._turn % len(ready)
            ready = (ready[first:] + ready[:first])[: self.max_batch_tokens]
            self._turn = first + len(ready)
        return [
            Chunk(request, sample, (sample.token_ids[-1],), request.position(sample), 1, (sample,))
            for request, sample in ready
        ]

    def _prefilling(self) -> Iterator[RequestState]:
        """Running requests with prompt tokens left, then waiting ones, admitted as the caller takes them."""
        yield from [request for request in self.running if not request.prefilled]
        while self.waiting and self._may_run(self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            yield request

    def _may_run(self, request: RequestState) -> bool:
        seqs = request.live + sum(other.live for other in self.running)
        pages = self.promised_pages + self._pages(request)
        return seqs <= self.limits.max_num_seqs and pages <= self.limits.num_pages


def _prompt_chunk(request: RequestState, budget: int) -> Chunk:
    start = request.computed
    end = min(len(request.prompt), start + budget)
    last = end == len(request.prompt)
    wants_all = request.sampling.prompt_logprobs is not None
    return Chunk(
        request,
        request.samples[0],
        request.prompt[start:end],
        start,
        num_logits=end - start if wants_all else int(last),
        receivers=tuple(request.samples) if last else (),
    )
