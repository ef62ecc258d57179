"""One attention layer of any kind, reading and writing the sparse KV pool.

Shapes: T tokens of the step, C hidden size, Hq/Hkv/Hi query, KV and index heads, D and Di their dims.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tamis.config import LayerKind, ModelConfig
from tamis.kernels import AttentionBatch, Ops
from tamis.kv import LayerScales, SlotIds, SparseKVPool
from tamis.models.layers import RMSNorm, apply_rope, linear


@dataclass(frozen=True)
class StepContext:
    """What one step's layers need beside their input: where to write K and V, what to read, and with which kernels."""

    pool: SparseKVPool
    ops: Ops
    batch: AttentionBatch
    slots: SlotIds
    """The slot of each of the step's T tokens."""


class Attention(nn.Module):
    """Dense or block-sparse attention; the layer's kind decides which planes it writes (FACTS section 1).

    K and V of the step's tokens are written first and everything is read back from the pool, so that a token sees its
    own chunk rounded exactly as it would see a cached prefix.
    """

    def __init__(self, config: ModelConfig, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.layer_id = config, layer_id
        self.kind = config.layer_kinds[layer_id]
        dim = config.head_dim
        self.splits = [config.q_heads * dim, config.kv_heads * dim, config.kv_heads * dim, *self._index_splits()]
        self.qkv_proj = linear(config.hidden_size, sum(self.splits), dtype, config.qkv_bias)
        self.o_proj = linear(config.q_heads * dim, config.hidden_size, dtype, config.o_bias)
        self.q_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else nn.Identity()
        if config.sparse is not None and self.kind is not LayerKind.DENSE:
            index_dim = config.sparse.index_head_dim
            self.index_q_norm = RMSNorm(index_dim, config.norm_eps)
            self.index_k_norm = RMSNorm(index_dim, config.norm_eps)
            if self.kind is LayerKind.SPARSE_KV:
                self.index_o_proj = linear(config.sparse.index_heads * index_dim, config.hidden_size, dtype)

    def _index_splits(self) -> list[int]:
        """Rows of `qkv_proj` for index q, index k and index v, as far as this kind of layer has them."""
        if self.config.sparse is None or self.kind is LayerKind.DENSE:
            return []
        dim = self.config.sparse.index_head_dim
        value = [dim] if self.kind is LayerKind.SPARSE_KV else []
        return [self.config.sparse.index_heads * dim, dim, *value]

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], step: StepContext) -> Tensor:
        """[T, C] -> [T, C]."""
        q, k, v, *index = self.qkv_proj(x).split(self.splits, dim=-1)
        heads = (x.shape[0], -1, self.config.head_dim)
        q = apply_rope(self.q_norm(q.reshape(heads)), rope)
        k = apply_rope(self.k_norm(k.reshape(heads)), rope)
        v = v.reshape(heads)
        if self.kind is LayerKind.DENSE:
            step.pool.set_kv_buffer(self.layer_id, step.slots, k, v)
            return self._project(self._dense(q, step))
        return self._sparse(q, k, v, index, rope, step)

    def _project(self, attended: Tensor) -> Tensor:
        out: Tensor = self.o_proj(attended.flatten(1))
        return out

    def _dense(self, q: Tensor, step: StepContext) -> Tensor:
        keys, values = step.pool.get_kv_buffer(self.layer_id)
        scales = step.pool.layout.layer_scales(self.layer_id)
        return step.ops.dense_attention(q, keys, values, step.batch, k_scale=scales.k, v_scale=scales.v)

    def _sparse(
        self, q: Tensor, k: Tensor, v: Tensor, index: list[Tensor], rope: tuple[Tensor, Tensor], step: StepContext
    ) -> Tensor:
        sparse = self.config.sparse
        assert sparse is not None  # ModelConfig refuses sparse layers without it
        heads = (q.shape[0], -1, sparse.index_head_dim)
        index_q = apply_rope(self.index_q_norm(index[0].reshape(heads)), rope)
        index_k = apply_rope(self.index_k_norm(index[1].reshape(heads)), rope)
        index_v = index[2].reshape(heads) if self.kind is LayerKind.SPARSE_KV else None
        pool, ops, scales = step.pool, step.ops, step.pool.layout.layer_scales(self.layer_id)
        pool.set_fused_kv_index_buffer(self.layer_id, step.slots, k, v, index_k, index_v)
        index_keys = pool.get_index_k_buffer(self.layer_id)
        scores = ops.score_blocks(index_q, index_keys, step.batch, sparse, k_scale=scales.index_k)
        picks = ops.select_blocks(scores, step.batch.positions, sparse)
        picks = pool.make_resident(self.layer_id, picks)
        keys, values = pool.get_kv_buffer(self.layer_id)
        attended = ops.sparse_attention(
            q, keys, values, picks, step.batch, sparse.block_size, k_scale=scales.k, v_scale=scales.v
        )
        out = self._project(attended)
        return out if index_v is None else out + self._index_output(index_q, step, scales)

    def _index_output(self, index_q: Tensor, step: StepContext, scales: LayerScales) -> Tensor:
        """What the index branch of a K+V layer adds: its own attention over the whole context, projected."""
        keys, values = step.pool.get_index_kv_buffer(self.layer_id)
        own = step.ops.index_value_attention(index_q, keys, values, step.batch, scales.index_k, scales.index_v)
        out: Tensor = self.index_o_proj(own.flatten(1))
        return out
