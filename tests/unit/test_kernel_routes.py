"""What `tamis doctor` says of operations is where their calls go."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch

from support.ragged import Heads, Ragged, make_ragged
from tamis.config import SparseAttentionConfig
from tamis.kernels.cpu import amx, prefill
from tamis.kernels.cpu.ops import CpuOps
from tamis.kernels.routes import TILES, TORCH, VECTORS, routes

CALLS: dict[str, Callable[[CpuOps, Ragged, SparseAttentionConfig, Any], object]] = {
    "write_pages": lambda ops, case, sparse, picks: ops.write_pages(case.k, case.slots[0], case.k[1, :, :1]),
    "gather_pages": lambda ops, case, sparse, picks: ops.gather_pages(case.k, case.batch.page_table[0], 3),
    "score_blocks": lambda ops, case, sparse, picks: ops.score_blocks(case.index_q, case.index_k, case.batch, sparse),
    "select_blocks": lambda ops, case, sparse, picks: ops.select_blocks(
        torch.zeros(2, case.batch.num_tokens, 2), case.batch.positions, sparse
    ),
    "pick_blocks": lambda ops, case, sparse, picks: ops.pick_blocks(case.index_q, case.index_k, case.batch, sparse),
    "sparse_attention": lambda ops, case, sparse, picks: ops.sparse_attention(
        case.q, case.k, case.v, picks, case.batch, sparse.block_size
    ),
    "picked_attention": lambda ops, case, sparse, picks: ops.picked_attention(
        case.q, case.k, case.v, case.index_q, case.index_k, case.batch, sparse
    ),
    "dense_attention": lambda ops, case, sparse, picks: ops.dense_attention(case.q, case.k, case.v, case.batch),
    "index_value_attention": lambda ops, case, sparse, picks: ops.index_value_attention(
        case.index_q, case.index_k, case.index_v, case.batch
    ),
}


class WentError(Exception):
    """A call got as far as what it runs on."""


def going(where: str) -> Callable[..., NoReturn]:
    def go(*_operands: Any, **_more: Any) -> NoReturn:
        raise WentError(where)

    return go


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuOps]:
    """A backend that computes nothing and tells where a call went."""
    backend = CpuOps(1)
    for name in ("plan_scores", "plan_sparse", "plan_dense"):
        monkeypatch.setattr(prefill, name, going(TILES))
    monkeypatch.setattr(backend.team, "run", going(VECTORS))
    for name in CALLS:
        monkeypatch.setattr(backend._reference, name, going(TORCH))
    yield backend
    backend.close()


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "dim"),
    [
        (torch.bfloat16, torch.bfloat16, 64),
        (torch.bfloat16, torch.bfloat16, 40),
        (torch.float32, torch.bfloat16, 64),
        (torch.bfloat16, torch.float8_e4m3fn, 64),
        (torch.float32, torch.float32, 64),
        (torch.float32, torch.float64, 64),
    ],
)
def test_the_route_is_the_one_taken(
    ops: CpuOps, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, tiles: bool
) -> None:
    monkeypatch.setattr(amx, "available", lambda: tiles)
    heads = Heads(q=4, kv=2, index=2, dim=dim, index_dim=dim)
    case = make_ragged([40], [2], 16, 1, heads, kv_dtype)
    case = Ragged(**{**case.__dict__, "q": case.q.to(dtype), "index_q": case.index_q.to(dtype)})
    sparse = SparseAttentionConfig(2, dim, block_size=32, topk=2)
    picks = torch.zeros(2, case.batch.num_tokens, 2, dtype=torch.int32)
    told = {way.op: way for way in routes(ops, dtype, kv_dtype, dim)}
    for name, call in CALLS.items():
        with pytest.raises(WentError) as went:
            call(ops, case, sparse, picks)
        assert told[name].runs_on == str(went.value), name
        assert told[name].why
