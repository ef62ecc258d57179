"""What the handlers of requests work with."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from tamis.engine.async_engine import AsyncEngine
from tamis.engine.tokenizer import Tokenizer
from tamis.errors import TokenizerError
from tamis.metrics import ServerMetrics
from tamis.server.auth import cache_salt
from tamis.server.config import ServerConfig
from tamis.server.errors import ApiError
from tamis.server.logprobs import TokenNames
from tamis.server.recents import RecentRequests
from tamis.server.stream import Feed
from tamis.units import show


@dataclass(frozen=True)
class Context:
    """One server's engine and settings."""

    engine: AsyncEngine
    config: ServerConfig
    metrics: ServerMetrics
    model: str
    """The name that requests use."""
    names: TokenNames
    started: int = field(default_factory=lambda: int(time.time()))
    """Unix time."""
    recent: RecentRequests = field(default_factory=RecentRequests)

    def check_model(self, asked: str | None) -> None:
        """Raise ApiError (404) for a model that is not served."""
        if asked is not None and asked != self.model:
            message = f"the model {show(asked)} is not served here: this server has {self.model!r}"
            raise ApiError(404, "model_not_found", message, param="model")

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError where it has none."""
        if self.engine.tokenizer is None:
            raise TokenizerError("the model has no tokenizer: send token ids, to /v1/completions")
        return self.engine.tokenizer

    def feed(self, request: Request) -> Feed:
        """An empty feed for `request`."""
        return Feed(self.metrics, request.scope["state"]["began"])

    def salt(self, request: Request, asked: str | None) -> str:
        """Whose cached pages `request` may share."""
        return cache_salt(request.scope["state"]["tenant"], asked)

    def remember(self, request: Request, salt: str, feed: Feed) -> None:
        """Let a session be made of `request` later on, if it has one prompt."""
        if len(feed.handles) == 1:
            state = request.scope["state"]
            self.recent.add(state["request_id"], state["tenant"], salt, feed.handles[0])
