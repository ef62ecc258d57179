"""How much memory there is, and how much of it the KV pool may take."""

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from tamis.config import KV_DTYPES, EngineConfig, ModelConfig
from tamis.errors import ConfigError
from tamis.kv import KVLayout, SparseKVPool
from tamis.units import format_size

logger = logging.getLogger(__name__)

DEFAULT_PAGE_SIZE = 32
"""Tokens a page of a dense model, and at most of a sparse one, when the user names none."""
MEMORY_SHARE = 0.5
"""Of the memory free after the weights are loaded, what a pool without an explicit budget takes at most."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process can still take: what the machine has available, cut down to its cgroup's limits (v1, v2)."""
    limits = [_machine_memory(root), *_cgroup_memory(root)]
    return max(0, min(limits))


def _machine_memory(root: Path) -> int:
    """MemAvailable of /proc/meminfo; half the physical memory where there is no such file."""
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_memory(root: Path) -> Iterator[int]:
    """What each limit on this process's groups, from its own up to the root, leaves free."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, read = root / "sys/fs/cgroup", _free_v2
        elif "memory" in controllers.split(","):
            top, read = root / "sys/fs/cgroup/memory", _free_v1
        else:
            continue
        group = top / path.lstrip("/")
        # In a container the path may be the host's: then only the mount's own root exists.
        for folder in (group, *group.parents):
            yield from read(folder)
            if folder == top:
                break


def _free_v2(group: Path) -> Iterator[int]:
    """Above memory.high the kernel slows the group down until it gives memory back; memory.max it never gives."""
    used, stat = _number(group / "memory.current"), _statistics(group)
    limits = (_number(group / "memory.max"), _number(group / "memory.high"))
    for limit in limits:
        if limit is not None and used is not None:
            yield limit - used + stat.get("inactive_file", 0) + stat.get("active_file", 0)


def _free_v1(group: Path) -> Iterator[int]:
    """A limit of a group above, which a container may not see, stands in the group's own statistics."""
    used, stat = _number(group / "memory.usage_in_bytes"), _statistics(group)
    limits = (_number(group / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit"))
    for limit in limits:
        if limit is not None and used is not None:
            yield limit - used + stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)


def _statistics(group: Path) -> dict[str, int]:
    """memory.stat; its file cache is what the kernel drops before it refuses memory."""
    pairs = (line.partition(" ") for line in _lines(group / "memory.stat"))
    return {name: int(value) for name, _, value in pairs if value.isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def resolve_page_size(page_size: int | None, config: ModelConfig) -> int:
    """The page size to use: where none is given, 32, or gcd(32, block_size) where neither divides the other.

    Pages of several small blocks are read as fast as those of a dense model; pages of their size would not be.
    Raises PageSizeError where the given one neither divides the sparse block size nor is a multiple of it.
    """
    if page_size is None:
        block = DEFAULT_PAGE_SIZE if config.sparse is None else config.sparse.block_size
        return math.gcd(DEFAULT_PAGE_SIZE, block) if DEFAULT_PAGE_SIZE % block else DEFAULT_PAGE_SIZE
    if config.sparse is not None:
        config.sparse.check_page_size(page_size)
    return page_size


def resolve_dtype(dtype: str, config: ModelConfig, *, native_bf16: bool | None = None) -> torch.dtype:
    """The type of weights and activations.

    "auto" is bf16 where the checkpoint does not hold full fp32 weights (it is 16-bit or quantised) and the CPU
    multiplies bf16 natively, else fp32.
    """
    if dtype != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    native = _cpu_has_bf16() if native_bf16 is None else native_bf16
    return torch.bfloat16 if native and config.dtype is not torch.float32 else torch.float32


def native_dtype() -> torch.dtype:
    """What "auto" is for a checkpoint that does not hold full fp32 weights, here."""
    return torch.bfloat16 if _cpu_has_bf16() else torch.float32


def _cpu_has_bf16() -> bool:
    # Private, so it may move; without it we cannot know, and fp32 is right everywhere.
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(probe()) if probe is not None else False


def resolve(engine: EngineConfig, config: ModelConfig) -> EngineConfig:
    """`engine` with dtype, kv_dtype, page size and device settled for the model; the KV budget is settled later.

    Raises ConfigError for a device tamis does not run on, PageSizeError for a page size that does not divide the block.
    """
    if engine.device not in ("auto", "cpu"):
        raise ConfigError(f"device={engine.device!r} is not one of auto, cpu")
    names = {value: name for name, value in KV_DTYPES.items()}
    dtype = names[resolve_dtype(engine.dtype, config)]
    return replace(
        engine,
        dtype=dtype,
        kv_dtype=dtype if engine.kv_dtype == "auto" else engine.kv_dtype,
        page_size=resolve_page_size(engine.page_size, config),
        device="cpu",
        threads=engine.threads or torch.get_num_threads(),
    )


def kv_budget(engine: EngineConfig, layout: KVLayout, context_length: int, available: int) -> int:
    """Bytes for usable pages: the given budget, else half of `available`, at most `max_num_seqs` full contexts.

    A given budget is taken as it is, whatever is available.
    Raises ConfigError naming both numbers where that is less than one page.
    """
    if engine.kv_budget is not None:
        budget, origin = engine.kv_budget, "kv_budget"
    else:
        contexts = engine.max_num_seqs * -(-context_length // layout.page_size) * layout.bytes_per_page
        budget, origin = min(int(available * MEMORY_SHARE), contexts), "the memory available for the KV pool"
    if budget < layout.bytes_per_page:
        raise ConfigError(
            f"{origin} is {budget} bytes, less than one page of {layout.bytes_per_page} bytes "
            f"({layout.page_size} tokens)"
        )
    return budget


def build_layout(engine: EngineConfig, config: ModelConfig) -> KVLayout:
    """What the pool of a resolved configuration keeps a token. Raises PageSizeError, ConfigError."""
    assert engine.page_size is not None
    return KVLayout.from_model(config, page_size=engine.page_size, dtype=KV_DTYPES[engine.kv_dtype])


def build_pool(engine: EngineConfig, config: ModelConfig) -> SparseKVPool:
    """The pool of a resolved configuration; its size is logged, and where it is more than the memory that is available.

    Raises ConfigError where it cannot be had.
    """
    layout, available = build_layout(engine, config), available_memory()
    budget = kv_budget(engine, layout, config.context_length, available)
    pages = layout.pages_for(budget)
    size, free = f"{budget} ({format_size(budget)})", f"{available} bytes ({format_size(available)})"
    try:
        pool = SparseKVPool(layout, pages, device=engine.device)
    except ConfigError as error:
        if budget <= available:
            raise
        raise ConfigError(
            f"kv_budget={size} is more than the {free} of memory that are available, and cannot be had: "
            "give less, or no budget for half of what is free"
        ) from error
    if budget > available:
        logger.warning(
            "kv_budget=%s is more than the %s of memory that are available: "
            "the system may end the process once the pool fills", size, free,
        )  # fmt: skip
    logger.info(
        "KV pool: %d pages of %d tokens = %d tokens, %s (%d bytes a token, %s)",
        pages, layout.page_size, pages * layout.page_size, format_size(pages * layout.bytes_per_page),
        layout.bytes_per_token["total"], engine.kv_dtype,
    )  # fmt: skip
    return pool
