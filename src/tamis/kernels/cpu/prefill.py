"""Attention and block scores at matrix speed: how work is cut into items, and the calls that backends make.

For bf16 planes, queries and outputs, head dims that are multiples of 32, and only where `amx.available()`; shapes are
as in `kernels/ops.py` and checked by the caller. Arrays are contiguous NumPy views of the tensors' memory
(`lowfloat.as_array`), bf16 as uint16.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from tamis.kernels.cpu import amx
from tamis.kernels.cpu.amx_attention import LOG2E, dense_items
from tamis.kernels.cpu.amx_room import Array, Operands, Room, State, room_bytes
from tamis.kernels.cpu.amx_score import ScoreRoom, score_items, score_room_bytes
from tamis.kernels.cpu.amx_sparse import sparse_items
from tamis.kernels.cpu.amx_tiles import CHUNK, LINE, ROWS
from tamis.kernels.cpu.scratch import Scratch
from tamis.kernels.cpu.threads import ThreadTeam

DENSE_STATE_BYTES = 1 << 19
"""State of a range of queries of dense attention: a part of the second-level cache, since all of it is used for each
chunk of the context."""
SPARSE_STATE_BYTES = 1 << 22
"""State of a range of queries of sparse attention: the longer the range, the more queries share an opened block."""
SCORE_ROWS = 1024
"""Query rows of a scoring item: with packed queries and results they fit in the second-level cache."""
DENSE_ITEMS, SPARSE_ITEMS = 4, 2
"""Work items there should be for each thread: more of them end more evenly, fewer share more."""

_NO_SINKS = np.zeros(0, np.float32)
_MANY = np.iinfo(np.int32).max


class ArrayBatch(NamedTuple):
    """`ops.AttentionBatch` as int32 arrays."""

    page_table: Array
    seq_lens: Array
    query_start: Array
    positions: Array


def supports(dim: int) -> bool:
    """Whether these calls take heads of this dim, here."""
    return dim % 32 == 0 and 0 < dim <= 256 and amx.available()


def dense(
    team: ThreadTeam, scratch: Scratch, q: Array, k: Array, v: Array, batch: ArrayBatch, out: Array, lse: Array,
    *, sinks: Array | None = None, k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """`Ops.dense_attention` into out bf16 [T, Hq, D] and lse float32 [T, Hq], decode and prefill."""
    call = _prepare(team, scratch, q, k, v, batch, out, lse, sinks, (DENSE_STATE_BYTES, DENSE_ITEMS), _MANY, 0)
    team.run(dense_items, *call.work, call.operands, *_scales(q, k_scale, v_scale), call.room, call.state)


def sparse(
    team: ThreadTeam, scratch: Scratch, q: Array, k: Array, v: Array, picks: Array, batch: ArrayBatch, block_size: int,
    out: Array, lse: Array, *, sinks: Array | None = None, k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """`Ops.sparse_attention` into out bf16 [T, Hq, D] and lse float32 [T, Hq], decode and prefill."""
    each = picks.shape[0] // k.shape[1] * picks.shape[2]
    most = each * block_size
    sizes = SPARSE_STATE_BYTES, SPARSE_ITEMS
    call = _prepare(team, scratch, q, k, v, batch, out, lse, sinks, sizes, most, each, block_size)
    scales = _scales(q, k_scale, v_scale)
    team.run(sparse_items, *call.work, call.operands, picks, block_size, *scales, call.room, call.state)


def score_blocks(
    team: ThreadTeam, scratch: Scratch, index_q: Array, index_k: Array, batch: ArrayBatch, block_size: int,
    scores: Array, *, k_scale: float = 1.0,
) -> None:  # fmt: skip
    """`Ops.score_blocks` of score type "max" into scores float32 [Hi, T, NB]."""
    heads, dim = index_q.shape[1], index_q.shape[2]
    span = max(1, SCORE_ROWS // heads)
    rows = -(-span * heads // ROWS) * ROWS
    threads = team.size
    room = ScoreRoom(
        scratch.get("score bytes", (threads, score_room_bytes(dim, rows)), np.uint8),
        scratch.get("score limits", (threads, 3, rows), np.int32),
        scratch.get("score tiles", (threads, CHUNK // ROWS), np.int64),
    )
    ranges = sum(-(-int(n) // span) for n in np.diff(batch.query_start))
    items = scratch.get("score items", (max(ranges, 1), 3), np.int32)
    cut_ranges(batch.query_start, span, items)
    scale = np.float32(k_scale * dim**-0.5)
    team.run(
        score_items, amx.tile_config(), items[:ranges], index_q, index_k, batch.page_table, batch.seq_lens,
        batch.positions, block_size, scale, room, scores,
    )  # fmt: skip


class _Call(NamedTuple):
    work: tuple[Array, Array, Array]
    """Tile configuration, items, counters of finished parts."""
    operands: Operands
    room: Room
    state: State


def _scales(q: Array, k_scale: float, v_scale: float) -> tuple[np.float32, np.float32]:
    return np.float32(k_scale * float(LOG2E) * q.shape[2] ** -0.5), np.float32(v_scale)


def _prepare(
    team: ThreadTeam, scratch: Scratch, q: Array, k: Array, v: Array, batch: ArrayBatch, out: Array, lse: Array,
    sinks: Array | None, sizes: tuple[int, int], most: int, picks_each: int, block_size: int = 1,
) -> _Call:  # fmt: skip
    """Items, room and state of an attention call.

    sizes: bytes of state of a range, items a thread; most: tokens of context a query reads; picks_each: blocks a KV
    head may pick for a token.
    """
    tokens, heads, dim, group = q.shape[0], k.shape[1], q.shape[2], q.shape[1] // k.shape[1]
    target = sizes[1] * team.size
    span = max(min(max(sizes[0] // (group * dim * 4), 1), -(-tokens * heads // target)), -(-ROWS // group))
    items, cut, ranges = _plan(scratch, batch, span, heads, target, most)
    threads, rows = team.size, -(-span * group // ROWS) * ROWS
    longest = -(-batch.page_table.shape[1] * k.shape[2] // block_size) if picks_each else 0
    room = Room(
        scratch.get("bytes", (threads, -(-room_bytes(dim, rows) // LINE) * LINE), np.uint8),
        scratch.get("lanes", (threads, 2, ROWS), np.float32),
        scratch.get("marks", (threads, 3, ROWS), np.int32),
        scratch.get("tiles", (threads, 4, CHUNK // ROWS), np.int64),
        scratch.get("clean", (threads, CHUNK, dim), np.uint16),
        scratch.get("limits", (threads, 3, rows), np.int32),
        scratch.get("lists", (threads, 2 * longest + span * picks_each), np.int32),
    )
    slots = threads + cut * heads
    state = State(
        scratch.get("sums", (slots, rows, dim), np.float32),
        scratch.get("peaks", (slots, rows), np.float32),
        scratch.get("totals", (slots, rows), np.float32),
    )
    done = scratch.get("done", (max(ranges * heads, 1),), np.int64)
    done.fill(0)
    operands = Operands(
        q, k, v, batch.page_table, batch.seq_lens, batch.positions, _NO_SINKS if sinks is None else sinks, out, lse
    )
    return _Call((amx.tile_config(), items, done), operands, room, state)


def _plan(scratch: Scratch, batch: ArrayBatch, span: int, heads: int, target: int, most: int) -> tuple[Array, int, int]:
    room = 64
    while True:
        items = scratch.get("items", (room, 7), np.int32)
        count, cut, ranges = plan_items(batch.query_start, batch.seq_lens, span, heads, target, most, items)
        if count <= room:
            return items[:count], cut, ranges
        room = 2 * count


@njit(cache=True)
def plan_items(query_start, seq_lens, span, heads, target, most, items):  # type: ignore[no-untyped-def]
    """Cut a batch into ranges of up to `span` tokens, and their contexts into parts where items would be too few.

    items int32 [n, 7]: sequence, first token, tokens, part, parts, first part of the range among all cut ones, range;
    the longest contexts first. `most`: tokens of context a query reads at most; `target`: items wanted, KV heads
    counted. Returns how many items there are (if more than n, only n are written), cut parts, ranges.
    """
    grain = 8 * CHUNK
    total = 0.0
    for seq in range(seq_lens.shape[0]):
        total += float(query_start[seq + 1] - query_start[seq]) * min(seq_lens[seq], most)
    share = max(total * heads / target, 1.0)
    count = cut = ranges = 0
    for seq in range(seq_lens.shape[0] - 1, -1, -1):
        context = min(seq_lens[seq], most)
        begin, end = query_start[seq], query_start[seq + 1]
        for number in range((end - begin + span - 1) // span - 1, -1, -1):
            token = begin + number * span
            tokens = min(span, end - token)
            parts = int(max(1.0, min(np.ceil(float(tokens) * context / share), np.ceil(context / grain))))
            for part in range(parts):
                if count < items.shape[0]:
                    line = items[count]
                    line[0], line[1], line[2], line[3], line[4] = seq, token, tokens, part, parts
                    line[5], line[6] = cut, ranges
                count += 1
            cut += parts if parts > 1 else 0
            ranges += 1
    return count, cut, ranges


@njit(cache=True)
def cut_ranges(query_start, span, items):  # type: ignore[no-untyped-def]
    """Cut a batch into ranges of up to `span` tokens: items int32 [n, 3]: sequence, first token, tokens."""
    count = 0
    for seq in range(query_start.shape[0] - 1):
        for token in range(query_start[seq], query_start[seq + 1], span):
            items[count, 0], items[count, 1] = seq, token
            items[count, 2] = min(span, query_start[seq + 1] - token)
            count += 1
    return count
