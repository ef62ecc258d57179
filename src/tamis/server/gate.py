"""What every request passes on its way in and out: an id, a key, a body, a log line, a count, an answer to errors."""

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tamis.metrics import ServerMetrics
from tamis.server.auth import ApiKeys
from tamis.server.bodies import Bodies, ClientGoneError, answer_unread
from tamis.server.config import ServerConfig
from tamis.server.errors import ApiError, to_api_error

logger = logging.getLogger("tamis.server")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_OPEN_PATHS = frozenset({"/health", "/openapi.json"})
"""Answered without a key: a load balancer has none."""
_UNCOUNTED = frozenset({"/health", "/metrics"})
"""What monitoring asks for, every few seconds; counted, it would hide how busy the server is."""
_HUNG_UP = 499
"""In log and counts: the client did not wait for its answer."""


class Gate:
    """ASGI middleware around the whole application. Clients may choose their request's id with X-Request-Id."""

    def __init__(self, app: ASGIApp, *, config: ServerConfig, metrics: ServerMetrics, paths: Iterable[str]) -> None:
        self._app = app
        self._keys = ApiKeys(config.api_keys)
        self._bodies = Bodies(config)
        self._metrics = metrics
        self._paths = frozenset(paths)
        """What counts are kept for by name; anything else could be a new name each time."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        with self._counted(scope["path"], exchange):
            await self._handle(scope, receive, exchange)

    @contextlib.contextmanager
    def _counted(self, path: str, exchange: "_Exchange") -> Iterator[None]:
        counts = path not in _UNCOUNTED
        self._metrics.http_active.inc(counts)
        try:
            yield
        finally:
            self._metrics.http_active.dec(counts)
            if counts:
                known = path if path in self._paths else "other"
                self._metrics.http_requests.labels(known, str(exchange.status)).inc()
            exchange.log()

    async def _handle(self, scope: Scope, receive: Receive, exchange: "_Exchange") -> None:
        try:
            if scope["path"] not in _OPEN_PATHS:
                scope["state"]["tenant"] = self._keys.check(exchange.header(b"authorization"))
            async with self._bodies.read(scope, receive) as replay:
                try:
                    await self._app(scope, replay, exchange.send)
                except Exception as error:
                    await self._answer(error, scope, exchange)
        except ApiError as error:
            await answer_unread(error, scope, receive, exchange.send)
        except ClientGoneError:
            exchange.status = _HUNG_UP

    async def _answer(self, error: Exception, scope: Scope, exchange: "_Exchange") -> None:
        """Answer what nobody caught. A reply that has begun can only be broken off."""
        logger.error("request %s failed", exchange.request_id, exc_info=error)
        if exchange.started:
            raise error
        await to_api_error(error).response()(scope, _nothing, exchange.send)


class _Exchange:
    """One request and what became of it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._began = time.perf_counter()
        self.status = _HUNG_UP
        self.started = False
        asked = self.header(b"x-request-id") or b""
        fits = _REQUEST_ID.fullmatch(asked) is not None
        self.request_id = asked.decode() if fits else f"req-{secrets.token_hex(12)}"
        state: dict[str, Any] = scope.setdefault("state", {})
        state.update(request_id=self.request_id, tenant="", began=self._began)

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self._scope["headers"] if key == name), None)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
        await self._send(message)

    def log(self) -> None:
        client = (self._scope.get("client") or ("-",))[0]
        # The path as it was sent, percent signs and all: nothing in it can pass for another line of the log.
        path = self._scope.get("raw_path") or self._scope["path"].encode()
        seconds = time.perf_counter() - self._began
        logger.info(
            "%s %s %s %d %.3fs %s", client, self._scope["method"], path.decode("ascii", "backslashreplace"),
            self.status, seconds, self.request_id,
        )  # fmt: skip


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
