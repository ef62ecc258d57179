"""Handing many arrays to a kernel as one: a *frame* of int64 holds the address and the shape of each.

Numba unpacks every array that Python passes, about half a microsecond each, and counts references to it with locked
instructions. A frame is unpacked once, and the arrays that `view1` to `view3` make of it are borrowed: whoever built
the frame keeps the memory alive while the kernel runs.
"""

from itertools import accumulate
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

_LONGEST = 1 << 10
"""Numbers that no frame has more of."""


class Frame:
    """Arrays (C-contiguous) and numbers in the order they are given, and what keeps their memory alive."""

    def __init__(self, *entries: "NDArray[Any] | int") -> None:
        values: list[int] = []
        for entry in entries:
            if isinstance(entry, int):
                values.append(entry)
            else:
                assert entry.flags.c_contiguous  # a kernel could not tell
                values += [entry.ctypes.data, *entry.shape]
        self.values = np.array(values, np.int64)
        self.address: int = self.values.ctypes.data
        self._kept = entries


def places(*sizes: int) -> tuple[int, ...]:
    """Where entries of these sizes begin: a number takes 1, an array one more than it has axes."""
    return tuple(accumulate(sizes[:-1], initial=0))


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_context: Any, address: Any, dtype: Any) -> Any:
    kind = types.CPointer(dtype.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return kind(types.intp, dtype), generate


@njit
def borrow(address, shape, dtype):  # type: ignore[no-untyped-def]
    """The memory at an address as an array."""
    return carray(_pointer(address, dtype), shape)


@njit
def open_frame(address):  # type: ignore[no-untyped-def]
    """The frame at an address; its length is not known here."""
    return borrow(address, (_LONGEST,), np.int64)


@njit
def view1(frame, at, dtype):  # type: ignore[no-untyped-def]
    """The array of one axis whose entry begins at `at`."""
    return borrow(frame[at], (frame[at + 1],), dtype)


@njit
def view2(frame, at, dtype):  # type: ignore[no-untyped-def]
    """The array of two axes whose entry begins at `at`."""
    return borrow(frame[at], (frame[at + 1], frame[at + 2]), dtype)


@njit
def view3(frame, at, dtype):  # type: ignore[no-untyped-def]
    """The array of three axes whose entry begins at `at`."""
    return borrow(frame[at], (frame[at + 1], frame[at + 2], frame[at + 3]), dtype)
