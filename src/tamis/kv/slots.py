"""Slot ids and page ids as callers hand them over, and the checks they pass before anything is touched.

slot = page * page_size + offset. torch reads a negative index from the end and so would write another sequence's
memory; every id is checked here, once, and never wraps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.config import KV_DTYPES
from tamis.errors import ForeignPageError, PageError, PlaneError, SlotError

WRITABLE_DTYPES = (torch.float64, *KV_DTYPES.values())


@dataclass(frozen=True, eq=False)
class SlotIds:
    """Slots that a pool has checked (`SparseKVPool.check_loc`); only that pool takes them without another check."""

    slots: Tensor
    """int64 [n], the caller's ids, on the pool's device."""
    pages: Tensor
    """int64 [n]: slots // page_size."""
    offsets: Tensor
    """int64 [n]: slots % page_size."""
    owner: object
    """Identity of the pool that checked them."""

    def __len__(self) -> int:
        return self.slots.shape[0]


def check_slots(loc: Tensor, first: int, end: int, name: str = "loc") -> Tensor:
    """A copy of `loc`, after checking that it is int64 [n] with first <= slot < end. Raises SlotError."""
    if not isinstance(loc, Tensor):
        raise SlotError(f"{name} is of type {type(loc).__name__}, an int64 tensor is needed")
    if loc.dtype is not torch.int64:
        raise SlotError(f"{name} has dtype {loc.dtype}, torch.int64 is needed")
    if loc.dim() != 1:
        raise SlotError(f"{name} has shape {list(loc.shape)}, one dimension is needed")
    copy = loc.detach().clone()
    outside = (copy < first) | (copy >= end)
    if bool(outside.any()):
        bad = int(copy[outside][0])
        raise SlotError(f"{name} holds slot {bad}, outside {first} <= slot < {end}")
    return copy


def check_unique_slots(slots: Tensor, name: str) -> None:
    """Raise SlotError where a slot appears twice."""
    ordered = slots.sort().values
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeated.numel():
        raise SlotError(f"{name} names slot {int(repeated[0])} more than once")


def check_page(page: int, num_pages: int) -> None:
    """Raise ForeignPageError unless 1 <= page <= num_pages; PageError unless it is an int (no bool)."""
    if isinstance(page, bool) or not isinstance(page, int):
        raise PageError(f"page={page!r} is not a page id: an int is needed")
    if not 1 <= page <= num_pages:
        raise ForeignPageError(f"page={page} is not a page of this pool, whose pages are 1 <= id <= {num_pages}")


def check_pages(pages: Sequence[int] | Tensor, num_pages: int, *, unique: bool = False) -> list[int]:
    """`pages` as a list, after checking each; `unique`: raises PageError where one appears twice."""
    if isinstance(pages, Tensor):
        if pages.dim() != 1:
            raise PageError(f"pages have shape {list(pages.shape)}, one dimension is needed")
        ids: list[int] = pages.tolist()
    else:
        ids = list(pages)
    seen: set[int] = set()
    for page in ids:
        check_page(page, num_pages)
        if unique and page in seen:
            raise PageError(f"page={page} is named more than once as a destination")
        seen.add(page)
    return ids


def check_rows(name: str, values: Tensor, tokens: int, row: tuple[int, int], device: torch.device) -> None:
    """Raise PlaneError unless `values` is a floating-point tensor [tokens, heads, dim] on `device`."""
    if not isinstance(values, Tensor):
        raise PlaneError(f"{name} is of type {type(values).__name__}, a tensor is needed")
    expected = [tokens, *row]
    if list(values.shape) != expected:
        raise PlaneError(f"{name} has shape {list(values.shape)}, {expected} (tokens, heads, dim) is needed")
    if values.dtype not in WRITABLE_DTYPES:
        raise PlaneError(f"{name} has dtype {values.dtype}, one of {', '.join(map(str, WRITABLE_DTYPES))} is needed")
    if values.device != device:
        raise PlaneError(f"{name} is on device {values.device}, the pool is on {device}")
