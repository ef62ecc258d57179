"""The threads that CPU kernels run on, and how they share work.

A kernel is a Numba function compiled with `nogil=True` whose first argument is an array of tickets. Every thread of a
team enters the same kernel with the same arguments and takes work items from the tickets until none is left, so that a
thread that wakes late only does less. Handing a kernel to a sleeping thread costs a few microseconds; nothing spins.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tamis.errors import EngineClosedError

NUM_TICKETS = 8
"""Counters a kernel may use: one for each of its phases, and one to number its threads."""


@intrinsic  # type: ignore[untyped-decorator]
def take_ticket(_context: Any, tickets: Any, phase: Any) -> Any:
    """`take_ticket(tickets, phase)` -> int64: the next work item of a phase, each handed out once over all threads."""
    signature = types.int64(tickets, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        pointer = cgutils.get_item_pointer(context, builder, signature.args[0], array, [args[1]])
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return signature, generate


class ThreadTeam:
    """`size` threads, the caller's among them. `close` ends the others; a kernel that fails raises in the caller.

    May be used from several threads: kernels run one after the other.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._jobs: list[queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None]] = []
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._closed = False
        self._threads: list[threading.Thread] = []
        for number in range(1, size):
            jobs: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
            # Daemons, so that a program that forgets to close does not hang at its end.
            thread = threading.Thread(target=self._serve, args=(jobs,), name=f"tamis-kernel-{number}", daemon=True)
            thread.start()
            self._jobs.append(jobs)
            self._threads.append(thread)

    def run(self, kernel: Callable[..., None], *args: Any, threads: int | None = None) -> None:
        """Run `kernel(tickets, *args)` on up to `threads` threads (None: all); returns when all have left it."""
        with self._lock:
            if self._closed:
                raise EngineClosedError("the kernel threads have been closed")
            tickets = np.zeros(NUM_TICKETS, np.int64)
            helpers = self._jobs[: self.size if threads is None else max(threads, 1) - 1]
            job = (kernel, (tickets, *args))
            for jobs in helpers:
                jobs.put(job)
            errors = [_attempt(*job), *(self._done.get() for _ in helpers)]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads; closing twice does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for jobs in self._jobs:
                    jobs.put(None)
                for thread in self._threads:
                    thread.join()

    def _serve(self, jobs: "queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None]") -> None:
        while (job := jobs.get()) is not None:
            self._done.put(_attempt(*job))


def _attempt(kernel: Callable[..., None], args: tuple[Any, ...]) -> BaseException | None:
    try:
        kernel(*args)
    except BaseException as error:
        return error
    return None
