"""The cache of compiled kernels under processes that compile at the same time."""

import multiprocessing
import sys
from pathlib import Path

import pytest
from numba.core import caching

from tamis.kernels.cpu.cache import LockedCacheFile

PROCESSES, KEYS = 4, 25


def _fill(kind: type[caching.IndexDataCacheFile], place: Path, process: int) -> None:
    for number in range(KEYS):
        kind(str(place), "kernel", "stamp").save((process, number), f"code {process} {number}")


def mixed_up(kind: type[caching.IndexDataCacheFile], place: Path) -> int:
    """How many of the kernels that several processes save are lost, or are another's code."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_fill, args=(kind, place, process)) for process in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    found = kind(str(place), "kernel", "stamp")
    wanted = {(process, number): f"code {process} {number}" for process in range(PROCESSES) for number in range(KEYS)}
    return sum(found.load(key) != code for key, code in wanted.items())


def test_processes_that_compile_at_once_neither_lose_nor_mix_up_kernels(tmp_path: Path) -> None:
    assert mixed_up(LockedCacheFile, tmp_path) == 0


def test_numba_uses_it() -> None:
    assert "tamis.kernels.cpu" in sys.modules
    assert caching.IndexDataCacheFile is LockedCacheFile


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a directory that nobody can write to: only known on Linux")
def test_a_place_that_cannot_be_written_to_can_be_read() -> None:
    assert LockedCacheFile("/proc", "kernel", "stamp").load("key") is None
