"""The model's own path in Numba against plain torch: every format, few rows and many."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from support.linears import (
    CLAMPED,
    random_experts,
    random_gated,
    random_groups,
    random_linear,
    random_matrix,
    random_norm,
)
from tamis.kernels.cpu.elements import narrow
from tamis.kernels.cpu.model import FEW, FEW_QUANTISED, CpuModelOps
from tamis.kernels.cpu.threads import ThreadTeam
from tamis.kernels.dense import TorchModelOps
from tamis.kernels.linear import Gate, HeadGroup, HeadProjection, Linear
from tamis.kernels.quant import Format

FP32, BF16 = torch.float32, torch.bfloat16
KINDS = [
    pytest.param(FP32, Format.FP32, id="fp32"),
    pytest.param(BF16, Format.BF16, id="bf16"),
    pytest.param(FP32, Format.INT8, id="int8"),
    pytest.param(FP32, Format.INT4, id="int4"),
    pytest.param(FP32, Format.INT4_CENTRED, id="int4-centred"),
]
ROWS = [1, 3, FEW, FEW + 1, FEW_QUANTISED, FEW_QUANTISED + 1]
HIDDEN = 96


@pytest.fixture(scope="module")
def ops() -> Iterator[CpuModelOps]:
    team = ThreadTeam(2)
    yield CpuModelOps(team)
    team.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Within rounding of the largest number: sums in another order, and in bf16 numbers kept in fp32 on the way."""
    limit = (1e-5 if dtype is FP32 else 2e-2) * float(wanted.abs().max())
    torch.testing.assert_close(got.float(), wanted.float(), atol=limit, rtol=0)


@pytest.mark.parametrize(("dtype", "form"), KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_heads(ops: CpuModelOps, dtype: torch.dtype, form: Format, rows: int) -> None:
    groups = random_groups()
    linear = random_linear(HIDDEN, sum(group.heads * group.dim for group in groups), dtype, form, bias=rows % 2 == 1)
    x, norm, angles = torch.randn(rows, HIDDEN), random_norm(HIDDEN), torch.randn(rows, 16)
    # A second projection of fewer heads, which turn at another speed.
    index = random_linear(HIDDEN, 64, dtype, form)
    ropes = ((angles.cos(), angles.sin()), ((2 * angles).cos(), (2 * angles).sin()))
    projections = (HeadProjection(linear, tuple(groups)), HeadProjection(index, (HeadGroup(2, 32, None, True),)))
    args = (x, norm, projections, ropes)
    for got, wanted in zip(ops.heads(*args), TorchModelOps().heads(*args), strict=True):
        assert got.dtype is dtype
        assert got.is_contiguous()
        close(got, wanted, dtype)


@pytest.mark.parametrize(("dtype", "form"), KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_projection(ops: CpuModelOps, dtype: torch.dtype, form: Format, rows: int) -> None:
    linear = random_linear(160, HIDDEN, dtype, form, bias=rows % 2 == 1)
    y = torch.randn(rows, 160).to(dtype)
    got, wanted = torch.ones(rows, HIDDEN), torch.ones(rows, HIDDEN)
    ops.add_projection(got, y, linear)
    TorchModelOps().add_projection(wanted, y, linear)
    close(got, wanted, dtype)


@pytest.mark.parametrize(("dtype", "form"), KINDS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("gate", [Gate(), CLAMPED], ids=["silu", "clamped"])
def test_gated(ops: CpuModelOps, dtype: torch.dtype, form: Format, rows: int, gate: Gate) -> None:
    weights = random_gated(HIDDEN, 160, dtype, form, gate, bias=rows % 2 == 1)
    x, norm = torch.randn(rows, HIDDEN), random_norm(HIDDEN)
    got, wanted = x.clone(), x.clone()
    ops.add_gated(got, norm, weights)
    TorchModelOps().add_gated(wanted, norm, weights)
    close(got - x, wanted - x, dtype)


@pytest.mark.parametrize(("dtype", "form"), KINDS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shared", [0, 64])
def test_experts(ops: CpuModelOps, dtype: torch.dtype, form: Format, rows: int, shared: int) -> None:
    weights = random_experts(HIDDEN, 32, dtype, form, CLAMPED, shared=shared)
    x, norm = torch.randn(rows, HIDDEN), random_norm(HIDDEN)
    got, wanted = x.clone(), x.clone()
    ops.add_experts(got, norm, weights)
    TorchModelOps().add_experts(wanted, norm, weights)
    close(got - x, wanted - x, dtype)


@pytest.mark.parametrize("rows", [2, 20])
def test_equal_router_scores_take_the_lowest_experts(ops: CpuModelOps, rows: int) -> None:
    weights = random_experts(HIDDEN, 32, FP32, Format.FP32, CLAMPED)
    weights.router.zero_()
    weights.router_bias.copy_(torch.tensor([0.0, 1, 0, 1, 0, 0]))
    x, norm = torch.randn(rows, HIDDEN), random_norm(HIDDEN)
    got, without = x.clone(), x.clone()
    ops.add_experts(got, norm, weights)
    for unused in (2, 4, 5):
        weights.routed.down.weight[unused].values.fill_(torch.nan)
    ops.add_experts(without, norm, weights)
    assert torch.equal(got, without)


@pytest.mark.parametrize(("dtype", "form"), KINDS)
@pytest.mark.parametrize("rows", [0, *ROWS])
def test_logits(ops: CpuModelOps, dtype: torch.dtype, form: Format, rows: int) -> None:
    linear, x, norm = random_linear(HIDDEN, 200, dtype, form), torch.randn(rows, HIDDEN), random_norm(HIDDEN)
    got, wanted = ops.logits(x, norm, linear), TorchModelOps().logits(x, norm, linear)
    assert got.shape == wanted.shape
    if rows:
        close(got, wanted, dtype)
        assert ops.logits(x, norm, linear).data_ptr() != got.data_ptr(), "logits outlive the step"


@pytest.mark.parametrize("rows", [2, 20])
def test_nan_stays_in_its_row(ops: CpuModelOps, rows: int) -> None:
    x, norm = torch.randn(rows, HIDDEN), random_norm(HIDDEN)
    x[1, 5] = torch.nan
    for shared in (0, 32):
        got = x.clone()
        ops.add_experts(got, norm, random_experts(HIDDEN, 32, FP32, Format.FP32, CLAMPED, shared=shared))
        assert bool(got[1].isnan().all())
        assert not bool(got[[0, *range(2, rows)]].isnan().any())


@pytest.mark.parametrize(("inputs", "outputs"), [(HIDDEN, 50), (40, 64)])
def test_odd_shapes_are_left_to_torch(ops: CpuModelOps, inputs: int, outputs: int) -> None:
    linear, x, norm = random_linear(inputs, outputs, FP32, Format.FP32), torch.randn(2, inputs), random_norm(inputs)
    close(ops.logits(x, norm, linear), TorchModelOps().logits(x, norm, linear), FP32)


def test_embedding_rows(ops: CpuModelOps) -> None:
    table = Linear(64, 10, BF16)
    table.weight = random_matrix(Format.INT8, (10, 64))
    rows = torch.tensor([3, 0, 9, 3])
    assert torch.equal(ops.embed(table, rows), table.weight.dense(FP32)[rows])


def test_a_large_quantised_matrix_is_expanded_in_parts(ops: CpuModelOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tamis.kernels.cpu.model.EXPANDED_BYTES", 4 * HIDDEN * 48)
    linear, x, norm = random_linear(HIDDEN, 200, FP32, Format.INT4), torch.randn(20, HIDDEN), random_norm(HIDDEN)
    close(ops.logits(x, norm, linear), TorchModelOps().logits(x, norm, linear), FP32)


def test_rounding_to_bf16_equals_torch() -> None:
    from numba import njit

    @njit
    def round_all(values, out):  # type: ignore[no-untyped-def]
        for i in range(len(values)):
            out[i] = narrow(out, values[i])

    values = torch.cat(
        [torch.randn(1000) * 10.0 ** torch.randint(-40, 38, (1000,)), torch.tensor([torch.inf, -torch.inf])]
    )
    out = np.empty(len(values), np.uint16)
    round_all(values.numpy(), out)
    assert torch.equal(torch.from_numpy(out.view(np.int16)), values.bfloat16().view(torch.int16))
    round_all(np.array([np.nan], np.float32), out)
    assert bool(torch.from_numpy(out[:1].view(np.int16)).view(BF16).isnan().all())
