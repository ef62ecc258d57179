"""Listening, and stopping without cutting replies off."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from tamis.engine.async_engine import AsyncEngine
from tamis.errors import ConfigError
from tamis.server.app import create_app
from tamis.server.config import ServerConfig
from tamis.server.protocol import make_protocol

logger = logging.getLogger("tamis.server")

_AFTER_DRAIN = 5.0
"""Seconds to write the last chunks once the engine has ended."""
_LAST_WORDS = 0.2
"""The same, for replies that were broken off by a second Ctrl-C."""
_LOOK = 0.05
"""Seconds between two looks for a second Ctrl-C."""


def listen(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address; connections are taken once `serve` runs. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host={config.host!r} is not an address of this machine: {error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason += " (--port takes another)"
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {reason}") from None
    return sock


def address_of(sock: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    engine: AsyncEngine,
    config: ServerConfig,
    sock: socket.socket,
    *,
    model_name: str | None = None,
    ready: Callable[[], None] | None = None,
) -> None:
    """Answer requests on `sock` until SIGINT or SIGTERM; then let running ones end and close `engine`.

    `ready` is called once requests are taken. A SIGINT after that ends everything at once. The log tells of both.
    """
    asyncio.run(Server(engine, config, model_name=model_name, ready=ready).serve(sockets=[sock]))


class Server(uvicorn.Server):
    """uvicorn with an engine to close."""

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        *,
        model_name: str | None = None,
        ready: Callable[[], None] | None = None,
    ) -> None:
        self._engine, self._drain, self._ready = engine, config.drain, ready
        settings = uvicorn.Config(
            create_app(engine, config, model_name=model_name),
            http=make_protocol(config),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            # Headers of proxies would let anybody write any address into the log.
            proxy_headers=False,
            h11_max_incomplete_event_size=config.max_header,
            timeout_keep_alive=config.keep_alive,  # type: ignore[arg-type]
            timeout_graceful_shutdown=config.drain + _AFTER_DRAIN,  # type: ignore[arg-type]
        )
        super().__init__(settings)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take requests."""
        await super().startup(sockets=sockets)
        if self._ready is not None:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, let running ones end, close the engine."""
        self._tell_what_is_waited_for()
        draining = asyncio.create_task(self._engine.aclose(drain=self._drain))
        hurrying = asyncio.create_task(self._hurry())
        await super().shutdown(sockets=sockets)
        if not self.force_exit:
            hurrying.cancel()
        await asyncio.wait((draining, hurrying))
        draining.result()

    def _tell_what_is_waited_for(self) -> None:
        if running := len(self.server_state.tasks):
            logger.warning(
                "stopping: waiting for %s, at most %g s; Ctrl-C again to stop at once", _requests(running), self._drain
            )
        else:
            logger.info("stopping")

    async def _hurry(self) -> None:
        """Once Ctrl-C has come again, break off what runs: uvicorn waits for open connections all the same."""
        while not self.force_exit:
            await asyncio.sleep(_LOOK)
        logger.warning("stopping at once: %s broken off", _requests(len(self.server_state.tasks)))
        await self._engine.aclose()  # of two deadlines the earlier counts
        await asyncio.sleep(_LAST_WORDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM. They are not raised again, as uvicorn does: the end was asked for."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _requests(count: int) -> str:
    return f"{count} running request{'' if count == 1 else 's'}"
