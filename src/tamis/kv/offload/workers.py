"""Threads that talk to the tiers, so that the engine's thread never waits for one."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from tamis.errors import TierError

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 2.0
"""That the end of a program waits for jobs that have begun. One that takes longer waits for a tier: no harm is done."""


class Job(Protocol):
    """Something that may take long, or for ever."""

    def run(self) -> None:
        """Do it; what it raises goes to `fail`."""

    def fail(self, error: BaseException) -> None:
        """It did not work out. Must not raise."""


class Workers:
    """Up to `count` daemon threads that run jobs in the order they came; one that dies is replaced.

    A job that raises has failed, and the thread goes on. The threads end when this object is dropped.
    """

    def __init__(self, name: str, count: int, done: Callable[[], None]) -> None:
        """`done` is called after each job, in its thread."""
        self._count = count
        self._work = _Work(name, done)
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _let_go, self._work, self._threads, count)

    def submit(self, job: Job) -> None:
        """Queue a job. Not for several threads at once."""
        self._work.add(job)
        self.revive()

    def revive(self) -> None:
        """Start a thread where one is missing and there is something to do."""
        self._threads[:] = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) < self._count and self._work.jobs.qsize() and not self._work.stopping:
            thread = threading.Thread(target=self._work.run, name=f"tamis-kv-{self._work.name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def is_idle(self) -> bool:
        """Whether all jobs have ended."""
        return not self._work.left

    @property
    def last_news(self) -> float:
        """When a job was queued or ended last (time.monotonic)."""
        return self._work.last_news

    @property
    def deaths(self) -> int:
        """Threads that ended on an error that no job may raise."""
        return self._work.deaths

    def stop(self, seconds: float) -> None:
        """End the threads once they are done with what they do now; whoever takes longer is left behind."""
        self._work.end(self._count)
        _join(self._threads, seconds)


class _Work:
    """What the threads share. Knows nothing of Workers, so that dropping that one ends them."""

    def __init__(self, name: str, done: Callable[[], None]) -> None:
        self.name = name
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.left = self.deaths = 0
        self.last_news = 0.0
        self.stopping = False
        self._done = done
        self._lock = threading.Lock()

    def add(self, job: Job) -> None:
        self._count_left(1)
        self.jobs.put(job)

    def end(self, threads: int) -> None:
        """Have nothing more begun."""
        self.stopping = True
        for _ in range(threads):
            self.jobs.put(None)

    def run(self) -> None:
        """In each thread."""
        while (job := self.jobs.get()) is not None:
            alive = self._attempt(job)
            self._count_left(-1)
            self._done()
            del job  # and what it holds, while the thread waits for the next one
            if not alive:
                return

    def _attempt(self, job: Job) -> bool:
        """Run a job; False where the thread has to end."""
        try:
            if self.stopping:
                raise TierError("the engine was closed")  # noqa: TRY301
            job.run()
        except Exception as error:
            job.fail(error)
        except BaseException as error:
            logger.exception("a thread of %s dies", self.name)
            with self._lock:
                self.deaths += 1
            job.fail(error)
            return False
        return True

    def _count_left(self, change: int) -> None:
        with self._lock:
            self.left += change
            self.last_news = time.monotonic()


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _let_go(work: _Work, threads: Sequence[threading.Thread], count: int) -> None:
    """The owner was dropped, or the program ends: a thread that is inside of torch then takes the process down."""
    work.end(count)
    if not threading.main_thread().is_alive():
        _join(threads, _EXIT_SECONDS)
