"""Slot ids and page ids as callers hand them over, and the checks they pass before anything is touched.

slot = page * page_size + offset. torch reads a negative index from the end and so would write another sequence's
memory; every id is checked here, once, and never wraps.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from tamis.config import KV_DTYPES
from tamis.errors import ForeignPageError, PageError, PlaneError, SlotError, TamisError

T = TypeVar("T")

WRITABLE_DTYPES = (torch.float64, *KV_DTYPES.values())


class SlotIds:
    """Slots that a pool has checked (`SparseKVPool.check_loc`); only that pool takes them without another check.

    Nobody else holds the tensors inside, so that what was checked is what is written.
    """

    __slots__ = ("_owner", "_rows", "_slots")

    def __init__(self, slots: Tensor, rows: Mapping[int, Tensor], owner: object) -> None:
        """slots int64 [n]; by number of heads, where they lie in a plane (`paging.plane_rows`); who checked them."""
        self._slots = slots
        self._rows = rows
        self._owner = owner

    @property
    def slots(self) -> Tensor:
        """The caller's ids, int64 [n], on the pool's device (a copy)."""
        return self._slots.clone()

    def rows(self, heads: int) -> Tensor:
        """int64 [n, heads], for the pool that made this; not to be changed."""
        return self._rows[heads]

    def is_checked_by(self, owner: object) -> bool:
        """Whether it was `owner` who checked these slots."""
        return self._owner is owner

    def __len__(self) -> int:
        return self._slots.shape[0]


def check_tensor(name: str, tensor: object, error: type[TamisError], wanted: str = "a tensor") -> None:
    """Raise `error` unless `tensor` is a tensor with values in ordinary memory (strided, not on device meta)."""
    if not isinstance(tensor, Tensor):
        raise error(f"{name} is of type {type(tensor).__name__}, {wanted} is needed")
    if tensor.layout is not torch.strided:
        raise error(f"{name} has layout {tensor.layout}, torch.strided is needed")
    if tensor.is_meta:
        raise error(f"{name} is on device meta, where tensors hold no values")


def check_slots(loc: Tensor, first: int, end: int, name: str = "loc") -> Tensor:
    """A copy of `loc`, after checking that it is int64 [n] with first <= slot < end. Raises SlotError."""
    check_tensor(name, loc, SlotError, "an int64 tensor")
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


def check_pages(pages: Iterable[int] | Tensor, num_pages: int, *, unique: bool = False) -> list[int]:
    """`pages` as a list, after checking each; `unique`: raises PageError where one appears twice."""
    ids: Iterable[int]
    if isinstance(pages, Tensor):
        check_tensor("pages", pages, PageError)
        if pages.dim() != 1:
            raise PageError(f"pages have shape {list(pages.shape)}, one dimension is needed")
        ids = pages.tolist()
    else:
        ids = as_tuple("pages", pages, PageError)
    seen: set[int] = set()
    for page in ids:
        check_page(page, num_pages)
        if unique and page in seen:
            raise PageError(f"page={page} is named more than once as a destination")
        seen.add(page)
    return list(ids)


def as_tuple(name: str, items: Iterable[T], error: type[TamisError]) -> tuple[T, ...]:
    """`items`, which may be an iterator, as something that can be read twice. Raises `error` unless it is iterable."""
    try:
        return tuple(items)
    except TypeError:
        raise error(f"{name}={items!r} is not a sequence") from None


def check_rows(name: str, values: Tensor, shape: tuple[int, int, int], device: torch.device) -> None:
    """Raise PlaneError unless `values` is a floating-point tensor [tokens, heads, dim] of `shape` on `device`."""
    check_tensor(name, values, PlaneError)
    if values.shape != shape:
        raise PlaneError(f"{name} has shape {list(values.shape)}, {list(shape)} (tokens, heads, dim) is needed")
    if values.dtype not in WRITABLE_DTYPES:
        raise PlaneError(f"{name} has dtype {values.dtype}, one of {', '.join(map(str, WRITABLE_DTYPES))} is needed")
    if values.device != device:
        raise PlaneError(f"{name} is on device {values.device}, the pool is on {device}")
