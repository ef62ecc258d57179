"""What the server tells about itself and its model: models, health, metrics, the pool, tokens."""

from typing import Any

from fastapi.responses import Response

from tamis.engine.async_engine import AsyncEngine
from tamis.server.chat_plan import encode_chat
from tamis.server.context import Context
from tamis.server.errors import ApiError
from tamis.server.replies import (
    DetokenizeReply,
    HealthReply,
    KVReply,
    ModelReply,
    ModelsReply,
    TokenizeReply,
)
from tamis.server.schema import DetokenizeRequest, TokenizeRequest
from tamis.server.stream import aside
from tamis.units import show


def models(context: Context) -> ModelsReply:
    """`/v1/models`."""
    return ModelsReply(object="list", data=[_model(context)])


def model(context: Context, name: str) -> ModelReply:
    """`/v1/models/NAME`. Raises ApiError (404)."""
    context.check_model(name)
    return _model(context)


def _model(context: Context) -> ModelReply:
    return ModelReply(
        id=context.model, object="model", created=context.started, owned_by="tamis",
        max_model_len=context.engine.config.context_length,
    )  # fmt: skip


def health(engine: AsyncEngine) -> HealthReply:
    """`/health`. Raises EngineDeadError, EngineClosedError: a load balancer sees 503."""
    engine.check_health()
    _ = engine.stats  # refuses once the engine takes no more requests
    return HealthReply(status="ok")


def metrics(context: Context) -> Response:
    """`/metrics`, in Prometheus' text format."""
    return Response(context.metrics.text(), media_type=context.metrics.content_type)


def kv(engine: AsyncEngine) -> KVReply:
    """`/v1/kv`."""
    usage: dict[str, Any] = engine.kv_usage()
    return KVReply(**usage)


async def tokenize(context: Context, body: TokenizeRequest) -> TokenizeReply:
    """`/tokenize`. Raises RequestError, TokenizerError."""
    context.check_model(body.model)
    tokenizer = context.tokenizer
    if body.messages is None:
        text = body.prompt or ""
        ids = await aside(lambda: tokenizer.encode(text, add_special_tokens=body.add_special_tokens))
    else:
        ids = await aside(lambda: encode_chat(context, body))
    return TokenizeReply(tokens=ids, count=len(ids), max_model_len=context.engine.config.context_length)


async def detokenize(context: Context, body: DetokenizeRequest) -> DetokenizeReply:
    """`/detokenize`. Raises ApiError naming an id outside the vocabulary."""
    context.check_model(body.model)
    tokenizer, size = context.tokenizer, context.engine.config.vocab_size
    for place, token in enumerate(body.tokens):
        if not 0 <= token < size:
            message = f"tokens[{place}] is {show(token)}, outside the vocabulary of {size} tokens"
            raise ApiError(400, "token_out_of_range", message, param="tokens")
    text = await aside(lambda: tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens))
    return DetokenizeReply(prompt=text)
