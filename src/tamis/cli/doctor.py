"""`tamis doctor`: what this machine has, what tamis does with it, and whether it computes what it should."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.options import AsJson, Debug, EngineKVDtype, Quiet, Threads, WeightDtype

if TYPE_CHECKING:
    from tamis.config import EngineConfig
    from tamis.kernels.routes import Route
    from tamis.kernels.selftest import SelfTest

UNSOUND = 1
"""Exit code where a backend differs from the reference."""


def doctor(
    kernels: Annotated[
        str, typer.Option("--kernels", metavar="BACKEND", help="auto, cpu or reference: the backend that is looked at.")
    ] = "auto",
    dtype: WeightDtype = "auto",
    kv_dtype: EngineKVDtype = "auto",
    threads: Threads = None,
    test: Annotated[bool, typer.Option("--test/--no-test", help="Compare the backend with the reference.")] = True,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="Time that the test may take; kernels that were never "
                            "compiled on this machine take longer, once.", min=0)
    ] = 30.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    _debug: Debug = False,
) -> None:  # fmt: skip
    """Show what this machine has and which kernels run here and why, and test them. Exit code 1 where one is wrong."""
    from tamis.cli.machine import machine_facts
    from tamis.cli.output import print_json
    from tamis.kernels import choose_model_ops, choose_ops
    from tamis.kernels.routes import routes
    from tamis.kernels.selftest import self_test

    settings = _settings(kernels, dtype, kv_dtype, threads)
    machine = machine_facts()
    ops, reason = choose_ops(settings)
    try:
        ways = routes(ops, *_dtypes(settings))
        tested = None
        if test:
            _announce(seconds, quiet=quiet)
            tested = self_test(ops, choose_model_ops(ops), seconds=seconds)
    finally:
        ops.close()
    backend = {"name": ops.name, "why": reason, "dtype": settings.dtype, "kv_dtype": settings.kv_dtype}
    if as_json:
        print_json({**machine, "backend": backend, "ops": [_route(way) for way in ways], "self_test": _tests(tested),
                    "advice": list(advice(machine))})  # fmt: skip
    else:
        _print(machine, backend, ways, tested)
    if tested is not None and not tested.passed:
        raise typer.Exit(UNSOUND)


def _settings(kernels: str, dtype: str, kv_dtype: str, threads: int | None) -> "EngineConfig":
    """Settings as the engine resolves them for a 16-bit checkpoint. Raises ConfigError."""
    from dataclasses import replace

    import torch

    from tamis.config import KV_DTYPES, EngineConfig
    from tamis.engine.memory import native_dtype

    settings = EngineConfig(kernels=kernels, dtype=dtype, kv_dtype=kv_dtype, threads=threads)
    names = {value: name for name, value in KV_DTYPES.items()}
    resolved = names[native_dtype()] if dtype == "auto" else dtype
    return replace(
        settings, dtype=resolved, kv_dtype=resolved if kv_dtype == "auto" else kv_dtype,
        threads=threads or torch.get_num_threads(),
    )  # fmt: skip


def _dtypes(settings: "EngineConfig") -> tuple[Any, Any]:
    from tamis.config import KV_DTYPES

    return KV_DTYPES[settings.dtype], KV_DTYPES[settings.kv_dtype]


def _announce(seconds: float, *, quiet: bool) -> None:
    from tamis.cli.local import say

    if not quiet:
        say(f"Testing for up to {seconds:g} s; kernels that are not compiled yet take longer.")


def advice(machine: dict[str, Any]) -> Iterator[str]:
    """What could be better here."""
    for cache in machine["caches"]:
        if not cache["writable"]:
            yield f"{cache['path']} cannot be written: {cache['what']} are made anew each time; TAMIS_CACHE moves it"
        elif cache["free"] < 1 << 30:
            yield f"{cache['path']} has less than 1 GiB left"
    if machine["memory"]["available"] < 2 << 30:
        yield "less than 2 GiB of memory are free: --kv-budget keeps the KV pool small"
    environment = machine["environment"]
    if environment.get("OMP_WAIT_POLICY", "passive").lower() == "active":
        yield "OMP_WAIT_POLICY=active: threads that spin while they wait slow each other down"
    if environment.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        yield "NUMBA_DISABLE_JIT is set: kernels run as plain Python, hundreds of times slower"
    if machine["cpu"]["threads"] > machine["cpu"]["usable_cores"]:
        yield f"there are more threads than the {machine['cpu']['usable_cores']} cores this process may use"
    if machine["gpus"]:
        yield "tamis computes on the CPU so far; the GPU is not used"


def _route(way: "Route") -> dict[str, str]:
    return {"op": way.op, "runs_on": way.runs_on, "why": way.why}


def _tests(tested: "SelfTest | None") -> dict[str, Any] | None:
    if tested is None:
        return None
    checks = [
        {"op": check.op, "kind": check.kind, "passed": check.passed, "seconds": check.seconds, "fault": check.fault,
         "difference": None if check.fault else check.difference, "tolerance": check.tolerance}
        for check in tested.checks
    ]  # fmt: skip
    return {"passed": tested.passed, "seconds": tested.seconds, "skipped": tested.skipped, "checks": checks}


def _print(
    machine: dict[str, Any], backend: dict[str, Any], ways: "list[Route]", tested: "SelfTest | None"
) -> None:  # fmt: skip
    from tamis.cli.output import key_values, new_table, print_table

    print_table(key_values("This machine", _machine_rows(machine)))
    types = f"weights in {backend['dtype']}, K and V in {backend['kv_dtype']}"
    columns = (("op", False), ("runs on", False), ("why", False))
    table = new_table(f"Kernels: {backend['name']} ({backend['why']}), {types}", columns)
    for way in ways:
        table.add_row(way.op, way.runs_on, way.why)
    print_table(table)
    if tested is not None:
        _print_test(tested)
    for line in advice(machine):
        print(f"advice: {line}")


def _machine_rows(machine: dict[str, Any]) -> list[tuple[str, str]]:
    from tamis.units import format_size

    cpu, memory, versions = machine["cpu"], machine["memory"], machine["versions"]
    tiles = "with matrix tiles" if cpu["matrix_tiles"] else "without matrix tiles"
    there = [f"{name} {found}" for name, found in versions.items() if found is not None]
    absent = [name for name, found in versions.items() if found is None]
    gpus = [f"{gpu['name']}, {format_size(gpu['memory'])}" for gpu in machine["gpus"]]
    return [
        ("system", machine["system"]),
        ("Python", machine["python"]),
        ("CPU", cpu["model"]),
        ("cores", f"{cpu['usable_cores']} of {cpu['cores']} usable, {cpu['threads']} threads"),
        ("instructions", f"{cpu['simd']}, {tiles}"),
        ("memory", f"{format_size(memory['available'])} of {format_size(memory['total'])} free"),
        ("GPU", "; ".join(gpus) or "none that torch can use"),
        *(("versions" if at == 0 else "", ", ".join(there[at : at + 4])) for at in range(0, len(there), 4)),
        ("not installed", ", ".join(absent) or "-"),
        *((cache["what"], _cache_text(cache)) for cache in machine["caches"]),
        *((name, value) for name, value in machine["environment"].items()),
    ]


def _cache_text(cache: dict[str, Any]) -> str:
    from tamis.units import format_size

    state = f"{format_size(cache['free'])} free" if cache["writable"] else "cannot be written"
    return f"{cache['path']}: {format_size(cache['bytes'])}, {state}"


def _print_test(tested: "SelfTest") -> None:
    from tamis.cli.output import new_table, print_table

    columns = (("op", False), ("operands", False), ("difference", True), ("allowed", True), ("s", True), ("", False))
    table = new_table("Compared with the reference", columns)
    for check in tested.checks:
        found = check.fault or f"{check.difference:.1e}"
        verdict = "ok" if check.passed else "WRONG"
        table.add_row(check.op, check.kind, found, f"{check.tolerance:.0e}", f"{check.seconds:.1f}", verdict)
    print_table(table)
    wrong = sum(not check.passed for check in tested.checks)
    left = f"; {tested.skipped} more did not fit into the time (--seconds)" if tested.skipped else ""
    print(f"{len(tested.checks) - wrong} of {len(tested.checks)} comparisons are right, {tested.seconds:.1f} s{left}")
