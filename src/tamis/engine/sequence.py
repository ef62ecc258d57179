"""What the engine keeps of a request while it waits and runs."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from tamis.engine.detokenizer import Detokenizer
from tamis.engine.sampler import Sampled, SamplerRow
from tamis.kv import KVSequence, Tokens
from tamis.request import Completion, FinishReason, PrefillProgress, SamplingParams, TokenLogprobs, Usage


@dataclass(eq=False)
class Sample:
    """One of a request's `n` completions in the making; owns its sequence in the pool and so its pages."""

    index: int
    kv: KVSequence
    """What is computed of its prompt and tokens; nothing while it waits, and again once it was retracted."""
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
    """Of these, tokens that the prefix cache had."""
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
