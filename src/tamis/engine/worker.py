"""One engine among several threads, without a thread of its own: whoever waits for a token takes the step."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tamis.engine.engine import Engine, EngineEvent
from tamis.errors import EngineClosedError
from tamis.request import Request


class Worker:
    """Steps an engine for as long as somebody waits for its events, and hands each thread those of its requests.

    Safe to use from any thread. An error that belongs to no request (KeyboardInterrupt) is raised in the thread that
    took the step.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Not reentrant, so that `abort` out of a garbage collection notices that its own thread is inside.
        self._idle = threading.Condition(threading.Lock())
        self._stepping = False
        self._guests = 0
        self._mail: dict[int, deque[EngineEvent]] = {}
        self._cancelled: deque[int] = deque()

    @contextmanager
    def running(self, requests: Sequence[Request], on_prefill: Callable[[int], None]) -> Iterator[list[int]]:
        """`submit`, and whatever has not ended by the end of the block is aborted."""
        ids = self.submit(requests, on_prefill)
        try:
            yield ids
        finally:
            self.abort(ids)

    def submit(self, requests: Sequence[Request], on_prefill: Callable[[int], None]) -> list[int]:
        """Queue requests, all or none; their ids. Raises what `Engine.add_request` raises."""
        ids: list[int] = []
        with self._between_steps():
            try:
                for request in requests:
                    ids.append(self.engine.add_request(request, on_prefill))
            except BaseException:
                self._cancelled.extend(ids)
                self._apply_cancelled()
                raise
            self._mail.update((request_id, deque()) for request_id in ids)
        return ids

    def next_events(self, request_ids: Sequence[int]) -> list[EngineEvent]:
        """Wait for events of these requests, taking steps where nobody else does; at least one event comes back.

        Raises EngineClosedError for requests that are unknown or whose last event was delivered already.
        """
        while True:
            mine, events = False, list[EngineEvent]()
            try:
                with self._idle:
                    self._idle.wait_for(lambda: self._arrived(request_ids) or not (self._stepping or self._guests))
                    if self._arrived(request_ids):
                        return self._collect(request_ids)
                    self._apply_cancelled()
                    if not any(self.engine.has_request(request_id) for request_id in request_ids):
                        raise EngineClosedError("the requests waited for are not in the engine")
                    mine = self._stepping = True
                events = self.engine.step()
            finally:
                # Also where Ctrl-C strikes between the two: whoever waits must not wait for ever.
                if mine:
                    self._end_step(events)

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests and drop their events: at once, or after the step that another thread is taking.

        Never blocks, since it is also called when an iterator is garbage collected.
        """
        self._cancelled.extend(request_ids)
        if self._idle.acquire(blocking=False):
            try:
                if not self._stepping:
                    self._apply_cancelled()
            finally:
                self._idle.release()

    def close(self) -> None:
        """Let the step that is being taken end, then abort everything; who waits gets those last events."""
        with self._between_steps():
            self.engine.close()
            self._deliver(self.engine.take_events())

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the engine while no step is taken. Steps wait for guests, so that a busy engine still takes requests."""
        with self._idle:
            self._guests += 1
            try:
                self._idle.wait_for(lambda: not self._stepping)
                self._apply_cancelled()
                yield
            finally:
                self._guests -= 1
                self._idle.notify_all()

    def _end_step(self, events: Sequence[EngineEvent]) -> None:
        with self._idle:
            self._stepping = False
            self._deliver(events)
            self._apply_cancelled()
            self._idle.notify_all()

    def _apply_cancelled(self) -> None:
        while self._cancelled:
            request_id = self._cancelled.popleft()
            self._mail.pop(request_id, None)
            self.engine.abort(request_id)
        self._deliver(self.engine.take_events())

    def _deliver(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if event.request_id in self._mail:
                self._mail[event.request_id].append(event)

    def _arrived(self, request_ids: Sequence[int]) -> bool:
        return any(self._mail.get(request_id) for request_id in request_ids)

    def _collect(self, request_ids: Sequence[int]) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for request_id in request_ids:
            mail = self._mail.get(request_id, deque())
            events += mail
            mail.clear()
        return events
