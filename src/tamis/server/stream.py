"""From the engine's events to bytes on the wire: merging what several prompts give, and server-sent events."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tamis.engine.async_engine import AsyncEngine, RequestHandle
from tamis.engine.front import Prompt
from tamis.errors import EngineClosedError
from tamis.metrics import ServerMetrics
from tamis.request import FinishReason, PrefillProgress, SamplingParams, TokenEvent, TokenLogprobs, Usage
from tamis.server.errors import to_api_error
from tamis.server.replies import PrefillReply, PromptTokensDetails, Reply, UsageReply
from tamis.server.schema import SamplingFields

logger = logging.getLogger("tamis.server")

Item = TokenEvent | PrefillProgress
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def frame(reply: Reply) -> bytes:
    """`reply` as one server-sent event."""
    return b"data: " + reply.json_bytes() + b"\n\n"


def json_reply(reply: Reply | None) -> Response:
    """`reply` as a whole answer; None: nobody is there to hear it."""
    return Response(b"" if reply is None else reply.json_bytes(), media_type="application/json")


def prefill_reply(place: int, progress: PrefillProgress) -> PrefillReply:
    """How far the prompt at `place` is."""
    return PrefillReply(
        prompt=place,
        total=progress.total,
        cached=progress.cached,
        processed=progress.processed,
        elapsed=round(progress.elapsed, 6),
    )


class Writer(Protocol):
    """Makes chunks of events."""

    def chunks(self, place: int, item: Item) -> Sequence[Reply]:
        """What a stream tells of one event of the prompt at `place`."""

    def usage_chunk(self, usage: UsageReply) -> Reply:
        """A last chunk with nothing but token counts."""


class ReplyWriter(Writer, Protocol):
    """Makes chunks, or one reply at the end."""

    async def whole(self, feed: "Feed") -> Reply:
        """Everything in one piece."""


async def frames(feed: "Feed", writer: Writer, *, usage: bool, request_id: str) -> AsyncIterator[bytes]:
    """A whole stream as server-sent events; what has come together is sent together."""
    try:
        async for batch in feed.batches():
            data = b"".join(frame(chunk) for place, item in batch for chunk in writer.chunks(place, item))
            if data:
                yield data
        if usage:
            yield frame(writer.usage_chunk(feed.usage()))
        yield DONE
    except Exception as error:
        told = to_api_error(error)
        if told.status == 500:
            logger.exception("request %s failed in its stream", request_id)
        # The status was sent long ago: the error is the stream's last event, and no [DONE] follows.
        yield b"data: " + json.dumps(told.body()).encode() + b"\n\n"


async def aside(work: Callable[[], T]) -> T:
    """Run what takes long for a long prompt (templates, tokenizers, schemas) while other streams go on."""
    return await asyncio.to_thread(work)


class Feed:
    """The events of one HTTP request's prompts, as they come. `close` ends whatever still runs."""

    def __init__(self, metrics: ServerMetrics, began: float) -> None:
        self._metrics, self._began = metrics, began
        # Holds no more than the request may generate: a client that reads slowly does not hold the engine up.
        self._queue: asyncio.Queue[tuple[int, Item | Exception | None]] = asyncio.Queue()
        self._pumps: list[asyncio.Task[None]] = []
        self._usage: dict[tuple[int, int], Usage] = {}
        self.handles: list[RequestHandle] = []
        """One for each prompt."""

    async def submit(
        self, engine: AsyncEngine, prompts: Sequence[Prompt], sampling: SamplingParams, *, salt: str, progress: bool
    ) -> None:
        """Queue all `prompts`, or none. Raises what AsyncEngine.submit raises."""

        def start() -> list[RequestHandle]:
            # Handles of prompts before one that is refused are dropped, and so ended.
            return [
                engine.submit(prompt, sampling, salt=salt, on_prefill=self._reporter(place) if progress else None)
                for place, prompt in enumerate(prompts)
            ]

        self.handles = await aside(start)
        self._pumps = [asyncio.create_task(self._pump(place, handle)) for place, handle in enumerate(self.handles)]

    @property
    def prompt_token_ids(self) -> list[list[int]]:
        """What the prompts became."""
        return [handle.prompt_token_ids for handle in self.handles]

    async def prompt_logprobs(self) -> list[Sequence[TokenLogprobs | None] | None]:
        """Of each prompt, once it has ended; None where they were not asked for."""
        return [(await handle.completions())[0].prompt_logprobs for handle in self.handles]

    async def batches(self) -> AsyncIterator[list[tuple[int, Item]]]:
        """All that has come since the last batch, each with its prompt's place. Raises the first error there is."""
        running = len(self.handles)
        while running:
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            running -= sum(what is None for _, what in items)
            batch = [(place, what) for place, what in items if isinstance(what, Item)]
            if batch:
                yield batch
            for _, what in items:
                if isinstance(what, Exception):
                    raise what
        self._metrics.request_seconds.observe(time.perf_counter() - self._began)

    def usage(self) -> UsageReply:
        """Token counts of what has ended."""
        by_prompt = {place: usage for (place, _), usage in self._usage.items()}
        prompt = sum(usage.prompt_tokens for usage in by_prompt.values())
        cached = sum(usage.cached_tokens for usage in by_prompt.values())
        completion = sum(usage.completion_tokens for usage in self._usage.values())
        return UsageReply(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    async def close(self) -> None:
        """End what still runs and wait until nothing here does."""
        for handle in self.handles:
            handle.abort()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def _reporter(self, place: int) -> Callable[[PrefillProgress], None]:
        def report(progress: PrefillProgress) -> None:
            self._queue.put_nowait((place, progress))

        return report

    async def _pump(self, place: int, handle: RequestHandle) -> None:
        last: dict[int, float] = {}
        try:
            async for event in handle:
                self._measure(event, last)
                if event.usage is not None:
                    self._usage[place, event.index] = event.usage
                if event.finish_reason is FinishReason.ABORT:
                    raise EngineClosedError("the server stopped before the reply was complete")  # noqa: TRY301
                self._queue.put_nowait((place, event))
        except Exception as error:
            self._queue.put_nowait((place, error))
        finally:
            self._queue.put_nowait((place, None))

    def _measure(self, event: TokenEvent, last: dict[int, float]) -> None:
        if event.finish_reason is not None:
            self._metrics.finished.labels(event.finish_reason.value).inc()
        if event.token_id is None:
            return
        now = time.perf_counter()
        if not last:
            self._metrics.first_token.observe(now - self._began)
        elif event.index in last:
            self._metrics.between_tokens.observe(now - last[event.index])
        last[event.index] = now


class EventStream(Response):
    """Server-sent events from `frames`; `close` is called however it ends.

    A client that hangs up, or does not read for `patience` seconds, ends it.
    """

    def __init__(self, frames: AsyncIterator[bytes], close: Callable[[], Awaitable[None]], *, patience: float) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        # Proxies that collect a reply before they hand it on (nginx) are told not to.
        self.headers.update({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._frames, self._close, self._patience = frames, close, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        try:
            await unless_hung_up(receive, self._write(send))
        except TimeoutError:
            request_id = scope["state"]["request_id"]
            logger.info("request %s: the client did not read for %g s", request_id, self._patience)
        finally:
            await self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._frames:
            async with asyncio.timeout(self._patience):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_hung_up(receive: Receive, work: Awaitable[T]) -> T | None:
    """What `work` gives; None, and `work` is cancelled, where the client hangs up first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(
    feed: "Feed", writer: ReplyWriter, body: SamplingFields, request: Request, *, patience: float
) -> Response:
    """What `writer` makes of `feed`, as a stream or in one piece; the feed is closed however that ends."""
    if body.stream:
        events = frames(feed, writer, usage=body.stream_usage, request_id=request.scope["state"]["request_id"])
        return EventStream(events, feed.close, patience=patience)
    try:
        return json_reply(await unless_hung_up(request.receive, writer.whole(feed)))
    finally:
        await feed.close()
