"""One attention layer of any kind, reading and writing the sparse KV pool.

Shapes: T tokens of the step, C hidden size, Hq/Hkv/Hi query, KV and index heads, D and Di their dims.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tamis.config import LayerKind, ModelConfig, SparseAttentionConfig
from tamis.kernels import AttentionBatch, Ops
from tamis.kernels.dense import TorchModelOps
from tamis.kernels.linear import HeadGroup, HeadProjection, LayerRunner, Linear, ModelOps, Ropes
from tamis.kv import SlotIds, SparseKVPool
from tamis.models.layers import RMSNorm


def go_on() -> None:
    """Nobody wants to end the step."""


@dataclass(frozen=True)
class StepContext:
    """What one step's layers need beside their input: where to write K and V, what to read, and with which kernels."""

    pool: SparseKVPool
    ops: Ops
    batch: AttentionBatch
    slots: SlotIds
    """The slot of each of the step's T tokens."""
    model_ops: ModelOps = field(default_factory=TorchModelOps)
    """For everything but attention."""
    layers: LayerRunner | None = None
    """Runs whole layers in a piece, where it can."""
    before_layer: Callable[[], None] = go_on
    """Called before every layer; what it raises ends the step (Ctrl-C, which must not strike in a kernel)."""


class Attention(nn.Module):
    """Dense or block-sparse attention; the layer's kind decides which planes it writes (facts.md section 1).

    K and V of the step's tokens are written first and everything is read back from the pool, so that a token sees its
    own chunk rounded exactly as it would see a cached prefix.
    """

    def __init__(self, config: ModelConfig, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.layer_id = config, layer_id
        self.kind = config.layer_kinds[layer_id]
        dim, eps = config.head_dim, config.norm_eps
        self.q_norm = RMSNorm(dim, eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, eps) if config.qk_norm else None
        self.groups = [
            HeadGroup(config.q_heads, dim, self.q_norm, rotates=True),
            HeadGroup(config.kv_heads, dim, self.k_norm, rotates=True),
            HeadGroup(config.kv_heads, dim),
        ]
        self.index_groups: list[HeadGroup] = []
        if config.sparse is not None and self.kind is not LayerKind.DENSE:
            self._add_index_heads(config, config.sparse, dtype)
        outputs = sum(group.heads * group.dim for group in self.groups)
        self.qkv_proj = Linear(config.hidden_size, outputs, dtype, bias=config.qkv_bias)
        self.o_proj = Linear(config.q_heads * dim, config.hidden_size, dtype, bias=config.o_bias)

    def _add_index_heads(self, config: ModelConfig, sparse: SparseAttentionConfig, dtype: torch.dtype) -> None:
        heads, dim = sparse.index_heads, sparse.index_head_dim
        eps = config.norm_eps if config.index_branch is None else config.index_branch.norm_eps
        self.index_q_norm, self.index_k_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)
        groups = [
            HeadGroup(heads, dim, self.index_q_norm, rotates=True),
            HeadGroup(1, dim, self.index_k_norm, rotates=True),
        ]
        if self.kind is LayerKind.SPARSE_KV:
            groups.append(HeadGroup(1, dim))
            self.index_o_proj = Linear(heads * dim, config.hidden_size, dtype)
        if config.index_branch is None:
            self.groups += groups
        else:
            self.index_groups = groups
            self.index_proj = Linear(config.hidden_size, sum(group.heads * group.dim for group in groups), dtype)

    @property
    def projections(self) -> tuple[HeadProjection, ...]:
        """What gives a token's heads: q, k and v, in sparse layers also index q and k, and in K+V layers index v."""
        main = HeadProjection(self.qkv_proj, tuple(self.groups))
        if not self.index_groups:
            return (main,)
        return main, HeadProjection(self.index_proj, tuple(self.index_groups))

    def forward(self, x: Tensor, norm: RMSNorm, ropes: Ropes, step: StepContext) -> None:
        """x fp32 [T, C] += attention(norm(x))."""
        q, k, v, *index = step.model_ops.heads(x, norm, self.projections, ropes)
        if self.kind is LayerKind.DENSE:
            step.pool.set_kv_buffer(self.layer_id, step.slots, k, v)
            attended = self._dense(q, step)
        else:
            attended = self._sparse(q, k, v, index, step)
        step.model_ops.add_projection(x, attended.flatten(1), self.o_proj)
        if self.kind is LayerKind.SPARSE_KV:
            step.model_ops.add_projection(x, self._index_values(index[0], step).flatten(1), self.index_o_proj)

    def _dense(self, q: Tensor, step: StepContext) -> Tensor:
        keys, values = step.pool.get_kv_buffer(self.layer_id)
        scales = step.pool.layout.layer_scales(self.layer_id)
        return step.ops.dense_attention(q, keys, values, step.batch, k_scale=scales.k, v_scale=scales.v)

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor, index: list[Tensor], step: StepContext) -> Tensor:
        sparse = self.config.sparse
        assert sparse is not None  # ModelConfig refuses sparse layers without it
        index_q, index_k, *index_v = index
        pool, ops, scales = step.pool, step.ops, step.pool.layout.layer_scales(self.layer_id)
        pool.set_fused_kv_index_buffer(self.layer_id, step.slots, k, v, index_k, *index_v)
        index_keys = pool.get_index_k_buffer(self.layer_id)
        if pool.all_resident:
            keys, values = pool.get_kv_buffer(self.layer_id)
            return ops.picked_attention(
                q, keys, values, index_q, index_keys, step.batch, sparse, index_scale=scales.index_k,
                k_scale=scales.k, v_scale=scales.v,
            )  # fmt: skip
        picks = ops.pick_blocks(index_q, index_keys, step.batch, sparse, k_scale=scales.index_k)
        picks = pool.make_resident(self.layer_id, picks)
        keys, values = pool.get_kv_buffer(self.layer_id)
        return ops.sparse_attention(
            q, keys, values, picks, step.batch, sparse.block_size, k_scale=scales.k, v_scale=scales.v
        )

    def _index_values(self, index_q: Tensor, step: StepContext) -> Tensor:
        """The index branch's own attention of a K+V layer, over the whole context."""
        scales = step.pool.layout.layer_scales(self.layer_id)
        keys, values = step.pool.get_index_kv_buffer(self.layer_id)
        return step.ops.index_value_attention(index_q, keys, values, step.batch, scales.index_k, scales.index_v)
