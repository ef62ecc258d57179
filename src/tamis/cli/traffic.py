"""Many clients against an OpenAI-compatible server: what each request took, by the client's own clock."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tamis.errors import RemoteError, RequestError

WORDS = ("sieve", "river", "stone", "paper", "window", "garden", "morning", "winter", "yellow", "silver", "carry",
         "follow", "gather", "listen", "measure", "answer", "bridge", "candle", "desert", "engine", "forest", "hammer",
         "island", "jacket", "kitchen", "ladder", "market", "needle", "orange", "pocket")  # fmt: skip
_FAILURES = (httpx.HTTPError, httpx.InvalidURL)


@dataclass(frozen=True)
class Target:
    """A server and who asks it."""

    url: str
    """With or without /v1."""
    model: str
    api_key: str | None = None
    timeout_s: float = 600.0
    """Of one wait for the server."""

    def client(self, connections: int) -> httpx.AsyncClient:
        """A client that keeps that many connections."""
        base = self.url.rstrip("/").removesuffix("/v1")
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        # A proxy from the environment would be measured as well.
        return httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=self.timeout_s, trust_env=False)


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: str
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of its body."""


@dataclass
class Outcome:
    """What became of a job; times are seconds of one clock."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    """When each piece of the reply came."""
    ended: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str | None = None
    """Why it failed; None: it did not."""

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece and the next."""
        return [after - before for before, after in itertools.pairwise(self.arrivals)]

    def take(self, chunk: dict[str, Any]) -> None:
        """One chunk of the stream."""
        if "error" in chunk:
            raise RemoteError(f"the server gave up: {_message(chunk)}")
        for choice in chunk.get("choices") or ():
            self.text += choice.get("text") or ""
            # A last chunk that only says why the reply ended is no token.
            if choice.get("text") or choice.get("finish_reason") is None:
                self.arrivals.append(time.perf_counter())
        if usage := chunk.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def ask(client: httpx.AsyncClient, model: str, job: Job) -> Outcome:
    """Stream one completion. A failure is noted in the outcome; only cancellation is raised."""
    body = {
        "model": model, "prompt": job.prompt, "max_tokens": job.max_tokens, "stream": True,
        "stream_options": {"include_usage": True}, **job.options,
    }  # fmt: skip
    outcome = Outcome(sent=time.perf_counter())
    try:
        await _stream(client, body, outcome)
    except (*_FAILURES, RemoteError) as error:
        outcome.error = str(error) or type(error).__name__
    outcome.ended = time.perf_counter()
    return outcome


async def _stream(client: httpx.AsyncClient, body: dict[str, Any], outcome: Outcome) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise RemoteError(f"{response.status_code} {_message(_json(response.text))}")
        async for chunk in _chunks(response):
            outcome.take(chunk)
    if not outcome.arrivals:
        raise RemoteError("the stream ended without a token")


async def run(
    target: Target, jobs: Sequence[Job], clients: int, on_end: Callable[[], None] = lambda: None
) -> tuple[list[Outcome], float]:
    """Let `clients` work off `jobs`, each taking the next when its last is done; outcomes in order, and seconds in all.

    `on_end` is called after each job.
    """
    outcomes: dict[int, Outcome] = {}
    left = iter(enumerate(jobs))

    async with target.client(clients) as client:

        async def work() -> None:
            for place, job in left:
                outcomes[place] = await ask(client, target.model, job)
                on_end()

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(clients)))
        seconds = time.perf_counter() - started
    return [outcomes[place] for place in range(len(jobs))], seconds


async def first_model(target: Target) -> str:
    """The first model that the server lists. Raises RemoteError where it does not answer so."""
    async with target.client(1) as client:
        try:
            response = await client.get("/v1/models")
        except _FAILURES as error:
            raise RemoteError(f"no server answers at {target.url}: {error or type(error).__name__}") from error
    reply = _json(response.text)
    if response.status_code != 200:
        raise RemoteError(f"{target.url} answers {response.status_code}: {_message(reply)}")
    names = [model.get("id") for model in reply.get("data") or () if isinstance(model, dict)]
    if not names or not isinstance(names[0], str):
        raise RemoteError(f"{target.url} lists no model: {response.text[:200]!r}")
    return names[0]


async def tokens_per_word(target: Target, rng: random.Random) -> float:
    """What a word of `prompts` comes to in this model's tokens. Raises RemoteError."""
    words = 200
    async with target.client(1) as client:
        outcome = await ask(client, target.model, Job(_text(words, rng), 1))
    if outcome.error is not None:
        raise RemoteError(f"{target.url} does not complete a prompt: {outcome.error}")
    if not outcome.prompt_tokens:
        raise RemoteError(f"{target.url} does not say how many tokens a prompt has")
    return outcome.prompt_tokens / words


def prompts(lengths: Sequence[int], prefix: int, per_word: float, rng: random.Random) -> Iterator[str]:
    """Random texts of about these many tokens, of which the first `prefix` are the same in all of them."""
    shared = _text(round(prefix / per_word), rng)
    for length in lengths:
        own = _text(max(1, round((length - prefix) / per_word)), rng)
        yield f"{shared} {own}".strip()


def random_lengths(mean: int, spread: float, count: int, rng: random.Random) -> list[int]:
    """Whole numbers around `mean`: evenly from (1 - spread) to (1 + spread) times it, none below 1."""
    if not 0 <= spread <= 1:
        raise RequestError(f"spread={spread} is not between 0 and 1")
    return [max(1, round(mean * rng.uniform(1 - spread, 1 + spread))) for _ in range(count)]


def _text(words: int, rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def _chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of server-sent events, up to [DONE]."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if data:
            yield _json(data)
    raise RemoteError("the stream broke off before [DONE]")


def _json(text: str) -> dict[str, Any]:
    """A JSON object. Raises RemoteError for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise RemoteError(f"the server answers {text[:200]!r}, not a JSON object")
    return value


def _message(reply: dict[str, Any]) -> str:
    error = reply.get("error")
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error or reply)[:200]
