"""One engine among several threads, without a thread of its own: whoever waits for a token takes the step."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tamis.engine.engine import Engine, EngineEvent
from tamis.errors import EngineClosedError, RequestError
from tamis.request import Request


@dataclass
class _Mail:
    """What one request's caller has not heard yet."""

    left: int
    """Samples whose last event was not collected yet."""
    events: deque[EngineEvent] = field(default_factory=deque)
    prefilled: list[int] = field(default_factory=list)
    """Prompt tokens computed, step by step."""


class Worker:
    """Steps an engine for as long as somebody waits for its events, and hands each thread those of its requests.

    Safe to use from any thread, and from signal handlers and finalizers that run inside one of its own calls: those may
    end requests and close, and are refused where they ask for more. Signal handlers wait while books are written
    (`SignalGate`); what they raise between two layers takes the step back and comes out in the thread that took it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.signals = engine.signals
        # Not reentrant: `_owner` tells whether this thread is inside already.
        self._idle = threading.Condition(threading.Lock())
        self._owner: int | None = None
        """The thread that holds the lock."""
        self._stepper: int | None = None
        """The thread that is taking a step."""
        self._guests = 0
        self._mail: dict[int, _Mail] = {}
        self._cancelled: deque[int] = deque()
        self._closing = False

    def submit(self, requests: Sequence[Request], ids: list[int]) -> None:
        """Queue requests, all or none; their ids are added to `ids`, and stand there even where an interrupt comes.

        Raises what `Engine.add_request` raises, RequestError from inside a step.
        """
        with self.signals, self._between_steps():
            try:
                for request in requests:
                    mail = _Mail(request.sampling.n)
                    ids.append(self.engine.add_request(request, mail.prefilled.append))
                    self._mail[ids[-1]] = mail
            except Exception:
                self._cancelled.extend(ids)
                raise

    def next_events(self, request_ids: Sequence[int], on_prefill: Callable[[int], None]) -> list[EngineEvent]:
        """Wait for events of these requests, taking steps where nobody else does; at least one event comes back.

        `on_prefill` is told, in this thread, how many prompt tokens each step computed. Raises EngineClosedError for
        requests that are unknown or whose last event was delivered already, RequestError from inside a step.
        """
        with self.signals:
            while True:
                self.signals.deliver()
                prefilled, events = self._collect_or_claim(request_ids)
                for tokens in prefilled:
                    self._open_for(on_prefill, tokens)
                if events:
                    return events
                if not prefilled:
                    self._step()

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests and drop their events: at once, or after the step that another thread is taking.

        Never blocks, since it is also called when an iterator is garbage collected.
        """
        with self.signals:
            self._cancelled.extend(request_ids)
            self._sweep()

    def close(self) -> None:
        """Let the step that is being taken end, then abort everything; who waits gets those last events.

        From inside a step (a signal's handler) it returns at once, and the engine closes after the step.
        """
        with self.signals:
            self._closing = True
            if not self._inside():
                with self._between_steps():
                    pass

    def _open_for(self, on_prefill: Callable[[int], None], tokens: int) -> None:
        self.signals.open_for(lambda: on_prefill(tokens))

    def _inside(self) -> bool:
        """Whether this very thread holds the lock or takes a step: waiting for either would last for ever."""
        return threading.get_ident() in (self._owner, self._stepper)

    def _refuse_inside(self) -> None:
        if self._inside():
            raise RequestError(
                "a request cannot be run from inside a step of the same engine, as in a signal's handler"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, and leave it with nothing undone that was asked for meanwhile. Its thread's gate is shut."""
        self._lock()
        try:
            yield
        finally:
            self._unlock()
            self._sweep()

    def _lock(self, *, blocking: bool = True) -> bool:
        taken = self._idle.acquire(blocking)
        if taken:
            self._owner = threading.get_ident()
        return taken

    def _unlock(self) -> None:
        try:
            if self._stepper is None:
                self._settle()
        finally:
            self._owner = None
            self._idle.release()

    def _sweep(self) -> None:
        """End what was cancelled, unless somebody is busy, who then does it afterwards."""
        while self._cancelled and self._stepper is None and self._lock(blocking=False):
            self._unlock()

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the engine while no step is taken. Steps wait for guests, so that a busy engine still takes requests."""
        self._refuse_inside()
        with self._locked():
            self._guests += 1
            try:
                while self._stepper is not None:
                    self._wait()
                self._settle()
                yield
            finally:
                self._guests -= 1
                self._idle.notify_all()

    def _wait(self) -> None:
        """Give the lock back until something happens; signals' handlers run then, without it."""
        self._owner = None
        self._idle.wait(self.signals.wait_s)
        if self.signals.waiting:
            self._idle.release()
            try:
                self.signals.deliver()
            finally:
                self._idle.acquire()
        self._owner = threading.get_ident()

    def _collect_or_claim(self, request_ids: Sequence[int]) -> tuple[list[int], list[EngineEvent]]:
        """What has arrived for these requests; nothing: it is up to this thread to take a step."""
        self._refuse_inside()
        with self._locked():
            while not self._arrived(request_ids) and (self._stepper is not None or self._guests):
                self._wait()
            if not self._arrived(request_ids):
                self._settle()
            if not self._arrived(request_ids):
                if not any(self.engine.has_request(request_id) for request_id in request_ids):
                    raise EngineClosedError("the requests waited for are not in the engine")
                self._stepper = threading.get_ident()
            return self._collect(request_ids)

    def _step(self) -> None:
        events: list[EngineEvent] = []
        try:
            events = self.engine.step()
        finally:
            with self._locked():
                self._stepper = None
                self._deliver(events)
                self._idle.notify_all()

    def _settle(self) -> None:
        """Do what was asked for while a step was taken or the lock was held."""
        while self._cancelled:
            request_id = self._cancelled.popleft()
            self._mail.pop(request_id, None)
            self.engine.abort(request_id)
        if self._closing:
            self._closing = False
            self.engine.close()
        self._deliver(self.engine.take_events())

    def _deliver(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if event.request_id in self._mail:
                self._mail[event.request_id].events.append(event)
        if events:
            self._idle.notify_all()

    def _arrived(self, request_ids: Sequence[int]) -> bool:
        mails = (self._mail.get(request_id) for request_id in request_ids)
        return any(mail.events or mail.prefilled for mail in mails if mail is not None)

    def _collect(self, request_ids: Sequence[int]) -> tuple[list[int], list[EngineEvent]]:
        prefilled: list[int] = []
        events: list[EngineEvent] = []
        for request_id in request_ids:
            mail = self._mail.get(request_id)
            if mail is None:
                continue
            # Whoever steps may add to this meanwhile.
            computed = list(mail.prefilled)
            del mail.prefilled[: len(computed)]
            prefilled += computed
            events += mail.events
            mail.left -= sum(event.completion is not None for event in mail.events)
            mail.events.clear()
            if not mail.left:
                del self._mail[request_id]
        return prefilled, events
