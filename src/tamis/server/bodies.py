"""Request bodies, read as a whole before a request is handled: bounded in size and time, for one and for all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Receive, Scope, Send

from tamis.server.config import ServerConfig
from tamis.server.errors import ApiError
from tamis.units import format_size

_LINGER = 5.0
"""Seconds that a refused body is read and thrown away: a connection reset would take the answer with it."""


class ClientGoneError(Exception):
    """The client hung up before it had sent its request."""


class Bodies:
    """Reads bodies and counts the bytes of all that are being held."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._held = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[Receive]:
        """A `receive` that gives the whole body at once and then what the client does, hanging up above all.

        Raises ApiError (413, 408, or 503 where all bodies together are too much), ClientGoneError.
        """
        self._check_declared(scope)
        parts: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(self._config.body_timeout):
                    await self._collect(receive, parts)
            except TimeoutError:
                seconds = self._config.body_timeout
                raise ApiError(408, "body_timeout", f"the request's body did not come within {seconds:g} s") from None
            yield _replay(b"".join(parts), receive)
        finally:
            self._held -= sum(map(len, parts))

    def _check_declared(self, scope: Scope) -> None:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._config.max_body:
                raise self._too_large(int(value))

    async def _collect(self, receive: Receive, parts: list[bytes]) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            parts.append(part)
            size += len(part)
            self._held += len(part)
            if size > self._config.max_body:
                raise self._too_large(size)
            if self._held > self._config.max_bodies:
                room = format_size(self._config.max_bodies)
                message_ = f"the bodies of all requests together take more than the server's {room}"
                raise ApiError(503, "too_many_bodies", message_, kind="overloaded_error", headers={"Retry-After": "1"})
            more = message.get("more_body", False)

    def _too_large(self, size: int) -> ApiError:
        limit = self._config.max_body
        return ApiError(413, "body_too_large", f"the body has {size} bytes or more, over the limit of {limit} bytes")


def _replay(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


async def answer_unread(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body was not read, and close the connection once the client has had time to listen."""
    response = error.response()
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    # Who waits for leave to send, or has stopped sending, would be waited for in vain.
    if error.status != 408 and not any(name == b"expect" for name, _ in scope["headers"]):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                while (await receive()).get("more_body", False):
                    pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
