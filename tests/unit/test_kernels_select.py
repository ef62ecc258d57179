"""Which blocks are scored and chosen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import oracle
from support.ragged import alone, make_batch, make_ragged, nan_plane, slots_of
from tamis.config import SparseAttentionConfig
from tamis.errors import KernelInputError, PageSizeError
from tamis.kernels import ReferenceOps

OPS = ReferenceOps()
INF = float("inf")
TOY = SparseAttentionConfig(index_heads=1, index_head_dim=1, block_size=4, topk=2)
"""Toy setup T of the field cases."""


def toy(
    topk: int = 2, init_blocks: int = 0, local_blocks: int = 1, index_heads: int = 1, index_head_dim: int = 1
) -> SparseAttentionConfig:
    return SparseAttentionConfig(index_heads, index_head_dim, 4, topk, init_blocks, local_blocks)


def select(scores: list[float], position: int, sparse: SparseAttentionConfig = TOY) -> list[int]:
    picks = OPS.select_blocks(torch.tensor([[scores]]), torch.tensor([position]), sparse)
    assert tuple(picks.shape) == (1, 1, sparse.topk)
    chosen: list[int] = picks[0, 0].tolist()
    return chosen


def picks_of_last(index_k: Tensor, table: list[int]) -> list[int]:
    batch = make_batch([table], [16], [1])
    scores = OPS.score_blocks(torch.ones(1, 1, 1), index_k, batch, TOY)
    picks: list[int] = OPS.select_blocks(scores, batch.positions, TOY)[0, 0].tolist()
    return picks


def test_picks_follow_index_keys_into_other_pages() -> None:
    """A1, the selection half: scores .1, 5, .2, .3 pick {1, 3}; an index plane left behind (zeros) gives {0, 3}."""
    keys = torch.tensor([0.1, 5.0, 0.2, 0.3]).repeat_interleave(4) - torch.tensor([0.0, 0.01, 0.02, 0.03]).repeat(4)
    plane = nan_plane(9, 1, 4, 1)
    for table in ([1, 2, 3, 4], [9, 2, 7, 5]):
        OPS.write_pages(plane, slots_of(table, 16, 4), keys.view(16, 1, 1))
        assert picks_of_last(plane, table) == [1, 3]
    assert picks_of_last(torch.zeros_like(plane), [9, 2, 7, 5]) == [0, 3]


def test_blocks_come_from_the_rows_own_length() -> None:
    """A5: lengths 9 and 6 in one batch have 3 and 2 blocks, and each row is what it is alone."""
    case = make_ragged([9, 6], [9, 6], page_size=4, seed=5)
    sparse = toy(index_heads=2, index_head_dim=4)
    scores = OPS.score_blocks(case.index_q, case.index_k, case.batch, sparse)
    picks = OPS.select_blocks(scores, case.batch.positions, sparse)
    out = OPS.sparse_attention(case.q, case.k, case.v, picks, case.batch, 4)
    assert (scores[0, [8, 14]] > -INF).sum(-1).tolist() == [3, 2]
    assert int(picks[:, 9:].max()) == 1
    for row in range(2):
        batch, rows = alone(case, row)
        solo = OPS.score_blocks(case.index_q[rows], case.index_k, batch, sparse)
        assert torch.equal(solo, scores[:, rows, : solo.shape[2]])
        solo_picks = OPS.select_blocks(solo, batch.positions, sparse)
        assert torch.equal(solo_picks, picks[:, rows])
        assert torch.equal(OPS.sparse_attention(case.q[rows], case.k, case.v, solo_picks, batch, 4), out[rows])


def test_a_finite_filler_never_outranks_minus_infinity() -> None:
    """A11: width 51 with 3 finite scores and k = 16 gives those 3 and -1, no id of 51 or more."""
    scores = [-INF] * 51
    for block, score in ((7, -3e38), (20, -5.0), (50, 1.0)):
        scores[block] = score
    for local_blocks in (0, 1):
        assert select(scores, 51 * 4 - 1, toy(16, local_blocks=local_blocks)) == [7, 20, 50] + [-1] * 13


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8, 32])
def test_candidates_come_from_the_context_not_the_chunk(chunk: int) -> None:
    """A12: 32 tokens in chunks of any size pick what the loop picks for all at once; token 31 sees 8 blocks."""
    table, sparse = [5, 2, 8, 1, 7, 3, 6, 4], toy(index_head_dim=4)
    generator = torch.Generator().manual_seed(12)
    keys, queries = torch.randn(32, 1, 4, generator=generator), torch.randn(32, 1, 4, generator=generator)
    plane, picks, scores = nan_plane(8, 1, 4, 4), [], torch.empty(0)
    for start in range(0, 32, chunk):
        stop = min(start + chunk, 32)
        OPS.write_pages(plane, slots_of(table, 32, 4)[start:stop], keys[start:stop])
        batch = make_batch([table], [stop], [stop - start])
        scores = OPS.score_blocks(queries[start:stop], plane, batch, sparse)
        picks += OPS.select_blocks(scores, batch.positions, sparse)[0].tolist()
    assert int((scores[0, -1] > -INF).sum()) == 8
    whole = make_batch([table], [32], [32])
    expected = oracle.select_blocks(oracle.score_blocks(queries, plane, whole, sparse), list(range(32)), sparse)
    assert picks == expected[0]


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16, 32, 128])
def test_page_size_is_not_block_size(page_size: int) -> None:
    """A13: 16 tokens, and one more token after 61, give the same picks and the same bits of output on any pages."""
    sparse = toy(index_heads=2, index_head_dim=4)
    results = []
    for size in (4, page_size):
        case = make_ragged([16, 62], [16, 1], size, seed=13)
        scores = OPS.score_blocks(case.index_q, case.index_k, case.batch, sparse)
        picks = OPS.select_blocks(scores, case.batch.positions, sparse)
        results.append((picks, OPS.sparse_attention(case.q, case.k, case.v, picks, case.batch, 4)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_page_size_that_does_not_divide_the_block_is_refused() -> None:
    """A13, the configuration half."""
    with pytest.raises(PageSizeError, match=r"page_size=3 does not divide the sparse block_size=4"):
        TOY.check_page_size(3)


def test_forced_blocks_use_up_slots() -> None:
    """Init and local blocks count inside topk, whatever their own scores."""
    scores = [-9.0, 3.0, 5.0, 4.0, -INF, -9.0]
    assert select(scores, 23, toy(4, init_blocks=1, local_blocks=2)) == [0, 2, 4, 5]
    assert select(scores, 23, toy(3, init_blocks=1, local_blocks=2)) == [0, 4, 5]
    assert select(scores, 23, toy(2, local_blocks=0)) == [2, 3]


def test_init_and_local_blocks_overlap_at_the_start() -> None:
    """A query in block 1 has two blocks, however many are forced; none of the future is chosen."""
    assert select([1.0, 1.0, 9.0, 9.0], 4, toy(5, init_blocks=3, local_blocks=2)) == [0, 1, -1, -1, -1]


def test_infinite_scores_do_not_push_out_forced_blocks() -> None:
    assert select([-1.0, INF, INF, INF, INF, -2.0], 23, toy(3, init_blocks=1)) == [0, 1, 5]
    assert select([-1.0, 3.4028234663852886e38, INF, 0.0], 15, toy(2)) == [2, 3]


def test_ties_go_to_the_lowest_block() -> None:
    assert select([1.0, 2.0, 2.0, 2.0, 2.0, 0.0], 23, toy(3)) == [1, 2, 5]
    assert select([-0.0, 0.0, -1.0, -1.0], 15, toy(2)) == [0, 3]
    assert select([7.0] * 200, 799, toy(17)) == [*range(16), 199]


def test_nan_counts_as_minus_infinity() -> None:
    assert select([float("nan"), -5.0, float("nan"), float("nan")], 15, toy(3)) == [1, 3, -1]


def test_a_row_without_context_picks_nothing() -> None:
    """Position -1 sees no block, not even its own."""
    assert select([1.0, 2.0], -1) == [-1, -1]


def test_nan_keys_hide_only_themselves_and_hidden_keys_reach_nobody() -> None:
    """A NaN key scores -inf; an infinite key is seen by the queries at or after it only."""
    plane = nan_plane(2, 1, 4, 1)
    keys = torch.tensor([1.0, float("nan"), 2.0, float("nan"), 0.5, INF, float("nan")])
    OPS.write_pages(plane, slots_of([2, 1], 7, 4), keys.view(7, 1, 1))
    scores = OPS.score_blocks(torch.ones(7, 1, 1), plane, make_batch([[2, 1]], [7], [7]), TOY)
    assert scores[0].tolist() == [[1, -INF], [1, -INF], [2, -INF], [2, -INF], [2, 0.5], [2, INF], [2, INF]]


@pytest.mark.parametrize(("lengths", "queries"), [([], []), ([0], [0]), ([5], [0]), ([0, 0], [1, 2])])
def test_steps_without_work_have_the_right_shapes(lengths: list[int], queries: list[int]) -> None:
    batch = make_batch([[1, 2][: -(-n // 4)] for n in lengths], lengths, queries)
    blocks = 2 if 5 in lengths else 0
    scores = OPS.score_blocks(torch.ones(sum(queries), 3, 1), nan_plane(2, 1, 4, 1), batch, TOY)
    assert tuple(scores.shape) == (3, sum(queries), blocks)
    picks = OPS.select_blocks(scores, batch.positions, TOY)
    assert picks.tolist() == [[[-1, -1]] * sum(queries)] * 3
    assert picks.dtype == torch.int32


def test_positions_that_do_not_fit_the_scores_are_refused() -> None:
    with pytest.raises(KernelInputError, match=r"positions \[3\] do not fit block scores \[1, 2, 4\]"):
        OPS.select_blocks(torch.zeros(1, 2, 4), torch.zeros(3, dtype=torch.int32), TOY)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_picks_are_unique_ascending_and_those_of_the_loop(data: st.DataObject) -> None:
    blocks, topk = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 8))
    init_blocks = data.draw(st.integers(0, topk))
    sparse = toy(topk, init_blocks, data.draw(st.integers(0, topk - init_blocks)))
    values = st.sampled_from([-INF, -1.0, -0.0, 0.0, 1.0, INF, float("nan")])
    scores = data.draw(st.lists(values, min_size=blocks, max_size=blocks))
    position = data.draw(st.integers(-1, 4 * blocks - 1))
    picks = select(scores, position, sparse)
    chosen = [block for block in picks if block >= 0]
    assert picks == sorted(set(chosen)) + [-1] * (topk - len(chosen))
    assert picks == oracle.select_blocks([[scores]], [position], sparse)[0][0]
