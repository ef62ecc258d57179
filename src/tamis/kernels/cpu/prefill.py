"""Attention and block scores at matrix speed: how work is cut into items, and the calls that backends make.

For bf16 planes, queries and outputs, head dims that are multiples of 32, and only where `amx.available()`; shapes are
as in `kernels/ops.py` and checked by the caller. Tensors are contiguous: kernels get their addresses.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from torch import Tensor

from tamis.config import SparseAttentionConfig
from tamis.kernels.cpu import amx
from tamis.kernels.cpu.amx_attention import LOG2E, launch_dense_items
from tamis.kernels.cpu.amx_room import Array, room_bytes
from tamis.kernels.cpu.amx_score import launch_pick_blocks, launch_score_items, score_room_bytes
from tamis.kernels.cpu.amx_sparse import launch_picked, launch_sparse_items
from tamis.kernels.cpu.amx_tiles import CHUNK, LINE, ROWS
from tamis.kernels.cpu.frames import Frame
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


class ScorePlan(NamedTuple):
    """`plan_scores`: the frame, and how many blocks the scores have."""

    frame: Frame
    blocks: int
    """NB: blocks of the longest sequence."""


# A plan is what all layers of a step share whose operands have one shape: work items, and the memory they are done in.
# Scratch is shared with every other plan, so calls come one after the other.


def plan_dense(
    team: ThreadTeam, scratch: Scratch, batch: ArrayBatch, q_heads: int, kv_heads: int, dim: int, page_size: int
) -> Frame:
    """A plan for `dense`."""
    shape = (q_heads, kv_heads, dim, page_size)
    return _plan_attention(team, scratch, batch, shape, (DENSE_STATE_BYTES, DENSE_ITEMS), _MANY, 0, 1)


def plan_sparse(
    team: ThreadTeam, scratch: Scratch, batch: ArrayBatch, q_heads: int, kv_heads: int, dim: int, page_size: int,
    *, index_heads: int, topk: int, block_size: int,
) -> Frame:  # fmt: skip
    """A plan for `sparse`."""
    each, shape = index_heads // kv_heads * topk, (q_heads, kv_heads, dim, page_size)
    sizes = SPARSE_STATE_BYTES, SPARSE_ITEMS
    return _plan_attention(team, scratch, batch, shape, sizes, each * block_size, each, block_size)


def plan_scores(
    team: ThreadTeam, scratch: Scratch, batch: ArrayBatch, heads: int, dim: int, page_size: int, block_size: int
) -> ScorePlan:
    """A plan for `score_blocks`."""
    span = max(1, SCORE_ROWS // heads)
    rows = -(-span * heads // ROWS) * ROWS
    ranges = sum(-(-int(n) // span) for n in np.diff(batch.query_start))
    items = np.empty((ranges, 3), np.int32)
    cut_ranges(batch.query_start, span, items)
    blocks = -(-int(batch.seq_lens.max(initial=0)) // block_size)
    frame = Frame(
        len(batch.positions), heads, dim, page_size, blocks, batch.page_table, batch.seq_lens, batch.positions,
        amx.tile_config(), items,
        scratch.get("score bytes", (team.size, score_room_bytes(dim, rows)), np.uint8),
        scratch.get("score limits", (team.size, 3, rows), np.int32),
        scratch.get("score tiles", (team.size, 2 * CHUNK // ROWS), np.int64),
    )  # fmt: skip
    return ScorePlan(frame, blocks)


def dense(
    team: ThreadTeam, plan: Frame, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """`Ops.dense_attention` into out bf16 [T, Hq, D] and lse float32 [T, Hq], decode and prefill."""
    team.run(launch_dense_items, plan.values, *_operands(q, k, v, sinks, out, lse), *_scales(q, k_scale, v_scale))


def sparse(
    team: ThreadTeam, plan: Frame, q: Tensor, k: Tensor, v: Tensor, picks: Tensor, block_size: int,
    out: Tensor, lse: Tensor, *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """`Ops.sparse_attention` into out bf16 [T, Hq, D] and lse float32 [T, Hq]; picks int32 [Hi, T, K]."""
    team.run(
        launch_sparse_items, plan.values, *_operands(q, k, v, sinks, out, lse), *_scales(q, k_scale, v_scale),
        picks.data_ptr(), picks.shape[0], picks.shape[2], block_size,
    )  # fmt: skip


def score_blocks(
    team: ThreadTeam, plan: ScorePlan, index_q: Tensor, index_k: Tensor, block_size: int, scores: Tensor,
    *, k_scale: float = 1.0,
) -> None:  # fmt: skip
    """`Ops.score_blocks` of score type "max" into scores float32 [Hi, T, NB]."""
    scale = np.float32(k_scale * index_q.shape[2] ** -0.5)
    team.run(
        launch_score_items, plan.frame.values, index_q.data_ptr(), index_k.data_ptr(), index_k.shape[0], block_size,
        scale, scores.data_ptr(),
    )  # fmt: skip


def pick_blocks(
    team: ThreadTeam, plan: ScorePlan, index_q: Tensor, index_k: Tensor, sparse: SparseAttentionConfig, scores: Tensor,
    picks: Tensor, *, k_scale: float = 1.0,
) -> None:  # fmt: skip
    """`Ops.pick_blocks` of score type "max" into picks int32 [Hi, T, topk], by way of scores float32 [Hi, T, NB]."""
    scale = np.float32(k_scale * index_q.shape[2] ** -0.5)
    team.run(
        launch_pick_blocks, plan.frame.values, index_q.data_ptr(), index_k.data_ptr(), index_k.shape[0],
        sparse.block_size, scale, scores.data_ptr(), sparse.init_blocks, sparse.local_blocks, picks.data_ptr(),
        sparse.topk,
    )  # fmt: skip


def picked(
    team: ThreadTeam, score_plan: ScorePlan, plan: Frame, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor,
    index_k: Tensor, sparse: SparseAttentionConfig, scores: Tensor, picks: Tensor, out: Tensor, lse: Tensor,
    *, index_scale: float = 1.0, k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """`Ops.picked_attention` of score type "max" into out bf16 [T, Hq, D]; the rest as `pick_blocks` and `sparse`."""
    scale = np.float32(index_scale * index_q.shape[2] ** -0.5)
    team.run(
        launch_picked, score_plan.frame.values, plan.values, index_q.data_ptr(), index_k.data_ptr(), index_k.shape[0],
        scale, scores.data_ptr(), picks.data_ptr(), index_q.shape[1], sparse.topk, sparse.block_size,
        sparse.init_blocks, sparse.local_blocks, *_operands(q, k, v, None, out, lse), *_scales(q, k_scale, v_scale),
    )  # fmt: skip


def _operands(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor) -> tuple[int, ...]:
    """As `amx_room.open_operands` takes them."""
    sink = 0 if sinks is None else sinks.data_ptr()
    return q.data_ptr(), k.data_ptr(), v.data_ptr(), k.shape[0], sink, out.data_ptr(), lse.data_ptr()


def _scales(q: Tensor, k_scale: float, v_scale: float) -> tuple[np.float32, np.float32]:
    return np.float32(k_scale * float(LOG2E) * q.shape[2] ** -0.5), np.float32(v_scale)


def _plan_attention(
    team: ThreadTeam, scratch: Scratch, batch: ArrayBatch, shape: tuple[int, int, int, int], sizes: tuple[int, int],
    most: int, picks_each: int, block_size: int,
) -> Frame:  # fmt: skip
    """Cut the work and find room for it; the frame is what `amx_room` reads.

    shape: query heads, KV heads, dim, page size; sizes: bytes of state of a range, items a thread; most: tokens of
    context a query reads; picks_each: blocks a KV head may pick for a token, 0: dense.
    """
    q_heads, heads, dim, page_size = shape
    tokens, group = len(batch.positions), q_heads // heads
    target = sizes[1] * team.size
    span = max(min(max(sizes[0] // (group * dim * 4), 1), -(-tokens * heads // target)), -(-ROWS // group))
    items, cut, ranges = _cut(batch, span, heads, target, most)
    threads, rows = team.size, -(-span * group // ROWS) * ROWS
    longest = -(-batch.page_table.shape[1] * page_size // block_size) if picks_each else 0
    slots = threads + cut * heads
    return Frame(
        tokens, *shape, batch.page_table, batch.seq_lens, batch.positions,
        amx.tile_config(), items, np.zeros(max(ranges * heads, 1), np.int64),
        scratch.get("bytes", (threads, -(-room_bytes(dim, rows) // LINE) * LINE), np.uint8),
        scratch.get("lanes", (threads, 2, ROWS), np.float32),
        scratch.get("marks", (threads, 3, ROWS), np.int32),
        scratch.get("tiles", (threads, 4, CHUNK // ROWS), np.int64),
        scratch.get("clean", (threads, CHUNK, dim), np.uint16),
        scratch.get("limits", (threads, 3, rows), np.int32),
        scratch.get("lists", (threads, 2 * longest + span * picks_each), np.int32),
        scratch.get("sums", (slots, rows, dim), np.float32),
        scratch.get("peaks", (slots, rows), np.float32),
        scratch.get("totals", (slots, rows), np.float32),
    )  # fmt: skip


def _cut(batch: ArrayBatch, span: int, heads: int, target: int, most: int) -> tuple[Array, int, int]:
    room = 64
    while True:
        items = np.empty((room, 7), np.int32)
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
    grain = 2 * CHUNK
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
