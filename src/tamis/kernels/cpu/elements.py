"""Single numbers and rows: rounding to storage types, sigmoid, norms, rotation, gates."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from tamis.kernels.cpu.lowfloat import FAST, fast_exp2, to_float

LOG2E = np.float32(1.4426950408889634)


@intrinsic  # type: ignore[untyped-decorator]
def narrow(_context: Any, array: Any, value: Any) -> Any:
    """`narrow(array, x)`: float32 x as an element of `array`, which is fp32, or bf16 in uint16 (to nearest even)."""
    if value != types.float32 or array.dtype not in (types.float32, types.uint16):
        return None
    i16, i32 = ir.IntType(16), ir.IntType(32)

    def as_is(_c: Any, _b: Any, _s: Any, args: Any) -> Any:
        return args[1]

    def to_bf16(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        bits = builder.bitcast(args[1], i32)
        odd = builder.and_(builder.lshr(bits, i32(16)), i32(1))
        rounded = builder.add(bits, builder.add(odd, i32(0x7FFF)))
        # Rounding could carry a NaN into the sign; a quiet one is written instead.
        is_nan = builder.fcmp_unordered("uno", args[1], args[1])
        return builder.trunc(builder.lshr(builder.select(is_nan, i32(0x7FC00000), rounded), i32(16)), i16)

    return array.dtype(array, value), as_is if array.dtype == types.float32 else to_bf16


@njit(fastmath=FAST)
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)) in float32; the exponential is only ever of a negative number, so nothing overflows."""
    small = fast_exp2(-np.abs(x) * LOG2E)
    large = np.float32(1) / (np.float32(1) + small)
    return large if x >= 0 else small * large


@njit(fastmath=FAST)
def gated(gate, up, clamped, alpha, limit):  # type: ignore[no-untyped-def]
    """One number of a gated MLP's inner row; see `linear.Gate`."""
    if clamped:
        # Written so that NaN passes: a comparison with it is false.
        gate = limit if gate > limit else gate
        up = limit if up > limit else (-limit if up < -limit else up)
        return (up + np.float32(1)) * gate * sigmoid(alpha * gate)
    return up * gate * sigmoid(gate)


@njit(fastmath=FAST)
def rms_scale(row, eps):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean square + eps) of a row in any storage type."""
    total = np.float32(0)
    for i in range(row.shape[0]):
        value = to_float(row[i])
        total += value * value
    return np.float32(1) / np.sqrt(total / np.float32(row.shape[0]) + eps)


@njit(fastmath=FAST)
def load_rows(x, weight, eps, rows):  # type: ignore[no-untyped-def]
    """rows[t] = x[t] in fp32, normed where `weight` [width] is not empty."""
    for t in range(x.shape[0]):
        source, target = x[t], rows[t]
        if weight.shape[0]:
            scale = rms_scale(source, eps)
            for i in range(source.shape[0]):
                target[i] = to_float(source[i]) * scale * weight[i]
        else:
            for i in range(source.shape[0]):
                target[i] = to_float(source[i])


@njit(fastmath=FAST)
def finish_head(head, weight, eps, rotates, cos, sin):  # type: ignore[no-untyped-def]
    """Norm (where `weight` is not empty), then rotate, one head [dim] in fp32, in place."""
    if weight.shape[0]:
        scale = rms_scale(head, eps)
        for i in range(head.shape[0]):
            head[i] *= scale * weight[i]
    if rotates:
        half = cos.shape[0]
        for i in range(half):
            first, second = head[i], head[half + i]
            head[i] = first * cos[i] - second * sin[i]
            head[half + i] = second * cos[i] + first * sin[i]
