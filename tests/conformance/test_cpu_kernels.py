"""The CPU kernels against the reference on the same ragged batches, with NaN in every slot that belongs to no token."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from support.ragged import Heads, Ragged, make_ragged
from tamis.config import SparseAttentionConfig
from tamis.errors import KernelInputError
from tamis.kernels import AttentionBatch, ReferenceOps
from tamis.kernels.cpu.ops import CpuOps

LENGTHS = [1, 127, 129, 0, 1000]
QUERIES = [1, 127, 5, 0, 70]
SHAPES = [
    (Heads(q=2, kv=1, index=1, dim=32, index_dim=32), 1),
    (Heads(q=9, kv=3, index=3, dim=64, index_dim=32), 16),
    (Heads(q=64, kv=4, index=4, dim=128, index_dim=128), 128),
    (Heads(q=12, kv=3, index=6, dim=64, index_dim=64), 32),
    (Heads(q=4, kv=2, index=2, dim=40, index_dim=24), 7),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float8_e4m3fn: 2e-2}


@pytest.fixture(scope="module")
def ops() -> Iterator[CpuOps]:
    backend = CpuOps(2)
    yield backend
    backend.close()


def case_of(heads: Heads, page_size: int, dtype: torch.dtype) -> Ragged:
    return make_ragged(LENGTHS, QUERIES, page_size, seed=page_size, heads=heads, dtype=dtype)


def settings(heads: Heads, score_type: str = "max") -> SparseAttentionConfig:
    return SparseAttentionConfig(
        heads.index, heads.index_dim, block_size=32, topk=5, init_blocks=1, local_blocks=2, score_type=score_type
    )


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance of the type, relative to the size of what is compared."""
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    size = float(wanted[wanted.isfinite()].abs().max()) if wanted.isfinite().any() else 1.0
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype] * max(size, 1.0), rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "page_size"), SHAPES)
def test_every_op_equals_the_reference(ops: CpuOps, heads: Heads, page_size: int, dtype: torch.dtype) -> None:
    case, reference = case_of(heads, page_size, dtype), ReferenceOps()
    sinks = torch.randn(heads.q, generator=torch.Generator().manual_seed(1))
    for score_type in ("max", "lse"):
        sparse = settings(heads, score_type)
        wanted_scores = reference.score_blocks(case.index_q, case.index_k, case.batch, sparse, 0.5)
        scores = ops.score_blocks(case.index_q, case.index_k, case.batch, sparse, 0.5)
        close(scores, wanted_scores, dtype)
        own = ops.select_blocks(scores, case.batch.positions, sparse)
        assert torch.equal(ops.pick_blocks(case.index_q, case.index_k, case.batch, sparse, 0.5), own)
        operands = (case.q, case.k, case.v)
        picked = ops.picked_attention(
            *operands, case.index_q, case.index_k, case.batch, sparse, index_scale=0.5, v_scale=2.0
        )
        assert torch.equal(picked, ops.sparse_attention(*operands, own, case.batch, sparse.block_size, v_scale=2.0))
    picks = reference.select_blocks(wanted_scores, case.batch.positions, sparse)
    assert torch.equal(ops.select_blocks(wanted_scores, case.batch.positions, sparse), picks)
    for sink in (None, sinks):
        for got, wanted in zip(
            ops.sparse_attention(case.q, case.k, case.v, picks, case.batch, 32, sinks=sink, return_lse=True),
            reference.sparse_attention(case.q, case.k, case.v, picks, case.batch, 32, sinks=sink, return_lse=True),
            strict=True,
        ):
            close(got, wanted, dtype)
        for got, wanted in zip(
            ops.dense_attention(case.q, case.k, case.v, case.batch, sinks=sink, v_scale=2.0, return_lse=True),
            reference.dense_attention(case.q, case.k, case.v, case.batch, sinks=sink, v_scale=2.0, return_lse=True),
            strict=True,
        ):
            close(got, wanted, dtype)
    close(
        ops.index_value_attention(case.index_q, case.index_k, case.index_v, case.batch),
        reference.index_value_attention(case.index_q, case.index_k, case.index_v, case.batch),
        dtype,
    )


@pytest.mark.parametrize("heads", [SHAPES[1][0], SHAPES[2][0]], ids=["9q3kv", "64q4kv"])
def test_bf16_queries_over_bf16_planes(ops: CpuOps, heads: Heads) -> None:
    """Activations of the type of the weights, as the engine passes them; a decode step and a prompt's last chunk."""
    case, reference = case_of(heads, 32, torch.bfloat16), ReferenceOps()
    q, index_q = case.q.bfloat16(), case.index_q.bfloat16()
    sparse = settings(heads)
    scores = reference.score_blocks(index_q, case.index_k, case.batch, sparse)
    close(ops.score_blocks(index_q, case.index_k, case.batch, sparse), scores, torch.bfloat16)
    picks = reference.select_blocks(scores, case.batch.positions, sparse)
    close(
        ops.sparse_attention(q, case.k, case.v, picks, case.batch, 32),
        reference.sparse_attention(q, case.k, case.v, picks, case.batch, 32),
        torch.bfloat16,
    )
    close(
        ops.dense_attention(q, case.k, case.v, case.batch),
        reference.dense_attention(q, case.k, case.v, case.batch),
        torch.bfloat16,
    )


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("plane", ["k", "v", "index_k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_poisoned_key_reaches_only_queries_that_see_it(
    ops: CpuOps, plane: str, poison: float, dtype: torch.dtype
) -> None:
    heads = Heads(q=8, kv=2, index=2, dim=64, index_dim=32)
    clean = make_ragged([200], [200], 16, 3, heads, dtype)
    case = make_ragged([200], [200], 16, 3, heads, dtype)
    at = 90
    slot = int(case.slots[0][at])
    getattr(case, plane)[slot // 16, :, slot % 16, 0] = poison
    sparse = SparseAttentionConfig(2, 32, block_size=32, topk=8)

    def run(step: Ragged) -> tuple[Tensor, Tensor]:
        scores = ops.score_blocks(step.index_q, step.index_k, step.batch, sparse)
        picks = ops.select_blocks(scores, step.batch.positions, sparse)
        return (
            ops.dense_attention(step.q, step.k, step.v, step.batch),
            ops.sparse_attention(step.q, step.k, step.v, picks, step.batch, 32),
        )

    for got, wanted in zip(run(case), run(clean), strict=True):
        assert got[:at].isfinite().all()
        torch.testing.assert_close(got[:at], wanted[:at])
        if plane == "v":
            assert not got[at:].isfinite().all()


def test_pages_that_do_not_exist_are_refused(ops: CpuOps) -> None:
    heads = Heads(q=4, kv=2, index=2, dim=32, index_dim=32)
    case = make_ragged([40], [2], 16, 1, heads)
    for bad in (-1, case.k.shape[0], 2**31 - 1):
        table = case.batch.page_table.clone()
        table[0, 1] = bad
        batch = AttentionBatch(table, case.batch.seq_lens, case.batch.query_start, case.batch.positions)
        with pytest.raises(KernelInputError, match=f"page id.* {bad}"):
            ops.dense_attention(case.q, case.k, case.v, batch)
    long = AttentionBatch(
        case.batch.page_table, torch.tensor([400], dtype=torch.int32), case.batch.query_start, case.batch.positions
    )
    with pytest.raises(KernelInputError, match="seq_len=400 does not fit"):
        ops.score_blocks(case.index_q, case.index_k, long, settings(heads))


@pytest.mark.parametrize(
    ("seq_lens", "query_start", "message"),
    [([-4], [0, 2], "negative length"), ([40], [1, 2], "query_start"), ([40, 40], [0, 9, 2], "query_start")],
)
def test_batches_that_contradict_themselves_are_refused(
    ops: CpuOps, seq_lens: list[int], query_start: list[int], message: str
) -> None:
    heads = Heads(q=4, kv=2, index=2, dim=32, index_dim=32)
    case = make_ragged([40], [2], 16, 1, heads)
    lens, starts = (torch.tensor(values, dtype=torch.int32) for values in (seq_lens, query_start))
    table = case.batch.page_table.expand(len(seq_lens), -1)
    batch = AttentionBatch(table, lens, starts, case.batch.positions)
    with pytest.raises(KernelInputError, match=message):
        ops.dense_attention(case.q, case.k, case.v, batch)


def test_what_the_kernels_cannot_take_goes_to_the_reference(ops: CpuOps, caplog: pytest.LogCaptureFixture) -> None:
    heads = Heads(q=4, kv=2, index=2, dim=32, index_dim=32)
    case = make_ragged([40], [2], 16, 1, heads)
    k, v = case.k.double(), case.v.double()
    for _ in range(2):
        torch.testing.assert_close(
            ops.dense_attention(case.q, k, v, case.batch),
            ReferenceOps().dense_attention(case.q, case.k, case.v, case.batch),
        )
    assert [record.message for record in caplog.records] == [
        "planes of torch.float64: the torch reference is used instead of the CPU kernels"
    ]
