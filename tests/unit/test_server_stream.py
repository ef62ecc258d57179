import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import pytest
from starlette.types import Message

from support.asgi import Answer, Client, scope_of
from tamis.engine.async_engine import AsyncEngine
from tamis.errors import EngineClosedError, LogitsError, QueueFullError
from tamis.metrics import ServerMetrics
from tamis.request import FinishReason, PrefillProgress, SamplingParams, TokenEvent, Usage
from tamis.server.replies import Reply, UsageReply
from tamis.server.stream import EventStream, Feed, Item, frames, unless_hung_up


class FakeHandle:
    """A request whose events the test writes."""

    def __init__(self, prompt: Sequence[int], events: Sequence[TokenEvent | Exception]) -> None:
        self.prompt_token_ids = list(prompt)
        self.aborted = False
        self._events = list(events)

    def abort(self) -> None:
        self.aborted = True

    def __aiter__(self) -> "FakeHandle":
        return self

    async def __anext__(self) -> TokenEvent:
        if not self._events:
            raise StopAsyncIteration
        event = self._events.pop(0)
        await asyncio.sleep(0)
        if isinstance(event, Exception):
            raise event
        return event


class FakeEngine:
    """Answers each prompt as its script says; `room` requests at most."""

    def __init__(self, *scripts: Sequence[TokenEvent | Exception], room: int = 9) -> None:
        self.handles: list[FakeHandle] = []
        self.progress: list[Any] = []
        self._scripts, self._room = scripts, room

    def submit(self, prompt: Sequence[int], _sampling: SamplingParams, *, salt: str, on_prefill: Any) -> FakeHandle:
        if len(self.handles) == self._room:
            raise QueueFullError("full")
        self.handles.append(FakeHandle(prompt, self._scripts[len(self.handles)]))
        self.progress.append(on_prefill)
        return self.handles[-1]


def token(text: str, index: int = 0) -> TokenEvent:
    return TokenEvent(index, 7, text)


def end(index: int = 0, tokens: int = 1, reason: FinishReason = FinishReason.STOP) -> TokenEvent:
    return TokenEvent(index, None, "", finish_reason=reason, usage=Usage(10, tokens, 4))


class Texts:
    """A writer that tells texts."""

    def chunks(self, place: int, item: Item) -> Sequence[Reply]:
        return [_Text(text=f"{place}{item.text}")] if isinstance(item, TokenEvent) and item.text else []

    def usage_chunk(self, usage: UsageReply) -> Reply:
        return usage


class _Text(Reply):
    text: str


def with_feed(engine: FakeEngine, use: Callable[[Feed], Awaitable[Any]], metrics: ServerMetrics | None = None) -> Any:
    async def run() -> Any:
        feed = Feed(metrics or ServerMetrics(), 0.0)
        prompts = [[place] for place in range(len(engine._scripts))]
        try:
            await feed.submit(cast(AsyncEngine, engine), prompts, SamplingParams(), salt="", progress=False)
            return await use(feed)
        finally:
            await feed.close()

    return asyncio.run(run())


async def read_all(feed: Feed) -> list[tuple[int, Item]]:
    return [item async for batch in feed.batches() for item in batch]


async def told(feed: Feed) -> list[Any]:
    """The events of a whole stream."""
    sent = b"".join([data async for data in frames(feed, Texts(), usage=True, request_id="r")]).decode()
    assert sent.endswith("\n\n")
    lines = sent[:-2].split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def test_events_of_all_prompts_come_with_their_places() -> None:
    engine = FakeEngine([token("a"), end()], [token("b"), token("c"), end(tokens=2)])
    items = with_feed(engine, read_all)
    texts = {place: "".join(event.text for at, event in items if at == place) for place in (0, 1)}
    assert texts == {0: "a", 1: "bc"}


def test_usage_counts_each_prompt_once_and_every_sample() -> None:
    engine = FakeEngine([end(0, 3), end(1, 5)], [end(0, 1), end(1, 1)])

    async def use(feed: Feed) -> UsageReply:
        await read_all(feed)
        return feed.usage()

    usage = with_feed(engine, use)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 10, 30)
    assert usage.prompt_tokens_details.cached_tokens == 8


def test_an_error_of_one_prompt_ends_all() -> None:
    engine = FakeEngine([token("a"), LogitsError("NaN")], [token("b")] * 1000)
    with pytest.raises(LogitsError, match="NaN"):
        with_feed(engine, read_all)
    assert all(handle.aborted for handle in engine.handles)


def test_a_reply_that_the_server_cut_off_is_an_error() -> None:
    engine = FakeEngine([token("a"), end(reason=FinishReason.ABORT)])
    with pytest.raises(EngineClosedError, match="before the reply was complete"):
        with_feed(engine, read_all)


def test_no_prompt_runs_where_the_queue_has_no_room_for_all() -> None:
    engine = FakeEngine([end()], [end()], room=1)
    with pytest.raises(QueueFullError):
        with_feed(engine, read_all)


def test_a_stream_is_texts_then_usage_then_done() -> None:
    events = with_feed(FakeEngine([token("a"), token(""), token("b"), end(tokens=3)]), told)
    assert events[:2] == [{"text": "0a"}, {"text": "0b"}]
    assert events[2]["completion_tokens"] == 3
    assert events[3:] == ["[DONE]"]


def test_a_stream_that_fails_ends_with_the_error() -> None:
    events = with_feed(FakeEngine([token("a"), LogitsError("NaN")]), told)
    assert events[0] == {"text": "0a"}
    assert events[1]["error"]["code"] == "broken_logits"
    assert len(events) == 2


def test_prefill_progress_comes_in_its_place() -> None:
    engine = FakeEngine([token("a"), end()])

    async def run() -> list[tuple[int, Item]]:
        feed = Feed(ServerMetrics(), 0.0)
        await feed.submit(cast(AsyncEngine, engine), [[1]], SamplingParams(), salt="", progress=True)
        engine.progress[0](PrefillProgress(10, 4, 8, 0.5))
        return await read_all(feed)

    (place, first), *rest = asyncio.run(run())
    assert (place, first) == (0, PrefillProgress(10, 4, 8, 0.5))
    assert [event.text for _, event in rest if isinstance(event, TokenEvent)] == ["a", ""]


def test_times_and_ends_are_measured_by_token() -> None:
    metrics = ServerMetrics()
    events = [token("a"), token("x", 1), token("b"), token("c"), end(0), end(1)]
    with_feed(FakeEngine(events), read_all, metrics)
    text = metrics.text().decode()
    assert "tamis_time_to_first_token_seconds_count 1.0" in text
    assert "tamis_time_between_tokens_seconds_count 2.0" in text
    assert 'tamis_completions_finished_total{reason="stop"} 2.0' in text
    assert "tamis_request_seconds_count 1.0" in text


def test_work_is_cancelled_when_the_client_hangs_up() -> None:
    async def run() -> tuple[object, bool]:
        client = Client()
        working = asyncio.create_task(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(client.hang_up)
        return await unless_hung_up(client.receive, working), working.cancelled()

    assert asyncio.run(run()) == (None, True)


def test_work_that_ends_first_gives_its_result_or_error() -> None:
    async def good() -> int:
        return 5

    async def bad() -> int:
        raise LogitsError("NaN")

    async def run() -> int | None:
        with pytest.raises(LogitsError):
            await unless_hung_up(Client().receive, bad())
        return await unless_hung_up(Client().receive, good())

    assert asyncio.run(run()) == 5


async def letters(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"a"
        await asyncio.sleep(0)


class _Closing:
    def __init__(self) -> None:
        self.times = 0

    async def __call__(self) -> None:
        self.times += 1


def test_a_stream_sends_everything_and_closes_its_source_once() -> None:
    async def run() -> tuple[Answer, int]:
        close, answer, client = _Closing(), Answer(), Client()
        await EventStream(letters(3), close, patience=1)(scope_of(), client.receive, answer.send)
        return answer, close.times

    answer, closed = asyncio.run(run())
    assert answer.body == b"aaa"
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.messages[-1]["more_body"] is False
    assert closed == 1


def test_a_client_that_does_not_read_ends_the_stream() -> None:
    async def run() -> int:
        close, client = _Closing(), Client()

        async def stuck(message: Message) -> None:
            if message.get("body"):
                await asyncio.sleep(60)

        scope = {**scope_of(), "state": {"request_id": "r"}}
        await EventStream(letters(3), close, patience=0.02)(scope, client.receive, stuck)
        return close.times

    assert asyncio.run(run()) == 1


def test_a_client_that_hangs_up_ends_the_stream() -> None:
    async def run() -> tuple[int, int]:
        close, answer, client = _Closing(), Answer(), Client()
        asyncio.get_running_loop().call_later(0.02, client.hang_up)
        await EventStream(letters(10**9), close, patience=1)(scope_of(), client.receive, answer.send)
        return close.times, len(answer.messages)

    closed, sent = asyncio.run(run())
    assert closed == 1
    assert sent > 1
