"""Clients that ask, change their minds, hang up and send nonsense, and know what must come of each."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from support.serving import MODEL

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PREFIXES = [random.Random(place).choices(LETTERS, k=length) for place, length in enumerate((20, 50, 200))]
"""Beginnings that many prompts share."""
RETRY_S = 0.1


def prompt(rng: random.Random, longest: int = 60) -> str:
    """Random text of byte tokens, often behind one of PREFIXES."""
    before = rng.choice([[], *PREFIXES])
    return "".join([*before, *rng.choices(LETTERS, k=rng.randint(1, longest))])


def known_bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Greedy requests whose answers must always be the same."""
    rng = random.Random(seed)
    return [
        {"model": MODEL, "prompt": prompt(rng), "max_tokens": rng.randint(1, 90), "temperature": 0,
         "stop": rng.choice([None, list("aeiou"), "xy"])}
        for _ in range(count)
    ]  # fmt: skip


async def answer(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason of one completion."""
    response = await http.post("/v1/completions", json=body)
    response.raise_for_status()
    (choice,) = response.json()["choices"]
    return choice["text"], choice["finish_reason"]


@dataclass
class Ledger:
    """What is expected of the server, and what was seen."""

    known: list[tuple[dict[str, Any], tuple[str, str]]]
    """Requests and their answers, found while nothing else ran."""
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """What must not be."""


class Client:
    """One client: random requests, one after another, until its time is up."""

    def __init__(self, http: httpx.AsyncClient, ledger: Ledger, seed: int) -> None:
        self._http, self._ledger = http, ledger
        self._rng = random.Random(seed)
        self._acts: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "known": (4, self._known), "whole": (2, self._whole), "stream": (4, self._stream), "chat": (2, self._chat),
            "hang_up": (4, self._hang_up), "cancel": (2, self._cancel), "nonsense": (1, self._nonsense),
            "half": (1, self._half_a_request),
        }  # fmt: skip

    async def run(self, seconds: float) -> None:
        """Act at random; what went wrong stands in the ledger."""
        names, weights = list(self._acts), [weight for weight, _ in self._acts.values()]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            (name,) = self._rng.choices(names, weights)
            try:
                await self._acts[name][1]()
            except _QueueFullError:
                self._ledger.counts["queue full"] += 1
                await asyncio.sleep(RETRY_S)
            except Exception as error:
                self._ledger.faults.append(f"{name}: {error!r}")
            else:
                self._ledger.counts[name] += 1

    def _body(self) -> dict[str, Any]:
        rng = self._rng
        changes: dict[str, Any] = {
            "n": rng.randint(1, 3), "seed": rng.randint(0, 9), "temperature": rng.choice([0, 0.7, 1.3]),
            "top_p": rng.choice([1, 0.9]), "stop": rng.choice([None, "a", list("bcdfgh")]),
            "stop_token_ids": rng.sample(range(3, 259), 5), "presence_penalty": rng.choice([0, 1]),
            "logprobs": rng.choice([None, 2]), "cache_salt": rng.choice(["", "x"]),
        }  # fmt: skip
        some = dict(rng.sample(sorted(changes.items()), 4))
        return {"model": MODEL, "prompt": prompt(rng), "max_tokens": rng.randint(1, 120), **some}

    async def _known(self) -> None:
        body, wanted = self._rng.choice(self._ledger.known)
        got = _checked(await self._http.post("/v1/completions", json=body))["choices"][0]
        assert (got["text"], got["finish_reason"]) == wanted, (body, wanted, got)

    async def _whole(self) -> None:
        body = self._body()
        reply = _checked(await self._http.post("/v1/completions", json=body))
        assert len(reply["choices"]) == body.get("n", 1)
        assert {choice["finish_reason"] for choice in reply["choices"]} <= {"stop", "length"}
        assert reply["usage"]["completion_tokens"] <= body["max_tokens"] * body.get("n", 1)

    async def _stream(self) -> None:
        body = {**self._body(), "stream": True, "stream_options": {"include_usage": True}}
        lines = await self._lines("/v1/completions", body)
        assert lines[-1] == "[DONE]", lines[-1]
        chunks = [json.loads(line) for line in lines[:-1]]
        ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        assert sorted(choice["index"] for choice in ends) == list(range(body.get("n", 1)))
        assert {choice["finish_reason"] for choice in ends} <= {"stop", "length"}
        assert chunks[-1]["usage"]["completion_tokens"] <= body["max_tokens"] * body.get("n", 1)

    async def _chat(self) -> None:
        message = {"role": "user", "content": prompt(self._rng)}
        body = {"model": MODEL, "messages": [message], "max_tokens": self._rng.randint(1, 40), "stream": True}
        assert (await self._lines("/v1/chat/completions", body))[-1] == "[DONE]"

    async def _hang_up(self) -> None:
        """Leave in the middle of a stream, or before its first token."""
        body = {**self._body(), "stream": True, "max_tokens": 200, "n": 1}
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            await _raise_for(response)
            left = self._rng.randint(0, 6)
            async for _ in response.aiter_lines():
                left -= 1
                if left < 0:
                    break

    async def _cancel(self) -> None:
        """Leave while waiting for the whole answer."""
        body = {**self._body(), "max_tokens": 200, "n": 1}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0, 0.3)):
                _checked(await self._http.post("/v1/completions", json=body))

    async def _nonsense(self) -> None:
        changes: dict[str, Any] = self._rng.choice(
            [{"max_tokens": -1}, {"prompt": "a" * 5000}, {"prompt": ""}, {"n": 10**6}, {"x": 1}]
        )
        response = await self._http.post("/v1/completions", json={**self._body(), **changes})
        assert response.status_code in (400, 422), (changes, response.status_code, response.text)
        assert response.json()["error"]["message"], response.text

    async def _half_a_request(self) -> None:
        url = self._http.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
        )
        writer.write(head[: self._rng.randint(1, len(head))] + b'{"prompt": "')
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _lines(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of every server-sent event."""
        async with self._http.stream("POST", path, json=body) as response:
            await _raise_for(response)
            return [line.removeprefix("data: ") async for line in response.aiter_lines() if line]


class _QueueFullError(Exception):
    """503, with a time to come back: asked for, since there are more clients than places."""


async def _raise_for(response: httpx.Response) -> None:
    if response.status_code != 200:
        await response.aread()
        _checked(response)


def _checked(response: httpx.Response) -> Any:
    if response.status_code == 503 and response.json()["error"]["code"] == "queue_full":
        assert int(response.headers["retry-after"]) > 0
        raise _QueueFullError
    assert response.status_code == 200, f"{response.status_code} {response.text}"
    return response.json()
