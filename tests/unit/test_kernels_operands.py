"""Writing and gathering paged planes, and operands that are refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.ragged import Ragged, make_ragged, nan_plane
from tamis.config import EngineConfig, SparseAttentionConfig
from tamis.errors import KernelInputError
from tamis.kernels import AttentionBatch, Ops, ReferenceOps, choose_ops

OPS = ReferenceOps()
SPARSE = SparseAttentionConfig(index_heads=2, index_head_dim=4, block_size=4, topk=2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def test_the_backend_is_the_reference() -> None:
    ops, reason = choose_ops(EngineConfig(kernels="reference"))
    checked: Ops = ReferenceOps()
    assert (ops.name, checked.name) == ("reference", "reference")
    assert reason == "it was asked for"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_written_tokens_are_gathered_and_nothing_else_changes(dtype: torch.dtype, scale: float) -> None:
    """Values that every type holds exactly come back times the scale; all other slots stay NaN."""
    plane = nan_plane(4, 2, 4, 3, dtype)
    values = (torch.arange(6.0).view(6, 1, 1) - 2.0).expand(6, 2, 3).contiguous()
    kept = values.clone()
    OPS.write_pages(plane, torch.tensor([12, 13, 14, 15, 4, 5]), values, scale)
    assert torch.equal(values, kept)
    assert torch.equal(OPS.gather_pages(plane, torch.tensor([3, 1, -1], dtype=torch.int32), 6, scale), values)
    assert torch.equal(OPS.gather_pages(plane, torch.tensor([3, 1]), 6), values / scale)
    stored = plane.float().isnan()
    assert int((~stored).sum()) == values.numel()
    assert stored[[0, 2, 4]].all()


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)], ids=str)
def test_fp8_saturates(dtype: torch.dtype, largest: float) -> None:
    plane = nan_plane(1, 1, 4, 1, dtype)
    values = torch.tensor([1e6, -1e6, float("inf"), 3.0]).view(4, 1, 1)
    OPS.write_pages(plane, torch.arange(4, 8), values)
    read = OPS.gather_pages(plane, torch.tensor([1]), 4)
    assert read.flatten().tolist() == [largest, -largest, largest, 3.0]


@pytest.mark.parametrize("slots", [[3, -1], [3, 20], [-20, 3]])
def test_a_slot_never_wraps_round(slots: list[int]) -> None:
    """A15 at the kernel: nothing is written, the good slot included."""
    plane = torch.zeros(5, 1, 4, 1)
    with pytest.raises(KernelInputError, match=rf"slots {min(slots)} to {max(slots)} lie outside 0\.\.19"):
        OPS.write_pages(plane, torch.tensor(slots), torch.ones(2, 1, 1))
    assert not plane.any()


@pytest.mark.parametrize("shape", [(2, 1, 2), (3, 1, 1), (2, 2, 1), (2, 1)])
def test_values_must_have_the_planes_shape(shape: tuple[int, ...]) -> None:
    plane = torch.zeros(5, 1, 4, 1)
    with pytest.raises(KernelInputError, match=r"do not fit slots \[2\] of a plane \[5, 1, 4, 1\]"):
        OPS.write_pages(plane, torch.tensor([1, 2]), torch.ones(shape))
    assert not plane.any()


@pytest.mark.parametrize(
    ("pages", "length", "message"),
    [
        ([1, -1], 5, r"page ids -1 to 1 lie outside 0\.\.2"),
        ([3], 1, r"page ids 3 to 3 lie outside 0\.\.2"),
        ([1, 2], 9, r"length=9 does not fit 2 pages of 4 tokens"),
    ],
)
def test_pages_that_do_not_exist_are_not_read(pages: list[int], length: int, message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        OPS.gather_pages(torch.zeros(3, 1, 4, 1), torch.tensor(pages), length)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16, torch.float32], ids=str)
def test_ids_of_a_type_that_torch_takes_for_a_mask_are_refused(dtype: torch.dtype) -> None:
    plane = torch.zeros(2, 1, 4, 1)
    with pytest.raises(KernelInputError, match=f"^slots are {dtype}, not torch.int64 or torch.int32$"):
        OPS.write_pages(plane, torch.tensor([1, 0]).to(dtype), torch.ones(2, 1, 1))
    assert not plane.any()
    with pytest.raises(KernelInputError, match=f"^page ids are {dtype}, not torch.int64 or torch.int32$"):
        OPS.gather_pages(plane, torch.tensor([1]).to(dtype), 4)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(KernelInputError, match=r"^length=-1 does not fit 1 pages of 4 tokens$"):
        OPS.gather_pages(torch.zeros(2, 1, 4, 1), torch.tensor([1]), -1)


def test_a_context_may_be_far_shorter_than_a_block() -> None:
    """No memory is taken for the rest of the block."""
    case = make_ragged([9], [9], page_size=2, seed=0)
    for score_type in ("max", "lse"):
        sparse = replace(SPARSE, score_type=score_type)
        scores = OPS.score_blocks(case.index_q, case.index_k, case.batch, replace(sparse, block_size=1 << 40))
        torch.testing.assert_close(
            scores, OPS.score_blocks(case.index_q, case.index_k, case.batch, replace(sparse, block_size=16))
        )  # fmt: skip


def attend(case: Ragged, changes: dict[str, Tensor]) -> Tensor:
    """Sparse attention of the case with some operands replaced."""
    operands = {"q": case.q, "k": case.k, "v": case.v, "picks": torch.zeros(2, len(case.q), 1).int()} | changes
    planes = operands["k"], operands["v"]
    return OPS.sparse_attention(
        operands["q"], *planes, operands["picks"], case.batch, 4, sinks=operands.get("sinks")
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(9, 3, 6)}, r"3 query heads are not a multiple of 2 KV heads"),
        ({"q": torch.zeros(9, 4, 5)}, r"q has head dim 5, the planes 6"),
        ({"q": torch.zeros(8, 4, 6)}, r"q has 8 tokens, positions 9"),
        ({"q": torch.zeros(9, 24)}, r"q \[9, 24\], k .* are not \[T, heads, dim\] and two equal planes"),
        ({"k": torch.zeros(7, 2, 2, 6)}, r"k \[7, 2, 2, 6\] and v \[9, 2, 2, 6\]"),
        ({"picks": torch.zeros(3, 9, 1).int()}, r"3 index heads are not a multiple of 2 KV heads"),
        ({"picks": torch.zeros(1, 9, 1).int()}, r"1 index heads are not a multiple of 2 KV heads"),
        ({"picks": torch.zeros(0, 9, 1).int()}, r"0 index heads are not a multiple of 2 KV heads"),
        ({"picks": torch.zeros(2, 8, 1).int()}, r"picks torch.int32 \[2, 8, 1\] are not block ids \[Hi, 9, K\]"),
        ({"picks": torch.zeros(2, 9, 1)}, r"picks torch.float32 \[2, 9, 1\] are not block ids"),
        ({"sinks": torch.zeros(2)}, r"sinks \[2\] are not one logit for each of 4 query heads"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes: dict[str, Tensor], message: str) -> None:
    case = make_ragged([9], [9], page_size=2, seed=0)
    assert tuple(attend(case, {}).shape) == (9, 4, 6)
    with pytest.raises(KernelInputError, match=message):
        attend(case, changes)


def cut(batch: AttentionBatch, **changes: object) -> AttentionBatch:
    return replace(batch, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: cut(b, query_start=torch.tensor([0, 8])), r"query_start ends at 8, not at the 9 tokens of q"),
        (lambda b: cut(b, query_start=torch.tensor([0, 4, 9])), r"query_start has 3 entries for 1 sequences"),
        (lambda b: cut(b, page_table=b.page_table[:0]), r"page_table \[0, 7\] has no row for each of 1 sequences"),
        (lambda b: cut(b, seq_lens=torch.tensor([-9])), r"seq_lens=\[-9\] holds a negative length"),
        (lambda b: cut(b, seq_lens=torch.tensor([15])), r"row 0: seq_len=15 does not fit 7 pages of 2 tokens"),
        (lambda b: cut(b, seq_lens=torch.tensor([11])), r"page ids -1 to \d lie outside 0\.\.8"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(
    spoil: Callable[[AttentionBatch], AttentionBatch], message: str
) -> None:
    """Every op checks; a page table's -1 is never taken for the last page."""
    case = make_ragged([9], [9], page_size=2, seed=0)
    batch, picks = spoil(case.batch), torch.zeros(2, 9, 1).int()
    with pytest.raises(KernelInputError, match=message):
        OPS.dense_attention(case.q, case.k, case.v, batch)
    with pytest.raises(KernelInputError, match=message):
        OPS.sparse_attention(case.q, case.k, case.v, picks, batch, 4)
    with pytest.raises(KernelInputError, match=message):
        OPS.score_blocks(case.index_q, case.index_k, batch, SPARSE)
    with pytest.raises(KernelInputError, match=message):
        OPS.index_value_attention(case.index_q, case.index_k, case.index_v, batch)


def test_index_planes_have_one_head() -> None:
    case = make_ragged([9], [9], page_size=2, seed=0)
    with pytest.raises(KernelInputError, match=r"an index plane has 1 head, not 2"):
        OPS.score_blocks(case.q, case.k, case.batch, SPARSE)
    with pytest.raises(KernelInputError, match=r"an index plane has 1 head, not 2"):
        OPS.index_value_attention(case.q, case.k, case.v, case.batch)


def test_block_size_must_be_positive() -> None:
    case = make_ragged([9], [9], page_size=2, seed=0)
    with pytest.raises(KernelInputError, match=r"block_size=0 must be at least 1"):
        OPS.sparse_attention(case.q, case.k, case.v, torch.zeros(2, 9, 1).int(), case.batch, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": torch.tensor([9])}, r"page_table has 2 rows, seq_lens 1, query_start 3"),
        ({"query_start": torch.tensor([0, 9, 5])}, r"query_start=\[0, 9, 5\] does not cut 5 tokens into rows"),
        ({"query_start": torch.tensor([1, 3, 5])}, r"query_start=\[1, 3, 5\] does not cut"),
        ({"seq_lens": torch.tensor([9, -1])}, r"row 1: seq_len=-1 does not fit"),
        ({"seq_lens": torch.tensor([40, 6])}, r"row 0: seq_len=40 does not fit 7 pages of 2"),
        ({"seq_lens": torch.tensor([9, 8])}, r"row 1: page ids .* outside 0\.\.11"),
        ({"seq_lens": torch.tensor([8, 6])}, r"row 0: positions \[6, 7, 8\] outside its 8 tokens"),
    ],
)
def test_the_boundary_check_names_what_contradicts(changes: dict[str, Tensor], message: str) -> None:
    batch = make_ragged([9, 6], [3, 2], page_size=2, seed=0).batch
    batch.check(page_size=2, num_pages=11)
    with pytest.raises(KernelInputError, match=message):
        cut(batch, **changes).check(page_size=2, num_pages=11)
