"""Compiling kernels is told as one task, and only where it happens."""

import pytest
from numba import njit

from support.progress import Recorder
from tamis.kernels import ReferenceOps, report_compiling
from tamis.kernels.cpu.compiling import TASK, report_to


def test_kernels_that_are_compiled_are_one_task_and_compiled_ones_none() -> None:
    @njit
    def inner(x):  # type: ignore[no-untyped-def]
        return x + 1

    @njit
    def outer(x):  # type: ignore[no-untyped-def]
        return inner(x) * 2

    first, second = Recorder(), Recorder()
    with report_to(first):
        assert outer(3) == 8
    with report_to(second):
        assert outer(4) == 10
    assert first.calls == [(TASK, None, "steps"), "done"]
    assert second.calls == []


def test_the_task_ends_where_compiling_fails() -> None:
    @njit
    def broken(x):  # type: ignore[no-untyped-def]
        raise ValueError(x)

    recorder = Recorder()
    with pytest.raises(ValueError, match="3"), report_to(recorder):
        broken(3)
    assert recorder.calls[-1] == "done"


def test_a_backend_that_compiles_nothing_tells_nothing() -> None:
    recorder = Recorder()
    with report_compiling(ReferenceOps(), recorder):
        pass
    assert recorder.calls == []
