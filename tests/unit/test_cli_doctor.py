import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cli import invoke
from tamis.cli.doctor import advice
from tamis.kernels import ReferenceOps
from tamis.kernels.dense import TorchModelOps
from tamis.kernels.routes import MODEL_OPS, OPS, routes
from tamis.kernels.selftest import relative_difference, self_test


def test_the_machine_and_the_kernels_for_people(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAMIS_CACHE", str(tmp_path))
    result = invoke("doctor", "--kernels", "reference")
    assert result.code == 0
    assert result.err == "Testing for up to 30 s; kernels that are not compiled yet take longer.\n"
    for words in (
        "cores",
        "memory",
        "instructions",
        "GPU",
        f"torch {torch.__version__}",
        str(tmp_path),
        *OPS,
        *MODEL_OPS,
    ):
        assert words in result.out, words
    assert "comparisons are right" in result.out
    assert "WRONG" not in result.out


def test_the_same_as_json_without_a_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAMIS_CACHE", str(tmp_path / "new"))
    result = invoke("doctor", "--kernels", "reference", "--no-test", "--json", "--dtype", "fp32", "--threads", "1")
    facts: dict[str, Any] = json.loads(result.out)
    assert (result.code, result.err) == (0, "")
    assert facts["backend"] == {"name": "reference", "why": "it was asked for", "dtype": "fp32", "kv_dtype": "fp32"}
    assert [way["op"] for way in facts["ops"]] == [*OPS, *MODEL_OPS]
    assert facts["self_test"] is None
    assert facts["cpu"]["cores"] >= facts["cpu"]["usable_cores"] >= 1
    assert 0 < facts["memory"]["available"] <= facts["memory"]["total"]
    models = next(cache for cache in facts["caches"] if cache["what"] == "models")
    assert (models["path"], models["bytes"], models["writable"]) == (str(tmp_path / "new" / "models"), 0, True)
    assert facts["environment"]["TAMIS_CACHE"] == str(tmp_path / "new")


def test_secrets_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TAMIS_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "hush-hush")
    assert "hush-hush" not in invoke("doctor", "--no-test", "--json").out


def test_a_wrong_setting_is_an_error_before_anything_runs() -> None:
    result = invoke("doctor", "--kernels", "cuda")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: kernels='cuda' is not one of auto, cpu, reference")


class Wrong(ReferenceOps):
    """A backend with two faults."""

    def gather_pages(self, *operands: Any) -> Any:
        return super().gather_pages(*operands) + 0.001

    def dense_attention(self, *operands: Any, **more: Any) -> Any:
        raise RuntimeError("no such instruction")


def test_a_backend_that_differs_or_raises_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = self_test(Wrong(), TorchModelOps())
    faults = {check.op: check.fault for check in tested.checks if not check.passed}
    assert faults == {"gather_pages": None, "dense_attention": "RuntimeError: no such instruction"}
    assert (tested.passed, tested.skipped) == (False, 0)
    monkeypatch.setattr("tamis.kernels.choose_ops", lambda settings: (Wrong(), "this is a test"))
    result = invoke("doctor", "--quiet")
    assert (result.code, result.err) == (1, "")
    assert "WRONG" in result.out


def test_every_op_is_compared_in_every_type() -> None:
    tested = self_test(ReferenceOps(), TorchModelOps())
    assert tested.passed
    assert len(tested.checks) == 3 * 7 + 4 * 2 * 2
    assert all(check.difference == 0 for check in tested.checks)


def test_when_the_time_is_up_the_rest_is_left_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(0.0)
    monkeypatch.setattr("tamis.kernels.selftest.time.perf_counter", lambda: next(ticks))
    tested = self_test(ReferenceOps(), TorchModelOps(), seconds=10)
    assert 0 < len(tested.checks) < 10
    assert len(tested.checks) + tested.skipped == 3 * 7 + 4 * 2 * 2


def test_differences_in_kind_are_infinite() -> None:
    nan, inf = float("nan"), float("inf")
    one = torch.tensor([1.0, -4.0])
    assert relative_difference(one, torch.tensor([1.0, -4.4])) == pytest.approx(0.4 / 4.4)
    assert relative_difference(one, torch.tensor([1.0])) == inf
    assert relative_difference(one, torch.tensor([1.0, nan])) == inf
    assert relative_difference(torch.tensor([inf]), torch.tensor([-inf])) == inf
    assert relative_difference(torch.tensor([nan, -inf, 2.0]), torch.tensor([nan, -inf, 2.0])) == 0


def test_a_backend_of_attention_alone_leaves_the_rest_to_torch() -> None:
    backend = ReferenceOps()
    backend.name = "other"
    ways = {way.op: way.runs_on for way in routes(backend, torch.bfloat16, torch.bfloat16)}
    assert ways == dict.fromkeys(OPS, "other") | dict.fromkeys(MODEL_OPS, "torch")


def test_advice_names_what_is_wrong() -> None:
    cache = {"what": "models", "path": "/c", "bytes": 0, "writable": True, "free": 1 << 40}
    fine: dict[str, Any] = {
        "caches": [cache], "memory": {"available": 1 << 34}, "environment": {}, "gpus": [],
        "cpu": {"threads": 2, "usable_cores": 2},
    }  # fmt: skip
    assert list(advice(fine)) == []
    worse = {
        "caches": [{**cache, "writable": False}, {**cache, "free": 5}], "memory": {"available": 1 << 20},
        "environment": {"OMP_WAIT_POLICY": "ACTIVE", "NUMBA_DISABLE_JIT": "1"}, "gpus": [{}],
        "cpu": {"threads": 9, "usable_cores": 2},
    }  # fmt: skip
    assert len(list(advice(worse))) == 7
