"""Building blocks that every model shares: norm, rotary embedding, gated MLP, mixture of experts.

Shapes: T tokens, H heads, D head dim, C hidden size, I intermediate size, E experts. Modules are built on the meta
device; `loader.py` gives them their weights.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.config import ModelConfig, MoEConfig, RopeConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32, returned in x's dtype.

    `weight` is the effective multiplier: for checkpoints that store w of (1 + w), the loader has added the 1.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def rope_frequencies(rope: RopeConfig) -> Tensor:
    """Angle a position, fp32 [rotary_dim / 2], with the scaling applied (linear, llama3, yarn; arXiv 2309.00071)."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    freqs = 1.0 / rope.theta**exponents
    if rope.scaling == "linear":
        return freqs / rope.factor
    if rope.scaling == "llama3":
        return _llama3_frequencies(freqs, rope)
    if rope.scaling == "yarn":
        return _yarn_frequencies(freqs, rope)
    return freqs / torch.tensor(rope.frequency_factors) if rope.frequency_factors is not None else freqs


def _llama3_frequencies(freqs: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    rotations = rope.original_context * freqs / (2 * math.pi)
    keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return freqs * (keep + (1 - keep) / rope.factor)


def _yarn_frequencies(freqs: Tensor, rope: RopeConfig) -> Tensor:
    """As llama3, but the ramp runs over channel numbers between two rotation counts."""

    def channel(rotations: float) -> float:
        wavelength = rope.original_context / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(len(freqs), dtype=torch.float32) - low) / (max(high - low, 0.001))
    keep = 1 - ramp.clamp(0.0, 1.0)
    return freqs * (keep + (1 - keep) / rope.factor)


class RotaryEmbedding:
    """Cos and sin of a step's positions, computed once a step and used by every layer."""

    def __init__(self, rope: RopeConfig) -> None:
        self._freqs = rope_frequencies(rope)
        self._scale = rope.attention_factor

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int [T] -> cos, sin fp32 [T, 1, rotary_dim / 2]."""
        angles = (positions.float()[:, None] * self._freqs)[:, None, :]
        return angles.cos() * self._scale, angles.sin() * self._scale


def apply_rope(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first channels of each head of x [T, H, D]: channel i pairs with i + rotary_dim / 2; others pass."""
    cos, sin = table
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return rotated if 2 * half == x.shape[-1] else torch.cat([rotated, x[..., 2 * half :]], dim=-1)


def linear(inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False) -> nn.Linear:
    """A projection without storage yet."""
    return nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=dtype).requires_grad_(False)


def gate_activation(config: ModelConfig, gate_up: Tensor) -> Tensor:
    """[..., 2 I] (gate, then up) -> [..., I], by the model's activation (FACTS section 3)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if config.activation == "silu":
        return F.silu(gate) * up
    gate = gate.clamp(max=config.swiglu_limit)
    up = up.clamp(-config.swiglu_limit, config.swiglu_limit)
    return (up + 1) * gate * torch.sigmoid(config.swiglu_alpha * gate)


class GatedMLP(nn.Module):
    """down(act(gate(x), up(x))), gate and up in one projection."""

    def __init__(self, config: ModelConfig, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.gate_up_proj = linear(config.hidden_size, 2 * intermediate_size, dtype, config.mlp_bias)
        self.down_proj = linear(intermediate_size, config.hidden_size, dtype, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, C]."""
        out: Tensor = self.down_proj(gate_activation(self.config, self.gate_up_proj(x)))
        return out


class MixtureOfExperts(nn.Module):
    """Sigmoid router with a selection bias, top-k routed experts and a shared one (FACTS section 3)."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.moe = config, moe
        experts, hidden, inter = moe.num_experts, config.hidden_size, moe.intermediate_size

        def empty(*shape: int, kind: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=kind, device="meta"), requires_grad=False)

        # The router stays in fp32: a rounded score would choose another expert.
        self.router = empty(experts, hidden, kind=torch.float32)
        self.router_bias = empty(experts, kind=torch.float32)
        self.gate_up_proj = empty(experts, 2 * inter, hidden)
        self.down_proj = empty(experts, hidden, inter)
        shared = moe.shared_intermediate_size
        self.shared_experts = GatedMLP(config, shared, dtype) if shared else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, C] -> expert ids int64 [T, k] and their weights fp32 [T, k], which sum to routed_scaling_factor."""
        scores = torch.sigmoid(F.linear(x.float(), self.router))
        chosen = torch.topk(scores + self.router_bias, self.moe.experts_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(dim=-1, keepdim=True) * self.moe.routed_scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, C]."""
        chosen, weights = self.route(x)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, slot = (chosen == expert).nonzero(as_tuple=True)
            inner = gate_activation(self.config, F.linear(x[rows], self.gate_up_proj[expert]))
            part = F.linear(inner, self.down_proj[expert]).float() * weights[rows, slot, None]
            out.index_add_(0, rows, part)
        routed = out.to(x.dtype)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)
