"""What a kernel backend offers, and the batch it works on.

Shapes: T tokens of this step over all sequences, B sequences, P page-table columns, Hq query heads, Hkv KV heads,
Hi index heads, D head dim, Di index head dim, K = topk, NB blocks of the longest sequence. A *plane* is one buffer of
the pool: `[num_pages + 1, heads, page_size, dim]`, in its storage type; ops read it in place and sum in fp32.

A query sees the tokens of its own sequence at or before its position and below seq_lens. Whatever else a plane holds,
NaN and infinities included, never changes a result; a NaN or an infinity among the tokens it sees (for sparse
attention: in the blocks it reads) spoils that query alone.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, overload

import torch
from torch import Tensor

from tamis.config import SparseAttentionConfig
from tamis.errors import KernelInputError


@dataclass(frozen=True)
class AttentionBatch:
    """A ragged batch: which tokens of which sequences this step computes, and where their context lies."""

    page_table: Tensor
    """int32 [B, P]: page ids of each sequence in order, -1 past the end."""
    seq_lens: Tensor
    """int32 [B]: tokens each sequence has in the pool, those of this step included; 0: an empty row."""
    query_start: Tensor
    """int32 [B + 1]: tokens of sequence b are rows query_start[b] to query_start[b + 1] of the step."""
    positions: Tensor
    """int32 [T]: each token's position in its sequence, from 0."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.positions.shape[0]

    @property
    def num_seqs(self) -> int:
        """B."""
        return self.seq_lens.shape[0]

    def check(self, page_size: int, num_pages: int) -> None:
        """Raise KernelInputError where the fields contradict each other or name pages that do not exist.

        `num_pages` counts usable pages (ids 1 to num_pages). For tests and for callers at the boundary; ops do not
        call it, since it costs a pass over the table.
        """
        batch, columns = self.page_table.shape
        lens = self.seq_lens.tolist()
        starts = self.query_start.tolist()
        if len(lens) != batch or len(starts) != batch + 1:
            raise KernelInputError(
                f"page_table has {batch} rows, seq_lens {len(lens)}, query_start {len(starts)} (must be rows + 1)"
            )
        if starts[0] != 0 or starts[-1] != self.num_tokens or any(a > b for a, b in zip(starts, starts[1:])):  # noqa: B905, RUF007
            raise KernelInputError(f"query_start={starts} does not cut {self.num_tokens} tokens into rows")
        for row, length in enumerate(lens):
            pages = -(-length // page_size)
            if length < 0 or pages > columns:
                raise KernelInputError(f"row {row}: seq_len={length} does not fit {columns} pages of {page_size}")
            used = self.page_table[row, :pages]
            if pages and (int(used.min()) < 0 or int(used.max()) > num_pages):
                raise KernelInputError(f"row {row}: page ids {used.tolist()} outside 0..{num_pages}")
            positions = self.positions[starts[row] : starts[row + 1]]
            if len(positions) and (int(positions.min()) < 0 or int(positions.max()) >= length):
                raise KernelInputError(f"row {row}: positions {positions.tolist()} outside its {length} tokens")


@dataclass(frozen=True)
class LayerPlanes:
    """The planes of one layer, and where in them a step's n tokens go (see `SparseKVPool.open_layer`)."""

    k: Tensor
    v: Tensor
    index_k: Tensor | None
    """None on a dense layer."""
    rows: Tensor
    """int64 [n, kv_heads]: rows of k and v seen as [(num_pages + 1) * kv_heads * page_size, dim]."""
    index_rows: Tensor | None
    """int64 [n, 1]: rows of index_k."""
    plain: bool
    """Whether what is written is the value itself: no scale divides it."""


class Ops(Protocol):
    """The operations every backend implements; `kernels/reference.py` is the specification."""

    name: str

    def close(self) -> None:
        """End what the backend keeps running; it is not used again."""

    def write_pages(self, plane: Tensor, slots: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """Write `values` [n, heads, dim] to slots int64 [n] (page * page_size + offset) of `plane`.

        Values are divided by `scale` in fp32, then cast to the plane's type; fp8 saturates instead of overflowing.
        """

    def gather_pages(self, plane: Tensor, pages: Tensor, length: int, scale: float = 1.0) -> Tensor:
        """Read the first `length` tokens of a sequence whose pages are int [P]: fp32 [length, heads, dim]."""

    def score_blocks(
        self, index_q: Tensor, index_k: Tensor, batch: AttentionBatch, sparse: SparseAttentionConfig,
        k_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """Block scores fp32 [Hi, T, NB] of `index_q` [T, Hi, Di]; -inf where a block has no visible token.

        s = q . k / sqrt(Di) for tokens at or before the query's position, NaN counted as -inf; a block's score is the
        max or the log-sum-exp of its tokens'. NB = ceil(max(seq_lens) / block_size).
        """

    def select_blocks(self, scores: Tensor, positions: Tensor, sparse: SparseAttentionConfig) -> Tensor:
        """Choose blocks: int32 [Hi, T, topk], ascending ids, -1 past the end.

        Init and local blocks first, then the best scores, ties to the lowest id; never a block scored -inf or NaN
        (unless forced), never one past the query's own; a position below 0 picks nothing.
        """

    def pick_blocks(
        self, index_q: Tensor, index_k: Tensor, batch: AttentionBatch, sparse: SparseAttentionConfig,
        k_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """`select_blocks` of `score_blocks`: int32 [Hi, T, topk]; the scores are not kept."""

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
        """Softmax attention over the visible tokens of the picked blocks, scale 1/sqrt(D).

        q [T, Hq, D]; k, v planes; picks int32 [Hi, T, K], any order, -1 anywhere; Hi a multiple of Hkv: KV head h reads
        the union of its Hi / Hkv index heads' picks, each block once. sinks fp32 [Hq]: a logit in the denominator only.
        Returns [T, Hq, D] in q's dtype (zeros where nothing is visible) and, when asked, the log-sum-exp of the scaled
        logits, sink included, fp32 [T, Hq] (-inf where nothing is visible and there is no sink).
        """

    def picked_attention(
        self, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, batch: AttentionBatch,
        sparse: SparseAttentionConfig, *, index_scale: float = 1.0, k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """`sparse_attention` to the blocks that `pick_blocks` picks: [T, Hq, D] in q's dtype."""

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
        """Causal attention over the whole context; otherwise as `sparse_attention`."""

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
        """The index branch's own output: causal softmax(q . k / sqrt(Di)) over the whole context, times index V.

        index_q [T, Hi, Di]; planes with one head. Returns [T, Hi, Di] in index_q's dtype, zeros where nothing is
        visible, and, when asked, the log-sum-exp of the scaled logits, fp32 [T, Hi], -inf there.
        """


def combine_partials(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint sets of keys: outs [T, H, D], lses fp32 [T, H]; returns the same for the union.

    A sink belongs to exactly one of the parts. Rows that see nothing in any part give zeros and -inf. Raises
    KernelInputError unless there is one log-sum-exp for each of at least one output.
    """
    if not outs or len(outs) != len(lses):
        raise KernelInputError(f"cannot join {len(outs)} partial outputs and {len(lses)} log-sum-exps")
    stacked = torch.stack(lses).float()
    total = torch.logsumexp(stacked, dim=0)
    # exp(-inf - -inf) is NaN: rows that see nothing anywhere get weight 0.
    weights = torch.exp(stacked - torch.where(total.isinf() & (total < 0), 0.0, total))
    joined = (torch.stack(outs).float() * weights[..., None]).sum(dim=0)
    return joined.to(outs[0].dtype), total
