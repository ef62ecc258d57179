"""What the benchmarks share: fair timing, and what this machine can do at most."""

import os

# Read when torch is loaded: threads that spin while they wait would slow whoever is timed next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    seconds: float,
    least: int = 3,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each run by the clock `now`, in turn so that noise meets all alike; one untimed round first."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or min(map(len, times.values())) < least:
        for name, run in runs.items():
            before = now()
            run()
            times[name].append(now() - before)
    return {name: statistics.median(found) for name, found in times.items()}


def read_bandwidth(seconds: float = 1.0) -> float:
    """Bytes a second that all threads together read from memory: the sum of 1 GiB of fp32."""
    data = torch.ones(1 << 28)
    return data.nbytes / interleaved({"sum": data.sum}, seconds)["sum"]


def matmul_speed(dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOP a second of a square matrix product."""
    size = 2048
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / interleaved({"mm": lambda: a @ b}, seconds)["mm"]


def limits(seconds: float = 1.0) -> dict[str, float]:
    """This machine's limits, measured now."""
    return {
        "threads": torch.get_num_threads(),
        "read_gb_s": read_bandwidth(seconds) / 1e9,
        "bf16_gflop_s": matmul_speed(torch.bfloat16, seconds) / 1e9,
        "fp32_gflop_s": matmul_speed(torch.float32, seconds) / 1e9,
    }


def table(title: str, rows: list[list[str]]) -> None:
    """Print columns aligned: the first to the left, the others to the right; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print(f"\n{title}")
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells]), flush=True)
