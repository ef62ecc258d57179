"""Calling an ASGI application without a network."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope


def scope_of(path: str = "/v1/completions", headers: Sequence[tuple[bytes, bytes]] = (), method: str = "POST") -> Scope:
    """The scope of a request."""
    return {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": list(headers),
            "query_string": b"", "client": ("192.0.2.1", 1)}  # fmt: skip


class Client:
    """What a client does: sends these parts of a body, then waits until it hangs up."""

    def __init__(self, *parts: bytes, complete: bool = True) -> None:
        last = len(parts) - 1 if complete else None
        self._messages: list[Message] = [
            {"type": "http.request", "body": part, "more_body": place != last} for place, part in enumerate(parts)
        ]
        self._gone = asyncio.Event()

    def hang_up(self) -> None:
        """Go away."""
        self._gone.set()

    async def receive(self) -> Message:
        """What the application hears."""
        if self._messages:
            return self._messages.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}


@dataclass
class Answer:
    """What the application sends."""

    messages: list[Message] = field(default_factory=list)

    async def send(self, message: Message) -> None:
        """What the application tells."""
        self.messages.append(message)

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    @property
    def headers(self) -> dict[str, str]:
        return {key.decode(): value.decode() for key, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


async def call(app: ASGIApp, client: Client, scope: Scope | None = None) -> Answer:
    """Send one request and wait for its whole answer."""
    answer = Answer()
    await app(scope or scope_of(), client.receive, answer.send)
    return answer
