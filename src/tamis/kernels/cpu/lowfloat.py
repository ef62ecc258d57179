"""Reading 16- and 8-bit floats in Numba, which has no such types.

A plane is handed to kernels as an integer array whose type says what the bits mean, so that Numba compiles one version
a storage type: bf16 as uint16, fp16 as int16, fp8 e4m3 as uint8, fp8 e5m2 as int8, fp32 as float32. `to_float`
compiles to a shift, a conversion instruction or nothing, and LLVM vectorises loops over it.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Floating-point freedoms of kernels: order of sums and fused products. NaN and infinity keep their meaning."""

_CONTAINERS = {
    torch.bfloat16: (torch.uint16, np.uint16),
    torch.float16: (torch.int16, np.int16),
    torch.float8_e4m3fn: (torch.uint8, np.uint8),
    torch.float8_e5m2: (torch.int8, np.int8),
    torch.float32: (torch.float32, np.float32),
}


def as_array(tensor: Tensor) -> "np.ndarray[Any, Any]":
    """The tensor's memory as a NumPy array in the container type of its dtype; no copy."""
    container, _ = _CONTAINERS[tensor.dtype]
    array: np.ndarray[Any, Any] = tensor.detach().view(container).numpy()
    return array


def is_readable(dtype: torch.dtype) -> bool:
    """Whether kernels can read planes of this dtype."""
    return dtype in _CONTAINERS


@intrinsic  # type: ignore[untyped-decorator]
def float_bits(_context: Any, value: Any) -> Any:
    """`float_bits(x)`: the bits of a float32 as int32."""
    if value != types.float32:
        return None
    return types.int32(value), lambda _c, builder, _s, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic  # type: ignore[untyped-decorator]
def bits_float(_context: Any, value: Any) -> Any:
    """`bits_float(i)`: the float32 whose bits are this int32."""
    if value != types.int32:
        return None
    return types.float32(value), lambda _c, builder, _s, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic  # type: ignore[untyped-decorator]
def to_float(_context: Any, value: Any) -> Any:
    """`to_float(x)`: one element of a plane as float32, by the container type of `x`."""
    i16, i32, f32 = ir.IntType(16), ir.IntType(32), ir.FloatType()

    def half(builder: Any, bits: Any) -> Any:
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), f32)

    def from_bf16(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], i32), ir.Constant(i32, 16)), f32)

    def from_e4m3(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        # Shifted into place the bits are an fp16 whose exponent bias is larger by 8; 0x7f, which is NaN, would be 480.
        wide = builder.zext(args[0], i16)
        sign = builder.shl(builder.and_(wide, ir.Constant(i16, 0x80)), ir.Constant(i16, 8))
        rest = builder.and_(wide, ir.Constant(i16, 0x7F))
        scaled = builder.fmul(
            half(builder, builder.or_(sign, builder.shl(rest, ir.Constant(i16, 7)))), ir.Constant(f32, 256.0)
        )
        is_nan = builder.icmp_unsigned("==", rest, ir.Constant(i16, 0x7F))
        return builder.select(is_nan, ir.Constant(f32, float("nan")), scaled)

    def from_e5m2(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return half(builder, builder.shl(builder.zext(args[0], i16), ir.Constant(i16, 8)))

    generators = {
        types.uint16: from_bf16,
        types.int16: lambda _c, builder, _s, args: half(builder, args[0]),
        types.uint8: from_e4m3,
        types.int8: from_e5m2,
        types.float32: lambda _c, _b, _s, args: args[0],
    }
    return (types.float32(value), generators[value]) if value in generators else None


@njit(inline="always", fastmath=FAST)  # type: ignore[untyped-decorator]
def fast_exp2(x: Any) -> Any:
    """2**x in float32 for x <= 0, within 2 ulp; 0 below -126, NaN for NaN. Compiles to vector code, unlike np.exp2."""
    clamped = max(x, np.float32(-127.0)) if x == x else x
    whole = np.floor(clamped)
    part = clamped - whole
    # A polynomial for 2**part on [0, 1), fitted for relative error (about 2e-7).
    value = np.float32(1.8775767e-3)
    value = value * part + np.float32(8.9893397e-3)
    value = value * part + np.float32(5.5826318e-2)
    value = value * part + np.float32(2.4015361e-1)
    value = value * part + np.float32(6.9315308e-1)
    value = value * part + np.float32(1.0)
    scale = bits_float(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))
    return value * scale
