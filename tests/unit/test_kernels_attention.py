"""What attention reads, what it must not read, and how partial results join."""

import random

import pytest
import torch
from torch import Tensor

from support import oracle
from support.ragged import Heads, Ragged, alone, make_batch, make_ragged, nan_plane, slots_of
from tamis.config import SparseAttentionConfig
from tamis.errors import KernelInputError
from tamis.kernels import AttentionBatch, ReferenceOps, combine_partials, reference

OPS = ReferenceOps()
INF, NAN = float("inf"), float("nan")
BLOCK = 4


def one_row(
    table: list[int], values: list[float], position: int, logits: list[float] | None = None
) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    """One query [1, 1, 1] of ones on pages of 4, keys `logits` (default 0), values as given."""
    k, v = nan_plane(9, 1, 4, 1), nan_plane(9, 1, 4, 1)
    length, slots = len(values), slots_of(table, len(values), 4)
    OPS.write_pages(k, slots, torch.tensor(logits or [0.0] * length).view(-1, 1, 1))
    OPS.write_pages(v, slots, torch.tensor(values).view(-1, 1, 1))
    batch = make_batch([table], [length], [1])
    batch.positions[0] = position
    return torch.ones(1, 1, 1), k, v, batch


def picks(*blocks: int) -> Tensor:
    return torch.tensor([[blocks]], dtype=torch.int32)


@pytest.mark.parametrize("chosen", [(0, -1), (-1, 0), (0, 0), (-1, -1, 0, -1, 0), (0, 3, 99, -7)])
def test_the_filler_reads_nothing(chosen: tuple[int, ...]) -> None:
    """A7: table [7, 3, 9], V = the block's number: picks [0, -1] give 0.0, not a share of the last page."""
    q, k, v, batch = one_row([7, 3, 9], [0.0] * 4 + [1.0] * 4 + [2.0] * 4, position=11)
    assert OPS.sparse_attention(q, k, v, picks(*chosen), batch, BLOCK).item() == 0.0


def test_a_doubled_pick_counts_once() -> None:
    """Block 0 named twice must not weigh more than block 2."""
    q, k, v, batch = one_row([7, 3, 9], [0.0] * 4 + [9.0] * 4 + [2.0] * 4, position=11)
    assert OPS.sparse_attention(q, k, v, picks(0, 2, 0), batch, BLOCK).item() == pytest.approx(1.0)


def test_a_block_of_the_future_reads_nothing() -> None:
    q, k, v, batch = one_row([7, 3, 9], [5.0] * 4 + [1.0] * 4 + [2.0] * 4, position=5)
    assert OPS.sparse_attention(q, k, v, picks(1, 2), batch, BLOCK).item() == 1.0


@pytest.mark.parametrize("position", [-1, 0, 3])
@pytest.mark.parametrize("sink", [None, 0.5])
def test_a_row_without_keys_gives_zeros(position: int, sink: float | None) -> None:
    """A8: lengths [5, 0]: row 1 is zeros (log-sum-exp: the sink, or -inf), row 0 is as alone."""
    case = make_ragged([5, 0], [1, 1], page_size=4, seed=8)
    case.batch.positions[1] = position
    sinks = None if sink is None else torch.full((4,), sink)
    everything = torch.arange(2, dtype=torch.int32).expand(2, 2, 2)
    batch, rows = alone(case, 0)
    dense, dense_lse = OPS.dense_attention(case.q, case.k, case.v, case.batch, sinks=sinks, return_lse=True)
    sparse, sparse_lse = OPS.sparse_attention(
        case.q, case.k, case.v, everything, case.batch, BLOCK, sinks=sinks, return_lse=True
    )
    index, index_lse = OPS.index_value_attention(case.index_q, case.index_k, case.index_v, case.batch, return_lse=True)
    assert torch.equal(dense[rows], OPS.dense_attention(case.q[rows], case.k, case.v, batch, sinks=sinks))
    for out, lse in ((dense, dense_lse), (sparse, sparse_lse)):
        assert not out[1].any()
        assert lse[1].tolist() == [-INF if sink is None else sink] * 4
        assert bool(lse[0].isfinite().all())
        assert bool(out[0].any())
    assert index_lse[1].tolist() == [-INF] * 2
    assert not index[1].any()
    assert bool(index[0].any())


def test_hidden_keys_before_the_visible_ones_do_not_poison() -> None:
    """A9: sixteen hidden keys, then two of equal score with V = 1 and 3: 2.0, in one go and in parts."""
    q, k, v, batch = one_row([4, 2, 6, 1, 3], [50.0] * 16 + [1.0, 3.0], position=17, logits=[80.0] * 16 + [1.0, 1.0])
    whole, whole_lse = OPS.sparse_attention(q, k, v, picks(4), batch, BLOCK, return_lse=True)
    assert whole.item() == pytest.approx(2.0)
    for order in ((-1, 4), (4, -1), (-1, -1, 4, -1)):
        parts = [OPS.sparse_attention(q, k, v, picks(block), batch, BLOCK, return_lse=True) for block in order]
        out, lse = combine_partials([part[0] for part in parts], [part[1] for part in parts])
        assert out.item() == pytest.approx(2.0)
        assert lse.item() == pytest.approx(whole_lse.item())


def test_parts_that_all_see_nothing_join_to_zeros() -> None:
    """A9: zeros and -inf, not NaN."""
    q, k, v, batch = one_row([4], [1.0] * 4, position=3)
    parts = [OPS.sparse_attention(q, k, v, picks(-1), batch, BLOCK, return_lse=True) for _ in range(2)]
    out, lse = combine_partials([part[0] for part in parts], [part[1] for part in parts])
    assert (out.item(), lse.item()) == (0.0, -INF)


@pytest.mark.parametrize("sinks", [None, torch.tensor([-2.0, 0.0, 1.0, 3.0])])
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_disjoint_parts_joins_to_the_whole(dtype: torch.dtype, parts: int, sinks: Tensor | None) -> None:
    """Every query and KV head deals its blocks out to the parts anew; the sink belongs to one part."""
    case = make_ragged([19, 30], [19, 4], page_size=2, seed=9)
    q, rng = case.q.to(dtype), random.Random(parts)
    owner = torch.tensor([[rng.choices(range(parts), k=8) for _ in range(len(q))] for _ in range(2)])
    outs, lses = [], []
    for part in range(parts):
        mine = torch.where(owner == part, torch.arange(8), -1).int()
        sink = sinks if part == parts - 1 else None
        out, lse = OPS.sparse_attention(q, case.k, case.v, mine, case.batch, BLOCK, sinks=sink, return_lse=True)
        outs.append(out)
        lses.append(lse)
    joined, joined_lse = combine_partials(outs, lses)
    whole, whole_lse = OPS.dense_attention(q, case.k, case.v, case.batch, sinks=sinks, return_lse=True)
    assert joined.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(joined, whole, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(joined_lse, whole_lse, atol=1e-5, rtol=1e-5)


def test_an_infinite_logit_poisons_its_own_row_only() -> None:
    """+inf in a part's log-sum-exp: that row has no softmax (NaN), its neighbours keep theirs."""
    outs = [torch.tensor([[[NAN]], [[1.0]]]), torch.tensor([[[5.0]], [[3.0]]])]
    out, lse = combine_partials(outs, [torch.tensor([[INF], [0.0]]), torch.tensor([[0.0], [0.0]])])
    assert out[0].isnan().all()
    assert out[1].item() == pytest.approx(2.0)
    assert lse[0].item() == INF


@pytest.mark.parametrize("counts", [(0, 0), (2, 1)])
def test_parts_that_do_not_pair_up_are_refused(counts: tuple[int, int]) -> None:
    outs, lses = [torch.zeros(1, 1, 1)] * counts[0], [torch.zeros(1, 1)] * counts[1]
    with pytest.raises(KernelInputError, match=f"{counts[0]} partial outputs and {counts[1]} log-sum-exps"):
        combine_partials(outs, lses)


@pytest.mark.parametrize("length", range(1, 25))
def test_sparse_is_dense_up_to_topk_blocks_and_the_loop_beyond(length: int) -> None:
    """A17: 8 tokens (2 blocks of 4) give dense attention; 9 and more differ from it and equal the loop."""
    sparse = SparseAttentionConfig(index_heads=2, index_head_dim=4, block_size=BLOCK, topk=2)
    case = make_ragged([length], [length], page_size=2, seed=17)
    scores = OPS.score_blocks(case.index_q, case.index_k, case.batch, sparse)
    chosen = OPS.select_blocks(scores, case.batch.positions, sparse)
    out = OPS.sparse_attention(case.q, case.k, case.v, chosen, case.batch, BLOCK)
    dense = OPS.dense_attention(case.q, case.k, case.v, case.batch)
    torch.testing.assert_close(out[:8], dense[:8], atol=1e-6, rtol=1e-6)
    assert length <= 8 or not torch.allclose(out[8:], dense[8:], atol=1e-3)
    wanted = oracle.select_blocks(
        oracle.score_blocks(case.index_q, case.index_k, case.batch, sparse), list(range(length)), sparse
    )
    visible = oracle.in_picks(torch.tensor(wanted), 2, BLOCK)
    expected = torch.tensor(oracle.attention(case.q, case.k, case.v, case.batch, visible)[0])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def all_results(case: Ragged, batch: AttentionBatch, rows: slice) -> list[Tensor]:
    """Every op's result for `rows` of the step, rows first."""
    sparse = SparseAttentionConfig(index_heads=2, index_head_dim=4, block_size=BLOCK, topk=2, score_type="lse")
    scores = OPS.score_blocks(case.index_q[rows], case.index_k, batch, sparse)
    chosen = OPS.select_blocks(scores, batch.positions, sparse)
    q = case.q[rows]
    return [
        torch.nn.functional.pad(scores, (0, 16 - scores.shape[2]), value=-INF).transpose(0, 1),
        chosen.transpose(0, 1),
        *OPS.sparse_attention(q, case.k, case.v, chosen, batch, BLOCK, return_lse=True),
        *OPS.dense_attention(q, case.k, case.v, batch, return_lse=True),
        *OPS.index_value_attention(case.index_q[rows], case.index_k, case.index_v, batch, return_lse=True),
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(seed: int) -> None:
    """A5 for every op: prompts, chunks and decode steps of lengths that sweep the residues of the block."""
    lengths = [9 + seed, 30, 6, 18 + seed, 43, 1]
    case = make_ragged(lengths, [9 + seed, 1, 3, 7, 20, 1], page_size=2, seed=seed)
    together = all_results(case, case.batch, slice(None))
    for row in range(len(lengths)):
        batch, rows = alone(case, row)
        for whole, solo in zip(together, all_results(case, batch, rows), strict=True):
            assert torch.equal(whole[rows], solo)


def test_long_steps_are_cut_into_parts_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 100 scores cuts these 43 rows into single ones; results stay within rounding, picks the same."""
    case = make_ragged([43, 9], [43, 5], page_size=2, seed=3)
    whole = all_results(case, case.batch, slice(None))
    monkeypatch.setattr(reference, "MAX_SCORES", 100)
    for one, cut in zip(whole, all_results(case, case.batch, slice(None)), strict=True):
        torch.testing.assert_close(one, cut, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("plane", ["k", "v", "index_k", "index_v"])
def test_what_is_not_finite_reaches_only_queries_that_see_it(plane: str, poison: float) -> None:
    """Token 9 of row 0 is poisoned: queries before it, those that did not pick its block, and row 1 are untouched."""
    sane = make_ragged([14, 6], [14, 6], page_size=2, seed=21)
    case = make_ragged([14, 6], [14, 6], page_size=2, seed=21)
    target: Tensor = getattr(case, plane)
    page, offset = divmod(int(case.slots[0][9]), 2)
    target[page, :, offset] = poison
    chosen = torch.tensor([[[0, 2]] * 12 + [[0, 3]] * 8] * 2, dtype=torch.int32)
    untouched = {"dense": [*range(9), *range(14, 20)], "sparse": [*range(9), *range(12, 20)]}
    for run in (sane, case):
        assert run.batch.positions.tolist() == [*range(14), *range(6)]
    outs = [
        {
            "dense": torch.cat([
                OPS.dense_attention(run.q, run.k, run.v, run.batch).flatten(1),
                OPS.index_value_attention(run.index_q, run.index_k, run.index_v, run.batch).flatten(1),
            ], dim=1),
            "sparse": OPS.sparse_attention(run.q, run.k, run.v, chosen, run.batch, BLOCK).flatten(1),
        }
        for run in (sane, case)
    ]  # fmt: skip
    for name, rows in untouched.items():
        assert torch.equal(outs[0][name][rows], outs[1][name][rows])
    if plane in ("v", "index_v"):
        seen = outs[1]["dense"][9:14]
        width = slice(0, 24) if plane == "v" else slice(24, 32)
        torch.testing.assert_close(seen[:, width], torch.full_like(seen[:, width], poison), equal_nan=True)
    elif poison != -INF:
        assert bool(outs[1]["dense"][9:14].isnan().any(dim=1).all())


def test_union_of_index_heads_is_shared_by_their_kv_head_only() -> None:
    """Four index heads, two KV heads: query heads 0 and 1 read blocks 0 and 2, heads 2 and 3 block 1."""
    case = make_ragged([12], [1], page_size=4, seed=4, heads=Heads(q=4, kv=2, index=4))
    case.v[:] = NAN
    for block, number in enumerate((0.0, 1.0, 5.0)):
        OPS.write_pages(case.v, case.slots[0][4 * block : 4 * block + 4], torch.full((4, 2, 6), number))
    case.k[:] = 0.0
    chosen = torch.tensor([[[0, 2]], [[2, -1]], [[1, -1]], [[-1, 1]]], dtype=torch.int32)
    out = OPS.sparse_attention(case.q, case.k, case.v, chosen, case.batch, BLOCK)
    torch.testing.assert_close(out[0, :, 0], torch.tensor([2.5, 2.5, 1.0, 1.0]))
    chosen[:2] = -1
    out = OPS.sparse_attention(case.q, case.k, case.v, chosen, case.batch, BLOCK)
    torch.testing.assert_close(out[0, :, 0], torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_huge_logits_do_not_overflow() -> None:
    q, k, v, batch = one_row([1, 2], [1.0, 2.0, 3.0, 4.0, 5.0], position=4, logits=[3e4, 3e4, -3e4, 0.0, 3e4])
    out, lse = OPS.dense_attention(q, k, v, batch, return_lse=True)
    assert out.item() == pytest.approx((1 + 2 + 5) / 3)
    assert lse.item() == pytest.approx(3e4 + 1.0986, rel=1e-6)


def test_a_huge_sink_takes_the_whole_weight() -> None:
    q, k, v, batch = one_row([1, 2], [1.0, 2.0, 3.0, 4.0, 5.0], position=4)
    for sink, expected in ((1000.0, 0.0), (-1000.0, 3.0)):
        out, lse = OPS.dense_attention(q, k, v, batch, sinks=torch.tensor([sink]), return_lse=True)
        assert out.item() == pytest.approx(expected)
        assert lse.item() == pytest.approx(max(sink, 1.6094379))


@pytest.mark.parametrize("position", [5, 7, 8, 100])
def test_nothing_past_the_context_is_seen(position: int) -> None:
    """A position past seq_len sees the 5 tokens that are there, for every op; the page's spare slots hold NaN."""
    case = make_ragged([5], [1], page_size=4, seed=6)
    chosen = torch.tensor([[[0, 1, 20]], [[20, 2, 1]]], dtype=torch.int32)
    sparse = SparseAttentionConfig(index_heads=2, index_head_dim=4, block_size=BLOCK, topk=2)

    def results() -> list[Tensor]:
        return [
            OPS.score_blocks(case.index_q, case.index_k, case.batch, sparse),
            OPS.dense_attention(case.q, case.k, case.v, case.batch),
            OPS.sparse_attention(case.q, case.k, case.v, chosen, case.batch, BLOCK),
        ]

    inside = results()
    case.batch.positions[0] = position
    for expected, actual in zip(inside, results(), strict=True):
        assert torch.equal(expected, actual)
