"""What a request says about sampling, as `SamplingParams`."""

from typing import Any

from tamis.engine.async_engine import AsyncEngine
from tamis.request import SamplingParams
from tamis.server.errors import ApiError
from tamis.server.schema import ChatRequest, CompletionRequest, SamplingFields

_SHARED = ("n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "ignore_eos",
           "presence_penalty", "frequency_penalty", "repetition_penalty", "prompt_logprobs")  # fmt: skip
_COMPLETION_TOKENS = 16
"""OpenAI's max_tokens of a completion that does not say it; a chat may go on for as long as there is room."""


def completion_sampling(engine: AsyncEngine, body: CompletionRequest) -> SamplingParams:
    """Of `/v1/completions`. Raises SamplingError naming the field and its value, ApiError."""
    values = _shared(body)
    values["logprobs"] = body.logprobs
    values["max_tokens"] = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.echo and body.max_tokens == 0:
        values["max_tokens"] = 1  # asked for the prompt's own log-probabilities: what is generated is thrown away
    return engine.default_sampling(**values)


def chat_sampling(engine: AsyncEngine, body: ChatRequest) -> SamplingParams:
    """Of `/v1/chat/completions`. Raises SamplingError naming the field and its value, ApiError."""
    values = _shared(body)
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return engine.default_sampling(**values, max_tokens=asked)


def _shared(body: SamplingFields) -> dict[str, Any]:
    """Fields that were sent; for the others the model's own defaults count."""
    values = {name: getattr(body, name) for name in _SHARED if getattr(body, name) is not None}
    if body.logit_bias is not None:
        values["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    if body.response_format is not None:
        values["response_format"] = body.response_format.model_dump(by_alias=True, exclude_unset=True)
    return values


def _token_id(key: str) -> int:
    # int() would also take "1_000", " 7 " and other scripts' digits.
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        message = f"logit_bias has the key {key[:40]!r}, which is not a token id"
        raise ApiError(400, "invalid_value", message, param="logit_bias")
    return int(key)
