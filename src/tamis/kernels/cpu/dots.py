"""Inner products of weight rows with activation rows, as explicit vector code.

LLVM's own vectoriser neither keeps a tile of sums in registers across types nor prefetches, and both decide whether the
weights arrive at memory speed; so the loop over the width is written in LLVM's vector types here. They compile on every
machine: wider vectors than it has are split.

A weight matrix reaches kernels as `values, scales, offsets` (`kernels/quant.py`), its format told by the type of
`values` [rows, width]: float32, uint16 (bf16), int8, uint8 (int4). Scales and offsets are fp16 in int16, the groups of
all rows in one line; empty where there are none.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tamis.kernels.cpu.lowfloat import FAST
from tamis.kernels.quant import GROUP

LANES = 16
ROWS = 4
"""Weight rows of a tile: so many streams the processor prefetches at once, so many sums stay in registers."""
COLUMNS = 4
"""Activation rows that share one pass over a tile."""

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_SECOND_LEVEL = ir.Constant(_I32, 2)
"""The cache prefetched into: the first level has no room for what is coming beside what is in use."""
_NIBBLE_SHIFT = 19
"""An int4 q is shifted into the top bits of a mantissa: with the exponent of 1.0 it reads as 1 + q / 16."""
_ONE_BITS = 0x3F800000


def _constant(kind: ir.VectorType, value: int | float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _load(builder: Any, pointer: Any, lane: ir.Type, lanes: int = LANES) -> Any:
    vector = ir.VectorType(lane, lanes)
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=1)


def _fp32_group(builder: Any, pointer: Any) -> list[Any]:
    return [_load(builder, builder.gep(pointer, [_I64(LANES * half)]), _F32) for half in range(2)]


def _bf16_group(builder: Any, pointer: Any) -> list[Any]:
    out = []
    for half in range(2):
        bits = builder.zext(_load(builder, builder.gep(pointer, [_I64(LANES * half)]), _I16), _INTS)
        out.append(builder.bitcast(builder.shl(bits, _constant(_INTS, 16)), _FLOATS))
    return out


def _int8_group(builder: Any, pointer: Any) -> list[Any]:
    halves = [_load(builder, builder.gep(pointer, [_I64(LANES * half)]), _I8) for half in range(2)]
    return [builder.sitofp(builder.sext(half, _INTS), _FLOATS) for half in halves]


def _int4_group(builder: Any, pointer: Any) -> list[Any]:
    """1 + q / 16 of each number."""
    wide = builder.zext(_load(builder, pointer, _I8), _INTS)
    out = []
    for shift in (_NIBBLE_SHIFT, _NIBBLE_SHIFT - 4):
        bits = builder.and_(builder.shl(wide, _constant(_INTS, shift)), _constant(_INTS, 15 << _NIBBLE_SHIFT))
        out.append(builder.bitcast(builder.or_(bits, _constant(_INTS, _ONE_BITS)), _FLOATS))
    return out


_Decoder = Callable[[Any, Any], list[Any]]
# By element type: how a group of 32 becomes two vectors of floats, how many elements it takes, whether it has a scale.
_FORMATS: dict[Any, tuple[_Decoder, int, bool]] = {
    types.float32: (_fp32_group, GROUP, False),
    types.uint16: (_bf16_group, GROUP, False),
    types.int8: (_int8_group, GROUP, True),
    types.uint8: (_int4_group, GROUP // 2, True),
}


class _Tile:
    """Emits the loop over the width for one tile of `rows` weight rows and `columns` activation rows."""

    def __init__(self, builder: Any, kind: Any, rows: int, columns: int) -> None:
        self.builder, self.rows, self.columns = builder, rows, columns
        self.decode, self.step, self.scaled = _FORMATS[kind]
        # A single column has too few sums to hide the latency of an addition; the two halves of a group get their own.
        self.chains = 2 if columns == 1 and not self.scaled else 1
        self.fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), "llvm.fmuladd.v16f32"
        )
        self.reduce = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_F32, [_F32, _FLOATS]), "llvm.vector.reduce.fadd.v16f32"
        )
        prefetch = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        self.prefetch = cgutils.get_or_insert_function(builder.module, prefetch, "llvm.prefetch.p0")

    def emit(self, weights: list[Any], ahead: Any, scales: list[Any], inputs: list[Any], groups: Any) -> list[Any]:
        """Sums fp32 [rows x columns], row by row, over `groups` groups of 32 (at least one)."""
        builder = self.builder
        before, loop, after = builder.block, builder.append_basic_block("group"), builder.append_basic_block("sums")
        builder.branch(loop)
        builder.position_at_end(loop)
        group = builder.phi(_I64)
        group.add_incoming(_I64(0), before)
        count = self.rows * self.columns
        starts = [[builder.phi(_FLOATS) for _ in range(self.chains)] for _ in range(count)]
        sums = [list(chains) for chains in starts]
        self._group(group, weights, ahead, scales, inputs, sums)
        for chains, ends in zip(starts, sums, strict=True):
            for phi, end in zip(chains, ends, strict=True):
                phi.add_incoming(_constant(_FLOATS, 0.0), before)
                phi.add_incoming(end, loop)
        following = builder.add(group, _I64(1))
        group.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
        builder.position_at_end(after)
        return [self._total(chains) for chains in sums]

    def _group(
        self, group: Any, weights: list[Any], ahead: Any, scales: list[Any], inputs: list[Any], sums: list[list[Any]]
    ) -> None:
        builder = self.builder
        at, inner = builder.mul(group, _I64(self.step)), builder.mul(group, _I64(GROUP))
        x = [_fp32_group(builder, builder.gep(pointer, [inner])) for pointer in inputs]
        for row, pointer in enumerate(weights):
            place = builder.gep(pointer, [at])
            far = builder.gep(builder.bitcast(place, _I8.as_pointer()), [ahead])
            builder.call(self.prefetch, [far, _I32(0), _SECOND_LEVEL, _I32(1)])
            w = self.decode(builder, place)
            scale = self._splat(builder.load(builder.gep(scales[row], [group]))) if self.scaled else None
            for column in range(self.columns):
                chains = sums[row * self.columns + column]
                if scale is None:
                    for half in range(2):
                        chains[half % self.chains] = self._fma(w[half], x[column][half], chains[half % self.chains])
                else:
                    product = self._fma(w[1], x[column][1], builder.fmul(w[0], x[column][0]))
                    chains[0] = self._fma(product, scale, chains[0])

    def _fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self.fma, [a, b, c])

    def _splat(self, value: Any) -> Any:
        undefined = ir.Constant(_FLOATS, ir.Undefined)
        single = self.builder.insert_element(undefined, value, _I32(0))
        return self.builder.shuffle_vector(single, undefined, _constant(_INTS, 0))

    def _total(self, chains: list[Any]) -> Any:
        total = chains[0]
        for chain in chains[1:]:
            total = self.builder.fadd(total, chain)
        return self.builder.call(self.reduce, [_F32(-0.0), total], fastmath=("reassoc",))


def _make_tile(rows: int, columns: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def dot_tile(
        _context: Any,
        values: Any,
        row: Any,
        scales: Any,
        x: Any,
        x_rows: Any,
        first: Any,
        out: Any,
        at: Any,
        column: Any,
    ) -> Any:
        """out[at + c, column + r] = values[row + r] . x[x_rows[first + c]], times scales fp32 [rows, groups]."""
        signature = types.void(values, types.intp, scales, x, x_rows, types.intp, out, types.intp, types.intp)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            arrays = {i: context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 2, 3, 4, 6)}
            widths = {i: cgutils.unpack_tuple(builder, arrays[i].shape)[-1] for i in (0, 3, 6)}

            def row_of(array: int, index: Any) -> Any:
                return builder.gep(arrays[array].data, [builder.mul(index, widths[array])])

            weights = [row_of(0, builder.add(args[1], _I64(r))) for r in range(rows)]
            picked = [builder.gep(arrays[4].data, [builder.add(args[5], _I64(c))]) for c in range(columns)]
            inputs = [row_of(3, builder.load(pointer)) for pointer in picked]
            tile = _Tile(builder, signature.args[0].dtype, rows, columns)
            groups = builder.sdiv(widths[3], _I64(GROUP))
            factors = [builder.gep(arrays[2].data, [builder.mul(_I64(r), groups)]) for r in range(rows)]
            # The same place of the tile that comes next.
            ahead = builder.mul(widths[0], _I64(rows * signature.args[0].dtype.bitwidth // 8))
            sums = tile.emit(weights, ahead, factors, inputs, groups)
            for place, value in enumerate(sums):
                r, c = divmod(place, columns)
                target = row_of(6, builder.add(args[7], _I64(c)))
                builder.store(value, builder.gep(target, [builder.add(args[8], _I64(r))]))
            return context.get_dummy_value()

        return signature, generate

    return dot_tile


dot_4x4, dot_4x1 = _make_tile(ROWS, COLUMNS), _make_tile(ROWS, 1)


@njit(fastmath=FAST)
def group_sums(x, sums):  # type: ignore[no-untyped-def]
    """sums[t, g] = the sum of group g of x[t]: what an int4 offset is multiplied by."""
    for t in range(x.shape[0]):
        for g in range(sums.shape[1]):
            total = np.float32(0)
            for i in range(GROUP):
                total += x[t, g * GROUP + i]
            sums[t, g] = total


# Below, elements are named by all their indices: a view of an array counts references, atomically and in memory that
# the threads share, which takes longer than the tile.


@intrinsic  # type: ignore[untyped-decorator]
def widen(_context: Any, source: Any, first: Any, target: Any) -> Any:
    """target[r, g] = source[first + r * groups + g] for fp16 `source` and fp32 `target` [4, groups]."""
    halves, floats = ir.VectorType(ir.HalfType(), ROWS), ir.VectorType(_F32, ROWS)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        inputs, outputs = (context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 2))
        with cgutils.for_range(builder, cgutils.unpack_tuple(builder, outputs.shape)[1]) as loop:
            at = builder.mul(loop.index, _I64(ROWS))
            read = builder.gep(inputs.data, [builder.add(args[1], at)])
            values = builder.fpext(builder.load(builder.bitcast(read, halves.as_pointer()), align=2), floats)
            write = builder.bitcast(builder.gep(outputs.data, [at]), floats.as_pointer())
            builder.store(values, write, align=4)
        return context.get_dummy_value()

    return types.void(source, types.intp, target), generate


@njit(fastmath=FAST)
def tile_scales(packed, scales, offsets, first, multipliers, shifts):  # type: ignore[no-untyped-def]
    """Scales of a tile's groups, from `first` on, as fp32, and what each adds times the sum of its inputs (int4 alone).

    With w' = 1 + q / 16, scale * q + offset = 16 scale * w' + (offset - 16 scale); centred, offset = -8 scale.
    """
    widen(scales, first, multipliers)
    if packed:
        has_offsets = offsets.shape[0] > 0
        if has_offsets:
            widen(offsets, first, shifts)
        for r in range(ROWS):
            for g in range(multipliers.shape[1]):
                scale = multipliers[r, g]
                multipliers[r, g] = np.float32(16) * scale
                shifts[r, g] = (shifts[r, g] if has_offsets else np.float32(-8) * scale) - np.float32(16) * scale


@njit(fastmath=FAST)
def dot_rows(  # type: ignore[no-untyped-def]
    values, scales, offsets, start, stop, x, sums, x_rows, first, count, multipliers, shifts, out
):  # fmt: skip
    """out[c, i] = weight row (start + i) . x[x_rows[first + c]] for i < stop - start (a multiple of 4), c < count.

    x fp32 [n, width] and its group sums (int4); multipliers, shifts fp32 [4, groups]; out fp32 [>= count, any width].
    """
    packed = 2 * values.shape[1] == x.shape[1]
    groups = x.shape[1] // GROUP
    for row in range(start, stop, ROWS):
        if scales.shape[0]:
            tile_scales(packed, scales, offsets, row * groups, multipliers, shifts)
        at = 0
        while at + COLUMNS <= count:
            dot_4x4(values, row, multipliers, x, x_rows, first + at, out, at, row - start)
            at += COLUMNS
        while at < count:
            dot_4x1(values, row, multipliers, x, x_rows, first + at, out, at, row - start)
            at += 1
        if packed:
            for c in range(count):
                source = x_rows[first + c]
                for r in range(ROWS):
                    total = np.float32(0)
                    for g in range(groups):
                        total += shifts[r, g] * sums[source, g]
                    out[c, row - start + r] += total
