"""What a weight plan is: for each parameter of the model, the checkpoint tensors that fill it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and the part of a parameter it fills."""

    name: str
    shape: tuple[int, ...]
    """As stored, rows first."""
    into: tuple[slice | int, ...] = ()
    """Index of the parameter's part; empty: all of it."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Applied to the tensor before it is copied in."""


@dataclass(frozen=True)
class WeightPlan:
    """Which checkpoint tensors fill which parameter, and which may be there without being read."""

    parameters: dict[str, tuple[Piece, ...]]
    ignored: tuple[str, ...] = field(default=())
    """Regular expressions, matched from the start of a name."""


def rows(pieces: list[tuple[str, tuple[int, ...], Callable[[Tensor], Tensor] | None]]) -> tuple[Piece, ...]:
    """Pieces (name, shape, transform) stacked along the first dimension of one parameter."""
    placed, start = [], 0
    for name, shape, transform in pieces:
        placed.append(Piece(name, shape, (slice(start, start + shape[0]),), transform))
        start += shape[0]
    return tuple(placed)


def plus_one(weight: Tensor) -> Tensor:
    """The effective multiplier of a Gemma norm, which stores w of x * (1 + w); exact in fp32."""
    return weight.float() + 1


def half_split_rows(heads: int) -> Callable[[Tensor], Tensor]:
    """Undo GGUF's llama row order: it interleaves the two halves of each rotary head (rows or bias entries)."""

    def reorder(weight: Tensor) -> Tensor:
        pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape)

    return reorder
