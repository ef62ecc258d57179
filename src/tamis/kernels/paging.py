"""Writing and reading paged planes: the one place that turns a slot into (page, offset) and a value into stored bytes.

A plane is `[num_pages + 1, heads, page_size, dim]`; slot = page * page_size + offset. Callers check their slots first:
torch would take a negative index as counted from the end, which is another sequence's memory.

float8 planes are stored as uint8 and viewed on read. torch lacks index kernels for float8 on some devices, so every
indexed access here goes through `raw_view`; only casts see the float8 type.
"""

import torch
from torch import Tensor

from tamis.errors import KernelInputError

FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type a plane of `dtype` is allocated in: uint8 for fp8, else `dtype` itself."""
    return torch.uint8 if dtype in FP8_DTYPES else dtype


def raw_view(tensor: Tensor) -> Tensor:
    """The same memory in a type that every index kernel takes: uint8 for fp8, else the tensor itself."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


def typed_view(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory as `dtype`, which is as wide as the type `raw` has: the inverse of `raw_view`."""
    return raw.view(dtype)


def cast_values(values: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """`values` as they are stored in a plane of `dtype`: divided by `scale` in fp32, then cast.

    fp8 saturates at its largest finite value, infinities included; NaN stays NaN. `values` itself is never changed,
    but may be returned as it is.
    """
    if values.requires_grad:
        values = values.detach()
    if scale != 1.0:
        values = values.float() / scale
    if dtype in FP8_DTYPES:
        largest = torch.finfo(dtype).max
        values = values.float().clamp(-largest, largest)
    return values if values.dtype is dtype else values.to(dtype)


def plane_rows(slots: Tensor, heads: int, page_size: int) -> Tensor:
    """Where each head of each slot lies in a plane viewed as [(num_pages + 1) * heads * page_size, dim].

    slots int64 [n], already checked; returns int64 [n, heads].
    """
    if heads == 1:
        return slots[:, None]
    first = slots + slots // page_size * ((heads - 1) * page_size)
    return first[:, None] + torch.arange(0, heads * page_size, page_size, device=slots.device)


def write_slots(plane: Tensor, slots: Tensor, values: Tensor, scale: float = 1.0) -> None:
    """Write `values` [n, heads, dim] to slots int64 [n] of `plane`, already checked (`Ops.write_pages`).

    Where a slot is named twice, one of its rows stays; which one is not defined.
    """
    page_size = plane.shape[2]
    stored = raw_view(cast_values(values, plane.dtype, scale))
    if stored.untyped_storage().data_ptr() == plane.untyped_storage().data_ptr():
        stored = stored.clone()  # the caller hands us a part of this very plane
    raw_view(plane)[slots // page_size, :, slots % page_size] = stored


def gather_pages(plane: Tensor, pages: Tensor, length: int, scale: float = 1.0) -> Tensor:
    """The first `length` tokens of a sequence whose pages are int [P]: fp32 [length, heads, dim], times `scale`.

    Pages past the last one needed are not looked at: they may be -1. Raises KernelInputError if `pages` are too few.
    """
    heads, page_size, dim = plane.shape[1:]
    needed = -(-length // page_size)
    if length < 0 or needed > pages.shape[0]:
        raise KernelInputError(f"length={length} does not fit {pages.shape[0]} pages of {page_size} tokens")
    picked = raw_view(plane).index_select(0, pages[:needed]).view(plane.dtype).float()
    tokens = picked.transpose(1, 2).reshape(needed * page_size, heads, dim)[:length]
    return tokens if scale == 1.0 else tokens * scale
