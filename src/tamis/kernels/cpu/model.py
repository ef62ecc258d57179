"""`CpuModelOps`: the model's own path on the CPU, in Numba for few rows and around torch's matrix products for many."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tamis.kernels.cpu import amx_multiply, experts, many, matvec
from tamis.kernels.cpu.dots import ROWS
from tamis.kernels.cpu.lowfloat import as_array
from tamis.kernels.cpu.scratch import Scratch
from tamis.kernels.cpu.threads import ThreadTeam
from tamis.kernels.dense import TorchModelOps, route
from tamis.kernels.linear import ExpertWeights, Gate, GatedWeights, HeadGroup, HeadProjection, Linear, Norm, Rope, Ropes
from tamis.kernels.quant import GROUP

logger = logging.getLogger(__name__)

FEW, FEW_QUANTISED = 8, 16
"""Rows up to which reading the weights once is what counts; beyond, torch's products win, which want dense weights."""
ITEM_BYTES = 1 << 16
"""Weights a work item reads: long enough to be worth a ticket, short enough that threads finish together."""
EXPANDED_BYTES = 1 << 24
"""Quantised weights are made dense this much at a time for torch, in memory that stays in the caches."""
CHUNK = 16
"""Rows a work item of the kernels around matrix products takes."""

_NO_FLOATS = np.empty(0, np.float32)
_NO_HALVES = np.empty(0, np.int16)


class Weights(NamedTuple):
    """A matrix as kernels take it, experts one below the other."""

    parts: tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
    """values, scales, offsets"""
    bias: NDArray[Any]

    @property
    def few(self) -> int:
        """Rows up to which the kernels for few rows are faster."""
        return FEW_QUANTISED if self.parts[1].size else FEW

    @property
    def chunk(self) -> int:
        """Rows a work item takes."""
        row_bytes: int = self.parts[0][0].nbytes
        return max(ROWS, ITEM_BYTES // row_bytes // ROWS * ROWS)

    @property
    def pair_chunk(self) -> int:
        """Gates a work item takes, with as many ups: half of `chunk`."""
        return max(ROWS, self.chunk // (2 * ROWS) * ROWS)


class Heads(NamedTuple):
    """What finishing the heads of a projection takes: see `matvec.put_head`."""

    table: NDArray[Any]
    norms: NDArray[Any]
    eps: np.float32
    groups: tuple[HeadGroup, ...]


class CpuModelOps:
    """See `ModelOps`. Weights that the kernels cannot take are left to torch, with one log line a shape."""

    name = "cpu"

    def __init__(self, team: ThreadTeam) -> None:
        self.team = team
        self._scratch = Scratch()
        self._torch = TorchModelOps()
        self._weights: dict[Linear, Weights | None] = {}
        self._head_tables: dict[Linear, Heads] = {}

    def embed(self, table: Linear, token_ids: Tensor) -> Tensor:
        """See `ModelOps.embed`."""
        return self._torch.embed(table, token_ids)

    def heads(self, x: Tensor, norm: Norm, projections: Sequence[HeadProjection], ropes: Ropes) -> list[Tensor]:
        """See `ModelOps.heads`."""
        found: list[Tensor] = []
        for place, (projection, rope) in enumerate(zip(projections, ropes, strict=False)):
            found += self._heads(x, norm, projection, rope, f"heads {place}")
        return found

    def _heads(self, x: Tensor, norm: Norm, projection: HeadProjection, rope: Rope, name: str) -> list[Tensor]:
        """The heads of one projection, in the reused buffer `name`."""
        linear, groups = projection
        weights = self.take(linear)
        if weights is None:
            return self._torch.heads(x, norm, [projection], (rope, rope))
        heads = self.tabulate(linear, groups)
        cos, sin = (table.numpy() for table in rope)
        tokens = len(x)
        flat = self._buffer(name, (tokens * linear.shape[-2],), linear.dtype)
        finish = (heads.table, heads.norms, heads.eps, cos, sin, as_array(flat))
        if tokens <= weights.few:
            room = self._room(tokens, linear.shape[-1], tokens * int(heads.table[:, 1].max()))
            self.team.run(matvec.launch_project_heads, *_normed(x, norm), *weights.parts, weights.bias, *finish, room)
        else:
            projected = self._buffer("projected", (tokens, linear.shape[-2]), linear.dtype)
            self._multiply(self._norm(x, norm, linear.dtype), linear, projected)
            self.team.run(many.launch_finish_heads, as_array(projected), *finish, CHUNK)
        parts = torch.split(flat, [tokens * group.heads * group.dim for group in groups])
        return [part.view(tokens, group.heads, group.dim) for part, group in zip(parts, groups, strict=True)]

    def add_projection(self, x: Tensor, y: Tensor, linear: Linear) -> None:
        """See `ModelOps.add_projection`."""
        weights = self.take(linear)
        if weights is None:
            self._torch.add_projection(x, y, linear)
        elif len(x) <= weights.few:
            self._project((y.float().contiguous().numpy(), _NO_FLOATS, np.float32(0)), linear, weights, x, add=True)
        else:
            out = self._buffer("projected", (len(x), linear.shape[-2]), linear.dtype)
            self._multiply(y, linear, out)
            x += out

    def add_gated(self, x: Tensor, norm: Norm, weights: GatedWeights) -> None:
        """See `ModelOps.add_gated`."""
        if not self._takes(weights):
            self._torch.add_gated(x, norm, weights)
        elif len(x) <= self._pair(weights)[0].few:
            self._few_gated(x, norm, None, weights)
        else:
            out = self._buffer("parts", tuple(x.shape), weights.down.dtype)
            self._gated(self._norm(x, norm, weights.gate_up.dtype), weights, out)
            x += out

    def add_experts(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> None:
        """See `ModelOps.add_experts`."""
        if not self._takes(weights.routed, weights.shared):
            self._torch.add_experts(x, norm, weights)
        elif len(x) <= self._pair(weights.routed)[0].few:
            self._few_gated(x, norm, weights, weights.shared)
        else:
            self._many_experts(x, norm, weights)

    def logits(self, x: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """See `ModelOps.logits`."""
        weights = self.take(linear)
        if weights is None or not len(x):
            return self._torch.logits(x, norm, linear)
        out = torch.empty(len(x), linear.shape[-2])
        if len(x) <= weights.few:
            self._project(_normed(x, norm), linear, weights, out, add=False)
            return out
        rounded = torch.empty(out.shape, dtype=linear.dtype)
        self._multiply(self._norm(x, norm, linear.dtype), linear, rounded)
        return rounded.float()

    # Few rows

    def _project(
        self, source: tuple[Any, Any, Any], linear: Linear, weights: Weights, out: Tensor, *, add: bool
    ) -> None:
        room = self._room(len(out), linear.shape[-1], len(out) * weights.chunk)
        self.team.run(
            matvec.launch_project, *source, *weights.parts, weights.bias, out.numpy(), add, room, weights.chunk
        )

    def _few_gated(self, x: Tensor, norm: Norm, routed: ExpertWeights | None, shared: GatedWeights | None) -> None:
        tokens, width = x.shape
        gated = routed.routed if routed is not None else shared
        assert gated is not None
        # Where there is only one kind, the other has no rows; its weights stand in, so that types stay the same.
        up, down = self._pair(gated)
        shared_up, shared_down = self._pair(shared or gated)
        topk = 0 if routed is None else routed.topk
        chosen = self._scratch.get("chosen", (tokens, topk), np.int64)
        shares = self._scratch.get("shares", (tokens, topk), np.float32)
        inner = self._scratch.get("inner rows", (tokens * topk, gated.down.shape[-1]), np.float32)
        shared_inner = self._scratch.get("shared rows", (tokens, shared.down.shape[-1] if shared else 0), np.float32)
        router = (_NO_FLOATS.reshape(0, width), _NO_FLOATS, np.float32(1))
        if routed is not None:
            router = (routed.router.numpy(), routed.router_bias.numpy(), np.float32(routed.scaling))
        chunk = up.pair_chunk
        self.team.run(
            experts.launch_gate_up, *_normed(x, norm), *router, up.parts, shared_up.parts, shared_up.bias,
            _gate(gated.gate), chosen, shares, inner, shared_inner, self._room(tokens, width, 2 * tokens * chunk),
            chunk,
        )  # fmt: skip
        room = self._room_of(experts.down_room_size(inner.shape, shared_inner.shape, tokens * down.chunk))
        self.team.run(
            experts.launch_down, chosen, shares, inner, shared_inner, down.parts, shared_down.parts, shared_down.bias,
            x.numpy(), room, down.chunk,
        )  # fmt: skip

    def _pair(self, weights: GatedWeights) -> tuple[Weights, Weights]:
        up, down = self._weights[weights.gate_up], self._weights[weights.down]
        assert up is not None and down is not None  # _takes said so
        return up, down

    # Many rows

    def _norm(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        out = self._buffer(f"normed {dtype}", tuple(x.shape), dtype)
        self.team.run(many.launch_norm_rows, *_normed(x, norm), as_array(out), CHUNK)
        return out

    def _gated(self, x: Tensor, weights: GatedWeights, out: Tensor, expert_rows: Sequence[int] | None = None) -> None:
        """out = MLP(x); with `expert_rows` the first so many rows go through expert 0, the next through expert 1..."""
        both = self._buffer("gate_up", (len(x), weights.gate_up.shape[-2]), out.dtype)
        inner = self._buffer("inner", (len(x), weights.down.shape[-1]), out.dtype)
        self._multiply_each(x, weights.gate_up, both, expert_rows)
        self.team.run(many.launch_gate_rows, as_array(both), *_gate(weights.gate), as_array(inner), CHUNK)
        self._multiply_each(inner, weights.down, out, expert_rows)

    def _many_experts(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> None:
        tokens, width = x.shape
        dtype, topk, shared = weights.routed.gate_up.dtype, weights.topk, weights.shared
        wide = self._norm(x, norm, torch.float32)
        chosen, shares = route(wide, weights)
        inputs = wide if dtype is torch.float32 else self._norm(x, norm, dtype)
        order = np.argsort(chosen.numpy(), axis=None, kind="stable")
        sizes = np.bincount(chosen.numpy().ravel(), minlength=len(weights.router)).tolist()
        routed = tokens * topk
        parts = self._buffer("parts", (routed + (tokens if shared else 0), width), dtype)
        sorted_inputs = self._buffer("sorted", (routed, width), dtype)
        torch.index_select(inputs, 0, torch.from_numpy(order // topk), out=sorted_inputs)
        self._gated(sorted_inputs, weights.routed, parts[:routed], sizes)
        places = np.empty(routed, np.int64)
        places[order] = np.arange(routed)
        columns, factors = [places.reshape(tokens, topk)], [shares.numpy()]
        if shared is not None:
            self._gated(inputs, shared, parts[routed:])
            columns.append(np.arange(routed, routed + tokens)[:, None])
            factors.append(np.ones((tokens, 1), np.float32))
        places, factor = np.concatenate(columns, axis=1), np.concatenate(factors, axis=1)
        self.team.run(many.launch_add_rows, as_array(parts), places, factor, x.numpy(), CHUNK)

    def _multiply_each(self, x: Tensor, linear: Linear, out: Tensor, expert_rows: Sequence[int] | None) -> None:
        if expert_rows is None:
            self._multiply(x, linear, out)
            return
        if _on_tiles(x, linear):
            amx_multiply.multiply(self.team, self._scratch, x, linear.weight, out, expert_rows)
            return
        start = 0
        for expert, rows in enumerate(expert_rows):
            if rows:
                self._multiply(x[start : start + rows], linear, out[start : start + rows], expert)
            start += rows

    def _multiply(self, x: Tensor, linear: Linear, out: Tensor, expert: int = 0) -> None:
        """out = linear(x), by torch."""
        outputs, width = linear.shape[-2:]
        quantised = linear.weight.format.is_quantised
        if quantised and _on_tiles(x, linear):
            amx_multiply.multiply(self.team, self._scratch, x, linear.weight, out, [len(x)], expert * outputs)
        elif not quantised:
            # torch's own products are faster where there is nothing to expand and nothing to sort.
            dense = linear.weight.values.view(-1, outputs, width)[expert]
            torch.mm(x, dense.t(), out=out)
        else:
            weights = self._weights[linear]
            assert weights is not None  # _takes said so
            step = max(1, EXPANDED_BYTES // (width * x.element_size()))
            for start in range(0, outputs, step):
                rows = min(step, outputs - start)
                tile = self._buffer("expanded", (rows, width), x.dtype)
                self.team.run(many.launch_expand_rows, *weights.parts, expert * outputs + start, as_array(tile), CHUNK)
                torch.mm(x, tile.t(), out=out if rows == outputs else out[:, start : start + rows])
        if linear.bias is not None:
            out += linear.bias

    # Weights and memory

    def _takes(self, *weights: GatedWeights | None) -> bool:
        linears = [linear for pair in weights if pair is not None for linear in (pair.gate_up, pair.down)]
        return None not in [self.take(linear) for linear in linears]

    def take(self, linear: Linear) -> Weights | None:
        """The weights as arrays; None where the kernels cannot take them."""
        if linear not in self._weights:
            self._weights[linear] = _as_weights(linear)
            if self._weights[linear] is None:
                logger.info("a projection of %s is left to torch: its rows do not divide by 4 and 32", linear.shape)
        return self._weights[linear]

    def tabulate(self, linear: Linear, groups: Sequence[HeadGroup]) -> Heads:
        """What finishing a projection's heads takes; made once."""
        if linear in self._head_tables:
            return self._head_tables[linear]
        rows, norms, start = [], [_NO_FLOATS], 0
        norm_at = 0
        for group in groups:
            has_norm = group.norm is not None
            for head in range(group.heads):
                rows.append((start + head * group.dim, group.dim, norm_at if has_norm else -1, group.rotates, start,
                             group.heads, head))  # fmt: skip
            if group.norm is not None:
                norms.append(group.norm.weight.numpy())
                norm_at += group.dim
            start += group.heads * group.dim
        eps = {group.norm.eps for group in groups if group.norm is not None} or {0.0}
        assert len(eps) == 1, "heads of one projection have one eps"
        table = np.array(rows, np.int64)
        heads = Heads(table, np.concatenate(norms), np.float32(eps.pop()), tuple(groups))
        self._head_tables[linear] = heads
        return heads

    def _room(self, tokens: int, width: int, tile: int) -> NDArray[Any]:
        return self._room_of(matvec.room_size(tokens, width, tile))

    def _room_of(self, size: int) -> NDArray[Any]:
        return self._scratch.get("room", (self.team.size, size), np.float32)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A reused tensor; its contents are whatever was left there."""
        if dtype is torch.float32:
            return torch.from_numpy(self._scratch.get(name, shape, np.float32))
        return torch.from_numpy(self._scratch.get(name, shape, np.int16)).view(dtype)


def _as_weights(linear: Linear) -> Weights | None:
    outputs, width = linear.shape[-2:]
    if outputs % ROWS or width % GROUP:
        return None
    matrix = linear.weight
    values = matrix.values.view(torch.uint16) if matrix.values.dtype is torch.bfloat16 else matrix.values
    halves = [
        _NO_HALVES if part is None else part.view(torch.int16).reshape(-1).numpy()
        for part in (matrix.scales, matrix.offsets)
    ]
    bias = _NO_FLOATS if linear.bias is None else linear.bias.detach().numpy()
    return Weights((values.reshape(-1, values.shape[-1]).numpy(), halves[0], halves[1]), bias)


def _normed(x: Tensor, norm: Norm) -> tuple[NDArray[Any], NDArray[Any], np.float32]:
    return x.numpy(), norm.weight.detach().numpy(), np.float32(norm.eps)


def _gate(gate: Gate) -> tuple[bool, np.float32, np.float32]:
    return gate.clamped, np.float32(gate.alpha), np.float32(gate.limit)


def _on_tiles(x: Tensor, linear: Linear) -> bool:
    """Whether `amx_multiply` takes the product (experts have no biases)."""
    return x.dtype is torch.bfloat16 and x.is_contiguous() and amx_multiply.supports(linear.weight)
