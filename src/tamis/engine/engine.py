"""Continuous batching: one step after another, each over whatever requests are there."""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tamis.engine.batch import Batch
from tamis.engine.grammar import Grammars
from tamis.engine.limits import Limits
from tamis.engine.pace import StepPace
from tamis.engine.runner import Runner
from tamis.engine.sampler import Sampled, prompt_logprobs, sample
from tamis.engine.scheduler import Chunk, Scheduler
from tamis.engine.sequence import EngineEvent, RequestState, Sample, new_sample
from tamis.engine.stats import Counters, EngineStats
from tamis.engine.tier_reads import TierReads
from tamis.engine.tokenizer import Tokenizer
from tamis.errors import EngineClosedError, LogitsError, TamisError, TransferError
from tamis.kv import KVManager, KVSequence
from tamis.kv.offload import KVOffload, OffloadConfig
from tamis.kv.tiers.base import Tier
from tamis.request import FinishReason, PrefillProgress, Request, TokenLogprobs

logger = logging.getLogger(__name__)

_TRANSFER_WAIT_S = 0.01
"""What a step that has nothing to compute waits for KV tiers at most, while others may ask for something else."""


class Engine:
    """Runs requests over one model and one pool. Not for several threads at once: see `thread.EngineThread`."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_batch_tokens: int,
        max_num_seqs: int,
        tokenizer: Tokenizer | None = None,
        end_ids: Sequence[int] = (),
        prefix_cache: bool = True,
        step_seconds: float | None = None,
        tiers: Tier | None = None,
        fingerprint: str = "",
        offload: OffloadConfig | None = None,
    ) -> None:
        """`tiers`, which the engine closes, keep pages under the model's `fingerprint`; they need `prefix_cache`."""
        assert prefix_cache or tiers is None
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
            grammars=None if tokenizer is None else Grammars(tokenizer, end_ids),
        )
        self.kv = KVManager(pool)
        self.pace = StepPace(step_seconds)
        self.offload = None if tiers is None else KVOffload(self.kv, tiers, fingerprint, offload)
        """What moves pages to and from the KV tiers."""
        self.reads = TierReads(self.offload, self.pace, self.kv.page_size)
        self.scheduler = Scheduler(self.limits, self.kv, self.pace, self.reads, max_batch_tokens=max_batch_tokens)
        self.must_stop: Callable[[], bool] = lambda: False
        """Asked before every layer; any thread may make it true, and the step is taken back."""
        self.crashes = 0
        """Steps that failed, one after another, since one succeeded."""
        self.last_crash: BaseException | None = None
        self._requests: dict[int, RequestState] = {}
        self._ids = itertools.count()
        self._events: list[EngineEvent] = []
        self._counters = Counters()
        self._shares_prefixes = prefix_cache
        self._closed = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._requests or self._events) or (self.offload is not None and self.offload.is_busy)

    def has_request(self, request_id: int) -> bool:
        """Whether a request waits or runs."""
        return request_id in self._requests

    def add_request(self, request: Request, on_prefill: Callable[[PrefillProgress], None] | None = None) -> int:
        """`prepare` and `enqueue`; returns the id under which the request's events come."""
        state = self.prepare(request, on_prefill)
        self.enqueue(state)
        return state.request_id

    def prepare(self, request: Request, on_prefill: Callable[[PrefillProgress], None] | None = None) -> RequestState:
        """A request that can be queued; it holds nothing yet. Any thread may call this at any time.

        `on_prefill` is told, step by step, how far the prompt is; what it raises ends its request.
        Raises what `Limits.check` raises, and GrammarError.
        """
        ids = self.limits.check(request.prompt_token_ids, request.sampling)
        request = replace(request, prompt_token_ids=ids)
        length = self.limits.max_length(len(ids), request.sampling)
        request_id = next(self._ids)
        # Under a salt of its own a request still finds what it computed before it was retracted.
        salt = request.salt if self._shares_prefixes else request_id
        samples = [
            new_sample(
                request, KVSequence(self.kv, salt), index=index, max_tokens=length - len(ids), end_ids=self.end_ids,
                tokenizer=self.tokenizer, grammars=self.limits.grammars,
            )
            for index in range(request.sampling.n)
        ]  # fmt: skip
        return RequestState(request_id, ids, request.sampling, length, samples, salt, on_prefill or _ignore)

    def enqueue(self, state: RequestState) -> None:
        """Queue what `prepare` gave. Raises EngineClosedError."""
        if self._closed:
            raise EngineClosedError("the engine is closed")
        self._requests[state.request_id] = state
        self.scheduler.add(state)

    def step(self) -> list[EngineEvent]:
        """Compute one batch; returns what happened since the last call.

        Where the batch fails, its requests end with an event that carries the error, their pages come back, and the
        engine goes on. A step that nobody needs any more is taken back before its next layer; one that waits in vain
        for what KV tiers should give is taken back too, and its requests go on without.
        """
        chunks = self._schedule()
        started, waited = time.perf_counter(), self.reads.seconds_waited
        try:
            if chunks:
                logits = self._compute(chunks, started)
                self._commit(chunks, logits, self._sample(chunks, logits))
                self._account(chunks, time.perf_counter() - started, self.reads.seconds_waited - waited)
                self.crashes = 0
        except _Abandoned:
            self._take_back(chunks)
        except TransferError as error:
            self._take_back(chunks)
            if not self.reads.drop([chunk.sample.kv for chunk in chunks], error):
                self._fail(chunks, error)
        except Exception as error:
            self._fail(chunks, error)
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
        """Abort everything; requests are refused from now on. Closing twice does nothing.

        What waits for KV tiers is written, for `OffloadConfig.flush_seconds` at most.
        """
        was_open, self._closed = not self._closed, True
        for request_id in list(self._requests):
            self.abort(request_id)
        if self.offload is not None and was_open:
            self.offload.close()
        self.runner.close()

    @property
    def pages_used(self) -> int:
        """Pages that requests hold."""
        return self.kv.usage.held

    @property
    def stats(self) -> EngineStats:
        """Counters as they stand."""
        return replace(
            self._counters.stats,
            retractions=self.scheduler.retractions,
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            pages=self.kv.usage,
            page_size=self.limits.page_size,
            offload=None if self.offload is None else self.offload.stats,
        )

    def check(self) -> None:
        """Assert that free + held + cached + in transfer = total, and every count behind it."""
        self.kv.check(sample.kv for request in self._requests.values() for sample in request.samples)

    def _schedule(self) -> list[Chunk]:
        """What the step computes; where there is nothing, see for a moment whether transfers get on."""
        if self.offload is None:
            return self.scheduler.schedule()
        self.offload.poll()
        chunks = self.scheduler.schedule()
        if not chunks and not self._events:
            self.offload.wait(_TRANSFER_WAIT_S)
        return chunks

    def _fail(self, chunks: list[Chunk], error: Exception) -> None:
        logger.exception("a step of %d sequences failed", len(chunks))
        self.crashes, self.last_crash = self.crashes + 1, error
        for chunk in chunks:
            self._end(chunk.request, FinishReason.ERROR, error)

    def _take_back(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            chunk.sample.kv.undo(len(chunk.token_ids))

    def _compute(self, chunks: list[Chunk], started: float) -> Tensor:
        """The step's logits. Raises _Abandoned where nobody needs them any more."""
        for chunk in chunks:
            chunk.request.started = chunk.request.started or started
        batch = self._batch(chunks)

        def before_layer() -> None:
            if self.must_stop() or all(chunk.request.cancelled for chunk in chunks):
                raise _Abandoned

        with self.reads.awaited([chunk.sample.kv for chunk in chunks], before_layer):
            return self.runner.run(batch, before_layer)

    def _batch(self, chunks: list[Chunk]) -> Batch:
        """The plain data of a step; takes the pages its tokens need."""
        batch = Batch()
        for chunk in chunks:
            kv = chunk.sample.kv
            slots = kv.append(len(chunk.token_ids)).tolist()
            batch.add(chunk.token_ids, chunk.start, slots, kv.table.pages, chunk.num_logits)
        self._counters.see_held(self.pages_used)
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
            chunk.sample.kv.commit(chunk.request.tokens(chunk.sample))
            if not chunk.request.prefilled:
                self._advance_prompt(chunk, logits[end - chunk.num_logits : end])
            for receiver in chunk.receivers:
                result = next(results)
                if receiver.finish_reason is None:
                    self._take_token(chunk.request, receiver, result)
            self._forget_if_ended(chunk.request)

    def _take_token(self, request: RequestState, receiver: Sample, result: Sampled | TamisError) -> None:
        if isinstance(result, TamisError):
            # A grammar or a bias that leaves no token says nothing of the pages.
            (receiver.kv.discard if isinstance(result, LogitsError) else receiver.kv.release)()
            self._emit(request, receiver, None, receiver.finish(FinishReason.ERROR), error=result)
            return
        text = receiver.accept(result)
        if receiver.finish_reason is not None:
            receiver.kv.release()
        self._emit(request, receiver, result.token_id, text, result.logprobs)

    def _advance_prompt(self, chunk: Chunk, logits: Tensor) -> None:
        request = chunk.request
        request.see_cached(chunk.start)
        request.processed = max(request.processed, chunk.end)
        try:
            self._add_prompt_logprobs(chunk, logits)
            request.on_prefill(request.progress())
        except Exception as error:
            # Logits that are no numbers, or a caller's mistake: this request's fault alone.
            self._end(request, FinishReason.ERROR, error)
            return
        if chunk.end == len(request.prompt):
            request.prefilled = True
            self._counters.add_prompt(request)
            for other in request.samples[1:]:
                other.kv = chunk.sample.kv.fork()

    def _add_prompt_logprobs(self, chunk: Chunk, logits: Tensor) -> None:
        request, asked = chunk.request, chunk.request.sampling.prompt_logprobs
        if asked is not None and request.wants_logprobs:
            following = request.prompt[chunk.end - chunk.num_logits + 1 : chunk.end + 1]
            request.prompt_logprobs += prompt_logprobs(logits[: len(following)], following, asked)

    def _account(self, chunks: list[Chunk], seconds: float, waited: float) -> None:
        """Keep what the step did and what it cost: so many seconds, some of which it `waited` for KV tiers."""
        self._counters.add_step(chunks, seconds)
        reading = [chunk for chunk in chunks if chunk.is_prefill]
        tokens = sum(len(chunk.token_ids) for chunk in reading)
        seen = sum(len(chunk.token_ids) * (chunk.start + chunk.end) / 2 for chunk in reading)
        self.pace.observe(
            replies=len(chunks) - len(reading),
            prompt_tokens=tokens,
            context=seen / tokens if tokens else 0.0,
            seconds=seconds - waited,
        )

    def _end(self, request: RequestState, reason: FinishReason, error: BaseException | None = None) -> None:
        """End every sample of `request` that has not ended."""
        for ending in request.samples:
            if reason is FinishReason.ERROR:
                ending.kv.discard()
            else:
                ending.kv.release()
        for ending in request.samples:
            if ending.finish_reason is None:
                self._emit(request, ending, None, ending.finish(reason), error=error)
        self._forget_if_ended(request)

    def _forget_if_ended(self, request: RequestState) -> None:
        if not request.live and self._requests.pop(request.request_id, None) is not None:
            self.scheduler.remove(request)
            if not self._shares_prefixes:
                self.kv.forget(request.salt)

    def _emit(
        self,
        request: RequestState,
        receiver: Sample,
        token_id: int | None,
        text: str,
        logprobs: TokenLogprobs | None = None,
        error: BaseException | None = None,
    ) -> None:
        self._events.append(request.event(receiver, token_id, text, logprobs, error))


class _Abandoned(Exception):
    """Nobody needs the step that is being computed."""


def _ignore(_progress: PrefillProgress) -> None:
    """Nobody asked how far the prompt is."""
