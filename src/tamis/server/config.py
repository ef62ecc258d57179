"""How a server behaves toward its clients."""

from dataclasses import dataclass

from tamis.errors import ConfigError
from tamis.units import format_size, show


@dataclass(frozen=True)
class ServerConfig:
    """Where a server listens, whom it answers, and what it takes from one client. Sizes in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any that is free."""
    api_keys: tuple[str, ...] = ()
    """A client must send one of them as a bearer token; none: everybody is answered."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the server from a browser; "*": any page."""
    max_body: int = 16 << 20
    """Of one request. A prompt of 500,000 token ids takes 4 MB."""
    max_bodies: int = 256 << 20
    """Of all requests that are being answered, together."""
    max_header: int = 32 << 10
    """Request line and headers of one request."""
    header_timeout: float = 10.0
    """Until a request's headers have come, from their first byte, or from when the connection was opened."""
    keep_alive: float = 30.0
    """That an idle connection stays open between two requests."""
    body_timeout: float = 60.0
    """Until the whole body has come."""
    write_timeout: float = 60.0
    """That a stream waits for a client that does not read."""
    drain: float = 30.0
    """That running requests may take after the server was told to stop."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be between 0 and 65535")
        for name in ("max_body", "max_bodies", "max_header", "header_timeout", "keep_alive", "body_timeout",
                     "write_timeout"):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        if self.drain < 0:
            raise ConfigError(f"drain={self.drain} must not be negative")
        if self.max_bodies < self.max_body:
            raise ConfigError(
                f"max_bodies={format_size(self.max_bodies)} is less than max_body={format_size(self.max_body)}"
            )
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise ConfigError("an API key must be printable ASCII without spaces around it, and not empty")
        for origin in self.cors_origins:
            if origin != "*" and "://" not in origin:
                raise ConfigError(f"cors_origin={show(origin)} is not an origin such as https://example.org")
