"""`TorchModelOps`: the model's own path in plain torch, the specification of `ModelOps`."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tamis.kernels.linear import ExpertWeights, Gate, GatedWeights, HeadGroup, HeadProjection, Linear, Norm, Rope, Ropes
from tamis.kernels.quant import Matrix

TILE_BYTES = 1 << 21
"""Quantised weights are expanded this much at a time."""


class TorchModelOps:
    """See `ModelOps`."""

    name = "torch"

    def embed(self, table: Linear, token_ids: Tensor) -> Tensor:
        """See `ModelOps.embed`."""
        return table.weight[token_ids].dense(torch.float32)

    def heads(self, x: Tensor, norm: Norm, projections: Sequence[HeadProjection], ropes: Ropes) -> list[Tensor]:
        """See `ModelOps.heads`."""
        normed = rms_norm(x, norm)
        found: list[Tensor] = []
        for (linear, groups), rope in zip(projections, ropes, strict=False):
            parts = torch.split(
                project(normed.to(linear.dtype), linear), [group.heads * group.dim for group in groups], dim=-1
            )
            found += [_finish(part, group, rope) for part, group in zip(parts, groups, strict=True)]
        return found

    def add_projection(self, x: Tensor, y: Tensor, linear: Linear) -> None:
        """See `ModelOps.add_projection`."""
        x += project(y, linear)

    def add_gated(self, x: Tensor, norm: Norm, weights: GatedWeights) -> None:
        """See `ModelOps.add_gated`."""
        x += gated(rms_norm(x, norm).to(weights.gate_up.dtype), weights)

    def add_experts(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> None:
        """See `ModelOps.add_experts`."""
        wide = rms_norm(x, norm)
        inputs = wide.to(weights.routed.gate_up.dtype)
        if weights.shared is not None:
            x += gated(inputs, weights.shared)
        chosen, shares = route(wide, weights)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, slot = (chosen == expert).nonzero(as_tuple=True)
            out = gated(inputs[rows], weights.routed, expert).float()
            x.index_add_(0, rows, out * shares[rows, slot, None])

    def logits(self, x: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """See `ModelOps.logits`."""
        return project(rms_norm(x, norm).to(linear.dtype), linear).float()


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x / rms(x) * weight over the last dimension, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + norm.eps) * norm.weight


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the first channels of each head, fp32 [T, H, D]: channel i pairs with i + rotary_dim / 2; others pass."""
    cos, sin = (table[:, None] for table in rope)
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], dim=-1)


def _finish(part: Tensor, group: HeadGroup, rope: Rope) -> Tensor:
    heads = part.reshape(len(part), group.heads, group.dim).float()
    heads = heads if group.norm is None else rms_norm(heads, group.norm)
    return (apply_rope(heads, rope) if group.rotates else heads).to(part.dtype)


def project(x: Tensor, linear: Linear, expert: int | None = None) -> Tensor:
    """[T, inputs] -> [T, outputs] in x's dtype; quantised weights are expanded a tile of rows at a time."""
    matrix = linear.weight if expert is None else linear.weight[expert]
    bias = None if linear.bias is None else linear.bias.to(x.dtype)
    if not matrix.format.is_quantised:
        return F.linear(x, matrix.dense(x.dtype), bias)
    out = torch.cat([F.linear(x, tile.dense(x.dtype)) for tile in _tiles(matrix)], dim=-1)
    return out if bias is None else out + bias


def _tiles(matrix: Matrix) -> list[Matrix]:
    rows, width = matrix.shape
    step = max(1, TILE_BYTES // (4 * width))
    return [matrix[start : start + step] for start in range(0, rows, step)]


def gated(x: Tensor, weights: GatedWeights, expert: int | None = None) -> Tensor:
    """A gated MLP, or one expert of several: [T, C] -> [T, C]."""
    return project(apply_gate(project(x, weights.gate_up, expert), weights.gate), weights.down, expert)


def apply_gate(gate_up: Tensor, gate: Gate) -> Tensor:
    """[..., 2 I] (gates, then ups) -> [..., I]."""
    wide, up = gate_up.float().chunk(2, dim=-1)
    if not gate.clamped:
        return (F.silu(wide) * up).to(gate_up.dtype)
    wide, up = wide.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return ((up + 1) * wide * torch.sigmoid(gate.alpha * wide)).to(gate_up.dtype)


def route(x: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """fp32 [T, C] -> expert ids int64 [T, k] and their weights fp32 [T, k]."""
    scores = torch.sigmoid(F.linear(x, weights.router))
    # A stable sort, unlike topk, takes the lowest number first among equals.
    order = torch.sort(scores + weights.router_bias, dim=-1, descending=True, stable=True).indices
    chosen = order[:, : weights.topk]
    shares = scores.gather(1, chosen)
    return chosen, shares / shares.sum(dim=-1, keepdim=True) * weights.scaling
