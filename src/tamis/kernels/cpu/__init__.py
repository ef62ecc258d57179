"""Kernels in Numba for CPUs, compiled at first use and kept in the cache directory."""

from tamis.kernels.cpu.cache import keep_compiled_kernels

keep_compiled_kernels()
