"""The engine's front door for asyncio programs, the server among them."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from tamis.config import GenerationDefaults
from tamis.engine.engine import Engine
from tamis.engine.front import EngineOptions, Front, Prompt
from tamis.engine.sequence import EngineEvent, RequestState
from tamis.engine.thread import Delivery, EngineThread
from tamis.engine.tokenizer import Tokenizer
from tamis.errors import ConfigError
from tamis.progress import Progress
from tamis.request import Completion, PrefillProgress, SamplingParams, TokenEvent
from tamis.units import show

STEP_SECONDS = 0.15
"""What a step with replies aims to take at most."""


class RequestHandle:
    """A request's events: an async iterator of TokenEvent over all samples, for one event loop.

    It ends after the last sample's last event, or raises the request's error. Whoever drops it, or is cancelled while
    waiting for it, ends the request.
    """

    def __init__(
        self, thread: EngineThread, request: RequestState, on_prefill: Callable[[PrefillProgress], None] | None
    ) -> None:
        self.request_id = request.request_id
        self.prompt_token_ids = list(request.prompt)
        self._thread, self._request = thread, request
        self._mail = _Mail(on_prefill)
        self._left = request.sampling.n
        self._completions: dict[int, Completion] = {}
        thread.submit([request], [self._mail.put])

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        if not self._left:
            raise StopAsyncIteration
        try:
            event = await self._mail.take()
        except BaseException:
            self._left = 0
            self.abort()
            raise
        if event.completion is not None:
            self._left -= 1
            self._completions[event.token.index] = event.completion
        return event.token

    async def completions(self) -> list[Completion]:
        """Wait for the end; the result of each sample, in order. Raises the request's error."""
        async for _ in self:
            pass
        return [self._completions[index] for index in sorted(self._completions)]

    @property
    def token_ids(self) -> list[int]:
        """The prompt and, once it has ended and was waited for, the first sample's reply."""
        reply = self._completions.get(0)
        return [*self.prompt_token_ids, *(() if reply is None else reply.token_ids)]

    def abort(self) -> None:
        """End the request: its last events come with FinishReason.ABORT. From any thread, any number of times."""
        self._thread.abort([self._request])

    def __del__(self) -> None:
        # Also of a handle whose request was refused.
        if getattr(self, "_left", 0):
            self.abort()


class AsyncEngine(Front):
    """The async twin of LLM: requests from an asyncio program to an engine that runs in a thread of its own.

    >>> async with AsyncEngine() as engine:
    ...     async for event in engine.submit("Once upon a time", engine.default_sampling()):
    ...         print(event.text, end="", flush=True)
    """

    def __init__(
        self, model: str | Path | None = None, *, max_queue: int = 1024, **options: Unpack[EngineOptions]
    ) -> None:
        """Load `model`, which takes a while and blocks; options and errors are those of `LLM`.

        At most `max_queue` requests wait while others run. `step_seconds` is 0.15 unless told otherwise, so that
        replies flow while long prompts are read.
        """
        self._max_queue = _check_queue(max_queue)
        options.setdefault("step_seconds", STEP_SECONDS)
        super().__init__(model, **options)

    @classmethod
    def from_engine(
        cls,
        engine: Engine,
        *,
        defaults: GenerationDefaults | None = None,
        progress: Progress | None = None,
        model_name: str = "model",
        max_queue: int = 1024,
    ) -> Self:
        """Wrap an engine built from parts; from now on only its own thread may touch it."""
        front = cls.__new__(cls)
        front._max_queue = _check_queue(max_queue)
        front._set_up(engine, defaults or GenerationDefaults(), progress, model_name)
        return front

    def _new_thread(self, engine: Engine) -> EngineThread:
        return EngineThread(engine, max_queue=self._max_queue)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where it has none."""
        return self._engine.tokenizer

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        salt: str = "",
        continues: bool | None = None,
        on_prefill: Callable[[PrefillProgress], None] | None = None,
    ) -> RequestHandle:
        """Start a request; from any thread, with or without an event loop.

        `salt`: prefixes are shared with requests of the same salt only. `continues`: the reply carries the
        prompt's text on (see `Request`); None: where the prompt is text. `on_prefill` is called in the event loop that
        waits for the handle's events, before the first of them; what it raises ends the request.

        Raises RequestError (or one of its kinds) or TokenizerError for what cannot be run, QueueFullError,
        EngineClosedError, EngineDeadError.
        """
        return RequestHandle(self._thread, self._prepare(prompt, sampling, salt=salt, continues=continues), on_prefill)

    def kv_usage(self) -> dict[str, Any]:
        """How full the pool is: pages by owner, tokens, and bytes by plane."""
        stats = self.stats
        pages = asdict(stats.pages)
        return {
            "page_size": stats.page_size,
            "pages": pages,
            "tokens": {owner: count * stats.page_size for owner, count in pages.items()},
            "bytes": self.pool.memory_bytes,
        }

    def check_health(self) -> None:
        """Raise EngineDeadError, with the reason, where the engine's thread has died."""
        self._thread.check_health()

    async def aclose(self, drain: float = 0.0) -> None:
        """Take no more requests, give those there are up to `drain` seconds, abort the rest, end the thread."""
        self._thread.close(drain)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        self._thread.check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Mail:
    """What the engine's thread has for one event loop. Nobody waits for a lock."""

    def __init__(self, on_prefill: Callable[[PrefillProgress], None] | None) -> None:
        self._on_prefill = on_prefill
        self._items: deque[Delivery] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def put(self, item: Delivery) -> None:
        """In the engine's thread."""
        self._items.append(item)
        # Read after the item is there: `take` looks for items after it has set this.
        if self._loop is not None:
            # A loop that is closed has nobody who waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    async def take(self) -> EngineEvent:
        """The next event; raises what the engine's thread or `on_prefill` raised."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._report()
            if self._error is not None:
                raise self._error
            if self._items:
                item = self._items.popleft()
                assert not isinstance(item, PrefillProgress)  # those were told
                error = item.error if isinstance(item, EngineEvent) else item
                if error is not None:
                    raise error
                assert isinstance(item, EngineEvent)
                return item
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        self._report()
        if self._waiter is not None and not self._waiter.done() and (self._items or self._error is not None):
            self._waiter.set_result(None)

    def _report(self) -> None:
        """Tell `on_prefill` of what comes next, as far as that is its concern."""
        try:
            while self._items and isinstance(item := self._items[0], PrefillProgress):
                self._items.popleft()
                if self._on_prefill is not None and self._error is None:
                    self._on_prefill(item)
        except Exception as error:
            self._error = error


def _check_queue(max_queue: int) -> int:
    if isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 1:
        raise ConfigError(f"max_queue={show(max_queue)} must be a whole number of at least 1")
    return max_queue
