"""HTTP/1.1 for clients that take their time on purpose: headers are bounded in size and time, and refused in JSON."""

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from tamis.server.config import ServerConfig
from tamis.server.errors import ApiError


def make_protocol(config: ServerConfig) -> type[H11Protocol]:
    """uvicorn's protocol, closing connections whose headers do not come within `config.header_timeout` seconds."""

    class _PatientToAPoint(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._await_headers()

        def send_400_response(self, msg: str) -> None:
            # Called while the parser's error is being handled, which knows more than `msg`.
            error = sys.exc_info()[1]
            status = getattr(error, "error_status_hint", 400)
            if status == 431:
                limit = config.max_header
                self._refuse(ApiError(431, "headers_too_large", f"the headers have more than {limit} bytes"))
            else:
                self._refuse(ApiError(400, "invalid_http", f"this is not an HTTP request: {error or msg}"))

        def _await_headers(self) -> None:
            """Start the clock where it does not run yet, stop it while a request is being handled."""
            handling = self.cycle is not None and not self.cycle.response_complete
            if handling or self.transport.is_closing():
                self._disarm()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(config.header_timeout, self._too_late)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_late(self) -> None:
            seconds = config.header_timeout
            self._refuse(ApiError(408, "header_timeout", f"the request's headers did not come within {seconds:g} s"))

        def _refuse(self, error: ApiError) -> None:
            self._disarm()
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                response = error.response()
                headers: list[Any] = [*response.raw_headers, (b"connection", b"close")]
                start = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
                for event in (start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    return _PatientToAPoint
