"""Matrix tiles (Intel AMX, bf16) in Numba kernels: whether this process may use them, and the instructions.

A thread has eight tile registers of 16 rows x 64 bytes. A kernel calls `configure` before the first of the other
instructions and `release` before it returns: the state belongs to the thread, and other code that runs on it (torch's
own products among it) sets up its own.
"""

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from tamis.errors import KernelInputError

TILE_BYTES = 1024
"""A full tile: 16 rows x 64 bytes."""

_SYS_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18
_NEEDED = ("amx-tile", "amx-bf16", "avx512f", "avx512dq", "avx512bw")

_I8, _I64 = ir.IntType(8), ir.IntType(64)


@cache
def available() -> bool:
    """Whether kernels of this process may use tiles: Linux on x86-64, a CPU that has them, and the kernel's consent.

    Asks the kernel for the permission (for the whole process); never raises.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    return _cpu_has_tiles() and _compiler_has_tiles() and _kernel_permits()


def _cpu_has_tiles() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line.split(":")[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    return {"amx_tile", "amx_bf16", "avx512f", "avx512dq", "avx512bw"}.issubset(flags)


def _compiler_has_tiles() -> bool:
    """Numba compiles for the features in this string (NUMBA_CPU_FEATURES changes them); its cache is keyed by it."""
    features = str(cpu_target.target_context.codegen().magic_tuple()[2]).split(",")
    return all(f"+{name}" in features for name in _NEEDED)


def _kernel_permits() -> bool:
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return False
    call.restype = ctypes.c_long
    arguments = (ctypes.c_long(value) for value in (_SYS_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    return bool(call(*arguments) == 0)


def tile_config() -> "np.ndarray[Any, Any]":
    """The 64 bytes that `configure` reads: all eight tiles with 16 rows of 64 bytes.

    Raises KernelInputError where there are no tiles: the instructions would end the process.
    """
    if not available():
        raise KernelInputError("this machine or process has no AMX tiles (amx.available() is False)")
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = 64
    config[48:56] = 16
    return config


def _emit(name: str, *kinds: Any) -> Any:
    """An instruction without a result, from the values of its operands; tile numbers become constants."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        operands = []
        for numba_type, value, kind in zip(signature.args, args, kinds, strict=True):
            if kind is _I8:
                operands.append(ir.Constant(_I8, numba_type.literal_value))
            else:
                operands.append(builder.inttoptr(value, kind) if isinstance(kind, ir.PointerType) else value)
        function = ir.FunctionType(ir.VoidType(), kinds)
        builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.x86.{name}"), operands)
        return context.get_dummy_value()

    return generate


_ADDRESS = _I8.as_pointer()


def _literal(*numbers: Any) -> bool:
    return all(isinstance(number, types.IntegerLiteral) for number in numbers)


@intrinsic  # type: ignore[untyped-decorator]
def configure(_context: Any, address: Any) -> Any:
    """`configure(address)`: set up this thread's tiles as the 64 bytes there say."""
    return types.void(types.intp), _emit("ldtilecfg", _ADDRESS)


@intrinsic  # type: ignore[untyped-decorator]
def release(_context: Any) -> Any:
    """`release()`: give this thread's tiles back."""
    return types.void(), _emit("tilerelease")


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def zero(_context: Any, tile: Any) -> Any:
    """`zero(tile)`; tile numbers are literals from 0 to 7."""
    return (types.void(tile), _emit("tilezero", _I8)) if _literal(tile) else None


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def load(_context: Any, tile: Any, address: Any, stride: Any) -> Any:
    """`load(tile, address, stride)`: row i from address + i * stride (bytes)."""
    signature = types.void(tile, types.intp, types.intp)
    return (signature, _emit("tileloadd64", _I8, _ADDRESS, _I64)) if _literal(tile) else None


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def store(_context: Any, tile: Any, address: Any, stride: Any) -> Any:
    """`store(tile, address, stride)`: row i to address + i * stride (bytes)."""
    signature = types.void(tile, types.intp, types.intp)
    return (signature, _emit("tilestored64", _I8, _ADDRESS, _I64)) if _literal(tile) else None


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dot(_context: Any, total: Any, a: Any, b: Any) -> Any:
    """`dot(c, a, b)`: c[m, n] += sum over k < 32 of a[m, k] * b[k // 2, n, k % 2]; c float32, a and b bf16."""
    return (types.void(total, a, b), _emit("tdpbf16ps", _I8, _I8, _I8)) if _literal(total, a, b) else None
