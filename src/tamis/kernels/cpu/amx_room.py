"""Memory that attention on matrix tiles works in: scratch of the threads, and what rows have summed so far."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tamis.kernels.cpu.amx_tiles import CHUNK, LINE, ROWS
from tamis.kernels.cpu.frames import borrow, places, view1, view2, view3

Array = np.ndarray[Any, Any]


class Room(NamedTuple):
    """Scratch of the threads; the first axis is the thread."""

    bytes: Array
    """uint8 [threads, room_bytes]: operands of the tiles."""
    lanes: Array
    """float32 [threads, 2, 16]: peaks and totals of a tile's rows."""
    marks: Array
    """int32 [threads, 3, 16]: a tile's limits and row numbers; the first token of the range."""
    tiles: Array
    """int64 [threads, 4, CHUNK / 16]: where a chunk's keys and values are, and those of the next."""
    clean: Array
    """uint16 [threads, CHUNK, dim]: values without infinities and NaN."""
    limits: Array
    """int32 [threads, 3, rows]: the last position a row sees, -1: none; the least and the most of those of 16 rows."""
    lists: Array
    """int32 [threads, n]: which tokens picked which block."""


class State(NamedTuple):
    """What rows have summed so far; the first axis is the slot: one a thread, then one a part of a cut context.

    Rows are allocated in multiples of 16.
    """

    sums: Array
    """float32 [slots, rows, dim]"""
    peaks: Array
    """float32 [slots, rows]: largest logit, before scaling."""
    totals: Array
    """float32 [slots, rows]"""


class Operands(NamedTuple):
    """What all work items share."""

    q: Array
    """bf16 [T, Hq, dim]"""
    k: Array
    v: Array
    """bf16 planes"""
    page_table: Array
    seq_lens: Array
    positions: Array
    """int32, as in AttentionBatch."""
    sinks: Array
    """float32 [Hq], or [0] for none."""
    out: Array
    """bf16 [T, Hq, dim]"""
    lse: Array
    """float32 [T, Hq]"""


# Where an attention call's frame has what (`prefill.plan_dense` and `plan_sparse` write it): first five numbers (query
# tokens, query heads, KV heads, head dim, page size), then arrays.
(
    _TOKENS, _Q_HEADS, _KV_HEADS, _DIM, _PAGE_SIZE, _TABLE, _LENS, _POSITIONS, _CONFIG, _ITEMS, _DONE, _ROOM, _STATE,
) = places(*[1] * 5, 3, 2, 2, 2, 3, 2, 3 + 5 * 4 + 3, 4 + 3 + 3)  # fmt: skip


@njit
def open_operands(frame, q, k, v, pages, sinks, out, lse):  # type: ignore[no-untyped-def]
    """The operands of a call: its frame, and the addresses of what changes from layer to layer; sinks 0: none."""
    tokens, q_heads, kv_heads = frame[_TOKENS], frame[_Q_HEADS], frame[_KV_HEADS]
    dim, page_size = frame[_DIM], frame[_PAGE_SIZE]
    rows, plane = (tokens, q_heads, dim), (pages, kv_heads, page_size, dim)
    return Operands(
        borrow(q, rows, np.uint16), borrow(k, plane, np.uint16), borrow(v, plane, np.uint16),
        view2(frame, _TABLE, np.int32), view1(frame, _LENS, np.int32), view1(frame, _POSITIONS, np.int32),
        borrow(sinks, (q_heads if sinks else 0,), np.float32),
        borrow(out, rows, np.uint16), borrow(lse, (tokens, q_heads), np.float32),
    )  # fmt: skip


@njit
def open_work(frame):  # type: ignore[no-untyped-def]
    """Tile configuration, items, counters of finished parts."""
    return view1(frame, _CONFIG, np.uint8), view2(frame, _ITEMS, np.int32), view1(frame, _DONE, np.int64)


@njit
def open_room(frame):  # type: ignore[no-untyped-def]
    """Room and state."""
    at = _ROOM
    room = Room(
        view2(frame, at, np.uint8), view3(frame, at + 3, np.float32), view3(frame, at + 7, np.int32),
        view3(frame, at + 11, np.int64), view3(frame, at + 15, np.uint16), view3(frame, at + 19, np.int32),
        view2(frame, at + 23, np.int32),
    )  # fmt: skip
    at = _STATE
    state = State(view3(frame, at, np.float32), view2(frame, at + 4, np.float32), view2(frame, at + 7, np.float32))
    return room, state


def room_bytes(dim: int, rows: int) -> int:
    """Bytes of `Room.bytes` a thread needs for items of up to `rows` rows."""
    token = 2 * dim
    packed_rows = -(-rows // ROWS) * ROWS
    return CHUNK * (LINE + LINE // 2 + 2 * ROWS + 3 * token) + ROWS * 4 * token + token + LINE + packed_rows * token


@njit
def room_places(base, row):  # type: ignore[no-untyped-def]
    """Addresses inside a thread's bytes: logits, pairs, weights, sums, values, copies of keys and of values, zeros, 16
    rows and these packed, queries, shrink factors."""
    pairs = base + CHUNK * LINE
    weights = pairs + CHUNK * LINE // 2
    sums = weights + CHUNK * ROWS * 2
    values = sums + ROWS * row * 2
    keys_copy = values + CHUNK * row
    values_copy = keys_copy + CHUNK * row
    gathered = values_copy + CHUNK * row
    one = gathered + ROWS * row
    zeros = one + ROWS * row
    return (
        base,
        pairs,
        weights,
        sums,
        values,
        keys_copy,
        values_copy,
        zeros,
        gathered,
        one,
        zeros + row + LINE,
        zeros + row,
    )


@njit
def state_places(state, slot):  # type: ignore[no-untyped-def]
    """Addresses of a slot's peaks, totals and sums."""
    return state.peaks[slot].ctypes.data, state.totals[slot].ctypes.data, state.sums[slot].ctypes.data


@njit
def slot_of(items, item, head, heads, threads, thread):  # type: ignore[no-untyped-def]
    """The slot of an item, and the first slot of its range's parts."""
    part, parts, first = items[item, 3], items[item, 4], items[item, 5]
    if parts == 1:
        return thread, thread
    base = threads + first * heads + head
    return base + part * heads, base
