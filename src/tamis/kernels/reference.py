"""Every operation in plain torch, summed in fp32: the specification that other backends are tested against.

Sequences are taken one at a time, so that a row's result cannot depend on its neighbours in the batch. What a plane
holds outside the tokens a query sees may be anything, NaN included: pages are gathered by the page table, cut to the
sequence's length, and hidden tokens are masked by replacement, never by multiplying with 0.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, overload

import torch
from torch import Tensor

from tamis.config import SparseAttentionConfig
from tamis.kernels.checks import (
    check_attention,
    check_fits,
    check_lengths,
    check_pages,
    check_picks,
    check_scores,
    check_write,
)
from tamis.kernels.ops import AttentionBatch
from tamis.kernels.paging import gather_pages, write_slots

MAX_SCORES = 1 << 24
"""Token scores held at a time: longer steps are cut into parts by query row."""

INF = float("inf")
NEG_INF = float("-inf")
LOG2_E = math.log2(math.e)


class ReferenceOps:
    """`ops.Ops` in torch, on any device; each method does what the protocol says."""

    name = "reference"

    def close(self) -> None:
        """Nothing to end."""

    def write_pages(self, plane: Tensor, slots: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """See `Ops.write_pages`; raises KernelInputError on slots outside the plane or values of another shape."""
        check_write(plane, slots, values)
        write_slots(plane, slots, values, scale)

    def gather_pages(self, plane: Tensor, pages: Tensor, length: int, scale: float = 1.0) -> Tensor:
        """See `Ops.gather_pages`; raises KernelInputError on too few pages and on page ids outside the plane."""
        check_pages(pages[: -(-max(0, length) // plane.shape[2])], plane)
        return gather_pages(plane, pages, length, scale)

    def score_blocks(
        self, index_q: Tensor, index_k: Tensor, batch: AttentionBatch, sparse: SparseAttentionConfig,
        k_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """See `Ops.score_blocks` (facts.md section 1); raises KernelInputError on operands that do not fit."""
        check_attention(index_q, index_k, index_k, batch, kv_heads=1)
        tokens, heads, dim = index_q.shape
        size = sparse.block_size
        longest = -(-max(_lengths(batch), default=0) // size)
        scores = index_q.new_full((heads, tokens, longest), NEG_INF, dtype=torch.float32)
        for seq in _sequences(batch, index_k):
            keys = gather_pages(index_k, seq.pages, seq.length, k_scale)[:, 0]
            places = torch.arange(seq.length, device=keys.device)
            for part in _parts(seq, heads * seq.length):
                logits = (index_q[part.rows].float().transpose(0, 1) * dim**-0.5) @ keys.T
                logits.nan_to_num_(nan=NEG_INF, posinf=INF, neginf=NEG_INF)
                logits.masked_fill_(places > part.positions[:, None], NEG_INF)
                by_block = _score(logits, sparse)
                scores[:, part.rows, : by_block.shape[2]] = by_block
        return scores

    def select_blocks(self, scores: Tensor, positions: Tensor, sparse: SparseAttentionConfig) -> Tensor:
        """See `Ops.select_blocks` (facts.md section 1); raises KernelInputError on operands that do not fit."""
        check_scores(scores, positions)
        blocks = scores.shape[2]
        if scores.numel() == 0:
            return scores.new_full((*scores.shape[:2], sparse.topk), -1, dtype=torch.int32)
        ids = torch.arange(blocks, device=scores.device)
        own = positions.div(sparse.block_size, rounding_mode="floor")[:, None]
        seen = ids <= own
        forced = seen & ((ids < sparse.init_blocks) | (ids > own - sparse.local_blocks))
        # Forced blocks are counted, not given a high score: a genuine +inf must not push one out.
        open_slots = sparse.topk - forced.sum(-1, keepdim=True)
        rivals = scores.float().nan_to_num(nan=NEG_INF, posinf=INF, neginf=NEG_INF)
        rivals.masked_fill_(forced | ~seen, NEG_INF)
        best = rivals.topk(min(sparse.topk, blocks), dim=-1).values
        bar = best.gather(-1, (open_slots.clamp(1, best.shape[-1]) - 1).expand(len(best), -1, 1))
        above = rivals > bar
        level = (rivals == bar) & (bar > NEG_INF)
        room = open_slots - above.sum(-1, keepdim=True)
        chosen = forced | above | (level & (level.cumsum(-1) <= room))
        # Left-justify: block b goes to the place that counts the chosen blocks before it, the others to a spare column.
        width = min(sparse.topk, blocks)
        places = torch.where(chosen, chosen.cumsum(-1) - 1, width)
        picks = places.new_full((*scores.shape[:2], width + 1), -1).scatter_(-1, places, ids.expand_as(places))
        padded = scores.new_full((*scores.shape[:2], sparse.topk), -1, dtype=torch.int32)
        padded[..., :width] = picks[..., :width]
        return padded

    def pick_blocks(
        self, index_q: Tensor, index_k: Tensor, batch: AttentionBatch, sparse: SparseAttentionConfig,
        k_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """See `Ops.pick_blocks`."""
        scores = self.score_blocks(index_q, index_k, batch, sparse, k_scale)
        return self.select_blocks(scores, batch.positions, sparse)

    @overload
    def sparse_attention(
        self, q: Tensor, k: Tensor, v: Tensor, picks: Tensor, batch: AttentionBatch, block_size: int,
        *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, return_lse: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def sparse_attention(
        self, q: Tensor, k: Tensor, v: Tensor, picks: Tensor, batch: AttentionBatch, block_size: int,
        *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def sparse_attention(
        self, q: Tensor, k: Tensor, v: Tensor, picks: Tensor, batch: AttentionBatch, block_size: int,
        *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """See `Ops.sparse_attention`; raises KernelInputError on operands that do not fit."""
        check_attention(q, k, v, batch, sinks)
        check_picks(picks, q, k, block_size)
        out, lse = _attention(q, k, v, batch, _Selection(picks, block_size), sinks, k_scale, v_scale)
        return (out, lse) if return_lse else out

    def picked_attention(
        self, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, batch: AttentionBatch,
        sparse: SparseAttentionConfig, *, index_scale: float = 1.0, k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """See `Ops.picked_attention`."""
        picks = self.pick_blocks(index_q, index_k, batch, sparse, index_scale)
        return self.sparse_attention(q, k, v, picks, batch, sparse.block_size, k_scale=k_scale, v_scale=v_scale)

    @overload
    def dense_attention(
        self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch,
        *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, return_lse: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def dense_attention(
        self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch,
        *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def dense_attention(
        self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch,
        *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """See `Ops.dense_attention`; raises KernelInputError on operands that do not fit."""
        check_attention(q, k, v, batch, sinks)
        out, lse = _attention(q, k, v, batch, None, sinks, k_scale, v_scale)
        return (out, lse) if return_lse else out

    @overload
    def index_value_attention(
        self, index_q: Tensor, index_k: Tensor, index_v: Tensor, batch: AttentionBatch,
        k_scale: float = 1.0, v_scale: float = 1.0, *, return_lse: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def index_value_attention(
        self, index_q: Tensor, index_k: Tensor, index_v: Tensor, batch: AttentionBatch,
        k_scale: float = 1.0, v_scale: float = 1.0, *, return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def index_value_attention(
        self, index_q: Tensor, index_k: Tensor, index_v: Tensor, batch: AttentionBatch,
        k_scale: float = 1.0, v_scale: float = 1.0, *, return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """See `Ops.index_value_attention` (facts.md section 1); raises KernelInputError on operands that do not fit."""
        check_attention(index_q, index_k, index_v, batch, kv_heads=1)
        out, lse = _attention(index_q, index_k, index_v, batch, None, None, k_scale, v_scale)
        return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Sequence:
    """What of one sequence is computed: rows of the step, and the context they may look at."""

    rows: slice
    length: int
    """Tokens of context in the pool."""
    pages: Tensor
    """int [ceil(length / page_size)]"""
    positions: Tensor
    """int64 [rows]: the last position each query sees; never past the context."""


@dataclass(frozen=True)
class _Selection:
    picks: Tensor
    block_size: int

    def blocks(self, seq: _Sequence, kv_heads: int) -> Tensor:
        """The picks of a sequence as a mask bool [Hkv, rows, blocks of the context]: a union, whatever the order.

        Ids below 0 and past the query's own block select nothing.
        """
        count = -(-seq.length // self.block_size)
        own = seq.positions.div(self.block_size, rounding_mode="floor")[:, None]
        picks = self.picks[:, seq.rows].long()
        ids = picks.reshape(kv_heads, -1, *picks.shape[1:]).transpose(1, 2).flatten(2)
        mask = torch.zeros((*ids.shape[:2], count + 1), dtype=torch.bool, device=ids.device)
        mask.scatter_(2, torch.where((ids >= 0) & (ids <= own), ids, count), True)
        return mask[..., :count]


def _lengths(batch: AttentionBatch) -> list[int]:
    lengths: list[int] = batch.seq_lens.tolist()
    check_lengths(lengths)
    return lengths


def _sequences(batch: AttentionBatch, plane: Tensor) -> Iterator[_Sequence]:
    """The sequences that have both queries and a context."""
    starts = batch.query_start.tolist()
    for row, length in enumerate(_lengths(batch)):
        rows = slice(starts[row], starts[row + 1])
        if rows.start == rows.stop or length == 0:
            continue
        check_fits(row, length, batch.page_table.shape[1], plane.shape[2])
        pages = batch.page_table[row, : -(-length // plane.shape[2])]
        check_pages(pages, plane)
        yield _Sequence(rows, length, pages, batch.positions[rows].long().clamp(max=length - 1))


def _parts(seq: _Sequence, scores_per_row: int) -> Iterator[_Sequence]:
    """The sequence cut by query rows, so that a part has at most MAX_SCORES scores (or one row)."""
    step = max(1, MAX_SCORES // max(1, scores_per_row))
    for start in range(seq.rows.start, seq.rows.stop, step):
        rows = slice(start, min(start + step, seq.rows.stop))
        first = rows.start - seq.rows.start
        yield replace(seq, rows=rows, positions=seq.positions[first : first + rows.stop - rows.start])


def _score(logits: Tensor, sparse: SparseAttentionConfig) -> Tensor:
    """Token scores [Hi, t, n] as block scores [Hi, t, blocks]; tokens that do not count are -inf."""
    tokens, size = logits.shape[2], sparse.block_size
    if tokens > size and tokens % size:
        logits = torch.nn.functional.pad(logits, (0, -tokens % size), value=NEG_INF)
    # A context shorter than a block is not padded: the block may be far larger than any memory.
    by_block = logits.view(*logits.shape[:2], -1, min(tokens, size))
    return by_block.amax(-1) if sparse.score_type == "max" else by_block.logsumexp(-1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, selection: _Selection | None, sinks: Tensor | None,
    k_scale: float, v_scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention, over the selected blocks only if there is a selection: out [T, Hq, D], lse fp32 [T, Hq]."""
    q_heads, kv_heads = q.shape[1], k.shape[1]
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], NEG_INF, dtype=torch.float32)
    if sinks is not None:
        sinks = sinks.float()
        lse[:] = sinks  # of the rows that see no keys; the others are overwritten
    for seq in _sequences(batch, k):
        places, keys, values = _read(k, v, seq, selection, k_scale, v_scale)
        if len(places) == 0:
            continue
        for part in _parts(seq, q_heads * len(places)):
            visible = (places <= part.positions[:, None])[None]
            if selection is not None:
                visible = visible & selection.blocks(part, kv_heads)[..., places // selection.block_size]
            out[part.rows], lse[part.rows] = _attend(q[part.rows].float(), keys, values, visible, sinks)
    return out, lse


def _read(
    k: Tensor, v: Tensor, seq: _Sequence, selection: _Selection | None, k_scale: float, v_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that some query of the sequence selected: positions int64 [m], ascending, K and V [m, Hkv, D].

    Only pages that hold such tokens are gathered. What else lies in them is dropped, so that sums run over the same
    tokens in the same order whatever the page size.
    """
    (_, kv_heads, page_size, _), length = k.shape, seq.length
    places = torch.arange(length, device=k.device)
    if selection is None:
        return places, gather_pages(k, seq.pages, length, k_scale), gather_pages(v, seq.pages, length, v_scale)
    selected = selection.blocks(seq, kv_heads).any(0).any(0)[places // selection.block_size]
    columns = torch.unique_consecutive(places[selected] // page_size)
    whole = (columns[:, None] * page_size + torch.arange(page_size, device=k.device)).flatten()
    whole = whole[whole < length]
    pages, kept = seq.pages[columns], selected[whole]
    keys = gather_pages(k, pages, len(whole), k_scale)
    values = gather_pages(v, pages, len(whole), v_scale)
    return (whole, keys, values) if bool(kept.all()) else (whole[kept], keys[kept], values[kept])


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax attention over m gathered tokens, in fp32.

    q [t, Hq, D]; k, v [m, Hkv, D]; visible bool [Hkv or 1, t, m]; sinks [Hq]. Returns [t, Hq, D] and the log-sum-exp
    of the scaled logits, sink included, [t, Hq]; zeros and -inf where nothing is visible.
    """
    (rows, _, dim), kv_heads = q.shape, k.shape[1]
    # Logits are kept in base 2: torch's exp is several times slower where it meets -inf, its exp2 is not.
    queries = q.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3) * (LOG2_E * dim**-0.5)
    visible = visible[:, None]
    logits = (queries.flatten(1, 2) @ k.permute(1, 2, 0)).view(*queries.shape[:3], -1)  # [Hkv, group, t, m]
    logits.masked_fill_(~visible, NEG_INF)
    peak = logits.amax(-1, keepdim=True)
    sink = None if sinks is None else sinks.view(kv_heads, -1, 1, 1) * LOG2_E
    if sink is not None:
        peak = peak.maximum(sink)
    peak = peak.masked_fill(peak == NEG_INF, 0.0)  # -inf - -inf would be NaN
    weights = logits.sub_(peak).exp2_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - peak).exp2()
    out = _weighted_sum(weights, v, visible) / total.masked_fill(total == 0.0, 1.0)
    lse = ((peak + total.log2()) / LOG2_E)[..., 0]
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1)


def _weighted_sum(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Sum of values [m, Hkv, D] under weights [Hkv, G, t, m], hidden tokens left out: [Hkv, G, t, D].

    A hidden token has weight 0, but 0 * NaN is NaN: where a product is not finite, the values that are not are taken
    out and given back only to the rows that see them.
    """
    by_head = values.transpose(0, 1)
    shape = (*weights.shape[:3], values.shape[2])
    total = (weights.flatten(1, 2) @ by_head).view(shape)
    if bool(total.isfinite().all()):
        return total
    total = (weights.flatten(1, 2) @ by_head.masked_fill(~by_head.isfinite(), 0.0)).view(shape)
    poisons = (INF, by_head == INF), (NEG_INF, by_head == NEG_INF), (float("nan"), by_head.isnan())
    for value, found in poisons:
        seen = visible.float() @ found.float()[:, None] > 0
        total = total + torch.zeros_like(total[:, :1]).masked_fill(seen, value)
    return total
