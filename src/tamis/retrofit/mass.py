"""How much of the attention the chosen blocks hold, seen while a model runs: in the engine, with its own kernels.

Shapes: n queries that are looked at, t tokens of context, b blocks, Hq/Hkv/Hi query, KV and index heads, D their dim.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tamis.config import SparseAttentionConfig
from tamis.engine.runner import Runner
from tamis.kernels import AttentionBatch, Ops
from tamis.kv import SparseKVPool
from tamis.retrofit.selection import block_sum

STRIDE = 61
"""Every so many positions a query is looked at; prime, so that all places within a block come up."""


@dataclass
class LayerMass:
    """Sums over the queries and index heads of one layer that were looked at."""

    captured: float = 0.0
    """Attention probability, mean over a group's heads, in the blocks that were chosen."""
    oracle: float = 0.0
    """The same in the blocks that hold most, forced ones included: no choice of as many blocks holds more."""
    count: int = 0


class MassMeter:
    """`Ops` that look at some of the queries that pass, and otherwise are those of `ops`."""

    def __init__(self, ops: Ops, pool: SparseKVPool, first: int, stride: int = STRIDE) -> None:
        """Look at queries at positions from `first` on, every `stride` of them."""
        self._ops = ops
        self._first, self._stride = first, stride
        self._layers = {pool.get_key_buffer(layer).data_ptr(): layer for layer in pool.layout.sparse_layers}
        self.layers = {layer: LayerMass() for layer in pool.layout.sparse_layers}
        """What was seen, by layer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def picked_attention(
        self, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, batch: AttentionBatch,
        sparse: SparseAttentionConfig, *, index_scale: float = 1.0, k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """See `Ops.picked_attention`."""
        rows = ((batch.positions >= self._first) & (batch.positions % self._stride == 0)).nonzero()[:, 0]
        # One sequence at a time is measured; a step of several is somebody else's.
        if len(rows) and batch.num_seqs == 1:
            some = AttentionBatch(
                batch.page_table, batch.seq_lens, torch.tensor([0, len(rows)], dtype=torch.int32), batch.positions[rows]
            )
            picks = self._ops.pick_blocks(index_q[rows], index_k, some, sparse, index_scale)
            mass = self._mass(q[rows], k, some, sparse, k_scale)
            best = self._ops.select_blocks(mass, some.positions, sparse)
            seen = self.layers[self._layers[k.data_ptr()]]
            seen.captured += _held(mass, picks)
            seen.oracle += _held(mass, best)
            seen.count += len(rows) * len(picks)
        return self._ops.picked_attention(
            q, k, v, index_q, index_k, batch, sparse, index_scale=index_scale, k_scale=k_scale, v_scale=v_scale
        )

    def _mass(
        self, q: Tensor, k: Tensor, batch: AttentionBatch, sparse: SparseAttentionConfig, k_scale: float
    ) -> Tensor:
        """Attention probability of q [n, Hq, D] over the whole context, by index head and block: fp32 [Hi, n, b]."""
        length = int(batch.seq_lens[0])
        keys = self._ops.gather_pages(k, batch.page_table[0, : -(-length // k.shape[2])], length, k_scale)
        queries = q.float().view(len(q), keys.shape[1], -1, q.shape[2]) * q.shape[2] ** -0.5
        logits = torch.einsum("nhgd,thd->hgnt", queries, keys)
        logits.masked_fill_(torch.arange(length) > batch.positions[:, None], -torch.inf)
        by_token = logits.softmax(-1).mean(1)
        # An index head that shares its KV head with others is held to the whole group's attention.
        return block_sum(by_token, sparse.block_size).repeat_interleave(sparse.index_heads // keys.shape[1], 0)


def _held(mass: Tensor, picks: Tensor) -> float:
    """Sum of mass [Hi, n, b] in picks int32 [Hi, n, K]."""
    chosen = mass.gather(-1, picks.long().clamp(min=0))
    return float(chosen.masked_fill(picks < 0, 0.0).sum(dtype=torch.float64))


@dataclass(frozen=True)
class Mass:
    """Attention probability in the chosen blocks, and in the best ones there are; shares of 1."""

    captured: float
    oracle: float
    by_layer: dict[int, tuple[float, float]]
    """Captured and oracle, by layer id."""

    @classmethod
    def of(cls, layers: Mapping[int, LayerMass]) -> "Mass":
        """Means, every layer counting the same."""
        by_layer = {layer: (seen.captured / seen.count, seen.oracle / seen.count) for layer, seen in layers.items()}
        captured, oracle = (math.fsum(pair[i] for pair in by_layer.values()) / len(by_layer) for i in (0, 1))
        return cls(captured, oracle, by_layer)


@contextlib.contextmanager
def metering(runner: Runner, first: int) -> Iterator[MassMeter]:
    """While this lasts, what passes through an idle engine's `runner` is looked at."""
    ops, layers = runner.ops, runner.layers
    meter = MassMeter(ops, runner.pool, first)
    # Whole layers in one call would pass the meter by.
    runner.ops, runner.layers = cast(Ops, meter), None
    try:
        yield meter
    finally:
        runner.ops, runner.layers = ops, layers
