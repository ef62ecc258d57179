"""Structured output: which tokens a reply may go on with, worked out by llguidance.

Whatever is asked for becomes a grammar in llguidance's Lark syntax, whose rule `start` is the whole reply. A grammar is
compiled once and kept; every reply follows a copy of its own.
"""

import json
import re
import threading
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from tamis.engine.tokenizer import Tokenizer
from tamis.errors import GrammarError

MAX_GRAMMAR_CHARS = 1 << 20
"""The longest grammar that is compiled; one of this length takes about a second."""
_KEPT = 64
"""Compiled grammars that are kept, the most recently used ones."""
_WHITESPACE = r"[ ]?(\n[ \t]{0,32})?"
"""White space that a JSON text may hold between two of its parts: without a bound, a small model may never stop."""
_PROBE = "\n"


class Constraint(Protocol):
    """What one reply may look like, followed token by token."""

    @property
    def done(self) -> bool:
        """Whether the reply is complete and nothing may follow."""

    def mask(self, logits: Tensor) -> None:
        """Set the logits [V] of tokens that may not come next to -inf, in place. Raises GrammarError."""

    def accept(self, token_id: int) -> None:
        """Take the next token of the reply."""


class GrammarConstraint:
    """A reply that follows a compiled grammar. Raises GrammarError from `mask` once it has become too complex."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    @property
    def done(self) -> bool:
        """Whether the reply is complete and nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self, logits: Tensor) -> None:
        """Set the logits [V] of tokens that may not come next to -inf, in place."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"the reply cannot follow its grammar further: {_reason(self._matcher.get_error())}")
        allowed = torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little"))
        known = logits[: self._vocab_size]
        known.masked_fill_((allowed[: len(known)] == 0).to(logits.device), -torch.inf)
        # A model's vocabulary may be padded beyond the tokenizer's.
        logits[self._vocab_size :] = -torch.inf

    def accept(self, token_id: int) -> None:
        """Take the next token of the reply; of one that was not allowed the next `mask` tells."""
        self._matcher.consume_token(token_id)


class Grammars:
    """The grammars of one model, compiled for its tokenizer; a reply may end with one of `end_ids` where its grammar
    allows an end. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = sorted(token for token in end_ids if token < tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._compiled = lru_cache(_KEPT)(self._compile)

    def check(self, response_format: Mapping[str, Any] | None) -> None:
        """Compile what SamplingParams.response_format asks for, or find it compiled.

        The first call takes a second or so for a large vocabulary. Raises GrammarError naming what is wrong: a schema
        that is malformed or too large, that asks for what cannot be promised, or a model without an end token.
        """
        text = grammar_text(response_format)
        if text is not None:
            self._compiled(text)

    def constraint(self, response_format: Mapping[str, Any] | None) -> Constraint | None:
        """A constraint for one new reply; None where it may be any text. Raises as `check`."""
        text = grammar_text(response_format)
        if text is None:
            return None
        return GrammarConstraint(self._compiled(text).deep_copy(), self._tokenizer.vocab_size)

    def _compile(self, text: str) -> LLMatcher:
        if len(text) > MAX_GRAMMAR_CHARS:
            raise GrammarError(f"the grammar has {len(text)} characters, more than {MAX_GRAMMAR_CHARS}")
        with self._lock:
            vocabulary = self._vocabulary
        matcher = LLMatcher(vocabulary, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {_reason(matcher.get_error())}")
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        if not self._end_ids:
            raise GrammarError(f"{self._tokenizer.origin}: the model has no end token, which a grammar needs")
        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer, self._end_ids)),
            n_vocab=self._tokenizer.vocab_size,
            eos_token=self._end_ids,
        )


class _Vocabulary:
    """A tokenizer as llguidance wants to see it: the bytes of every token, and a function from text to tokens."""

    def __init__(self, tokenizer: Tokenizer, end_ids: list[int]) -> None:
        self.eos_token_id = end_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids | set(end_ids))
        self._tokenizer = tokenizer
        special = set(self.special_token_ids)
        self._ids = {data: token for token, data in enumerate(self.tokens) if data and token not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens whose bytes are exactly those of `text`, as the tokenizer would cut it where it can."""
        data = text.encode() if isinstance(text, str) else text
        try:
            plain = data.decode()
        except UnicodeDecodeError:
            return self._longest_matches(data)
        # SentencePiece puts a space before a text: what it makes of this one alone is seen behind a probe.
        return self._last_tokens(plain, data) or self._last_tokens(_PROBE + plain, data) or self._longest_matches(data)

    def _last_tokens(self, text: str, data: bytes) -> list[int]:
        """The last tokens of `text`, whose bytes are `data`; none where no token begins there."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        start, length = len(ids), 0
        while start and length < len(data):
            start -= 1
            length += len(self.tokens[ids[start]])
        return ids[start:] if b"".join(self.tokens[token] for token in ids[start:]) == data else []

    def _longest_matches(self, data: bytes) -> list[int]:
        """`data` cut into the longest tokens there are, from its start; bytes that begin no token are left out."""
        found, place = [], 0
        while place < len(data):
            lengths = range(min(self._longest, len(data) - place), 0, -1)
            length = next((n for n in lengths if data[place : place + n] in self._ids), 0)
            if length:
                found.append(self._ids[data[place : place + length]])
            place += length or 1
        return found


def grammar_text(response_format: Mapping[str, Any] | None) -> str | None:
    """The Lark text of what SamplingParams.response_format asks for; None where it may be any text.

    Raises GrammarError where a schema cannot be written as JSON.
    """
    kind = "text" if response_format is None else response_format["type"]
    if response_format is None or kind == "text":
        return None
    if kind == "grammar":
        return str(response_format["grammar"])
    schema = {"type": "object"} if kind == "json_object" else response_format["json_schema"]["schema"]
    return f"start: {json_rule(schema)}\n"


def json_rule(schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> str:
    """A term of a Lark grammar: JSON texts that `schema` allows. With `lenient`, keywords that a grammar cannot express
    are passed over; without, they fail to compile. Raises GrammarError where `schema` cannot be written as JSON."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    # "x-guidance" holds llguidance's own settings: a caller's are not taken.
    plain = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE, "lenient": lenient}}
    try:
        return f"%json {json.dumps(plain, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"the schema cannot be written as JSON: {' '.join(str(error).split())}") from None


def check_rule(rule: str) -> None:
    """Raise GrammarError where `rule`, a term of a Lark grammar, does not compile on its own."""
    message = LLMatcher.validate_grammar(f"start: {rule}\n")
    if message and not message.startswith("WARNING"):
        raise GrammarError(f"the grammar cannot be compiled: {_reason(message)}")


def _reason(message: str) -> str:
    """What llguidance says is wrong, on one line and without the grammar's text."""
    message = re.sub(r"^at \d+\(\d+\): ", "", message)
    message = re.split(r"\n +\d+ \| |\s*<state>", message)[0].removeprefix("failed to compile JSON schema: ")
    plain = " ".join(message.split()).replace("NoExtensionBias", "no token of the vocabulary comes next")
    return plain if len(plain) <= 300 else plain[:297] + "..."
