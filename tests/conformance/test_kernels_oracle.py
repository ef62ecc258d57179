"""Every backend against the plain Python loops of `support/oracle.py`, on planes full of NaN wherever no token is."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from support import oracle
from support.ragged import Heads, Ragged, make_ragged
from tamis.config import SparseAttentionConfig
from tamis.kernels import Ops, ReferenceOps
from tamis.kernels.cpu.ops import CpuOps

BLOCK = 4
PAGE_SIZES = (1, 2, 4, 16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(params=[ReferenceOps, lambda: CpuOps(2)], ids=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    backend: Ops = request.param()
    return backend


def sparse_config(**changes: int | str) -> SparseAttentionConfig:
    values = {"index_heads": 2, "index_head_dim": 4, "block_size": BLOCK, "topk": 3} | changes
    return SparseAttentionConfig(**values)  # type: ignore[arg-type]


def ragged(seed: int, page_size: int, heads: Heads | None = None, dtype: torch.dtype = torch.float32) -> Ragged:
    """Three sequences: a whole prompt, a chunk and a decode step; seeds 0..3 sweep every residue of the block size."""
    lengths = [17 + seed % BLOCK, 22 + seed % BLOCK, 27 + seed % BLOCK]
    return make_ragged(lengths, [lengths[0], 6, 1], page_size, seed, heads, dtype)


def close(actual: Tensor, expected: Sequence[object], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("score_type", ["max", "lse"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_block_scores_equal_the_loop(ops: Ops, seed: int, page_size: int, score_type: str) -> None:
    case = ragged(seed, page_size)
    sparse = sparse_config(score_type=score_type)
    scores = ops.score_blocks(case.index_q, case.index_k, case.batch, sparse)
    assert scores.dtype == torch.float32
    close(scores, oracle.score_blocks(case.index_q, case.index_k, case.batch, sparse))


@pytest.mark.parametrize("init_blocks", [0, 1, 2])
@pytest.mark.parametrize("local_blocks", [0, 1, 2])
@pytest.mark.parametrize("topk", [4, 5, 12])
def test_picks_equal_the_loop(ops: Ops, init_blocks: int, local_blocks: int, topk: int) -> None:
    """Scores with many ties, infinities and NaN; contexts shorter and longer than topk blocks."""
    sparse = sparse_config(topk=topk, init_blocks=init_blocks, local_blocks=local_blocks)
    rng = random.Random(topk * 100 + init_blocks * 10 + local_blocks)
    values = [-1.0, -0.0, 0.0, 0.5, 0.5, 2.0, float("inf"), float("-inf"), float("nan"), 3.4e38]
    scores = torch.tensor([[rng.choices(values, k=9) for _ in range(40)] for _ in range(3)])
    positions = torch.tensor([rng.randrange(9 * BLOCK) for _ in range(40)], dtype=torch.int32)
    picks = ops.select_blocks(scores, positions, sparse)
    assert picks.dtype == torch.int32
    assert picks.tolist() == oracle.select_blocks(scores.tolist(), positions.tolist(), sparse)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("heads", [Heads(), Heads(q=3, kv=1, index=2), Heads(q=4, kv=2, index=4), Heads(q=2, kv=2)])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_attention_to_random_picks_equals_the_loop(
    ops: Ops, seed: int, page_size: int, heads: Heads, with_sinks: bool
) -> None:
    """Picks in any order, doubled, with -1 anywhere, of blocks that do not exist or lie in the future."""
    case = ragged(seed, page_size, heads)
    rng = random.Random(seed)
    picks = torch.tensor(
        [[rng.choices(range(-1, 9), k=3) for _ in range(len(case.q))] for _ in range(heads.index)], dtype=torch.int32
    )
    sinks = torch.randn(heads.q, generator=torch.Generator().manual_seed(seed)) if with_sinks else None
    out, lse = ops.sparse_attention(
        case.q, case.k, case.v, picks, case.batch, BLOCK, sinks=sinks, return_lse=True
    )  # fmt: skip
    visible = oracle.in_picks(picks, heads.kv, BLOCK)
    expected, expected_lse = oracle.attention(case.q, case.k, case.v, case.batch, visible, sinks)
    close(out, expected)
    close(lse, expected_lse)
    assert torch.equal(out, ops.sparse_attention(case.q, case.k, case.v, picks, case.batch, BLOCK, sinks=sinks))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_dense_attention_equals_the_loop(ops: Ops, seed: int, page_size: int, with_sinks: bool) -> None:
    case = ragged(seed, page_size)
    sinks = torch.tensor([-1.0, 0.0, 2.0, float("-inf")]) if with_sinks else None
    out, lse = ops.dense_attention(case.q, case.k, case.v, case.batch, sinks=sinks, return_lse=True)
    expected, expected_lse = oracle.attention(case.q, case.k, case.v, case.batch, oracle.dense, sinks)
    close(out, expected)
    close(lse, expected_lse)
    assert torch.equal(out, ops.dense_attention(case.q, case.k, case.v, case.batch, sinks=sinks))


@pytest.mark.parametrize("heads", [Heads(), Heads(index=3), Heads(index=1)])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_index_value_output_equals_the_loop(ops: Ops, page_size: int, heads: Heads) -> None:
    case = ragged(page_size, page_size, heads)
    operands = case.index_q, case.index_k, case.index_v, case.batch
    out, lse = ops.index_value_attention(*operands, return_lse=True)
    expected, expected_lse = oracle.attention(*operands, oracle.dense)
    close(out, expected)
    close(lse, expected_lse)
    assert torch.equal(out, ops.index_value_attention(*operands))


@pytest.mark.parametrize("score_type", ["max", "lse"])
@pytest.mark.parametrize("seed", range(4))
def test_the_whole_branch_equals_the_loop(ops: Ops, seed: int, score_type: str) -> None:
    """Scores, picks and outputs one after the other, each from the step before, beyond topk blocks."""
    case = ragged(seed, 2, Heads(q=4, kv=2, index=4))
    sparse = sparse_config(index_heads=4, init_blocks=1, score_type=score_type)
    scores = ops.score_blocks(case.index_q, case.index_k, case.batch, sparse)
    picks = ops.select_blocks(scores, case.batch.positions, sparse)
    out = ops.sparse_attention(case.q, case.k, case.v, picks, case.batch, BLOCK)
    expected = oracle.select_blocks(
        oracle.score_blocks(case.index_q, case.index_k, case.batch, sparse), case.batch.positions.tolist(), sparse
    )
    assert picks.tolist() == expected
    visible = oracle.in_picks(torch.tensor(expected), 2, BLOCK)
    close(out, oracle.attention(case.q, case.k, case.v, case.batch, visible)[0])
    dense = ops.dense_attention(case.q, case.k, case.v, case.batch)
    assert not torch.allclose(out, dense, atol=1e-3), "the context must be longer than topk blocks"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_planes_of_every_type_are_read_with_their_scales(ops: Ops, dtype: torch.dtype) -> None:
    """The stored values are exact in fp32, so the tolerance is that of fp32 whatever the type."""
    case = ragged(1, 4, dtype=dtype)
    sparse = sparse_config()
    scores = ops.score_blocks(case.index_q, case.index_k, case.batch, sparse, k_scale=0.5)
    close(scores, oracle.score_blocks(case.index_q, case.index_k, case.batch, sparse, 0.5))
    picks = ops.select_blocks(scores, case.batch.positions, sparse)
    out = ops.sparse_attention(case.q, case.k, case.v, picks, case.batch, BLOCK, k_scale=0.5, v_scale=2.0)
    visible = oracle.in_picks(picks, 2, BLOCK)
    close(out, oracle.attention(case.q, case.k, case.v, case.batch, visible, None, 0.5, 2.0)[0])
    dense = ops.dense_attention(case.q, case.k, case.v, case.batch, k_scale=0.5, v_scale=2.0)
    close(dense, oracle.attention(case.q, case.k, case.v, case.batch, oracle.dense, None, 0.5, 2.0)[0])
    own = ops.index_value_attention(case.index_q, case.index_k, case.index_v, case.batch, 0.5, 2.0)
    planes = case.index_k, case.index_v
    close(own, oracle.attention(case.index_q, *planes, case.batch, oracle.dense, None, 0.5, 2.0)[0])


def test_queries_in_bf16_are_answered_in_bf16(ops: Ops) -> None:
    case = ragged(2, 4)
    q = case.q.bfloat16()
    out, lse = ops.dense_attention(q, case.k, case.v, case.batch, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    expected, expected_lse = oracle.attention(q, case.k, case.v, case.batch, oracle.dense)
    close(lse, expected_lse)
    close(out, expected, tolerance=2**-8)
