"""The HTTP application: OpenAI's API over an AsyncEngine."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request

from tamis.engine.async_engine import AsyncEngine
from tamis.errors import TamisError
from tamis.metrics import ServerMetrics
from tamis.server import info, replies, schema, sessions
from tamis.server.chat import chat
from tamis.server.completions import complete
from tamis.server.config import ServerConfig
from tamis.server.context import Context
from tamis.server.engine_metrics import engine_metrics
from tamis.server.errors import to_api_error
from tamis.server.gate import Gate
from tamis.server.json_route import JsonRoute
from tamis.server.logprobs import TokenNames

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": replies.ErrorReply, "description": text}
    for status, text in {
        400: "The request cannot be run; the message names the value.",
        401: "No API key, or a wrong one.",
        404: "No such model, session or path.",
        408: "The body did not come in time.",
        413: "The body is too large.",
        415: "The body is not called JSON.",
        500: "The server is at fault.",
        503: "Too many requests, a KV tier that fails, or the server is stopping.",
    }.items()
}


def create_app(engine: AsyncEngine, config: ServerConfig | None = None, *, model_name: str | None = None) -> FastAPI:
    """The application. `model_name`: what requests call the model; None: its own name. The caller closes `engine`.

    Every answer of 4xx and 5xx is an OpenAI error object.
    """
    config, metrics = config or ServerConfig(), ServerMetrics()
    metrics.add_source(engine_metrics(engine))
    context = Context(engine, config, metrics, model_name or engine.model_name, TokenNames(engine.tokenizer))
    # The pages that FastAPI would show at /docs load their scripts from elsewhere.
    app = FastAPI(title="tamis", version=version("tamis"), docs_url=None, redoc_url=None, responses=_ERRORS)
    routes = _routes(context)
    app.include_router(routes)
    for kind in (TamisError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)
    paths = {route.path for route in routes.routes if isinstance(route, APIRoute)}
    app.add_middleware(Gate, config=config, metrics=metrics, paths=paths)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.cors_origins, allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",), expose_headers=("x-request-id",),
        )  # fmt: skip
    app.openapi = lambda: _openapi(app, bool(config.api_keys))  # type: ignore[method-assign]
    return app


def _routes(context: Context) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    engine = context.engine
    # No type: some take a stream's schema as that of the whole text, others as that of one event.
    events = {"description": "Lines `data: ` with a JSON object each, and at the end [DONE]."}
    stream: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": events}}}}

    @router.get("/v1/models", summary="The model that is served")
    async def models() -> replies.ModelsReply:
        return info.models(context)

    @router.get("/v1/models/{name:path}", summary="One model")
    async def model(name: str) -> replies.ModelReply:
        return info.model(context, name)

    @router.post(
        "/v1/completions", response_model=replies.CompletionReply, responses=stream, summary="Go on with a text"
    )
    async def completions(body: schema.CompletionRequest, request: Request) -> Response:
        return await complete(context, body, request)

    @router.post("/v1/chat/completions", response_model=replies.ChatReply, responses=stream, summary="Answer in a chat")
    async def chat_completions(body: schema.ChatRequest, request: Request) -> Response:
        return await chat(context, body, request)

    @router.get("/v1/kv", summary="How full the KV pool is")
    async def kv() -> replies.KVReply:
        return info.kv(engine)

    @router.get("/v1/kv/sessions", summary="Prompts that are kept in the KV tiers")
    async def list_sessions(request: Request) -> replies.SessionsReply:
        return await sessions.sessions(context, request)

    @router.post("/v1/kv/sessions/{name}", summary="Keep a prompt in the KV tiers")
    async def save_session(name: str, body: schema.SessionRequest, request: Request) -> replies.SessionReply:
        return await sessions.save(context, name, body, request)

    @router.delete("/v1/kv/sessions/{name}", summary="Keep it no longer")
    async def delete_session(name: str, request: Request) -> replies.SessionDeletedReply:
        return await sessions.delete(context, name, request)

    @router.post("/tokenize", summary="Token ids of a text or chat")
    async def tokenize(body: schema.TokenizeRequest) -> replies.TokenizeReply:
        return await info.tokenize(context, body)

    @router.post("/detokenize", summary="The text of token ids")
    async def detokenize(body: schema.DetokenizeRequest) -> replies.DetokenizeReply:
        return await info.detokenize(context, body)

    @router.get("/health", summary="Whether requests are taken")
    async def health() -> replies.HealthReply:
        return info.health(engine)

    @router.get(
        "/metrics", response_class=Response, summary="Figures for Prometheus",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )  # fmt: skip
    async def metrics() -> Response:
        return info.metrics(context)

    return router


async def _answer(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        wrong = "there is nothing here:" if error.status_code == 404 else "this path does not take"
        error = HTTPException(error.status_code, f"{wrong} {request.method} {request.url.path[:200]}", error.headers)
    return to_api_error(error).response()


def _openapi(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    """FastAPI's description without its own error objects, which are never sent."""
    if app.openapi_schema is None:
        described = FastAPI.openapi(app)
        for name in ("HTTPValidationError", "ValidationError"):
            described["components"]["schemas"].pop(name, None)
        for path, operations in described["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if needs_key and path != "/health":
                    operation["security"] = [{"key": []}]
        if needs_key:
            described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = described
    return app.openapi_schema
