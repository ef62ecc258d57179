"""Whole decoder layers of few rows in one call from Python: projections, page writes, attention, MLP.

Between kernels Python needs a hundred microseconds a layer, several times that when the weights that were just read
have pushed it out of the caches; for one token that is as long as the work itself. Here compiled code goes from one
kernel to the next. The kernels are those that `CpuOps` and `CpuModelOps` run one by one, and so are the results, bit
for bit.

Taken are dense and K-only layers with bf16 planes on matrix tiles; everything else goes the ordinary way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from tamis.kernels.cpu import prefill
from tamis.kernels.cpu.amx_attention import LOG2E, dense_items
from tamis.kernels.cpu.amx_sparse import pick_and_attend
from tamis.kernels.cpu.amx_tiles import copy_row
from tamis.kernels.cpu.experts import down, down_room_size, gate_up
from tamis.kernels.cpu.frames import Frame, borrow, open_frame, places, view1, view2
from tamis.kernels.cpu.matvec import project, project_heads, room_size
from tamis.kernels.cpu.model import CpuModelOps, Heads, Weights
from tamis.kernels.cpu.ops import CpuOps, fit_tiles
from tamis.kernels.cpu.threads import share
from tamis.kernels.linear import HeadGroup, LayerWeights, Ropes
from tamis.kernels.ops import AttentionBatch, LayerPlanes

_MATRIX = 3 + 2 + 2 + 2
"""Numbers of a frame that describe a weight: values, scales, offsets, bias."""
_BF16 = np.empty(0, np.uint16)
"""The kind of an index projection that stands alone."""
_NO_FLOATS, _NO_HALVES = np.empty(0, np.float32), np.empty(0, np.int16)
_NO_MATRIX = Weights((np.empty((0, 0), np.uint16), _NO_HALVES, _NO_HALVES), _NO_FLOATS)
_NO_HEADS = Heads(np.empty((0, 7), np.int64), _NO_FLOATS, np.float32(0), ())
"""Of layers whose index heads come from the projection of q, k and v, or that have none."""

# A layer's frame: numbers, then arrays.
(
    _WIDTH, _Q_HEADS, _KV_HEADS, _DIM, _INDEX_HEADS, _INDEX_DIM, _BLOCK, _INIT, _LOCAL, _TOPK, _CLAMPED,
    _FLOATS, _NORM, _QKV, _TABLE, _NORMS, _O, _MLP_NORM, _ROUTER, _ROUTER_BIAS, _UP, _DOWN, _SHARED_UP, _SHARED_DOWN,
    _INDEX, _INDEX_TABLE, _INDEX_NORMS,
) = places(*[1] * 11, 2, 2, _MATRIX, 3, 2, _MATRIX, 2, 3, 2, *[_MATRIX] * 4, _MATRIX, 3, 2)  # fmt: skip
# A step's: numbers, then memory that every layer of this shape works in.
(
    _TOKENS, _ROTATED, _INDEX_ROTATED, _O_CHUNK, _UP_CHUNK, _DOWN_CHUNK,
    _HEADS, _SCORES, _PICKS, _ATTENDED, _LSE, _CHOSEN, _SHARES, _INNER, _SHARED_INNER, _ROOM,
) = places(*[1] * 6, 2, 4, 4, 3, 3, 3, 3, 3, 3, 3)  # fmt: skip


@njit
def _matrix(frame, at, kind):  # type: ignore[no-untyped-def]
    """A weight: (values, scales, offsets), bias. `kind`: any array of the values' type."""
    values = view2(frame, at, kind.dtype)
    return (values, view1(frame, at + 3, np.int16), view1(frame, at + 5, np.int16)), view1(frame, at + 7, np.float32)


@njit
def _put_rows(source, rows, target, count, row):  # type: ignore[no-untyped-def]
    """Write `count` heads to where `rows` (int64) says they lie in a plane; addresses, `row` bytes a head."""
    targets = borrow(rows, (count,), np.int64)
    for i in range(count):
        copy_row(source + i * row, target + targets[i] * row, row)


@njit
def _attend(box, layer, step, score, attend, heads, k, v, index_k, pages):  # type: ignore[no-untyped-def]
    """Attention of a layer's new tokens, which are in their planes."""
    tokens, dim = step[_TOKENS], layer[_DIM]
    out, lse = step[_ATTENDED], step[_LSE]
    floats = view1(layer, _FLOATS, np.float32)
    scale, index_scale, one, nothing = floats[6], floats[7], np.float32(1), 0
    index_heads, block = layer[_INDEX_HEADS], layer[_BLOCK]
    if index_heads == 0:
        return share(box, dense_items, (attend, heads, k, v, pages, nothing, out, lse, scale, one))
    index_q = heads + tokens * (layer[_Q_HEADS] + 2 * layer[_KV_HEADS]) * dim * 2
    return pick_and_attend(
        box, score, attend, index_q, index_k, pages, index_scale, step[_SCORES], step[_PICKS], index_heads,
        layer[_TOPK], block, layer[_INIT], layer[_LOCAL], heads, k, v, pages, nothing, out, lse, scale, one,
    )  # fmt: skip


@njit
def _feed_forward(box, up_kind, down_kind, layer, step, x, room):  # type: ignore[no-untyped-def]
    """x += the layer's MLP, routed or not."""
    floats = view1(layer, _FLOATS, np.float32)
    chosen, shares = view2(step, _CHOSEN, np.int64), view2(step, _SHARES, np.float32)
    inner, shared_inner = view2(step, _INNER, np.float32), view2(step, _SHARED_INNER, np.float32)
    up, _ = _matrix(layer, _UP, up_kind)
    low, _ = _matrix(layer, _DOWN, down_kind)
    shared_up, up_bias = _matrix(layer, _SHARED_UP, up_kind)
    shared_low, low_bias = _matrix(layer, _SHARED_DOWN, down_kind)
    gate = (layer[_CLAMPED] != 0, floats[3], floats[4])
    failed = share(
        box, gate_up,
        (x, view1(layer, _MLP_NORM, np.float32), floats[1], view2(layer, _ROUTER, np.float32),
         view1(layer, _ROUTER_BIAS, np.float32), floats[5], up, shared_up, up_bias, gate, chosen, shares, inner,
         shared_inner, room, step[_UP_CHUNK]),
    )  # fmt: skip
    return failed | share(
        box, down,
        (chosen, shares, inner, shared_inner, low, shared_low, low_bias, x, room, step[_DOWN_CHUNK]),
    )  # fmt: skip


@njit
def _project_index(box, layer, step, x, cos, sin, out, room):  # type: ignore[no-untyped-def]
    """Index heads from a projection of their own, which is bf16; `out`: address."""
    half, outputs = step[_INDEX_ROTATED], layer[_INDEX + 1]
    tables = (step[_TOKENS], half)
    floats = view1(layer, _FLOATS, np.float32)
    (values, scales, offsets), bias = _matrix(layer, _INDEX, _BF16)
    return share(
        box, project_heads,
        (x, view1(layer, _NORM, np.float32), floats[0], values, scales, offsets, bias,
         view2(layer, _INDEX_TABLE, np.int64), view1(layer, _INDEX_NORMS, np.float32), floats[8],
         borrow(cos, tables, np.float32), borrow(sin, tables, np.float32),
         borrow(out, (step[_TOKENS] * outputs,), np.uint16), room),
    )  # fmt: skip


@njit
def _run_layer(  # type: ignore[no-untyped-def]
    box, qkv_kind, o_kind, up_kind, down_kind, layer, step, score, attend, x, cos, sin, index_cos, index_sin, k, v,
    index_k, pages, rows, index_rows,
):  # fmt: skip
    """x fp32 [T, C] += the layer. Frames as above and as `prefill` makes them; the rest are addresses."""
    tokens, dim, kv_heads = step[_TOKENS], layer[_DIM], layer[_KV_HEADS]
    stream = borrow(x, (tokens, layer[_WIDTH]), np.float32)
    half = step[_ROTATED]
    cosines, sines = borrow(cos, (tokens, half), np.float32), borrow(sin, (tokens, half), np.float32)
    floats, room = view1(layer, _FLOATS, np.float32), view2(step, _ROOM, np.float32)
    qkv, bias = _matrix(layer, _QKV, qkv_kind)
    failed = share(
        box, project_heads,
        (stream, view1(layer, _NORM, np.float32), floats[0], qkv[0], qkv[1], qkv[2], bias,
         view2(layer, _TABLE, np.int64), view1(layer, _NORMS, np.float32), floats[2], cosines, sines,
         view1(step, _HEADS, np.uint16), room),
    )  # fmt: skip
    row, heads = dim * 2, step[_HEADS]
    keys = heads + tokens * layer[_Q_HEADS] * row
    values = keys + tokens * kv_heads * row
    _put_rows(keys, rows, k, tokens * kv_heads, row)
    _put_rows(values, rows, v, tokens * kv_heads, row)
    if layer[_INDEX + 1]:
        index_heads = values + tokens * kv_heads * row
        failed |= _project_index(box, layer, step, stream, index_cos, index_sin, index_heads, room)
    if layer[_INDEX_HEADS]:
        row = layer[_INDEX_DIM] * 2
        keys = values + tokens * (kv_heads * dim + layer[_INDEX_HEADS] * layer[_INDEX_DIM]) * 2
        _put_rows(keys, index_rows, index_k, tokens, row)
    failed |= _attend(box, layer, step, score, attend, heads, k, v, index_k, pages)
    o, o_bias = _matrix(layer, _O, o_kind)
    attended = view2(step, _ATTENDED, np.uint16)
    failed |= share(
        box, project,
        (attended, floats[:0], floats[0], o[0], o[1], o[2], o_bias, stream, True, room, step[_O_CHUNK]),
    )  # fmt: skip
    return failed | _feed_forward(box, up_kind, down_kind, layer, step, stream, room)


@njit(nogil=True, cache=True)
def launch_layers(  # type: ignore[no-untyped-def]
    box, qkv_kind, o_kind, up_kind, down_kind, calls, x, cos, sin, index_cos, index_sin
):
    """x fp32 [T, C] += one layer after another; calls int64 [layers, 10]: four frames, then the end of `_run_layer`."""
    failed = 0
    for i in range(calls.shape[0]):
        call = calls[i]
        failed |= _run_layer(
            box, qkv_kind, o_kind, up_kind, down_kind, open_frame(call[0]), open_frame(call[1]), open_frame(call[2]),
            open_frame(call[3]), x, cos, sin, index_cos, index_sin, call[4], call[5], call[6], call[7], call[8],
            call[9],
        )  # fmt: skip
        if failed:
            break
    return failed


@dataclass(frozen=True)
class _Layer:
    """A layer as the kernels take it."""

    frame: Frame
    kinds: tuple[NDArray[Any], ...]
    """An array of the type of each matrix's values: kernels are compiled for it."""
    dtypes: tuple[DTypeLike, ...]
    """Of `kinds`: layers run in one call where they are alike."""
    few: int
    """Rows up to which this way is the faster one."""
    shape: tuple[Any, ...]
    """What the memory of a step depends on; layers of one shape share it."""
    matrices: tuple[Weights, Weights, Weights, Weights]
    """qkv, o, up, down."""
    groups: tuple[HeadGroup, ...]
    """Of all projections."""
    weights: LayerWeights


@dataclass(frozen=True)
class _Step:
    frame: Frame
    score: Frame | None
    """None in a dense layer."""
    attend: Frame


class FusedLayers:
    """Runs layers for a `CpuOps` and a `CpuModelOps` that share a team; not for several threads at once, as they."""

    def __init__(self, ops: CpuOps, model: CpuModelOps) -> None:
        self._ops, self._model = ops, model
        self._layers: dict[LayerWeights, _Layer | None] = {}

    def run(
        self, weights: Sequence[LayerWeights], x: Tensor, ropes: Ropes, open_layer: Callable[[int], LayerPlanes],
        batch: AttentionBatch,
    ) -> int:  # fmt: skip
        """See `LayerRunner.run`."""
        calls: list[list[int]] = []
        first: _Layer | None = None
        for place, weight in enumerate(weights):
            layer = self._layer(weight)
            if layer is None or len(x) > layer.few:
                break
            if first is not None and first.dtypes != layer.dtypes:
                break
            planes = open_layer(place)
            if not _fits(planes):
                break
            first = first or layer
            calls.append(self._call(layer, planes, ropes, batch))
        if first is not None:
            tables = (table.data_ptr() for rope in ropes for table in rope)
            self._ops.team.run(launch_layers, *first.kinds, np.array(calls, np.int64), x.data_ptr(), *tables)
        return len(calls)

    def _call(self, layer: _Layer, planes: LayerPlanes, ropes: Ropes, batch: AttentionBatch) -> list[int]:
        """A row of `launch_layers`' calls."""
        key = ("layer", layer.shape, planes.k.shape, planes.rows.shape)
        step: _Step = self._ops.planned(batch, key, lambda: self._plan(layer, planes, batch, ropes))
        return [
            layer.frame.address, step.frame.address, 0 if step.score is None else step.score.address,
            step.attend.address,
            planes.k.data_ptr(), planes.v.data_ptr(), 0 if planes.index_k is None else planes.index_k.data_ptr(),
            planes.k.shape[0], planes.rows.data_ptr(),
            0 if planes.index_rows is None else planes.index_rows.data_ptr(),
        ]  # fmt: skip

    def _layer(self, weights: LayerWeights) -> _Layer | None:
        if weights not in self._layers:
            self._layers[weights] = self._take(weights)
        return self._layers[weights]

    def _take(self, weights: LayerWeights) -> _Layer | None:
        sparse, qkv = weights.sparse, weights.heads[0].linear
        groups = tuple(group for projection in weights.heads for group in projection.groups)
        routed, shared = weights.routed, weights.shared
        gated = weights.gated
        pair = shared or gated
        own = weights.heads[1:]
        linears = (qkv, weights.o, gated.gate_up, gated.down, pair.gate_up, pair.down, *(each.linear for each in own))
        taken = [self._model.take(linear) for linear in linears]
        matrices = [matrix for matrix in taken if matrix is not None]
        wanted = 3 if sparse is None else 5
        dims = {group.dim for group in groups}
        if (
            len(matrices) < len(taken)
            or len(groups) != wanted
            or (sparse is not None and sparse.score_type != "max")
            or not all(prefill.supports(dim) for dim in dims)
            or qkv.dtype is not torch.bfloat16
            or weights.o.dtype is not torch.bfloat16
            or matrices[2].parts[0].dtype != matrices[4].parts[0].dtype
            or matrices[3].parts[0].dtype != matrices[5].parts[0].dtype
            or any(matrix.parts[0].dtype != np.uint16 for matrix in matrices[6:])
        ):
            return None
        q, k = groups[0], groups[1]
        heads = self._model.tabulate(*weights.heads[0])
        index_matrix, index_heads = _NO_MATRIX, _NO_HEADS
        if own:
            index_matrix, index_heads = matrices[6], self._model.tabulate(*own[0])
        width = qkv.shape[-1]
        index = (groups[3].heads, groups[3].dim) if sparse is not None else (0, 0)
        blocks = (0, 0, 0, 0)
        if sparse is not None:
            blocks = (sparse.block_size, sparse.init_blocks, sparse.local_blocks, sparse.topk)
        gate = gated.gate
        floats = (
            weights.norm.eps, weights.mlp_norm.eps, heads.eps, gate.alpha, gate.limit,
            1.0 if routed is None else routed.scaling,
            float(LOG2E) * q.dim**-0.5, 1.0 if sparse is None else groups[3].dim ** -0.5, index_heads.eps,
        )  # fmt: skip
        router = np.empty((0, width), np.float32) if routed is None else routed.router.numpy()
        router_bias = np.empty(0, np.float32) if routed is None else routed.router_bias.numpy()
        frame = Frame(
            width, q.heads, k.heads, q.dim, *index, *blocks, int(gate.clamped),
            np.array(floats, np.float32), weights.norm.weight.detach().numpy(), *_entries(matrices[0]),
            heads.table, heads.norms, *_entries(matrices[1]), weights.mlp_norm.weight.detach().numpy(),
            router, router_bias, *(entry for matrix in matrices[2:6] for entry in _entries(matrix)),
            *_entries(index_matrix), index_heads.table, index_heads.norms,
        )  # fmt: skip
        kinds = tuple(np.empty(0, matrix.parts[0].dtype) for matrix in matrices[:4])
        shape = (
            width, tuple((group.heads, group.dim) for group in groups), blocks,
            0 if routed is None else routed.topk, gated.down.shape, None if shared is None else shared.down.shape,
            tuple(matrix.chunk for matrix in matrices),
        )  # fmt: skip
        few = min(matrix.few for matrix in matrices)
        dtypes = tuple(kind.dtype for kind in kinds)
        return _Layer(
            frame, kinds, dtypes, few, shape, (matrices[0], matrices[1], matrices[2], matrices[3]), groups, weights
        )

    def _plan(self, layer: _Layer, planes: LayerPlanes, batch: AttentionBatch, ropes: Ropes) -> _Step:
        ops, groups, tokens = self._ops, layer.groups, batch.num_tokens
        arrays = ops.arrays(batch, planes.k).batch
        q, k = groups[0], groups[1]
        page_size = planes.k.shape[2]
        shape = (q.heads, k.heads, q.dim, page_size)
        sparse = layer.weights.sparse
        if sparse is None:
            attend = prefill.plan_dense(ops.team, ops.scratch, arrays, *shape)
            frame = self._memory(layer, tokens, ropes, 0)
            return _Step(frame, None, attend)
        index = groups[3]
        score = prefill.plan_scores(ops.team, ops.scratch, arrays, index.heads, index.dim, page_size, sparse.block_size)
        attend = prefill.plan_sparse(
            ops.team, ops.scratch, arrays, *shape, index_heads=index.heads, topk=sparse.topk,
            block_size=sparse.block_size,
        )  # fmt: skip
        frame = self._memory(layer, tokens, ropes, score.blocks)
        return _Step(frame, score.frame, attend)

    def _memory(self, layer: _Layer, tokens: int, ropes: Ropes, blocks: int) -> Frame:
        weights, get = layer.weights, self._ops.scratch.get
        shared = weights.shared
        topk = 0 if weights.routed is None else weights.routed.topk
        _, o, up, low = layer.matrices
        q, width = layer.groups[0], weights.heads[0].linear.shape[-1]
        index_heads = layer.groups[3].heads if weights.sparse is not None else 0
        picks = weights.sparse.topk if weights.sparse is not None else 0
        inner = (tokens * topk, weights.gated.down.shape[-1])
        shared_inner = (tokens, 0 if shared is None else shared.down.shape[-1])
        room = max(
            room_size(tokens, width, tokens * max(group.dim for group in layer.groups)),
            room_size(tokens, q.heads * q.dim, tokens * o.chunk),
            room_size(tokens, width, 2 * tokens * up.pair_chunk),
            down_room_size(inner, shared_inner, tokens * low.chunk),
        )
        heads = sum(group.heads * group.dim for group in layer.groups)
        return Frame(
            tokens, ropes[0][0].shape[1], ropes[1][0].shape[1], o.chunk, up.pair_chunk, low.chunk,
            get("layer heads", (tokens * heads,), np.uint16),
            get("layer scores", (index_heads, tokens, blocks), np.float32),
            get("layer picks", (index_heads, tokens, picks), np.int32),
            get("layer attended", (tokens, q.heads * q.dim), np.uint16),
            get("layer lse", (tokens, q.heads), np.float32),
            get("layer chosen", (tokens, topk), np.int64),
            get("layer shares", (tokens, topk), np.float32),
            get("layer inner", inner, np.float32),
            get("layer shared inner", shared_inner, np.float32),
            get("layer room", (self._ops.team.size, room), np.float32),
        )  # fmt: skip


def _entries(matrix: Weights) -> tuple[NDArray[Any], ...]:
    return (*matrix.parts, matrix.bias)


def _fits(planes: LayerPlanes) -> bool:
    index = () if planes.index_k is None else (planes.index_k,)
    return planes.plain and fit_tiles(planes.k, planes.v, *index)
