"""`CpuOps`: the operations of `kernels/ops.py` in Numba, on the pool's own memory."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from tamis.config import SparseAttentionConfig
from tamis.errors import KernelInputError
from tamis.kernels.checks import check_attention, check_fits, check_lengths, check_picks, check_scores
from tamis.kernels.cpu import plan, prefill
from tamis.kernels.cpu.attend import launch_dense_parts, launch_finish, launch_sparse_parts
from tamis.kernels.cpu.frames import Frame
from tamis.kernels.cpu.lowfloat import as_array, is_readable
from tamis.kernels.cpu.prefill import ArrayBatch
from tamis.kernels.cpu.score import launch_score_tiles, launch_select
from tamis.kernels.cpu.scratch import Scratch
from tamis.kernels.cpu.threads import ThreadTeam
from tamis.kernels.ops import AttentionBatch
from tamis.kernels.reference import ReferenceOps

logger = logging.getLogger(__name__)

LOG2E = 1 / math.log(2)
GRAIN = 256
"""Contexts are cut at multiples of this many tokens."""
SPAN = 2048
"""Tokens of context a scoring work item covers."""
MANY_ROWS = 32
"""Query rows (tokens x heads) that share a tile of keys."""


@dataclass(frozen=True)
class _Arrays:
    """A batch as NumPy arrays, and what the kernels derive from it."""

    batch: ArrayBatch
    token_seq: NDArray[Any]
    """int32 [T]: the sequence of each token; -1 where it sees nothing."""
    page_size: int
    last_page: int
    """The largest page id any sequence uses."""
    plans: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """By the shapes of a call: what was planned for it once its operands had been checked."""


class CpuOps:
    """Numba kernels on a team of threads; what they cannot take goes to the reference, with one log line a reason.

    bf16 queries over bf16 planes run on matrix tiles where the CPU has them (`prefill.supports`), all else in fp32.
    """

    name = "cpu"

    def __init__(self, threads: int) -> None:
        self.team = ThreadTeam(threads)
        self.scratch = Scratch()
        self._reference = ReferenceOps()
        self._told: set[str] = set()
        self._last: tuple[AttentionBatch, _Arrays] | None = None

    def close(self) -> None:
        """End the threads."""
        self.team.close()

    def write_pages(self, plane: Tensor, slots: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """See `Ops.write_pages`."""
        self._reference.write_pages(plane, slots, values, scale)

    def gather_pages(self, plane: Tensor, pages: Tensor, length: int, scale: float = 1.0) -> Tensor:
        """See `Ops.gather_pages`."""
        return self._reference.gather_pages(plane, pages, length, scale)

    def score_blocks(
        self, index_q: Tensor, index_k: Tensor, batch: AttentionBatch, sparse: SparseAttentionConfig,
        k_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """See `Ops.score_blocks`."""
        if sparse.score_type == "max" and _queries_fit(index_q) and fit_tiles(index_k):
            return self._score_tiles(index_q, index_k, batch, sparse, k_scale)
        if not self._takes(index_q, index_k):
            return self._reference.score_blocks(index_q, index_k, batch, sparse, k_scale)
        check_attention(index_q, index_k, index_k, batch, kv_heads=1)
        tokens, heads, dim = index_q.shape
        arrays = self.arrays(batch, index_k)
        seq_lens, positions = arrays.batch.seq_lens, arrays.batch.positions
        blocks = -(-int(seq_lens.max(initial=0)) // sparse.block_size)
        scores = torch.full((heads, tokens, blocks), -torch.inf)
        tiles = plan.query_tiles(arrays.token_seq, seq_lens, positions, max(1, MANY_ROWS // heads))
        items = plan.score_items(tiles, sparse.block_size, SPAN)
        self.team.run(
            launch_score_tiles, items, as_array(index_q.float().contiguous()), as_array(index_k),
            arrays.batch.page_table, positions, sparse.block_size, np.float32(dim**-0.5), np.float32(k_scale),
            sparse.score_type == "lse", as_array(scores),
            threads=len(items),
        )  # fmt: skip
        return scores

    def select_blocks(self, scores: Tensor, positions: Tensor, sparse: SparseAttentionConfig) -> Tensor:
        """See `Ops.select_blocks`."""
        if scores.device.type != "cpu":
            return self._reference.select_blocks(scores, positions, sparse)
        check_scores(scores, positions)
        picks = torch.empty((*scores.shape[:2], sparse.topk), dtype=torch.int32)
        work = scores.numel()
        self.team.run(
            launch_select, as_array(scores.float().contiguous()), positions.int().numpy(), sparse.block_size,
            sparse.init_blocks, sparse.local_blocks, picks.numpy(), threads=1 + work // 2048,
        )  # fmt: skip
        return picks

    def pick_blocks(
        self, index_q: Tensor, index_k: Tensor, batch: AttentionBatch, sparse: SparseAttentionConfig,
        k_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """See `Ops.pick_blocks`."""
        if sparse.score_type != "max" or not (_queries_fit(index_q) and fit_tiles(index_k)):
            scores = self.score_blocks(index_q, index_k, batch, sparse, k_scale)
            return self.select_blocks(scores, batch.positions, sparse)
        tokens, heads, _ = index_q.shape
        score_plan = self._score_plan(index_q, index_k, batch, sparse)
        scores = self._scratch_tensor("block scores", (heads, tokens, score_plan.blocks), np.float32)
        picks = torch.empty((heads, tokens, sparse.topk), dtype=torch.int32)
        prefill.pick_blocks(
            self.team, score_plan, index_q.contiguous(), index_k, sparse, scores, picks, k_scale=k_scale
        )
        return picks

    @overload
    def sparse_attention(
        self, q: Tensor, k: Tensor, v: Tensor, picks: Tensor, batch: AttentionBatch, block_size: int,
        *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, return_lse: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def sparse_attention(
        self, q: Tensor, k: Tensor, v: Tensor, picks: Tensor, batch: AttentionBatch, block_size: int,
        *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def sparse_attention(
        self, q: Tensor, k: Tensor, v: Tensor, picks: Tensor, batch: AttentionBatch, block_size: int,
        *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """See `Ops.sparse_attention`."""
        if _queries_fit(q) and fit_tiles(k, v):
            out, lse = self._sparse_tiles(q, k, v, picks, batch, block_size, sinks, k_scale, v_scale)
            return (out, lse) if return_lse else out
        if not self._takes(q, k):
            out, lse = self._reference.sparse_attention(
                q, k, v, picks, batch, block_size, sinks=sinks, k_scale=k_scale, v_scale=v_scale, return_lse=True
            )
            return (out, lse) if return_lse else out
        check_attention(q, k, v, batch, sinks)
        check_picks(picks, q, k, block_size)
        arrays = self.arrays(batch, k)
        tokens, kv_heads = q.shape[0], k.shape[1]
        parts = self._parts(tokens * kv_heads, picks.shape[2])
        sums, tops, masses = self._partials(q, parts)
        self.team.run(
            launch_sparse_parts, arrays.token_seq, as_array(q.float().contiguous()), as_array(k), as_array(v),
            picks.int().contiguous().numpy(), arrays.batch.page_table, arrays.batch.seq_lens, arrays.batch.positions,
            block_size, parts,
            np.float32(LOG2E * q.shape[2] ** -0.5), np.float32(k_scale), np.float32(v_scale), sums, tops, masses,
        )  # fmt: skip
        return self._finish(q, arrays, parts, sums, tops, masses, sinks, return_lse)

    def picked_attention(
        self, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, batch: AttentionBatch,
        sparse: SparseAttentionConfig, *, index_scale: float = 1.0, k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """See `Ops.picked_attention`."""
        fit = _queries_fit(q) and _queries_fit(index_q) and fit_tiles(k, v, index_k)
        if not fit or sparse.score_type != "max":
            picks = self.pick_blocks(index_q, index_k, batch, sparse, index_scale)
            return self.sparse_attention(q, k, v, picks, batch, sparse.block_size, k_scale=k_scale, v_scale=v_scale)
        score_plan = self._score_plan(index_q, index_k, batch, sparse)
        heads, tokens = index_q.shape[1], index_q.shape[0]
        scores = self._scratch_tensor("block scores", (heads, tokens, score_plan.blocks), np.float32)
        picks = self._scratch_tensor("block picks", (heads, tokens, sparse.topk), np.int32)
        plan = self._sparse_plan(q, k, v, picks, batch, sparse.block_size, None)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = self._scratch_tensor("log-sum-exps", (tokens, q.shape[1]), np.float32)
        prefill.picked(
            self.team, score_plan, plan, q.contiguous(), k, v, index_q.contiguous(), index_k, sparse, scores, picks,
            out, lse, index_scale=index_scale, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        return out

    @overload
    def dense_attention(
        self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch,
        *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, return_lse: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def dense_attention(
        self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch,
        *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def dense_attention(
        self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch,
        *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """See `Ops.dense_attention`."""
        if _queries_fit(q) and fit_tiles(k, v):
            out, lse = self._dense_tiles(q, k, v, batch, sinks, k_scale, v_scale)
            return (out, lse) if return_lse else out
        if not self._takes(q, k):
            out, lse = self._reference.dense_attention(
                q, k, v, batch, sinks=sinks, k_scale=k_scale, v_scale=v_scale, return_lse=True
            )
            return (out, lse) if return_lse else out
        check_attention(q, k, v, batch, sinks)
        arrays = self.arrays(batch, k)
        group, kv_heads = q.shape[1] // k.shape[1], k.shape[1]
        seq_lens, positions = arrays.batch.seq_lens, arrays.batch.positions
        tiles = plan.query_tiles(arrays.token_seq, seq_lens, positions, max(1, MANY_ROWS // group))
        longest = int(tiles[:, 3].max(initial=0))
        parts = self._parts(len(tiles) * kv_heads, -(-longest // GRAIN))
        sums, tops, masses = self._partials(q, parts)
        self.team.run(
            launch_dense_parts, plan.dense_items(tiles, parts, GRAIN), as_array(q.float().contiguous()), as_array(k),
            as_array(v), arrays.batch.page_table, positions, np.float32(LOG2E * q.shape[2] ** -0.5),
            np.float32(k_scale), np.float32(v_scale), sums, tops, masses,
        )  # fmt: skip
        return self._finish(q, arrays, parts, sums, tops, masses, sinks, return_lse)

    @overload
    def index_value_attention(
        self, index_q: Tensor, index_k: Tensor, index_v: Tensor, batch: AttentionBatch,
        k_scale: float = 1.0, v_scale: float = 1.0, *, return_lse: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def index_value_attention(
        self, index_q: Tensor, index_k: Tensor, index_v: Tensor, batch: AttentionBatch,
        k_scale: float = 1.0, v_scale: float = 1.0, *, return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def index_value_attention(
        self, index_q: Tensor, index_k: Tensor, index_v: Tensor, batch: AttentionBatch,
        k_scale: float = 1.0, v_scale: float = 1.0, *, return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """See `Ops.index_value_attention`."""
        check_attention(index_q, index_k, index_v, batch, kv_heads=1)
        out, lse = self.dense_attention(
            index_q, index_k, index_v, batch, k_scale=k_scale, v_scale=v_scale, return_lse=True
        )
        return (out, lse) if return_lse else out

    def _score_tiles(
        self, index_q: Tensor, index_k: Tensor, batch: AttentionBatch, sparse: SparseAttentionConfig, k_scale: float
    ) -> Tensor:
        plan = self._score_plan(index_q, index_k, batch, sparse)
        scores = torch.empty((index_q.shape[1], index_q.shape[0], plan.blocks))
        queries = index_q.contiguous()
        prefill.score_blocks(self.team, plan, queries, index_k, sparse.block_size, scores, k_scale=k_scale)
        return scores

    def _score_plan(
        self, index_q: Tensor, index_k: Tensor, batch: AttentionBatch, sparse: SparseAttentionConfig
    ) -> prefill.ScorePlan:
        def make() -> prefill.ScorePlan:
            check_attention(index_q, index_k, index_k, batch, kv_heads=1)
            arrays = self.arrays(batch, index_k)
            heads, dim = index_q.shape[1:]
            page_size, size = index_k.shape[2], sparse.block_size
            return prefill.plan_scores(self.team, self.scratch, arrays.batch, heads, dim, page_size, size)

        plan: prefill.ScorePlan = self.planned(batch, ("scores", index_q.shape, index_k.shape, sparse.block_size), make)
        return plan

    def _sparse_tiles(
        self, q: Tensor, k: Tensor, v: Tensor, picks: Tensor, batch: AttentionBatch, block_size: int,
        sinks: Tensor | None, k_scale: float, v_scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        plan = self._sparse_plan(q, k, v, picks, batch, block_size, sinks)
        out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty(q.shape[:2])
        prefill.sparse(
            self.team, plan, q.contiguous(), k, v, picks.int().contiguous(), block_size, out, lse, sinks=_logits(sinks),
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        return out, lse

    def _sparse_plan(
        self, q: Tensor, k: Tensor, v: Tensor, picks: Tensor, batch: AttentionBatch, block_size: int,
        sinks: Tensor | None,
    ) -> Frame:  # fmt: skip
        def make() -> Frame:
            check_attention(q, k, v, batch, sinks)
            check_picks(picks, q, k, block_size)
            arrays = self.arrays(batch, k)
            return prefill.plan_sparse(
                self.team, self.scratch, arrays.batch, q.shape[1], k.shape[1], q.shape[2], k.shape[2],
                index_heads=picks.shape[0], topk=picks.shape[2], block_size=block_size,
            )  # fmt: skip

        shapes = q.shape, k.shape, v.shape, picks.shape, picks.dtype, None if sinks is None else sinks.shape
        plan: Frame = self.planned(batch, ("sparse", block_size, *shapes), make)
        return plan

    def _scratch_tensor(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        return torch.from_numpy(self.scratch.get(name, shape, dtype))

    def _dense_tiles(
        self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, sinks: Tensor | None, k_scale: float,
        v_scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        def make() -> Frame:
            check_attention(q, k, v, batch, sinks)
            arrays = self.arrays(batch, k)
            return prefill.plan_dense(
                self.team, self.scratch, arrays.batch, q.shape[1], k.shape[1], q.shape[2], k.shape[2]
            )

        shapes = q.shape, k.shape, v.shape, None if sinks is None else sinks.shape
        plan = self.planned(batch, ("dense", *shapes), make)
        out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty(q.shape[:2])
        prefill.dense(
            self.team, plan, q.contiguous(), k, v, out, lse, sinks=_logits(sinks), k_scale=k_scale, v_scale=v_scale
        )
        return out, lse

    def planned(self, batch: AttentionBatch, shapes: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What `make` checked and planned for the first layer of a step whose operands have these shapes."""
        last = self._last
        if last is not None and last[0] is batch and shapes in last[1].plans:
            return last[1].plans[shapes]
        plan = make()
        assert self._last is not None  # `make` asked for the arrays
        self._last[1].plans[shapes] = plan
        return plan

    def _parts(self, items: int, most: int) -> int:
        """Into how many parts each work item is cut, so that there is something for every thread, evenly."""
        wanted = 8 * self.team.size if self.team.size > 1 else 1
        return max(1, min(-(-wanted // max(items, 1)), most))

    def _partials(self, q: Tensor, parts: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        tokens, heads, dim = q.shape
        return (
            self.scratch.get("sums", (tokens, heads, parts, dim), np.float32),
            self.scratch.get("tops", (tokens, heads, parts), np.float32),
            self.scratch.get("masses", (tokens, heads, parts), np.float32),
        )

    def _finish(
        self, q: Tensor, arrays: _Arrays, parts: int, sums: NDArray[Any], tops: NDArray[Any], masses: NDArray[Any],
        sinks: Tensor | None, return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = torch.empty(q.shape, dtype=torch.float32), torch.empty(q.shape[:2], dtype=torch.float32)
        parts_of = np.where(arrays.token_seq >= 0, np.int32(parts), np.int32(0))
        logits = _logits(sinks)
        sink = np.empty(0, np.float32) if logits is None else logits.numpy()
        self.team.run(
            launch_finish,
            parts_of,
            sums,
            tops,
            masses,
            sink,
            out.numpy(),
            lse.numpy(),
            threads=1 + out.numel() // 65536,
        )
        result = out.to(q.dtype)
        return (result, lse) if return_lse else result

    def arrays(self, batch: AttentionBatch, plane: Tensor) -> _Arrays:
        """The batch as arrays; a step's layers all pass the same batch, so the last one is kept.

        Kernels trust page ids, so this is where one that `plane` does not have raises KernelInputError.
        """
        pages, _, page_size, _ = plane.shape
        last = self._last
        if last is None or last[0] is not batch or last[1].page_size != page_size:
            last = self._last = (batch, _as_arrays(batch, page_size))
        if last[1].last_page >= pages:
            raise KernelInputError(f"page id {last[1].last_page} lies outside 0..{pages - 1}")
        return last[1]

    def _takes(self, q: Tensor, plane: Tensor) -> bool:
        reason = ""
        if plane.device.type != "cpu":
            reason = f"planes on {plane.device}"
        elif not is_readable(plane.dtype):
            reason = f"planes of {plane.dtype}"
        elif not q.is_floating_point():
            reason = f"queries of {q.dtype}"
        if reason and reason not in self._told:
            self._told.add(reason)
            logger.warning("%s: the torch reference is used instead of the CPU kernels", reason)
        return not reason


def _as_arrays(batch: AttentionBatch, page_size: int) -> _Arrays:
    table = batch.page_table.int().contiguous().numpy()
    seq_lens, starts, positions = (
        tensor.int().contiguous().numpy() for tensor in (batch.seq_lens, batch.query_start, batch.positions)
    )
    if len(table) < len(seq_lens) or np.diff(starts, prepend=0).min(initial=0) < 0 or starts[:1].any():
        raise KernelInputError(
            f"query_start={starts.tolist()} and a page table of {len(table)} rows do not fit {len(seq_lens)} sequences"
        )
    check_lengths(seq_lens.tolist())
    if len(seq_lens):
        longest = int(seq_lens.argmax())
        check_fits(longest, int(seq_lens[longest]), table.shape[1], page_size)
    needed = -(-seq_lens // page_size)
    used = table[np.arange(table.shape[1]) < needed[:, None]]
    if used.min(initial=0) < 0:
        raise KernelInputError(f"page id {used.min()} is below 0")
    token_seq = np.full(batch.num_tokens, -1, np.int32)
    plan.token_sequences(seq_lens, starts, positions, token_seq)
    return _Arrays(ArrayBatch(table, seq_lens, starts, positions), token_seq, page_size, int(used.max(initial=0)))


def _logits(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.float().contiguous()


def _queries_fit(q: Tensor) -> bool:
    return q.dtype is torch.bfloat16 and q.is_cpu and q.dim() == 3 and prefill.supports(q.shape[2])


def fit_tiles(*planes: Tensor) -> bool:
    """Whether matrix tiles read these planes; kernels get addresses, so all about them is looked at here."""
    return all(plane.dtype is torch.bfloat16 and plane.is_cpu and plane.is_contiguous() for plane in planes)
