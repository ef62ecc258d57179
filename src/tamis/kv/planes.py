"""The memory behind a pool: one allocation, cut into a buffer for each plane of each layer."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tamis.kernels.paging import storage_dtype, typed_view
from tamis.kv.layout import KVLayout

MAX_PAGES = 2**31 - 1
"""Page tables are int32."""
ALIGNMENT = 64
"""Bytes: every buffer starts at a multiple, so that no vector of a kernel lies across two cache lines for nothing."""


@dataclass(frozen=True, eq=False, slots=True)
class Plane:
    """One plane of one layer, under each shape and type that it is used in; all are the same memory."""

    name: str
    """ "k", "v", "index_k" or "index_v"."""
    row: tuple[int, int]
    """(heads, dim) of one token."""
    scale: float
    """What values are divided by before they are stored."""
    buffer: Tensor
    """[num_pages + 1, heads, page_size, dim] in the plane's own type."""
    raw: Tensor
    """As `buffer`, in a type that every index kernel takes (uint8 for fp8)."""
    rows: Tensor
    """As `raw`, [(num_pages + 1) * heads * page_size, dim]: what `paging.plane_rows` counts."""


class PlaneMemory:
    """Zeroed buffers for every plane of the layout's own layers; layers and planes it does not have take no memory."""

    def __init__(self, layout: KVLayout, pages: int, device: torch.device) -> None:
        """`pages`: usable ones and the padding page.

        Raises ValueError for too many pages or a device without memory, and what numpy and torch raise.
        """
        if pages > MAX_PAGES:
            raise ValueError(f"there can be {MAX_PAGES} pages at most")
        if device.type == "meta":
            raise ValueError("tensors there hold no values")
        tokens = pages * layout.page_size
        sizes = {
            (layer, name): tokens * math.prod(layout.row_shape(name)) * layout.plane_dtype(name).itemsize
            for layer in layout.local_layers
            for name in layout.planes(layer)
        }
        memory = _zeros(sum(_aligned(size) for size in sizes.values()), device)
        self._first, self._end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        self.planes: dict[int, dict[str, Plane]] = {layer: {} for layer in layout.local_layers}
        """By global layer id and name."""
        start = 0
        for (layer, name), size in sizes.items():
            self.planes[layer][name] = _plane(layout, layer, name, memory[start : start + size])
            start += _aligned(size)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor on the same device is a view of this memory."""
        return self._first <= tensor.data_ptr() < self._end

    def nbytes(self, layers: tuple[int, ...], names: tuple[str, ...]) -> int:
        """Bytes of these planes of these layers, padding page included."""
        return sum(self.planes[layer][name].buffer.nbytes for layer in layers for name in names)


def _zeros(size: int, device: torch.device) -> Tensor:
    """uint8 [size], zeroed, aligned. On a CPU a page takes physical memory only once it is written or read."""
    if device.type == "cpu":
        spare = torch.from_numpy(np.zeros(size + ALIGNMENT, np.uint8))  # torch.zeros would touch all of it
    else:
        spare = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -spare.data_ptr() % ALIGNMENT
    return spare[start : start + size]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _plane(layout: KVLayout, layer: int, name: str, memory: Tensor) -> Plane:
    (heads, dim), dtype = layout.row_shape(name), layout.plane_dtype(name)
    raw = memory.view(storage_dtype(dtype)).view(-1, heads, layout.page_size, dim)
    return Plane(
        name, (heads, dim), layout.layer_scales(layer).of(name), typed_view(raw, dtype), raw, raw.view(-1, dim)
    )  # fmt: skip
