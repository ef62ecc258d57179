"""The kernels written out as Python loops over floats (double precision): what every backend must agree with.

Tensors are only unpacked here; all arithmetic is Python's. Results are nested lists. Nothing is shared with
`tamis.kernels` but the batch type, so that an error there cannot hide itself.
"""

import math
from collections.abc import Callable

from torch import Tensor

from tamis.config import SparseAttentionConfig
from tamis.kernels import AttentionBatch

Vector = list[float]
Visible = Callable[[int, int, int, int], bool]
"""(row of the step, KV head, position of the query, position of the key) -> may the query read the key?"""


class Plane:
    """A plane unpacked: the vector of a token by page table, position and head."""

    def __init__(self, plane: Tensor, scale: float) -> None:
        self._stored: list[list[list[Vector]]] = plane.float().tolist()
        self._page_size = plane.shape[2]
        self._scale = scale

    def token(self, pages: list[int], position: int, head: int) -> Vector:
        page = pages[position // self._page_size]
        assert page >= 0, f"position {position} lies past the page table {pages}"
        return [value * self._scale for value in self._stored[page][head][position % self._page_size]]


def dot(a: Vector, b: Vector) -> float:
    products = [x * y for x, y in zip(a, b, strict=True)]
    return math.fsum(products) if all(map(math.isfinite, products)) else sum(products)


def log_sum_exp(logits: Vector) -> float:
    peak = max(logits, default=-math.inf)
    if math.isinf(peak):
        return peak
    return peak + math.log(math.fsum(math.exp(logit - peak) for logit in logits))


def rows_of(batch: AttentionBatch) -> list[tuple[int, int, int, list[int]]]:
    """(row of the step, position, context length, pages) of every token of the step."""
    starts, lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    positions, tables = batch.positions.tolist(), batch.page_table.tolist()
    return [
        (row, positions[row], lens[seq], tables[seq])
        for seq in range(len(lens))
        for row in range(starts[seq], starts[seq + 1])
    ]


def score_blocks(
    index_q: Tensor, index_k: Tensor, batch: AttentionBatch, sparse: SparseAttentionConfig, k_scale: float = 1.0
) -> list[list[Vector]]:
    """[Hi][T][NB]"""
    size, plane = sparse.block_size, Plane(index_k, k_scale)
    longest = max(batch.seq_lens.tolist(), default=0)
    blocks = len(range(0, longest, size))
    scores = [[[-math.inf] * blocks for _ in range(index_q.shape[0])] for _ in range(index_q.shape[1])]
    for row, position, length, pages in rows_of(batch):
        keys = [plane.token(pages, j, 0) for j in range(min(position + 1, length))]
        for head in range(index_q.shape[1]):
            query = index_q[row, head].float().tolist()
            tokens = [dot(query, key) / math.sqrt(len(query)) for key in keys]
            tokens = [-math.inf if math.isnan(score) else score for score in tokens]
            for block in range(len(range(0, len(tokens), size))):
                members = tokens[block * size : block * size + size]
                scores[head][row][block] = max(members) if sparse.score_type == "max" else log_sum_exp(members)
    return scores


def select_blocks(
    scores: list[list[Vector]], positions: list[int], sparse: SparseAttentionConfig
) -> list[list[list[int]]]:
    """[Hi][T][topk]"""
    return [[_select(by_block, position, sparse) for by_block, position in zip(by_row, positions, strict=True)]
            for by_row in scores]  # fmt: skip


def _select(scores: Vector, position: int, sparse: SparseAttentionConfig) -> list[int]:
    seen = [block for block in range(len(scores)) if block * sparse.block_size <= position]
    own = position // sparse.block_size
    forced = [block for block in seen if block < sparse.init_blocks or block > own - sparse.local_blocks]
    free = [b for b in seen if b not in forced and not math.isnan(scores[b]) and scores[b] != -math.inf]
    free.sort(key=lambda block: (-scores[block], block))
    picks = sorted((forced + free)[: sparse.topk])
    return picks + [-1] * (sparse.topk - len(picks))


def attention(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, visible: Visible, sinks: Tensor | None = None,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> tuple[list[list[Vector]], list[Vector]]:  # fmt: skip
    """Softmax attention over the tokens that `visible` allows: out [T][Hq][D], log-sum-exp [T][Hq]."""
    q_heads, kv_heads, dim = q.shape[1], k.shape[1], v.shape[3]
    k_plane, v_plane = Plane(k, k_scale), Plane(v, v_scale)
    out = [[[0.0] * dim for _ in range(q_heads)] for _ in range(q.shape[0])]
    sink = [-math.inf] * q_heads if sinks is None else sinks.float().tolist()
    lse = [list(sink) for _ in range(q.shape[0])]
    for row, position, length, pages in rows_of(batch):
        for head in range(q_heads):
            kv_head = head // (q_heads // kv_heads)
            keys = [j for j in range(min(position + 1, length)) if visible(row, kv_head, position, j)]
            if not keys:
                continue
            query = q[row, head].float().tolist()
            logits = [dot(query, k_plane.token(pages, j, kv_head)) / math.sqrt(len(query)) for j in keys]
            total = log_sum_exp([*logits, sink[head]])
            weights = [math.exp(logit - total) for logit in logits]
            values = [v_plane.token(pages, j, kv_head) for j in keys]
            out[row][head] = [dot(weights, [value[d] for value in values]) for d in range(dim)]
            lse[row][head] = total
    return out, lse


def dense(_row: int, _kv_head: int, _position: int, _key: int) -> bool:
    """Visible: everything causal."""
    return True


def in_picks(picks: Tensor, kv_heads: int, block_size: int) -> Visible:
    """Visible: what any index head of the KV head picked; picks [Hi, T, K]."""
    chosen = picks.tolist()
    share = len(chosen) // kv_heads

    def visible(row: int, kv_head: int, _position: int, key: int) -> bool:
        return any(key // block_size in chosen[kv_head * share + i][row] for i in range(share))

    return visible
