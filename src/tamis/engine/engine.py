"""Continuous batching: one step after another, each over whatever requests are there."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tamis.engine.batch import Batch
from tamis.engine.detokenizer import Detokenizer
from tamis.engine.limits import Limits
from tamis.engine.runner import Runner
from tamis.engine.sampler import Sampled, SamplerRow, prompt_logprobs, sample
from tamis.engine.scheduler import Chunk, Scheduler
from tamis.engine.sequence import RequestState, Sample
from tamis.engine.tokenizer import Tokenizer
from tamis.errors import EngineClosedError, TamisError
from tamis.kv import PageAllocator, PageTable
from tamis.request import Completion, FinishReason, Request, TokenEvent, TokenLogprobs


@dataclass(frozen=True)
class EngineEvent:
    """A token event and the request it belongs to."""

    request_id: int
    token: TokenEvent
    completion: Completion | None = None
    """The whole result of this sample; set in its last event."""
    error: BaseException | None = None
    """What went wrong, where the finish reason is "error"."""


@dataclass(frozen=True)
class EngineStats:
    """What an engine has done so far and how full its pool is."""

    steps: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    prefill_seconds: float = 0.0
    """A step that mixes prompt tokens and replies is divided between the two by tokens."""
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    waiting: int = 0
    """Requests."""
    running: int = 0
    """Requests."""
    pages_total: int = 0
    """Usable pages of the pool."""
    pages_used: int = 0
    pages_peak: int = 0
    """The most pages in use at once so far."""
    page_size: int = 0


class Engine:
    """Runs requests over one model and one pool. Not for several threads at once: see `worker.Worker`."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_batch_tokens: int,
        max_num_seqs: int,
        tokenizer: Tokenizer | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.end_ids = frozenset(end_ids)
        config, pool = runner.model.config, runner.pool
        self.pool = pool
        self.limits = Limits(
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            page_size=pool.layout.page_size,
            num_pages=pool.num_pages,
            max_num_seqs=max_num_seqs,
            has_tokenizer=tokenizer is not None,
        )
        self.allocator = PageAllocator(pool.num_pages)
        self.scheduler = Scheduler(self.limits, max_batch_tokens=max_batch_tokens)
        self.signals = runner.signals
        self._requests: dict[int, RequestState] = {}
        self._ids = itertools.count()
        self._events: list[EngineEvent] = []
        self._counts = _Counts()
        self._closed = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._requests or self._events)

    def has_request(self, request_id: int) -> bool:
        """Whether a request waits or runs."""
        return request_id in self._requests

    def add_request(self, request: Request, on_prefill: Callable[[int], None] | None = None) -> int:
        """Queue a request; returns the id under which its events come.

        `on_prefill` is told, step by step, how many prompt tokens were computed; what it raises ends its request.
        Raises EngineClosedError, and what `Limits.check` raises, before anything is queued.
        """
        if self._closed:
            raise EngineClosedError("the engine is closed")
        ids = self.limits.check(request.prompt_token_ids, request.sampling)
        request = replace(request, prompt_token_ids=ids)
        length = self.limits.max_length(len(ids), request.sampling)
        samples = [self._new_sample(request, length - len(ids), index) for index in range(request.sampling.n)]
        state = RequestState(next(self._ids), ids, request.sampling, length, samples, on_prefill or _ignore)
        self._requests[state.request_id] = state
        self.scheduler.add(state)
        return state.request_id

    def step(self) -> list[EngineEvent]:
        """Compute one batch; returns what happened since the last call.

        Where the batch fails, its requests end with an event that carries the error, their pages come back, and the
        engine goes on. An interrupt (KeyboardInterrupt) comes out between two layers of the model; the step is taken
        back then, and the requests go on with the next one.
        """
        with self.signals:
            chunks = self.scheduler.schedule()
            if chunks:
                started = time.perf_counter()
                try:
                    logits = self._compute(chunks)
                    self._commit(chunks, logits, self._sample(chunks, logits))
                except Exception as error:
                    self._fail(chunks, error)
                self._counts.add(chunks, time.perf_counter() - started)
            return self.take_events()

    def take_events(self) -> list[EngineEvent]:
        """What happened since this or `step` was last called: the ends that `abort` and `close` caused."""
        events, self._events = self._events, []
        return events

    def abort(self, request_id: int) -> None:
        """End a request with FinishReason.ABORT, wherever it stands, and give its pages back.

        A request that has ended already, or never was, is left alone.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, FinishReason.ABORT)

    def close(self) -> None:
        """Abort everything; requests are refused from now on. Closing twice does nothing."""
        self._closed = True
        for request_id in list(self._requests):
            self.abort(request_id)
        self.runner.close()

    @property
    def pages_used(self) -> int:
        """Pages that requests hold."""
        return self.allocator.num_pages - self.allocator.num_free

    @property
    def stats(self) -> EngineStats:
        """Counters as they stand."""
        counts = self._counts
        return EngineStats(
            steps=counts.steps,
            prefill_tokens=counts.prefill_tokens,
            prefill_seconds=counts.prefill_seconds,
            decode_tokens=counts.decode_tokens,
            decode_seconds=counts.decode_seconds,
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            pages_total=self.allocator.num_pages,
            pages_used=self.pages_used,
            pages_peak=counts.pages_peak,
            page_size=self.limits.page_size,
        )

    def check(self) -> None:
        """Assert that free + held = total, every page held by exactly the page tables that name it."""
        held = Counter(page for r in self._requests.values() for s in r.samples for page in s.table.pages)
        for page, tables in held.items():
            holders = self.allocator.holders(page)
            assert holders == tables, f"page {page} has {holders} holders and stands in {tables} page tables"
        free, total = self.allocator.num_free, self.allocator.num_pages
        assert free + len(held) == total, f"{free} pages free + {len(held)} held is not {total}"

    def _new_sample(self, request: Request, max_tokens: int, index: int) -> Sample:
        tokenizer, sampling = self.tokenizer, request.sampling
        ends = frozenset() if sampling.ignore_eos else self.end_ids
        return Sample(
            index=index,
            table=PageTable(self.pool, self.allocator),
            row=SamplerRow(sampling, request.prompt_token_ids, index),
            detokenizer=None
            if tokenizer is None
            else Detokenizer(tokenizer, sampling.stop_strings, continues=request.continues),
            stop_ids=ends | frozenset(sampling.stop_ids),
            max_tokens=max_tokens,
        )

    def _compute(self, chunks: list[Chunk]) -> Tensor:
        """The step's logits. After an interrupt nothing has changed."""
        batch = self._batch(chunks)
        try:
            return self.runner.run(batch)
        except BaseException as error:
            if not isinstance(error, Exception):
                for chunk in chunks:
                    chunk.sample.table.trim(len(chunk.token_ids))
            raise

    def _batch(self, chunks: list[Chunk]) -> Batch:
        """The plain data of a step; takes the pages its tokens need."""
        batch = Batch()
        for chunk in chunks:
            table = chunk.sample.table
            slots = table.append(len(chunk.token_ids)).tolist()
            batch.add(chunk.token_ids, chunk.start, slots, table.pages, chunk.num_logits)
        self._counts.pages_peak = max(self._counts.pages_peak, self.pages_used)
        return batch

    @torch.inference_mode()
    def _sample(self, chunks: list[Chunk], logits: Tensor) -> list[Sampled | TamisError]:
        """The next token of every chunk's receivers, in order, or the error that ends one of them."""
        rows, end = [], 0
        for chunk in chunks:
            end += chunk.num_logits
            rows += [end - 1] * len(chunk.receivers)
        if rows != list(range(len(logits))):
            logits = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
        return sample(logits, [receiver.row for chunk in chunks for receiver in chunk.receivers])

    def _commit(self, chunks: list[Chunk], logits: Tensor, sampled: list[Sampled | TamisError]) -> None:
        """Let every request take what the step computed."""
        results = iter(sampled)
        end = 0
        for chunk in chunks:
            end += chunk.num_logits
            if chunk.is_prefill:
                self._advance_prompt(chunk, logits[end - chunk.num_logits : end])
            for receiver in chunk.receivers:
                result = next(results)
                if receiver.finish_reason is None:
                    self._take_token(chunk.request, receiver, result)
            self._forget_if_ended(chunk.request)

    def _take_token(self, request: RequestState, receiver: Sample, result: Sampled | TamisError) -> None:
        if isinstance(result, TamisError):
            receiver.table.reset()
            self._emit(request, receiver, None, receiver.finish(FinishReason.ERROR), error=result)
            return
        text = receiver.accept(result)
        if receiver.finish_reason is not None:
            receiver.table.reset()
        self._emit(request, receiver, result.token_id, text, result.logprobs)

    def _advance_prompt(self, chunk: Chunk, logits: Tensor) -> None:
        request = chunk.request
        request.computed += len(chunk.token_ids)
        try:
            request.on_prefill(len(chunk.token_ids))
        except Exception as error:
            self._end(request, FinishReason.ERROR, error)
            return
        asked = request.sampling.prompt_logprobs
        if asked is not None:
            following = request.prompt[chunk.start + 1 : request.computed + 1]
            try:
                request.prompt_logprobs += prompt_logprobs(logits[: len(following)], following, asked)
            except TamisError as error:
                # Logits that are no numbers are this request's fault alone.
                self._end(request, FinishReason.ERROR, error)
                return
        if request.prefilled:
            for other in request.samples[1:]:
                other.table = chunk.sample.table.fork()

    def _fail(self, chunks: list[Chunk], error: BaseException) -> None:
        for chunk in chunks:
            self._end(chunk.request, FinishReason.ERROR, error)

    def _end(self, request: RequestState, reason: FinishReason, error: BaseException | None = None) -> None:
        """End every sample of `request` that has not ended."""
        for ending in request.samples:
            ending.table.reset()
        for ending in request.samples:
            if ending.finish_reason is None:
                self._emit(request, ending, None, ending.finish(reason), error=error)
        self._forget_if_ended(request)

    def _forget_if_ended(self, request: RequestState) -> None:
        if not request.live and self._requests.pop(request.request_id, None) is not None:
            self.scheduler.remove(request)

    def _emit(
        self,
        request: RequestState,
        receiver: Sample,
        token_id: int | None,
        text: str,
        logprobs: TokenLogprobs | None = None,
        error: BaseException | None = None,
    ) -> None:
        ended = receiver.finish_reason is not None
        event = TokenEvent(
            receiver.index,
            token_id,
            text,
            logprobs,
            receiver.finish_reason,
            request.usage(receiver) if ended else None,
        )
        completion = request.completion(receiver) if ended else None
        self._events.append(EngineEvent(request.request_id, event, completion, error))


@dataclass
class _Counts:
    steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    pages_peak: int = 0

    def add(self, chunks: list[Chunk], seconds: float) -> None:
        prefill = sum(len(chunk.token_ids) for chunk in chunks if chunk.is_prefill)
        total = sum(len(chunk.token_ids) for chunk in chunks)
        self.steps += 1
        self.prefill_tokens += prefill
        self.prefill_seconds += seconds * prefill / total
        self.decode_tokens += total - prefill
        self.decode_seconds += seconds * (total - prefill) / total


def _ignore(_tokens: int) -> None:
    """Nobody asked how far the prompt is."""
