"""Routes whose bodies are JSON, read more strictly than FastAPI reads them, and refused in words."""

import email.message
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from tamis.server.errors import ApiError
from tamis.units import show

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route that reads a POST's body before FastAPI does."""

    def get_route_handler(self) -> _Handler:
        """FastAPI's handler behind our reading."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            if request.method != "POST":
                return await handle(request)
            _check_type(request.headers.get("content-type"))
            return await handle(_Read(request, _parse(await request.body())))

        return handler


class _Read(Request):
    """A request whose body was parsed already."""

    def __init__(self, request: Request, parsed: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body, self._json = request._body, parsed


def _check_type(content_type: str | None) -> None:
    """A page in a browser may send anything but JSON to any server without asking: nothing else is taken."""
    message = email.message.Message()
    message["content-type"] = content_type or "nothing"
    if message.get_content_type() != "application/json":
        told = show(content_type) if content_type else "missing"
        raise ApiError(415, "unsupported_media_type", f"content-type is {told}: send application/json")


def _parse(body: bytes) -> Any:
    if not body:
        raise ApiError(400, "invalid_json", "the body is empty: send a JSON object")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}"
        raise ApiError(400, "invalid_json", message) from None
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from None
