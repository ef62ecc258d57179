"""The nouns of a run: what is asked for, what comes back. Plain data, no behaviour beyond checking itself."""

import copy
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tamis.errors import SamplingError
from tamis.units import show

MAX_LOGPROBS = 100
"""Most alternatives a token that `logprobs` and `prompt_logprobs` may ask for."""


MAX_STOP_STRINGS = 64
"""Every token of a reply is compared with all of them."""


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """An end id, a stop token id or a stop string."""
    LENGTH = "length"
    """max_tokens or the model's context was reached."""
    ABORT = "abort"
    """The caller cancelled it."""
    ERROR = "error"
    """A step failed."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request (vLLM's names). Raises SamplingError naming the field and its value."""

    n: int = 1
    """Completions of the same prompt."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1: all."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one."""
    max_tokens: int | None = 256
    """Tokens to generate at most; None: as many as the context and the KV pool have room for."""
    stop: tuple[str, ...] | list[str] | str | None = ()
    """Strings that end the text; they are not part of it. None: none, as for the next one and logit_bias."""
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    """Token ids that end the text, beside the model's own end ids; they are not part of it."""
    seed: int | None = None
    """Same seed, same prompt, same parameters: same tokens, whatever else runs."""
    logprobs: int | None = None
    """Alternatives to report with each generated token; 0: the token's own log-probability only."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    ignore_eos: bool = False
    """The model's end ids do not end the text."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token generated so far."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was generated."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by this where positive, multiplied where negative."""
    logit_bias: Mapping[int, float] | None = field(default_factory=dict)
    """Added to the logits of these token ids."""
    response_format: Mapping[str, Any] | None = None
    """What the text must be: {"type": "text"} (anything), {"type": "json_object"}, {"type": "json_schema",
    "json_schema": {"schema": ...}}, or {"type": "grammar", "grammar": ...} in llguidance's Lark syntax."""
    skip_special_tokens: bool = True
    """Special tokens are not part of the text."""

    def __post_init__(self) -> None:
        for name, low, high in (("n", 1, 128), ("top_k", -1, None), ("logprobs", 0, MAX_LOGPROBS),
                                ("prompt_logprobs", 0, MAX_LOGPROBS), ("max_tokens", 1, None),
                                ("seed", -(2**63), 2**63 - 1)):  # fmt: skip
            self._check_int(name, low, high)
        for name, low_f, high_f in (("temperature", 0.0, math.inf), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0),
                                    ("presence_penalty", -2.0, 2.0), ("frequency_penalty", -2.0, 2.0),
                                    ("repetition_penalty", 0.0, math.inf)):  # fmt: skip
            self._check_float(name, low_f, high_f)
        if self.top_p == 0:
            raise SamplingError("top_p=0 must be above 0")
        if self.repetition_penalty == 0:
            raise SamplingError("repetition_penalty=0 must be above 0")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise SamplingError(f"{name}={getattr(self, name)!r} must be true or false")
        self._check_collections()
        self._own_collections()

    def _check_int(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        optional = name in ("logprobs", "prompt_logprobs", "max_tokens", "seed")
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise SamplingError(f"{name}={value!r} must be a whole number")
        if value < low or (high is not None and value > high):
            bounds = f"between {low} and {high}" if high is not None else f"at least {low}"
            raise SamplingError(f"{name}={value} must be {bounds}")

    def _check_float(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not math.isfinite(value):
            raise SamplingError(f"{name}={value!r} must be a finite number")
        if not low <= value <= high:
            bounds = f"between {low:g} and {high:g}" if high != math.inf else f"at least {low:g}"
            raise SamplingError(f"{name}={value} must be {bounds}")

    def _check_collections(self) -> None:
        listed = self.stop is None or isinstance(self.stop, str | list | tuple)
        if not listed or not all(isinstance(s, str) for s in self.stop_strings):
            raise SamplingError(f"stop={self.stop!r} must be a string or a list of strings")
        if any(not s for s in self.stop_strings):
            raise SamplingError("stop holds an empty string")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise SamplingError(
                f"stop holds {len(self.stop_strings)} strings, at most {MAX_STOP_STRINGS} are looked for"
            )
        if not isinstance(self.stop_token_ids, list | tuple | None):
            raise SamplingError(f"stop_token_ids={self.stop_token_ids!r} must be a list of token ids")
        for token in self.stop_ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise SamplingError(f"stop_token_ids holds {token!r}, which is not a token id")
        self._check_biases()
        self._check_response_format()

    def _check_biases(self) -> None:
        if not isinstance(self.logit_bias, Mapping | None):
            raise SamplingError(f"logit_bias={self.logit_bias!r} must map token ids to numbers")
        for token, bias in self.biases.items():
            if isinstance(token, bool) or not isinstance(token, int):
                raise SamplingError(f"logit_bias has the key {token!r}, which is not a token id")
            if not _is_number(bias) or math.isnan(bias):
                raise SamplingError(f"logit_bias of token {token} is {bias!r}, which is not a number")

    def _check_response_format(self) -> None:
        """Its form; whether a schema or grammar makes sense is seen when it is compiled (GrammarError)."""
        wanted = self.response_format
        if wanted is None:
            return
        if not isinstance(wanted, Mapping):
            raise SamplingError(f"response_format={show(wanted)} must be an object with a type")
        kind = wanted.get("type")
        if kind not in ("text", "json_object", "json_schema", "grammar"):
            raise SamplingError(f"response_format has the type {show(kind)}, not text, json_object or json_schema")
        if kind == "json_schema":
            inner = wanted.get("json_schema")
            if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping | bool):
                raise SamplingError("response_format of type json_schema has no schema under json_schema.schema")
        if kind == "grammar" and not isinstance(wanted.get("grammar"), str):
            raise SamplingError("response_format of type grammar has no text under grammar")

    def _own_collections(self) -> None:
        """Copy what the caller could still change, so that what was checked is what is used."""
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.response_format is not None:
            try:
                object.__setattr__(self, "response_format", copy.deepcopy(dict(self.response_format)))
            except RecursionError:
                raise SamplingError("response_format is nested too deeply") from None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple."""
        return tuple(self.stop_token_ids or ())

    @property
    def biases(self) -> Mapping[int, float]:
        """`logit_bias` as a mapping."""
        return self.logit_bias or {}

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0


def _is_number(value: object) -> bool:
    """Whether `value` is a float, or an int that fits one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


@dataclass(frozen=True)
class Request:
    """What is asked of an engine."""

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    continues: bool = False
    """The reply carries the prompt's text on: a SentencePiece model's space before its first word is kept."""
    salt: str = ""
    """Requests share cached prefixes with those of the same salt only: it keeps tenants apart."""


@dataclass(frozen=True)
class PrefillProgress:
    """How far a prompt is."""

    total: int
    """Tokens of the prompt."""
    cached: int
    """Tokens found in the prefix cache so far."""
    processed: int
    """Tokens whose K and V are in the pool, found or computed."""
    elapsed: float
    """Seconds since the prompt's first step began."""


@dataclass(frozen=True)
class Usage:
    """Token counts of one completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose K and V were found in a cache."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's own distribution (before bias, penalties, temperature)."""

    logprob: float
    """Of the token that stands here."""
    top: dict[int, float]
    """Of the most probable tokens, by token id, most probable first; the token itself always included."""


@dataclass(frozen=True)
class TokenEvent:
    """One step of a stream. Texts of all events of a completion, joined, are its text."""

    index: int
    """Which of the request's `n` completions."""
    token_id: int | None
    """None in an event that only ends the stream or flushes held-back text."""
    text: str
    """New text; may be empty while a character or a possible stop string is incomplete."""
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    """Set in exactly one event, the last."""
    usage: Usage | None = None
    """Set in the last event."""


@dataclass(frozen=True)
class Completion:
    """The result of one request and one of its `n` samples."""

    index: int
    """Which of the request's `n` samples; not the prompt's place in a list of prompts."""
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated ids, an end id or stop token included."""
    text: str
    """Without end ids and stop strings."""
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[float, ...] | None = None
    """A float a generated token, when asked."""
    top_logprobs: tuple[dict[int, float], ...] | None = None
    """A dict a generated token, when `logprobs` asks for one or more."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One a prompt token, None for the first, when asked."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the text, if one did."""
