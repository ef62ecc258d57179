"""The threads that CPU kernels run on, and how they share work.

A kernel is a Numba function whose first argument is an array of tickets. Every thread of a team enters the same kernel
with the same arguments and takes work items from the tickets until none is left, so that a thread that comes late, or
not at all, only does less. `share` runs a kernel on the whole team from inside compiled code; a *launcher* is the
compiled function around it that Python calls: `box` first, then the kernel's arguments.

The caller unpacks the arguments once, in memory that the others read; they wait for it in compiled code, without
Python's lock. After a short wait (`SPINS`) they sleep, so that an idle team costs nothing and a busy neighbour little.
"""

import platform
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from tamis.errors import EngineClosedError, KernelFailedError

NUM_TICKETS = 8
"""Counters a kernel may use: one for each of its phases, and one to number its threads."""
SPINS = 2000
"""How often a thread looks for work before it sleeps: about 100 us on current processors."""
PATIENCE = 64
"""Looks after which a thread that waits for others offers its processor to them."""

# The mailbox, int64, a cache line each: what one thread writes should not slow another that reads its neighbour.
_LINE = 8
_TICKETS = 0
"""NUM_TICKETS counters."""
_JOB = _LINE
"""The number of the job that may be entered; 0: none, -1: the end."""
_INSIDE = 2 * _LINE
"""Threads beside the caller that are in the job."""
_FUNCTION, _ARGUMENTS, _COUNT = 3 * _LINE, 3 * _LINE + 1, 3 * _LINE + 2
"""Where the kernel and its arguments are; jobs so far. Only the caller writes them, while no job is open."""
_STATUS = 4 * _LINE
"""Not 0 when the kernel failed in a thread beside the caller."""
_ASLEEP = 5 * _LINE
"""A line for each thread, which alone writes it: 0 awake, 1 asleep."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_ENTRY = ir.FunctionType(_I64, [_I8.as_pointer()])


def _cell(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    view = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, view, [index])


def _update(operation: str, fixed: int | None = None) -> Callable[..., Any]:
    """Change a cell (arguments: array, index, value unless that is `fixed`) in one order that all threads agree on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _cell(context, builder, signature.args[0], args[0], args[1])
        value = args[2] if fixed is None else ir.Constant(_I64, fixed)
        return builder.atomic_rmw(operation, pointer, value, "seq_cst")

    return generate


@intrinsic  # type: ignore[untyped-decorator]
def take_ticket(_context: Any, tickets: Any, phase: Any) -> Any:
    """`take_ticket(tickets, phase)` -> int64: the next work item of a phase, each handed out once over all threads."""
    return types.int64(tickets, types.intp), _update("add", 1)


@intrinsic  # type: ignore[untyped-decorator]
def _add(_context: Any, box: Any, index: Any, value: Any) -> Any:
    """Add to a cell of the mailbox; returns the old value."""
    return types.int64(box, types.intp, types.int64), _update("add")


@intrinsic  # type: ignore[untyped-decorator]
def _swap(_context: Any, box: Any, index: Any, value: Any) -> Any:
    """Write a cell of the mailbox; returns the old value."""
    return types.int64(box, types.intp, types.int64), _update("xchg")


@intrinsic  # type: ignore[untyped-decorator]
def _read(_context: Any, box: Any, index: Any) -> Any:
    """Read a cell of the mailbox, in the same order."""
    signature = types.int64(box, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _cell(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(pointer, "seq_cst", 8)

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def _relax(_context: Any) -> Any:
    """Tell the processor that this is a loop that waits."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if platform.machine().lower() in ("x86_64", "amd64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _offer(_context: Any) -> Any:
    """Let another thread have this processor, if one wants it."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), name), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _enter(_context: Any, function: Any, arguments: Any) -> Any:
    """Run the kernel at an address with the arguments at another; 0, or not 0 if it failed."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        entry = builder.inttoptr(args[0], _ENTRY.as_pointer())
        return builder.call(entry, [builder.inttoptr(args[1], _I8.as_pointer())])

    return types.int64(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pack(typing: Any, box: Any, kernel: Any, arguments: Any) -> Any:
    """Write where a kernel and its arguments are to the mailbox; the arguments stay in the caller's frame."""
    kinds = (types.Array(types.int64, 1, "C"), *arguments.types)
    call = kernel.get_call_type(typing, kinds, {})
    signature = types.void(box, kernel, arguments)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        compiled = kernel.dispatcher.get_compile_result(call)
        context.active_code_library.add_linking_library(compiled.library)
        box_type, box_value = signature.args[0], args[0]
        values = [context.make_array(box_type)(context, builder, box_value)._getvalue()]
        values += cgutils.unpack_tuple(builder, args[2])
        values = [
            _lend(context, builder, wanted, context.cast(builder, value, kind, wanted))
            for value, kind, wanted in zip(values, (box_type, *arguments.types), call.args, strict=True)
        ]
        frame = ir.LiteralStructType([value.type for value in values])
        place = cgutils.alloca_once(builder, frame)
        for i, value in enumerate(values):
            builder.store(value, cgutils.gep_inbounds(builder, place, 0, i))
        entry = _entry(context, builder.module, compiled.fndesc, call, frame)
        for index, value in ((_FUNCTION, entry), (_ARGUMENTS, place)):
            cell = _cell(context, builder, box_type, box_value, ir.Constant(_I64, index))
            builder.store(builder.ptrtoint(value, _I64), cell)
        return context.get_dummy_value()

    return signature, generate


def _lend(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """The value with its arrays borrowed: references to them are not counted.

    Counting takes locked instructions on a line that all threads write: a kernel that cuts a row out of an array for
    every head it works on spent most of its time there. The caller's frame keeps the arrays alive.
    """
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = ir.Constant(array.meminfo.type, None)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for i, part in enumerate(kind.types):
            lent = _lend(context, builder, part, builder.extract_value(value, i))
            value = builder.insert_value(value, lent, i)
    return value


def _entry(context: Any, module: Any, kernel: Any, call: Any, frame: Any) -> Any:
    """A function of type _ENTRY that calls `kernel` with the values of a frame."""
    function = ir.Function(module, _ENTRY, name=f"{kernel.mangled_name}.entry")
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    place = builder.bitcast(function.args[0], frame.as_pointer())
    values = [builder.load(cgutils.gep_inbounds(builder, place, 0, i)) for i in range(len(frame.elements))]
    status, _ = context.call_internal_no_propagate(builder, kernel, call, values)
    builder.ret(builder.sext(status.code, _I64))
    return function


@njit(nogil=True)
def _wait(turn):  # type: ignore[no-untyped-def]
    """One look of a loop that waits for another thread."""
    _relax()
    if turn % PATIENCE == PATIENCE - 1:
        _offer()


@njit(nogil=True)
def share(box, kernel, arguments):  # type: ignore[no-untyped-def]
    """Run `kernel(tickets, *arguments)` on the team of `box`; when all have left it: 0, or not 0 if it failed."""
    _pack(box, kernel, arguments)
    for i in range(NUM_TICKETS):
        box[_TICKETS + i] = 0
    box[_COUNT] += 1
    _swap(box, _STATUS, 0)
    _swap(box, _JOB, box[_COUNT])
    status = _enter(box[_FUNCTION], box[_ARGUMENTS])
    _swap(box, _JOB, 0)
    turn = 0
    while _read(box, _INSIDE) != 0:
        _wait(turn)
        turn += 1
    return status | _read(box, _STATUS)


@njit(nogil=True, cache=True)
def _serve(box, number, seen):  # type: ignore[no-untyped-def]
    """Take part in jobs until there was none for a while; returns the last one seen, or -1 at the end."""
    asleep = _ASLEEP + number * _LINE
    idle = 0
    while True:
        job = _read(box, _JOB)
        if job == -1:
            return job
        if job not in (0, seen):
            seen, idle = job, 0
            # The caller closes a job before it looks who is inside; so it waits for this thread, or this thread sees
            # that the job is closed.
            _add(box, _INSIDE, 1)
            if _read(box, _JOB) == job:
                status = _enter(box[_FUNCTION], box[_ARGUMENTS])
                if status != 0:
                    _swap(box, _STATUS, status)
            _add(box, _INSIDE, -1)
        elif idle < SPINS:
            _wait(idle)
            idle += 1
        else:
            # Said before the last look: a caller that opens a job after it sees that it has to wake this thread.
            _swap(box, asleep, 1)
            if _read(box, _JOB) in (0, seen):
                return seen
            _swap(box, asleep, 0)
            idle = 0


class ThreadTeam:
    """`size` threads, the caller's among them. `close` ends the others; a kernel that fails raises in the caller.

    May be used from several threads: kernels run one after the other. A team that is dropped ends its threads as well.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._box, self._solo = _mailbox(size), _mailbox(1)
        self._box[_JOB] = -1
        _serve(self._box, 0, 0)  # compiled here, where a fault would be seen
        self._box[_JOB] = 0
        self._closed = False
        self._alarms: list[queue.SimpleQueue[None]] = []
        self._threads: list[threading.Thread] = []
        # The threads know nothing of the team; before the first of them, so that none is left where one cannot start.
        self._end = weakref.finalize(self, _end, self._box, self._alarms)
        for number in range(1, size):
            alarm: queue.SimpleQueue[None] = queue.SimpleQueue()
            # Daemons, so that a program that forgets to close does not hang at its end.
            thread = threading.Thread(
                target=_serve_on, args=(self._box, number, alarm), name=f"tamis-kernel-{number}", daemon=True
            )
            self._alarms.append(alarm)
            thread.start()
            self._threads.append(thread)

    def run(self, launcher: Callable[..., int], *args: Any, threads: int | None = None) -> None:
        """`launcher(box, *args)`, on this thread alone or on all (`threads` None, or more than 1).

        Raises EngineClosedError after `close`, KernelFailedError when a kernel raised.
        """
        with self._lock:
            if self._closed:
                raise EngineClosedError("the kernel threads have been closed")
            box = self._solo
            if threads is None or threads > 1:
                box = self._box
                self._wake()
            status = launcher(box, *args)
        if status:
            raise KernelFailedError(f"kernel {launcher.__name__} failed with status {status}")

    def close(self) -> None:
        """End the threads; closing twice does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._end()
                for thread in self._threads:
                    thread.join()

    def _wake(self) -> None:
        """Call those who sleep; a thread that lies down at this moment sees the job itself, or is not needed.

        Nothing is noted here, so that an interrupt at any line is made good by the next call.
        """
        for number, alarm in enumerate(self._alarms, 1):
            if self._box[_ASLEEP + number * _LINE] == 1:
                alarm.put(None)


def _mailbox(threads: int) -> NDArray[np.int64]:
    size = _ASLEEP + threads * _LINE
    raw = np.zeros(size + _LINE, np.int64)
    start = -raw.ctypes.data // 8 % _LINE
    return raw[start : start + size]


def _serve_on(box: NDArray[np.int64], number: int, alarm: "queue.SimpleQueue[None]") -> None:
    seen = 0
    while (seen := _serve(box, number, seen)) != -1:
        alarm.get()
        box[_ASLEEP + number * _LINE] = 0
        while not alarm.empty():  # called several times while waking up
            alarm.get()


def _end(box: NDArray[np.int64], alarms: "Sequence[queue.SimpleQueue[None]]") -> None:
    """Tell the threads to end. May run in any of them, by the garbage collector: it does not wait."""
    box[_JOB] = -1
    for alarm in alarms:
        alarm.put(None)
