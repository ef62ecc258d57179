"""Attention and block scores on matrix tiles against the reference; everything that belongs to no token is NaN."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from support.ragged import Heads, Ragged, make_ragged
from tamis.config import SparseAttentionConfig
from tamis.errors import KernelInputError
from tamis.kernels import AttentionBatch, ReferenceOps
from tamis.kernels.cpu import amx, prefill
from tamis.kernels.cpu.scratch import ALIGNMENT, Scratch
from tamis.kernels.cpu.threads import ThreadTeam

LENGTHS, QUERIES = [1, 127, 129, 0, 1000], [1, 127, 5, 0, 70]
SHAPES = [
    (Heads(q=64, kv=4, index=4, dim=128, index_dim=128), 128, 128),
    (Heads(q=2, kv=1, index=1, dim=32, index_dim=32), 1, 32),
    (Heads(q=9, kv=3, index=3, dim=64, index_dim=32), 16, 24),
    (Heads(q=12, kv=3, index=6, dim=64, index_dim=64), 7, 32),
    (Heads(q=8, kv=1, index=2, dim=96, index_dim=96), 3, 300),
    (Heads(q=32, kv=1, index=2, dim=32, index_dim=96), 64, 5),
]
REFERENCE = ReferenceOps()
needs_tiles = pytest.mark.skipif(not amx.available(), reason="this machine has no AMX tiles")


@dataclass
class Tiles:
    """The calls under test, on tensors."""

    team: ThreadTeam
    scratch: Scratch

    def dense(self, case: Ragged, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, (out, lse) = case.q.bfloat16(), nan_outputs(case)
        plan = prefill.plan_dense(self.team, self.scratch, arrays(case.batch), *sizes(case))
        prefill.dense(self.team, plan, q, case.k, case.v, out, lse, sinks=sinks, k_scale=0.5, v_scale=2.0)
        return out, lse

    def sparse(self, case: Ragged, picks: Tensor, size: int, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, (out, lse) = case.q.bfloat16(), nan_outputs(case)
        plan = prefill.plan_sparse(
            self.team, self.scratch, arrays(case.batch), *sizes(case), index_heads=picks.shape[0],
            topk=picks.shape[2], block_size=size,
        )  # fmt: skip
        prefill.sparse(self.team, plan, q, case.k, case.v, picks, size, out, lse, sinks=sinks, k_scale=0.5, v_scale=2.0)
        return out, lse

    def scores(self, case: Ragged, size: int) -> Tensor:
        heads, dim = case.index_q.shape[1:]
        plan = prefill.plan_scores(self.team, self.scratch, arrays(case.batch), heads, dim, case.index_k.shape[2], size)
        scores = torch.full((heads, case.batch.num_tokens, plan.blocks), float("nan"))
        prefill.score_blocks(self.team, plan, case.index_q.bfloat16(), case.index_k, size, scores, k_scale=0.5)
        return scores


@pytest.fixture(scope="module", params=[1, 2], ids=["1thread", "2threads"])
def tiles(request: pytest.FixtureRequest) -> Iterator[Tiles]:
    team = ThreadTeam(request.param)
    yield Tiles(team, Scratch())
    team.close()


def sizes(case: Ragged) -> tuple[int, int, int, int]:
    """Query heads, KV heads, dim, page size."""
    return case.q.shape[1], case.k.shape[1], case.k.shape[3], case.k.shape[2]


def arrays(batch: AttentionBatch) -> prefill.ArrayBatch:
    return prefill.ArrayBatch(
        batch.page_table.numpy(), batch.seq_lens.numpy(), batch.query_start.numpy(), batch.positions.numpy()
    )


def nan_outputs(case: Ragged) -> tuple[Tensor, Tensor]:
    shape = case.q.shape
    return torch.full(shape, float("nan")).bfloat16(), torch.full(shape[:2], float("nan"))


def settings(heads: Heads, block_size: int) -> SparseAttentionConfig:
    return SparseAttentionConfig(heads.index, heads.index_dim, block_size=block_size, topk=5, local_blocks=2)


def bf16_case(heads: Heads, page_size: int, lengths: list[int], queries: list[int]) -> Ragged:
    return make_ragged(lengths, queries, page_size, seed=page_size, heads=heads, dtype=torch.bfloat16)


def close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Relative to the largest value; no NaN anywhere."""
    finite = wanted.float()[wanted.isfinite()]
    size = max(float(finite.abs().max()) if len(finite) else 0.0, 1e-3)
    torch.testing.assert_close(got.float(), wanted.float(), atol=tolerance * size, rtol=0.0)


@needs_tiles
@pytest.mark.parametrize(
    ("lengths", "queries"), [(LENGTHS, QUERIES), ([5000, 3], [1, 1]), ([5, 0], [5, 2])], ids=["ragged", "decode", "few"]
)
@pytest.mark.parametrize(("heads", "page_size", "size"), SHAPES)
def test_tiles_equal_the_reference(
    tiles: Tiles, heads: Heads, page_size: int, size: int, lengths: list[int], queries: list[int]
) -> None:
    """Queries, weights and outputs are rounded to bf16 (2**-9 each); scores and log-sum-exps are fp32 sums."""
    case = bf16_case(heads, page_size, lengths, queries)
    q, index_q = case.q.bfloat16(), case.index_q.bfloat16()
    sparse = settings(heads, size)
    scores = REFERENCE.score_blocks(index_q, case.index_k, case.batch, sparse, 0.5)
    close(tiles.scores(case, size), scores, 1e-5)
    picks = REFERENCE.select_blocks(scores, case.batch.positions, sparse)
    for sinks in (None, torch.randn(heads.q, generator=torch.Generator().manual_seed(1))):
        options = {"sinks": sinks, "k_scale": 0.5, "v_scale": 2.0}
        wanted = REFERENCE.dense_attention(q, case.k, case.v, case.batch, return_lse=True, **options)  # type: ignore[call-overload]
        for got, expected, tolerance in zip(tiles.dense(case, sinks), wanted, (1e-2, 1e-5), strict=True):
            close(got, expected, tolerance)
        wanted = REFERENCE.sparse_attention(  # type: ignore[call-overload]
            q, case.k, case.v, picks, case.batch, size, return_lse=True, **options
        )
        for got, expected, tolerance in zip(tiles.sparse(case, picks, size, sinks), wanted, (1e-2, 1e-5), strict=True):
            close(got, expected, tolerance)


@needs_tiles
def test_picks_may_repeat_and_stand_in_any_order(tiles: Tiles) -> None:
    """The index heads of a KV head are joined, each block counts once; ids below 0 or past the query's block never."""
    heads = Heads(q=8, kv=2, index=4, dim=64, index_dim=32)
    case = bf16_case(heads, 16, [300], [40])
    picks = torch.tensor([[7, -1, 2, 2, 99], [2, 0, -1, -1, 9], [-1, -1, -1, -1, -1], [10, 5, 9, 8, 5]])
    picks = picks[:, None].expand(4, 40, 5).to(torch.int32).contiguous()
    got = tiles.sparse(case, picks, 32)
    wanted = REFERENCE.sparse_attention(
        case.q.bfloat16(), case.k, case.v, picks, case.batch, 32, k_scale=0.5, v_scale=2.0, return_lse=True
    )
    close(got[0], wanted[0], 1e-2)
    close(got[1], wanted[1], 1e-5)


@needs_tiles
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("plane", ["k", "v", "index_k"])
@pytest.mark.parametrize("at", [90, 199])
def test_a_poisoned_token_reaches_only_queries_that_see_it(tiles: Tiles, plane: str, poison: float, at: int) -> None:
    heads = Heads(q=8, kv=2, index=2, dim=64, index_dim=32)
    clean, case = (bf16_case(heads, 16, [200], [200]) for _ in range(2))
    slot = int(case.slots[0][at])
    getattr(case, plane)[slot // 16, :, slot % 16, 0] = poison
    picks = torch.arange(7, dtype=torch.int32).expand(2, 200, 7).contiguous()
    for got, wanted in (
        (tiles.dense(case), tiles.dense(clean)),
        (tiles.sparse(case, picks, 32), tiles.sparse(clean, picks, 32)),
    ):
        torch.testing.assert_close(got[0][:at], wanted[0][:at])
        if plane == "v":
            assert not got[0][at:, :, 0].isfinite().any()
            torch.testing.assert_close(got[0][at:, :, 1:], wanted[0][at:, :, 1:])
        if plane == "k" and poison != poison:
            assert got[0][at:].isnan().all()
    index_q, sparse = case.index_q.bfloat16(), settings(heads, 32)
    close(tiles.scores(case, 32), REFERENCE.score_blocks(index_q, case.index_k, case.batch, sparse, 0.5), 1e-5)


@needs_tiles
def test_a_row_does_not_depend_on_its_neighbours(tiles: Tiles) -> None:
    heads = SHAPES[0][0]
    case = bf16_case(heads, 16, [300, 200], [3, 7])
    alone = AttentionBatch(
        case.batch.page_table[1:], case.batch.seq_lens[1:], torch.tensor([0, 7], dtype=torch.int32),
        case.batch.positions[3:],
    )  # fmt: skip
    one = Ragged(alone, case.q[3:], case.k, case.v, case.index_q[3:], case.index_k, case.index_v, case.slots[1:])
    close(tiles.dense(case)[0][3:], tiles.dense(one)[0], 1e-2)
    assert torch.equal(tiles.scores(one, 32), tiles.scores(case, 32)[:, 3:, :7])


@needs_tiles
def test_kernels_leave_the_tiles_to_others(tiles: Tiles) -> None:
    """torch's bf16 products set up tiles of their own on the same thread."""
    a, b = torch.randn(64, 96).bfloat16(), torch.randn(96, 80).bfloat16()
    before = a @ b
    case = bf16_case(SHAPES[0][0], 128, [200], [20])
    tiles.dense(case)
    assert torch.equal(a @ b, before)


def test_a_machine_without_tiles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "available", lambda: False)
    assert not prefill.supports(64)
    with pytest.raises(KernelInputError, match="no AMX"):
        amx.tile_config()


@pytest.mark.parametrize("dim", [0, 24, 40, 512])
def test_dims_that_do_not_fill_tiles_are_not_supported(dim: int) -> None:
    assert not prefill.supports(dim)


def test_features_switched_off_in_the_compiler_switch_tiles_off() -> None:
    """Numba compiles for the features it is told of; the tile instructions would not assemble without theirs."""
    code = "from tamis.kernels.cpu import amx; print(amx.available())"
    environment = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+sse2", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_scratch_reuses_grows_and_aligns() -> None:
    scratch = Scratch()
    first = scratch.get("a", (3, 5), np.float32)
    assert first.ctypes.data % ALIGNMENT == 0
    assert np.shares_memory(first, scratch.get("a", (2, 2), np.int64))
    assert not np.shares_memory(first, scratch.get("b", (3, 5), np.float32))
    held = scratch.nbytes
    scratch.get("a", (3, 5), np.float32)
    assert scratch.nbytes == held
    assert scratch.get("a", (100,), np.float64).shape == (100,)
    assert scratch.nbytes > held
