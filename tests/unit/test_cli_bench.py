"""What `tamis bench` makes of answers, good and bad, and of many measurements."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from support.cli import invoke
from tamis.cli.bench import distribution, percentile, summary
from tamis.cli.traffic import Job, Outcome, Target, ask, first_model, prompts, random_lengths, run
from tamis.errors import RemoteError

Handler = Callable[[httpx.Request], httpx.Response]
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}


def events(*chunks: dict[str, Any], done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + (["data: [DONE]\n\n"] if done else [])
    return ": a comment\n\n".join(lines).encode()


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def asked(handler: Handler) -> Outcome:
    async def go() -> Outcome:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://x") as client:
            return await ask(client, "m", Job("hello", 5, {"temperature": 0}))

    return asyncio.run(go())


def answering(content: bytes | str, status: int = 200) -> Handler:
    return lambda request: httpx.Response(status, content=content)


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Callable[[Handler], None]:
    """Answer every client of a Target with this handler."""

    def install(handler: Handler) -> None:
        def client(self: Target, connections: int) -> httpx.AsyncClient:
            return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url=self.url)

        monkeypatch.setattr(Target, "client", client)

    return install


def test_pieces_are_timed_and_tokens_are_counted_as_the_server_says() -> None:
    """A piece may hold several tokens; the end of a stream, and its usage, are no piece."""
    sent: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        chunks = (piece("on"), piece(""), piece("e two"), piece("", "length"), {"choices": [], "usage": USAGE})
        return httpx.Response(200, content=events(*chunks))

    outcome = asked(handler)
    assert (outcome.text, len(outcome.arrivals), outcome.error) == ("one two", 3, None)
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (7, 5, 4)
    assert 0 <= outcome.first <= outcome.ended - outcome.sent
    assert len(outcome.gaps) == 2
    assert sent == [
        {"model": "m", "prompt": "hello", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True},
         "temperature": 0}
    ]  # fmt: skip


def test_text_that_comes_with_the_end_is_a_piece() -> None:
    assert len(asked(answering(events(piece("a"), piece("b", "stop")))).arrivals) == 2


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (answering('{"error": {"message": "the queue is full"}}', 503), "503 the queue is full"),
        (answering('{"error": "no"}', 500), "500 no"),
        (answering("<html>", 502), "the server answers '<html>', not a JSON object"),
        (answering(events(piece("a"), {"error": {"message": "a step failed"}})), "the server gave up: a step failed"),
        (answering(events(piece("a"), done=False)), "the stream broke off before [DONE]"),
        (answering(events()), "the stream ended without a token"),
        (answering(b"data: [1]\n\n"), "the server answers '[1]', not a JSON object"),
    ],
)
def test_a_failure_is_noted_and_not_raised(handler: Handler, error: str) -> None:
    assert asked(handler).error == error


def test_a_connection_that_breaks_is_a_failure() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("")

    assert asked(handler).error == "ReadError"


def test_clients_share_the_jobs_and_outcomes_stand_in_their_order(transport: Callable[[Handler], None]) -> None:
    running, most = 0, 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return httpx.Response(200, content=events(piece(json.loads(request.content)["prompt"])))

    transport(handler)  # type: ignore[arg-type]
    ended: list[None] = []
    jobs = [Job(f"job {place}", 1) for place in range(7)]
    outcomes, seconds = asyncio.run(run(Target("http://x", "m"), jobs, 3, lambda: ended.append(None)))
    assert [outcome.text for outcome in outcomes] == [job.prompt for job in jobs]
    assert (most, len(ended), seconds > 0) == (3, 7, True)


@pytest.mark.parametrize(
    ("content", "status", "error"),
    [
        ('{"data": []}', 200, "http://x lists no model: '{\"data\": []}'"),
        ('{"error": {"message": "no key"}}', 401, "http://x answers 401: no key"),
        ("hello", 200, "the server answers 'hello', not a JSON object"),
    ],
)
def test_a_server_without_models_is_named(
    transport: Callable[[Handler], None], content: str, status: int, error: str
) -> None:
    transport(answering(content, status))
    with pytest.raises(RemoteError) as caught:
        asyncio.run(first_model(Target("http://x", "")))
    assert str(caught.value) == error


def test_where_nobody_listens_is_one_line() -> None:
    result = invoke("bench", "--url", "http://127.0.0.1:1", "--quiet")
    assert (result.code, result.out) == (2, "")
    assert result.told == "error: no server answers at http://127.0.0.1:1: All connection attempts failed\n"
    assert "no server answers at nonsense" in invoke("bench", "--url", "nonsense").err


def test_the_url_may_end_in_v1() -> None:
    for url in ("http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/"):
        assert str(Target(url, "m").client(1).base_url) == "http://x:1"


def test_percentiles_are_interpolated() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [percentile(values, share) for share in (0, 50, 90, 100)] == [1, 3, pytest.approx(4.6), 5]
    assert percentile([7.0], 99) == 7
    found = distribution([3.0, 1.0])
    assert found is not None
    assert (found["mean"], found["p50"], found["max"]) == (2, 2, 3)
    assert distribution([]) is None


def test_failed_requests_count_as_such_only() -> None:
    good = Outcome(0.0, [0.5, 0.75, 1.5], 2.0, prompt_tokens=10, completion_tokens=3, cached_tokens=4)
    bad = Outcome(0.0, [0.1], 9.0, 99, 99, error="503 full")
    facts = summary([good, bad, bad], 4.0)
    assert (facts["requests"], facts["failed"], facts["errors"]) == (3, 2, {"503 full": 2})
    assert (facts["prompt_tokens"], facts["cached_tokens"], facts["output_tokens"]) == (10, 4, 3)
    assert (facts["requests_per_second"], facts["output_tokens_per_second"]) == (0.25, 0.75)
    assert (facts["first_token"]["max"], facts["between_tokens"]["max"], facts["request"]["max"]) == (0.5, 0.75, 2.0)


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    texts = [text.split() for text in prompts([60, 80], 40, 2.0, random.Random(0))]
    assert [len(words) for words in texts] == [30, 40]
    assert texts[0][:20] == texts[1][:20]
    assert texts[0][20:] != texts[1][20:30]
    assert [len(text.split()) for text in prompts([1, 10], 0, 2.0, random.Random(0))] == [1, 5]


def test_lengths_lie_within_the_spread() -> None:
    found = random_lengths(100, 0.5, 200, random.Random(0))
    assert 50 <= min(found) < 70 < 130 < max(found) <= 150
    assert random_lengths(7, 0, 3, random.Random(0)) == [7, 7, 7]
    assert min(random_lengths(1, 1, 50, random.Random(0))) == 1
    assert invoke("bench", "--spread", "1.5").told == "error: spread=1.5 is not between 0 and 1\n"
