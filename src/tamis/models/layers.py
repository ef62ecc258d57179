"""Building blocks that every model shares: norm, rotary embedding, gated MLP, mixture of experts.

Modules hold weights and say what is computed with them; how is the business of the step's `ModelOps`. They are built
without storage; `loader.py` gives them their weights.
"""

import math

import torch
from torch import Tensor, nn

from tamis.config import ModelConfig, MoEConfig, RopeConfig
from tamis.kernels.linear import ExpertWeights, Gate, GatedWeights, Linear, ModelOps, Rope


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension.

    `weight` is the effective multiplier: for checkpoints that store w of (1 + w), the loader has added the 1.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32, device="meta"), requires_grad=False)


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

    def table(self, positions: Tensor) -> Rope:
        """Positions int [T] -> cos, sin fp32 [T, rotary_dim / 2]."""
        angles = positions.float()[:, None] * self._freqs
        return angles.cos() * self._scale, angles.sin() * self._scale


def gate_of(config: ModelConfig) -> Gate:
    """The activation of a model's gated MLPs."""
    if config.activation == "silu":
        return Gate()
    return Gate(clamped=True, alpha=config.swiglu_alpha, limit=config.swiglu_limit)


class GatedMLP(nn.Module):
    """down(act(gate(x), up(x))), gate and up in one projection."""

    def __init__(self, config: ModelConfig, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        bias = config.mlp_bias
        self.gate_up_proj = Linear(config.hidden_size, 2 * intermediate_size, dtype, bias=bias)
        self.down_proj = Linear(intermediate_size, config.hidden_size, dtype, bias=bias)
        self.weights = GatedWeights(self.gate_up_proj, self.down_proj, gate_of(config))

    def forward(self, x: Tensor, norm: RMSNorm, ops: ModelOps) -> None:
        """x [T, C] += MLP(norm(x))."""
        ops.add_gated(x, norm, self.weights)


class MixtureOfExperts(nn.Module):
    """Sigmoid router with a selection bias, top-k routed experts and a shared one (facts.md section 3)."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.moe = moe
        experts, hidden, inter = moe.num_experts, config.hidden_size, moe.intermediate_size
        # The router stays in fp32: a rounded score would choose another expert.
        self.router = nn.Parameter(torch.empty(experts, hidden, device="meta"), requires_grad=False)
        self.router_bias = nn.Parameter(torch.empty(experts, device="meta"), requires_grad=False)
        self.gate_up_proj = Linear(hidden, 2 * inter, dtype, experts=experts)
        self.down_proj = Linear(inter, hidden, dtype, experts=experts)
        self.routed = GatedWeights(self.gate_up_proj, self.down_proj, gate_of(config))
        shared = moe.shared_intermediate_size
        self.shared_experts = GatedMLP(config, shared, dtype) if shared else None

    @property
    def weights(self) -> ExpertWeights:
        """What the kernels need of this layer."""
        shared = None if self.shared_experts is None else self.shared_experts.weights
        moe = self.moe
        return ExpertWeights(
            self.router, self.router_bias, moe.experts_per_token, moe.routed_scaling_factor, self.routed, shared
        )

    def forward(self, x: Tensor, norm: RMSNorm, ops: ModelOps) -> None:
        """x [T, C] += experts(norm(x))."""
        ops.add_experts(x, norm, self.weights)
