"""The thread that an engine runs in, and the only one that touches it.

Callers put what they want into a queue and are told what happens by a function of theirs, which this thread calls.
Nothing here waits for a lock, so that a call may be interrupted at any line, or come from a finalizer, and leave
nothing behind: the books are written in a thread that no signal handler ever runs in.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from tamis.engine.engine import Engine
from tamis.engine.sequence import EngineEvent, RequestState
from tamis.engine.stats import EngineStats
from tamis.errors import EngineClosedError, EngineDeadError, QueueFullError, RequestError
from tamis.request import PrefillProgress

logger = logging.getLogger(__name__)
T = TypeVar("T")

Delivery = EngineEvent | PrefillProgress | EngineClosedError | EngineDeadError
"""What the caller of a request is told; an exception is the last thing that it hears."""
Deliver = Callable[[Delivery], None]

MAX_CRASHES = 3
"""Steps that may fail one after another; then it is not the requests that are broken."""
_WAIT_S = 0.05
"""What Ctrl-C is late by at most."""
_LOOK_S = 1.0
"""How often a thread with nothing to do looks whether KV tiers are done with what they took long to write."""
_EXIT_WAIT_S = 15.0
"""How long a program that forgot to close waits at its end: what waits for KV tiers is written meanwhile."""


@dataclass(frozen=True)
class _Submission:
    requests: Sequence[RequestState]
    deliver: Sequence[Deliver]


@dataclass(frozen=True)
class _Abort:
    requests: Sequence[RequestState]


@dataclass(frozen=True)
class _Call:
    function: Callable[[Engine], Any]
    result: SimpleQueue[tuple[Any, BaseException | None]]


_Command = _Submission | _Abort | _Call | None


class EngineThread:
    """Runs an engine in a thread of its own until it is closed, dropped, or cannot go on.

    All methods may be called from any thread, signal handlers and finalizers included.
    """

    def __init__(self, engine: Engine, *, max_queue: int | None = None) -> None:
        """Start it. At most `max_queue` requests wait for their turn; None: any number."""
        self._loop = _Loop(engine)
        self._max_queue = max_queue
        self._process = os.getpid()
        # A daemon, so that a program that forgets to close ends all the same: see _let_go.
        self._thread = threading.Thread(target=self._loop.run, name="tamis-engine", daemon=True)
        weakref.finalize(self, _let_go, self._loop, self._thread)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """Only for what never changes: its limits, model, pool and tokenizer."""
        return self._loop.engine

    @property
    def stats(self) -> EngineStats:
        """As they were after the last step, before anybody was told of it."""
        return self._loop.stats

    def submit(self, requests: Sequence[RequestState], deliver: Sequence[Deliver]) -> None:
        """Queue prepared requests, all or none; `deliver[i]` is called in the engine's thread and must not block.

        Each is told of its request's progress and events, to the last event of each sample; or of an exception.
        Raises EngineClosedError, EngineDeadError, QueueFullError.
        """
        self.check_open()
        if threading.current_thread() is self._thread:
            raise RequestError("a request cannot be run from inside a step of the same engine")
        if self._max_queue is not None and self._loop.queued + len(requests) > self._max_queue:
            raise QueueFullError(f"{self._loop.queued} requests wait already, of at most max_queue={self._max_queue}")
        self._loop.put(_Submission(requests, deliver))

    def abort(self, requests: Sequence[RequestState]) -> None:
        """End requests, wherever they stand; one that has ended, or was never submitted, is left alone.

        A step that nobody needs any more ends before its next layer.
        """
        for request in requests:
            request.cancelled = True
        self._loop.put(_Abort(requests))

    def call(self, function: Callable[[Engine], T]) -> T:
        """`function(engine)` between two steps, after all that was asked for before; waits for what it gives or raises.

        Raises EngineClosedError or EngineDeadError where the thread has ended.
        """
        if threading.current_thread() is self._thread:
            return function(self.engine)
        result: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._check_process()
        self._loop.put(_Call(function, result))
        value, error = take(result)
        if error is not None:
            raise error
        return cast(T, value)

    def check_open(self) -> None:
        """Raise EngineDeadError where the thread has died, EngineClosedError where requests are not taken any more."""
        self.check_health()
        self._check_process()
        if self._loop.closing:
            raise EngineClosedError("the engine is closed")

    def _check_process(self) -> None:
        """Threads do not pass a fork: nobody would ever answer."""
        if os.getpid() != self._process:
            raise EngineClosedError(f"the engine runs in process {self._process}; after a fork, make one of your own")

    def check_health(self) -> None:
        """Raise EngineDeadError, with the reason, where the thread has died."""
        if isinstance(self._loop.end, EngineDeadError):
            # A new one each time: a traceback grows with every raise.
            raise EngineDeadError(str(self._loop.end)) from self._loop.end.__cause__

    def close(self, drain: float = 0.0) -> None:
        """Take no more requests; end when all have, or in `drain` seconds, aborting the rest. Does not wait."""
        self._loop.close(drain)

    def join(self) -> None:
        """Wait for the end; in the engine's own thread it cannot come, and there is no waiting."""
        if threading.current_thread() is not self._thread:
            self._thread.join()


class _Loop:
    """What runs in the thread. Knows nothing of EngineThread, so that dropping that one ends this one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stats = engine.stats
        self.end: EngineClosedError | EngineDeadError | None = None
        """Why the thread has ended."""
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._callers: dict[int, Deliver] = {}
        """By request id."""
        self._deadline: float | None = None
        engine.must_stop = self._past_deadline

    @property
    def closing(self) -> bool:
        """Whether no more requests are taken."""
        return self._deadline is not None or self.end is not None

    @property
    def queued(self) -> int:
        """Requests that wait for their turn."""
        return self._inbox.qsize() + len(self.engine.scheduler.waiting)

    def put(self, command: _Command) -> None:
        """Have the thread do something."""
        self._inbox.put(command)
        if self.end is not None:
            # The thread may have ended before it saw the command.
            self._refuse_rest(self.end)

    def close(self, drain: float) -> None:
        """Set the deadline; an earlier one stays."""
        deadline = time.monotonic() + drain
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        self.put(None)

    def run(self) -> None:
        """Work until the end. Everybody who waits is told of it, whatever it is."""
        end: EngineClosedError | EngineDeadError
        try:
            while not self._is_over():
                self._read_inbox()
                if self.engine.has_work:
                    self._step()
            self._read_inbox()
            self.engine.close()
            self._tell(self.engine.take_events())
            end = EngineClosedError("the engine is closed")
        except BaseException as error:
            logger.critical("the engine's thread ends: %r", error, exc_info=error)
            end = error if isinstance(error, EngineDeadError) else _dead(error)
        self.stats = self.engine.stats
        self.end = end
        for deliver in self._callers.values():
            deliver(end)
        self._callers.clear()
        self._refuse_rest(end)

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False
        return self._past_deadline() or not (self.engine.has_work or self._inbox.qsize())

    def _past_deadline(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _read_inbox(self) -> None:
        """Do what callers asked for; where there is nothing else to do, wait for them."""
        try:
            while True:
                block = not self.engine.has_work and not self.closing
                writing = self.engine.offload is not None and self.engine.offload.is_writing
                self._do(self._inbox.get(block, _LOOK_S if writing else None))
        except Empty:
            return

    def _do(self, command: _Command) -> None:
        if isinstance(command, _Submission):
            for request, deliver in zip(command.requests, command.deliver, strict=True):
                self._callers[request.request_id] = deliver
                request.on_prefill = deliver
                self.engine.enqueue(request)
        elif isinstance(command, _Abort):
            for request in command.requests:
                self.engine.abort(request.request_id)
            self.stats = self.engine.stats
            self._tell(self.engine.take_events())
        elif isinstance(command, _Call):
            command.result.put(_attempt(command.function, self.engine))

    def _step(self) -> None:
        events = self.engine.step()
        self.stats = self.engine.stats
        self._tell(events)
        if self.engine.crashes >= MAX_CRASHES:
            raise _dead(self.engine.last_crash) from self.engine.last_crash

    def _tell(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            self._callers[event.request_id](event)
        for event in events:
            if not self.engine.has_request(event.request_id):
                self._callers.pop(event.request_id, None)

    def _refuse_rest(self, end: EngineClosedError | EngineDeadError) -> None:
        """Tell those whose requests came too late. Any thread may do it."""
        try:
            while True:
                command = self._inbox.get_nowait()
                if isinstance(command, _Submission):
                    for deliver in command.deliver:
                        deliver(end)
                elif isinstance(command, _Call):
                    command.result.put((None, end))
        except Empty:
            return


def take(queue: SimpleQueue[T]) -> T:
    """The next item of `queue`, as soon as there is one. Ctrl-C ends the wait.

    A signal that comes just before the main thread falls asleep does not wake it: it looks again every so often.
    """
    in_main = threading.current_thread() is threading.main_thread()
    while True:
        try:
            return queue.get(timeout=_WAIT_S if in_main else None)
        except Empty:
            continue


def _attempt(function: Callable[[Engine], Any], engine: Engine) -> tuple[Any, BaseException | None]:
    try:
        return function(engine), None
    except Exception as error:
        return None, error


def _dead(error: BaseException | None) -> EngineDeadError:
    dead = EngineDeadError(f"the engine has stopped after an error: {error!r}")
    dead.__cause__ = error
    return dead


def _let_go(loop: _Loop, thread: threading.Thread) -> None:
    """The owner was dropped, or the program ends: a daemon that is inside a kernel then may take the process down."""
    loop.close(0.0)
    if threading.current_thread() is not thread:
        thread.join(_EXIT_WAIT_S)
