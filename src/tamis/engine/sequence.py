"""What the engine keeps of a request while it waits and runs."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from tamis.engine.detokenizer import Detokenizer
from tamis.engine.grammar import Grammars
from tamis.engine.sampler import Sampled, SamplerRow
from tamis.engine.tokenizer import Tokenizer
from tamis.kv import KVSequence, Tokens
from tamis.kv.offload import Lookup
from tamis.request import (
    Completion,
    FinishReason,
    PrefillProgress,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    Usage,
)


@dataclass(frozen=True)
class EngineEvent:
    """A token event and the request it belongs to."""

    request_id: int
    token: TokenEvent
    completion: Completion | None = None
    """The whole result of this sample; set in its last event."""
    error: BaseException | None = None
    """What went wrong, where the finish reason is "error"."""


@dataclass(eq=False)
class Sample:
    """One of a request's `n` completions in the making; owns its sequence in the pool and so its pages."""

    index: int
    kv: KVSequence
    """What is computed of its prompt and tokens; while its request waits, nothing but what is loaded for it."""
    row: SamplerRow
    detokenizer: Detokenizer | None
    """None where the model has no tokenizer: the text stays empty."""
    stop_ids: frozenset[int]
    """Ids that end it: the model's end ids, unless ignored, and the request's own."""
    max_tokens: int
    """Tokens it may generate: at least 1, no more than the context has room for."""
    token_ids: list[int] = field(default_factory=list)
    """Generated so far. The K and V of the last one are not in the pool yet."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lookup: Lookup | None = None
    """What the KV tiers have of it, until it is settled whether that is loaded."""

    def accept(self, sampled: Sampled) -> str:
        """Take the next token and settle whether it is the last; returns the text that is certain now."""
        token = sampled.token_id
        self.token_ids.append(token)
        self.row.observe(token)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
        if token in self.stop_ids:
            self.stop_reason = token
            return self.finish(FinishReason.STOP)
        text = "" if self.detokenizer is None else self.detokenizer.push(token)
        self.texts.append(text)
        if self._stop_string() is not None:
            self.stop_reason, self.finish_reason = self._stop_string(), FinishReason.STOP
        elif self.row.done:
            text += self.finish(FinishReason.STOP)
        elif len(self.token_ids) == self.max_tokens:
            text += self.finish(FinishReason.LENGTH)
        return text

    def finish(self, reason: FinishReason) -> str:
        """End for `reason`; returns the text that was held back, nothing after an error."""
        text = "" if self.detokenizer is None or reason is FinishReason.ERROR else self.detokenizer.finish()
        self.texts.append(text)
        self.finish_reason = reason
        if reason is FinishReason.LENGTH and self._stop_string() is not None:
            # The last bytes only became characters now, and completed a stop string.
            self.stop_reason, self.finish_reason = self._stop_string(), FinishReason.STOP
        return text

    def _stop_string(self) -> str | None:
        return None if self.detokenizer is None else self.detokenizer.stopped


def new_sample(
    request: Request,
    kv: KVSequence,
    *,
    index: int,
    max_tokens: int,
    end_ids: frozenset[int],
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
) -> Sample:
    """The sample `index` of a request that can be run, over an empty sequence. Raises GrammarError."""
    sampling = request.sampling
    constraint = None if grammars is None else grammars.constraint(sampling.response_format)
    ends = frozenset() if sampling.ignore_eos else end_ids
    return Sample(
        index=index,
        kv=kv,
        row=SamplerRow(sampling, request.prompt_token_ids, index, constraint),
        detokenizer=None
        if tokenizer is None
        else Detokenizer(
            tokenizer,
            sampling.stop_strings,
            continues=request.continues,
            skip_special_tokens=sampling.skip_special_tokens,
        ),
        stop_ids=ends | frozenset(sampling.stop_ids),
        max_tokens=max_tokens,
    )


@dataclass(eq=False)
class RequestState:
    """A request, its progress through the prompt, and its samples."""

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_length: int
    """Prompt and output together at most, never more than the context."""
    samples: list[Sample]
    """`n` of them; the first computes the prompt, the others start from its pages."""
    salt: Hashable
    """Prefixes are shared with requests of the same salt."""
    on_prefill: Callable[[PrefillProgress], None]
    """Told how far the prompt is, after each step that computed some of it."""
    cancelled: bool = False
    """Nobody waits for it any more. Any thread may set this; `Engine.abort` must follow."""
    started: float = 0.0
    """When the prompt's first step began."""
    prefilled: bool = False
    """Whether the prompt was computed to its end, so that every sample has its first token."""
    processed: int = 0
    """Prompt tokens that were in the pool at most."""
    cached_tokens: int = 0
    """Of these, tokens that the prefix cache had, or a KV tier."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """Of the prompt's first tokens, as many as were computed with the one after them; None for the first."""

    @property
    def live(self) -> int:
        """Samples that have not ended."""
        return sum(sample.finish_reason is None for sample in self.samples)

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still missing."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt)

    def total(self, sample: Sample) -> int:
        """Tokens of prompt and `sample`; the last one's successor is what it waits for."""
        return len(self.prompt) + len(sample.token_ids)

    def pending(self, sample: Sample) -> int:
        """Tokens that are to be computed before the next one can be sampled: 1 while a reply runs."""
        return self.total(sample) - sample.kv.length

    @property
    def next_to_read(self) -> Sample | None:
        """The sample that has more than its next token to compute.

        One at a time: the others of a request that was retracted then find its prompt in the tree, and need no more
        pages than they had when they shared it.
        """
        if not self.prefilled:
            return self.samples[0]
        live = (sample for sample in self.samples if sample.finish_reason is None)
        return next((sample for sample in live if self.pending(sample) > 1), None)

    def see_cached(self, length: int) -> None:
        """The first `length` tokens of the prompt are there. What the request did not compute itself is a hit."""
        if not self.prefilled and length > self.processed:
            self.cached_tokens += length - self.processed
            self.processed = length

    def readable(self, sample: Sample) -> int:
        """Tokens that may come from the prefix cache: never the last, nor those whose log-probabilities are missing."""
        least = self.total(sample) - 1
        return min(least, len(self.prompt_logprobs) - 1) if self.wants_logprobs else least

    def tokens(self, sample: Sample) -> Tokens:
        """The tokens of prompt and `sample`, by position."""
        prompt, reply = self.prompt, sample.token_ids

        def between(start: int, end: int) -> tuple[int, ...]:
            size = len(prompt)
            if end <= size:
                return prompt[start:end]
            return prompt[start:] + tuple(reply[max(0, start - size) : end - size])

        return between

    def progress(self) -> PrefillProgress:
        """How far the prompt is."""
        elapsed = time.perf_counter() - self.started
        return PrefillProgress(len(self.prompt), self.cached_tokens, self.processed, elapsed)

    def usage(self, sample: Sample) -> Usage:
        """Token counts of `sample`."""
        return Usage(len(self.prompt), len(sample.token_ids), self.cached_tokens)

    def event(
        self,
        sample: Sample,
        token_id: int | None,
        text: str,
        logprobs: TokenLogprobs | None,
        error: BaseException | None,
    ) -> EngineEvent:
        """What happened to `sample`, with its result if that was its end."""
        reason = sample.finish_reason
        usage = None if reason is None else self.usage(sample)
        token = TokenEvent(sample.index, token_id, text, logprobs, reason, usage)
        return EngineEvent(self.request_id, token, None if reason is None else self.completion(sample), error)

    def completion(self, sample: Sample) -> Completion:
        """The result of `sample`, which has ended."""
        assert sample.finish_reason is not None
        asked = self.sampling.logprobs
        return Completion(
            index=sample.index,
            prompt_token_ids=self.prompt,
            token_ids=tuple(sample.token_ids),
            text="".join(sample.texts),
            finish_reason=sample.finish_reason,
            usage=self.usage(sample),
            logprobs=None if asked is None else tuple(entry.logprob for entry in sample.logprobs),
            top_logprobs=tuple(entry.top for entry in sample.logprobs) if asked else None,
            prompt_logprobs=None if self.sampling.prompt_logprobs is None else tuple(self.prompt_logprobs),
            stop_reason=sample.stop_reason,
        )
