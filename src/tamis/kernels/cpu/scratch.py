"""Memory that kernels reuse from step to step."""

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

ALIGNMENT = 64
"""Bytes: a cache line, and a row of a matrix tile."""


class Scratch:
    """Named arrays that grow and are never given back, so that a step in a warm program allocates nothing.

    Not for several threads at once: whoever runs kernels holds it alone.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray[Any, Any]] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> "np.ndarray[Any, Any]":
        """An array of this shape whose contents are whatever was left there, aligned to ALIGNMENT.

        The same name gives the same memory: an array from an earlier call with the name must not be in use any more.
        """
        wanted = np.dtype(dtype)
        size = math.prod(shape) * wanted.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < size:
            raw = np.empty(size + ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT
            buffer = self._buffers[name] = raw[start : start + size]
        return buffer[:size].view(wanted).reshape(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
