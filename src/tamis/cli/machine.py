"""What this machine has that matters to tamis: cores, memory, instructions, GPUs, versions, caches, settings."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "numpy", "numba", "llvmlite", "safetensors", "gguf", "tokenizers", "llguidance", "huggingface-hub",
    "fastapi", "uvicorn",
)  # fmt: skip
"""What tamis needs, where its version matters most."""
OPTIONAL = ("triton", "redis", "fsspec", "transformers")
"""What some of tamis needs."""
VARIABLES = (
    "TAMIS_CACHE", "XDG_CACHE_HOME", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "NUMBA_CACHE_DIR",
    "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_DISABLE_JIT", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "HF_HOME",
    "HF_HUB_OFFLINE",
)  # fmt: skip
"""Settings in the environment that change what tamis does; none of them is a secret."""


def machine_facts() -> dict[str, Any]:
    """Everything, for JSON. Memory and sizes in bytes."""
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "cpu": _cpu(),
        "memory": _memory(),
        "gpus": _gpus(),
        "versions": {"tamis": _version("tamis")} | {name: _version(name) for name in (*PACKAGES, *OPTIONAL)},
        "caches": _caches(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _cpu() -> dict[str, Any]:
    import torch

    from tamis.kernels.cpu import amx

    return {
        "model": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "matrix_tiles": amx.available(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _memory() -> dict[str, int]:
    from tamis.engine.memory import available_memory

    return {
        "total": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "available": available_memory(),
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": gpu.name, "memory": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"} for gpu in found
    ]  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _caches() -> list[dict[str, Any]]:
    """Directories that tamis keeps things in: what for, size, whether they can be written, what is free there."""
    import numba

    import tamis.kernels.cpu  # noqa: F401  (it says where compiled kernels are kept)
    from tamis.cache import cache_dir

    places = [("models", cache_dir() / "models"), ("compiled kernels", Path(str(numba.config.CACHE_DIR or "")))]
    return [_cache(what, path) for what, path in places if path != Path()]


def _cache(what: str, path: Path) -> dict[str, Any]:
    there = next((place for place in (path, *path.parents) if place.exists()), path)
    return {
        "what": what,
        "path": str(path),
        "bytes": sum(size for size in _sizes(path)),
        "writable": os.access(there, os.W_OK),
        "free": shutil.disk_usage(there).free if there.exists() else 0,
    }


def _sizes(path: Path) -> Iterator[int]:
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                yield (Path(folder) / name).stat().st_size
            except OSError:  # it went while we were looking
                continue
