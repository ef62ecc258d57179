"""Random weights of the model's own path, in any format."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tamis.kernels.linear import ExpertWeights, Gate, GatedWeights, HeadGroup, Linear
from tamis.kernels.quant import Format, Matrix, encode, grouped

CLAMPED = Gate(clamped=True, alpha=1.702, limit=1.5)


@dataclass(frozen=True)
class RandomNorm:
    """An RMS norm whose weights matter."""

    weight: Tensor
    eps: float = 1e-6


def random_norm(dim: int) -> RandomNorm:
    """Weights around 1."""
    return RandomNorm(torch.rand(dim) + 0.5)


def random_matrix(form: Format, shape: tuple[int, ...]) -> Matrix:
    """Numbers of about width ** -0.5, in `form`."""
    values = torch.randn(shape) * shape[-1] ** -0.5
    if form is not Format.INT4_CENTRED:
        return encode(values, form)
    scales = grouped(values).abs().amax(dim=-1).div(8).half()
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    return Matrix(form, packed, scales)


def random_linear(
    inputs: int, outputs: int, dtype: torch.dtype, form: Format, *, experts: int | None = None, bias: bool = False
) -> Linear:
    """A projection with weights."""
    linear = Linear(inputs, outputs, dtype, experts=experts, bias=bias)
    linear.weight = random_matrix(form, linear.shape)
    if bias:
        linear.bias = nn.Parameter(torch.randn(outputs) * 0.1, requires_grad=False)
    return linear


def random_gated(
    hidden: int, inter: int, dtype: torch.dtype, form: Format, gate: Gate, *, experts: int | None = None,
    bias: bool = False,
) -> GatedWeights:  # fmt: skip
    """A gated MLP, or the experts of one layer."""
    return GatedWeights(
        random_linear(hidden, 2 * inter, dtype, form, experts=experts, bias=bias),
        random_linear(inter, hidden, dtype, form, experts=experts, bias=bias),
        gate,
    )


def random_experts(
    hidden: int, inter: int, dtype: torch.dtype, form: Format, gate: Gate, *, experts: int = 6, topk: int = 3,
    shared: int = 0,
) -> ExpertWeights:  # fmt: skip
    """A layer of routed experts, with a shared one of `shared` inner numbers where that is not 0."""
    return ExpertWeights(
        torch.randn(experts, hidden) * hidden**-0.5, torch.randn(experts) * 0.1, topk, 2.0,
        random_gated(hidden, inter, dtype, form, gate, experts=experts),
        random_gated(hidden, shared, dtype, form, gate, bias=True) if shared else None,
    )  # fmt: skip


def random_groups(dim: int = 64, index_dim: int = 32) -> list[HeadGroup]:
    """Queries, keys, values and an index key."""
    return [
        HeadGroup(4, dim, random_norm(dim), rotates=True),
        HeadGroup(2, dim, random_norm(dim), rotates=True),
        HeadGroup(2, dim),
        HeadGroup(1, index_dim, random_norm(index_dim), rotates=True),
    ]
