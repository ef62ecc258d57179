"""Vectors of sixteen float32 in Numba kernels (AVX-512), and the shuffles that matrix tiles need.

Numba has no vector types, and its loops do not always become the code one wants. These intrinsics take addresses
(`array.ctypes.data` plus bytes) and vectors held in variables; they compile to one or a few instructions each. They may
only be called where `amx.available()`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

BYTES = 64
"""Bytes of a vector."""

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_F32, 16), ir.VectorType(_I32, 16)
_ALL = ir.Constant(_I16, -1)

_EXP2 = (1.8775767e-3, 8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 1.0)
"""A polynomial for 2**x on [0, 1), highest power first, fitted for relative error (about 2e-7)."""


class Floats(types.Type):  # type: ignore[misc]
    """The Numba type of a vector of sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


floats = Floats()


@register_model(Floats)
class _FloatsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _FLOATS)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _read(builder: Any, address: Any, kind: Any = _FLOATS) -> Any:
    return builder.load(_pointer(builder, address, kind), align=4)


def _write(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, _pointer(builder, address, value.type), align=4)


def _offset(builder: Any, address: Any, number: int, stride: Any = BYTES) -> Any:
    step = builder.mul(stride, ir.Constant(_I64, number)) if isinstance(stride, ir.Value) else None
    return builder.add(address, ir.Constant(_I64, number * BYTES) if step is None else step)


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, single, ir.Constant(_INTS, [0] * 16))


def _constant(value: float) -> Any:
    return ir.Constant(_FLOATS, [float(np.float32(value))] * 16)


def _nothing(context: Any) -> Any:
    return context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]
def load(_context: Any, address: Any) -> Any:
    """`load(address)`: sixteen float32 from any address."""
    return floats(types.intp), lambda _c, builder, _s, args: _read(builder, args[0])


@intrinsic  # type: ignore[untyped-decorator]
def store(_context: Any, address: Any, value: Any) -> Any:
    """`store(address, value)`."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _write(builder, args[1], args[0])
        return _nothing(context)

    return types.void(types.intp, floats), generate


@intrinsic  # type: ignore[untyped-decorator]
def splat(_context: Any, value: Any) -> Any:
    """`splat(x)`: sixteen times the float32 x."""
    return floats(types.float32), lambda _c, builder, _s, args: _splat(builder, args[0], _FLOATS)


@intrinsic  # type: ignore[untyped-decorator]
def peek(_context: Any, address: Any) -> Any:
    """`peek(address)`: the int64 there.

    Functions that are entered thousands of times a millisecond take addresses, not arrays: Numba counts references to
    arrays with locked instructions, which wait for all stores before them.
    """
    return types.int64(types.intp), lambda _c, builder, _s, args: builder.load(_pointer(builder, args[0], _I64))


@intrinsic  # type: ignore[untyped-decorator]
def poke(_context: Any, address: Any, value: Any) -> Any:
    """`poke(address, i)`: write an int64."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], _I64))
        return _nothing(context)

    return types.void(types.intp, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def peek32(_context: Any, address: Any) -> Any:
    """`peek32(address)`: the int32 there, as int64."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.sext(builder.load(_pointer(builder, args[0], _I32)), _I64)

    return types.int64(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def spread(_context: Any, address: Any) -> Any:
    """`spread(address)`: sixteen times the float32 there."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return _splat(builder, builder.load(_pointer(builder, args[0], _F32)), _FLOATS)

    return floats(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def get(_context: Any, value: Any, number: Any) -> Any:
    """`get(x, i)`: element i."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.extract_element(args[0], builder.trunc(args[1], _I32))

    return types.float32(floats, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def add(_context: Any, a: Any, b: Any) -> Any:
    """`add(a, b)`."""
    return floats(floats, floats), lambda _c, builder, _s, args: builder.fadd(*args)


@intrinsic  # type: ignore[untyped-decorator]
def mul(_context: Any, a: Any, b: Any) -> Any:
    """`mul(a, b)`."""
    return floats(floats, floats), lambda _c, builder, _s, args: builder.fmul(*args)


@intrinsic  # type: ignore[untyped-decorator]
def fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """`fma(a, b, c)`: a * b + c, rounded once."""
    return floats(floats, floats, floats), lambda _c, builder, _s, args: _fma(builder, *args)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", _FLOATS, a, b, c)


@intrinsic  # type: ignore[untyped-decorator]
def maximum(_context: Any, a: Any, b: Any) -> Any:
    """`maximum(a, b)`: b where a is NaN."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return floats(floats, floats), generate


@intrinsic  # type: ignore[untyped-decorator]
def zero_where_infinite(_context: Any, value: Any) -> Any:
    """`zero_where_infinite(x)`: x, but 0 where it is minus infinity."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("==", args[0], _constant(-np.inf)), _constant(0.0), args[0])

    return floats(floats), generate


@intrinsic  # type: ignore[untyped-decorator]
def exp2(_context: Any, value: Any) -> Any:
    """`exp2(x)`: 2**x within 2 ulp; 0 for minus infinity, NaN for NaN."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        x = args[0]
        floor, current = ir.Constant(_I32, 9), ir.Constant(_I32, 4)
        part = _call(builder, "llvm.x86.avx512.mask.reduce.ps.512", _FLOATS, x, floor, x, _ALL, current)
        power = _constant(_EXP2[0])
        for factor in _EXP2[1:]:
            power = _fma(builder, power, part, _constant(factor))
        return _call(builder, "llvm.x86.avx512.mask.scalef.ps.512", _FLOATS, power, x, power, _ALL, current)

    return floats(floats), generate


@intrinsic  # type: ignore[untyped-decorator]
def hide_above(_context: Any, value: Any, limits: Any, position: Any) -> Any:
    """`hide_above(x, limits, position)`: minus infinity where the int32 at address `limits` is below `position`."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        place = _splat(builder, builder.trunc(args[2], _I32), _INTS)
        seen = builder.icmp_signed(">=", _read(builder, args[1], _INTS), place)
        return builder.select(seen, args[0], _constant(-np.inf))

    return floats(floats, types.intp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_pairs(_context: Any, address: Any, low: Any, high: Any) -> Any:
    """`store_pairs(address, low, high)`: sixteen pairs of bf16 (low[i], high[i]), rounded to nearest."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        half, top = ir.Constant(_INTS, [0x8000] * 16), ir.Constant(_INTS, [0xFFFF0000] * 16)
        low, high = (builder.add(builder.bitcast(value, _INTS), half) for value in args[1:])
        pairs = builder.or_(builder.lshr(low, ir.Constant(_INTS, [16] * 16)), builder.and_(high, top))
        _write(builder, pairs, args[0])
        return _nothing(context)

    return types.void(types.intp, floats, floats), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_bf16(_context: Any, address: Any, value: Any) -> Any:
    """`store_bf16(address, x)`: sixteen bf16, rounded to nearest, ties to even. A NaN must be one that bf16 has."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[1], _INTS)
        sixteen, half = ir.Constant(_INTS, [16] * 16), ir.Constant(_INTS, [0x7FFF] * 16)
        odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(_INTS, [1] * 16))
        rounded = builder.lshr(builder.add(builder.add(bits, half), odd), sixteen)
        _write(builder, builder.trunc(rounded, ir.VectorType(_I16, 16)), args[0])
        return _nothing(context)

    return types.void(types.intp, floats), generate


@intrinsic  # type: ignore[untyped-decorator]
def interleave(_context: Any, first: Any, second: Any, low: Any, high: Any) -> Any:
    """Pairs (first[i], second[i]) of 32 16-bit values at two addresses: 16 pairs to `low`, 16 to `high`."""
    words = ir.VectorType(_I16, 32)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        a, b = _read(builder, args[0], words), _read(builder, args[1], words)
        for start, target in ((0, args[2]), (16, args[3])):
            order = [start + i // 2 + 32 * (i % 2) for i in range(32)]
            pairs = builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, 32), order))
            _write(builder, pairs, target)
        return _nothing(context)

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def transpose(_context: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> Any:
    """Transpose 16 x 16 32-bit values between addresses; strides in bytes."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows = [_read(builder, _offset(builder, args[0], i, args[1]), _INTS) for i in range(16)]
        for i, row in enumerate(_transposed(builder, rows)):
            _write(builder, row, _offset(builder, args[2], i, args[3]))
        return _nothing(context)

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Four rounds of shuffles of two vectors: 32-bit and 64-bit parts inside 128-bit lanes, then the lanes."""

    def both(orders: tuple[list[int], list[int]], pairs: Callable[[int], tuple[int, int]]) -> None:
        for i in range(8):
            low, high = pairs(i)
            a, b = rows[low], rows[high]
            for at, order in zip((low, high), orders, strict=True):
                rows[at] = builder.shuffle_vector(a, b, ir.Constant(_INTS, order))

    lanes = [4 * lane for lane in range(4)]
    even = [at for lane in lanes for at in (lane, lane + 16, lane + 1, lane + 17)]
    odd = [at for lane in lanes for at in (lane + 2, lane + 18, lane + 3, lane + 19)]
    both((even, odd), lambda i: (2 * i, 2 * i + 1))
    low = [at for lane in lanes for at in (lane, lane + 1, lane + 16, lane + 17)]
    high = [at for lane in lanes for at in (lane + 2, lane + 3, lane + 18, lane + 19)]
    both((low, high), lambda i: (i // 2 * 4 + i % 2, i // 2 * 4 + i % 2 + 2))
    # Now row 4 * r + c holds, in lane l, column 4 * l + (0, 2, 1, 3)[c] of rows 4 * r to 4 * r + 3.
    outside = [at + i for at in (0, 8, 16, 24) for i in range(4)]
    inside = [at + i for at in (4, 12, 20, 28) for i in range(4)]
    both((outside, inside), lambda i: (i // 4 * 8 + i % 4, i // 4 * 8 + i % 4 + 4))
    both((outside, inside), lambda i: (i, i + 8))
    # Row 4 * l + c holds column 4 * l + (0, 2, 1, 3)[c].
    return [rows[4 * lane + c] for lane in range(4) for c in (0, 2, 1, 3)]


def _prefetch(builder: Any, address: Any) -> None:
    hints = [ir.Constant(_I32, value) for value in (0, 2, 1)]  # read, second level, data
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), _pointer(builder, address, ir.IntType(8)), *hints)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_each(_context: Any, table: Any, offset: Any) -> Any:
    """Bring the cache lines at `offset` from each of eight addresses (int64 at `table`) into the second level."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        for i in range(8):
            start = _read(builder, builder.add(args[0], ir.Constant(_I64, 8 * i)), _I64)
            _prefetch(builder, builder.add(start, args[1]))
        return _nothing(context)

    return types.void(types.intp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_run(_context: Any, address: Any) -> Any:
    """Bring the sixteen cache lines from `address` on into the second level."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        for i in range(16):
            _prefetch(builder, builder.add(args[0], ir.Constant(_I64, BYTES * i)))
        return _nothing(context)

    return types.void(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def spread_half(_context: Any, address: Any) -> Any:
    """`spread_half(address)`: sixteen times the fp16 there."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        half = builder.load(_pointer(builder, args[0], ir.HalfType()))
        return _splat(builder, builder.fpext(half, _F32), _FLOATS)

    return floats(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_bytes(_context: Any, address: Any) -> Any:
    """`load_bytes(address)`: sixteen int8 as float32."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.sitofp(builder.sext(_bytes(builder, args[0]), _INTS), _FLOATS)

    return floats(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def low_nibbles(_context: Any, address: Any) -> Any:
    """`low_nibbles(address)`: the lower four bits of sixteen bytes as float32."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        wide = builder.zext(_bytes(builder, args[0]), _INTS)
        return builder.sitofp(builder.and_(wide, ir.Constant(_INTS, [15] * 16)), _FLOATS)

    return floats(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def high_nibbles(_context: Any, address: Any) -> Any:
    """`high_nibbles(address)`: the upper four bits of sixteen bytes as float32."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        wide = builder.zext(_bytes(builder, args[0]), _INTS)
        return builder.sitofp(builder.lshr(wide, ir.Constant(_INTS, [4] * 16)), _FLOATS)

    return floats(types.intp), generate


def _bytes(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, ir.VectorType(ir.IntType(8), 16)), align=1)
