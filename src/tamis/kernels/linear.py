"""The model's own path: what layers compute beside attention, and the weights they compute it with.

One `ModelOps` protocol, as for attention: `kernels/dense.py` is plain torch and the specification, and
`kernels/cpu/model.py` is Numba where few rows are computed and torch's matrix products where many are.

Shapes: T tokens, C hidden size, I intermediate size, E experts. The residual stream `x` is fp32 [T, C] and is added to
in place; what goes into and comes out of a projection is in the model's dtype, sums are fp32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tamis.config import SparseAttentionConfig
from tamis.kernels.ops import AttentionBatch, LayerPlanes
from tamis.kernels.quant import Matrix


class Linear(nn.Module):
    """A projection from `inputs` to `outputs`, or one for each of `experts`; its storage comes with its weights."""

    def __init__(
        self, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = False, experts: int | None = None
    ) -> None:
        super().__init__()
        self.shape = (outputs, inputs) if experts is None else (experts, outputs, inputs)
        self.dtype = dtype
        """Of inputs and outputs; how the weight is stored is its own affair."""
        self._weight: Matrix | None = None
        empty = torch.empty(outputs, dtype=torch.float32, device="meta")
        self.bias = nn.Parameter(empty, requires_grad=False) if bias else None

    @property
    def weight(self) -> Matrix:
        """[outputs, inputs], or [experts, outputs, inputs]."""
        assert self._weight is not None, "the weight is used before it was loaded"
        return self._weight

    @weight.setter
    def weight(self, weight: Matrix) -> None:
        assert weight.shape == self.shape, f"a weight of {weight.shape} for a projection of {self.shape}"
        self._weight = weight


class Norm(Protocol):
    """An RMS norm: x / rms(x) * weight."""

    @property
    def weight(self) -> Tensor:
        """fp32 [dim]."""

    @property
    def eps(self) -> float:
        """Added to the mean square."""


@dataclass(frozen=True)
class HeadGroup:
    """Neighbouring outputs of a projection that are heads of one kind."""

    heads: int
    dim: int
    norm: Norm | None = None
    """Over each head, before it rotates."""
    rotates: bool = False


class HeadProjection(NamedTuple):
    """A projection and the heads it gives."""

    linear: Linear
    groups: tuple[HeadGroup, ...]


@dataclass(frozen=True)
class Gate:
    """How gate and up become one: silu(gate) * up, or clamped (up + 1) * gate * sigmoid(alpha * gate) (facts.md 3)."""

    clamped: bool = False
    alpha: float = 1.0
    limit: float = 0.0


@dataclass(frozen=True)
class GatedWeights:
    """down(gate(gate_up(x))); `gate_up` gives I gates, then I ups."""

    gate_up: Linear
    down: Linear
    gate: Gate


@dataclass(frozen=True)
class ExpertWeights:
    """Routed experts behind a sigmoid router with a selection bias, and one that every token takes."""

    router: Tensor
    """fp32 [E, C]."""
    router_bias: Tensor
    """fp32 [E], counts for the choice alone."""
    topk: int
    scaling: float
    """The weights of a token's experts sum to this."""
    routed: GatedWeights
    shared: GatedWeights | None


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """A whole decoder layer, for backends that run one in a piece."""

    norm: Norm
    heads: tuple[HeadProjection, ...]
    """q, k, v; in sparse layers index q and index k; in K+V layers index v: from one projection, or the index heads
    from another one."""
    o: Linear
    mlp_norm: Norm
    mlp: GatedWeights | ExpertWeights
    sparse: SparseAttentionConfig | None
    """None: a dense layer."""

    @property
    def routed(self) -> ExpertWeights | None:
        """The MLP, where it has experts."""
        return self.mlp if isinstance(self.mlp, ExpertWeights) else None

    @property
    def shared(self) -> GatedWeights | None:
        """What every token takes: the shared expert, or the whole MLP."""
        return self.mlp.shared if isinstance(self.mlp, ExpertWeights) else self.mlp

    @property
    def gated(self) -> GatedWeights:
        """The routed experts, or the whole MLP."""
        return self.mlp.routed if isinstance(self.mlp, ExpertWeights) else self.mlp


Rope = tuple[Tensor, Tensor]
"""cos and sin of the step's positions, fp32 [T, rotary_dim / 2]."""
Ropes = tuple[Rope, Rope]
"""Of the first projection of a layer's heads, and of a second one, where the index heads have their own."""


class ModelOps(Protocol):
    """The operations between attention layers."""

    name: str

    def embed(self, table: Linear, token_ids: Tensor) -> Tensor:
        """Rows of an embedding table: int64 [T] -> fp32 [T, C]."""

    def heads(self, x: Tensor, norm: Norm, projections: Sequence[HeadProjection], ropes: Ropes) -> list[Tensor]:
        """Project norm(x) and finish each head: its norm, then its rotation (channel i with i + rotary_dim / 2).

        Returns [T, heads, dim] for each group of each projection, contiguous. The next call may overwrite them.
        """

    def add_projection(self, x: Tensor, y: Tensor, linear: Linear) -> None:
        """x += linear(y)."""

    def add_gated(self, x: Tensor, norm: Norm, weights: GatedWeights) -> None:
        """x += the gated MLP of norm(x)."""

    def add_experts(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> None:
        """x += the weighted sum of the chosen experts of norm(x), and the shared one.

        An expert is chosen by sigmoid score + bias, the lowest number first among equals; its weight is its score over
        the sum of the chosen ones', times the scaling.
        """

    def logits(self, x: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """linear(norm(x)) in fp32 [T, outputs]."""


class LayerRunner(Protocol):
    """Runs whole decoder layers in a piece, where it can."""

    def run(
        self, weights: Sequence[LayerWeights], x: Tensor, ropes: Ropes, open_layer: Callable[[int], LayerPlanes],
        batch: AttentionBatch,
    ) -> int:  # fmt: skip
        """x fp32 [T, C] += the first so many of these layers, K and V written to their planes; how many were taken.

        `open_layer(i)` gives the planes of the i-th (`SparseKVPool.open_layer`), asked for only where the layer may be
        taken. Results are those of `ModelOps` and `Ops` called one by one.
        """
