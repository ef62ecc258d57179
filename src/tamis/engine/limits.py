"""What a request may ask of an engine; everything is checked before any work is done."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tamis.engine.grammar import Grammars
from tamis.engine.sampler import check_token_ids
from tamis.errors import (
    EmptyPromptError,
    NeverFitsError,
    PromptTooLongError,
    RequestError,
    SamplingError,
    TokenizerError,
    TokenRangeError,
)
from tamis.request import SamplingParams


@dataclass(frozen=True)
class Limits:
    """The sizes that bound a request."""

    vocab_size: int
    context_length: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    has_tokenizer: bool
    grammars: Grammars | None = None
    """Where response_format is compiled; None: the model has no tokenizer."""

    def check(self, prompt: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
        """The prompt as plain ints, once it and `sampling` are known to be runnable.

        Raises EmptyPromptError, TokenRangeError, PromptTooLongError, NeverFitsError, SamplingError, GrammarError, or
        TokenizerError where stop strings or a form of reply are asked of a model without a tokenizer. To compile a new
        response_format takes milliseconds, the first one of a model up to a second.
        """
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling is {type(sampling).__name__}, not SamplingParams")
        ids = self._token_ids(prompt)
        if not ids:
            raise EmptyPromptError("the prompt is empty: it has no tokens")
        self._check_sampling(sampling)
        self._check_length(len(ids))
        self._check_pages(len(ids), sampling)
        return ids

    def max_length(self, prompt_tokens: int, sampling: SamplingParams) -> int:
        """Tokens of prompt and output together at most: max_tokens is cut down to what the context has room for.

        Without max_tokens also to what the pool has room for, but to no less than one token.
        """
        if sampling.max_tokens is not None:
            return min(prompt_tokens + sampling.max_tokens, self.context_length)
        shared = prompt_tokens // self.page_size
        room = (shared + (self.num_pages - shared) // sampling.n) * self.page_size + 1
        return max(prompt_tokens + 1, min(room, self.context_length))

    def pages_needed(self, prompt_tokens: int, max_length: int, samples: int) -> int:
        """Pages that `samples` continuations of one prompt hold at most: they share its full pages and nothing else.

        The last token of `max_length` is generated, but never computed on: it needs no room.
        """
        kept = max_length - 1
        shared = prompt_tokens // self.page_size
        each = -(-kept // self.page_size) - shared
        # With one token to generate nobody writes behind the prompt, so that its last page is shared as well.
        return shared + each * (samples if kept > prompt_tokens else 1)

    def _token_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str | bytes) or not isinstance(prompt, Iterable):
            raise RequestError(f"the prompt is {prompt!r}, not a list of token ids")
        ids = []
        for place, token in enumerate(prompt):
            try:
                if isinstance(token, bool):
                    raise TypeError  # noqa: TRY301
                value = operator.index(token)
            except TypeError:
                raise TokenRangeError(f"the prompt's token {place} is {token!r}, which is not a token id") from None
            if not 0 <= value < self.vocab_size:
                raise TokenRangeError(
                    f"the prompt's token {place} is {value}, outside the vocabulary of {self.vocab_size} tokens"
                )
            ids.append(value)
        return tuple(ids)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        if sampling.n > self.max_num_seqs:
            raise SamplingError(f"n={sampling.n} is more than max_num_seqs={self.max_num_seqs}, which run at once")
        check_token_ids(sampling, self.vocab_size)
        if sampling.stop_strings and not self.has_tokenizer:
            raise TokenizerError("the model has no tokenizer: stop strings cannot be looked for in its output")
        if self.grammars is not None:
            self.grammars.check(sampling.response_format)
        elif sampling.response_format is not None:
            raise TokenizerError("the model has no tokenizer: its output cannot be held to a response_format")

    def _check_length(self, tokens: int) -> None:
        if tokens > self.context_length:
            raise PromptTooLongError(
                f"the prompt has {tokens} tokens, more than the model's context of {self.context_length}"
            )
        if tokens == self.context_length:
            raise PromptTooLongError(
                f"the prompt has {tokens} tokens, which leaves no room for output in the model's context of "
                f"{self.context_length}"
            )

    def _check_pages(self, prompt_tokens: int, sampling: SamplingParams) -> None:
        length = self.max_length(prompt_tokens, sampling)
        needed = self.pages_needed(prompt_tokens, length, sampling.n)
        if needed > self.num_pages:
            samples = f"{sampling.n} samples of " if sampling.n > 1 else ""
            raise NeverFitsError(
                f"the request needs {needed} pages ({samples}{prompt_tokens} prompt + {length - prompt_tokens} output "
                f"tokens), more than the KV pool's {self.num_pages} pages ({self.num_pages * self.page_size} tokens)"
            )
