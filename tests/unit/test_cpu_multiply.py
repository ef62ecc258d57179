"""Products on matrix tiles against double precision; whatever lies beside rows and outputs is NaN."""

from collections.abc import Iterator

import pytest
import torch

from tamis.kernels.cpu import amx, amx_multiply
from tamis.kernels.cpu.scratch import Scratch
from tamis.kernels.cpu.threads import ThreadTeam
from tamis.kernels.quant import Format, Matrix, encode

pytestmark = pytest.mark.skipif(not amx.available(), reason="this machine has no AMX tiles")


@pytest.fixture(scope="module", params=[1, 2], ids=["1thread", "2threads"])
def team(request: pytest.FixtureRequest) -> Iterator[ThreadTeam]:
    team = ThreadTeam(request.param)
    yield team
    team.close()


@pytest.mark.parametrize("form", [Format.BF16, Format.INT8, Format.INT4, Format.INT4_CENTRED], ids=str)
@pytest.mark.parametrize("sizes", [[1], [16], [17, 0, 0, 31, 1], [0, 0, 5], [600], [0, 0], [130, 129]], ids=str)
@pytest.mark.parametrize(("outputs", "width"), [(32, 32), (96, 64), (64, 544), (32, 2080)])
def test_rows_meet_the_weights_of_their_group(
    team: ThreadTeam, sizes: list[int], outputs: int, width: int, form: Format
) -> None:
    generator = torch.Generator().manual_seed(outputs + width)
    rows = sum(sizes)
    room = torch.full((rows + 40, width), float("nan"), dtype=torch.bfloat16)
    x = room[:rows].copy_(torch.randn(rows, width, generator=generator))
    weights = torch.randn(len(sizes), outputs, width, generator=generator)
    stored = encode(weights, Format.INT4 if form is Format.INT4_CENTRED else form)
    if form is Format.INT4_CENTRED:
        stored = Matrix(form, stored.values, stored.scales)
    weights = stored.dense(torch.bfloat16).double()
    target = torch.full((rows + 1, outputs), float("nan"), dtype=torch.bfloat16)
    assert amx_multiply.supports(stored)
    amx_multiply.multiply(team, Scratch(), x, stored, target[:rows], sizes)
    expected = [part.double() @ weights[group].t() for group, part in enumerate(torch.split(x, sizes))]
    # Sums are fp32; the result is rounded once.
    wanted = torch.cat(expected)
    size = float(weights.abs().max()) * width**0.5
    torch.testing.assert_close(target[:rows].double(), wanted, atol=1e-5 * size, rtol=2**-8)
    assert target[rows].isnan().all()


@pytest.mark.parametrize(("outputs", "width"), [(16, 32), (32, 48), (33, 64)])
def test_shapes_that_do_not_fill_tiles_are_left_to_others(outputs: int, width: int) -> None:
    assert not amx_multiply.supports(Matrix(Format.BF16, torch.zeros(outputs, width, dtype=torch.bfloat16)))


def test_one_expert_of_several(team: ThreadTeam) -> None:
    x, weights = torch.randn(20, 64).bfloat16(), torch.randn(3, 32, 64).bfloat16()
    out = torch.empty(20, 32, dtype=torch.bfloat16)
    amx_multiply.multiply(team, Scratch(), x, Matrix(Format.BF16, weights), out, [20], first_row=64)
    torch.testing.assert_close(out.float(), x.float() @ weights[2].float().t(), atol=1e-3, rtol=2**-8)
