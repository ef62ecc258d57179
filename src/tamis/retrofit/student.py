"""The index branch of one layer while it learns, and what it learns from (facts.md section 2).

Shapes: T tokens, n queries of a strip, t keys they see, H index heads (one a KV head), d their dim, C hidden size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.kernels.dense import apply_rope
from tamis.kernels.linear import Rope
from tamis.models.attention import Attention
from tamis.retrofit.selection import Selection, block_max, block_sum
from tamis.retrofit.teacher import hide_future, reach

SMALL = 1e-9
"""Teachers' probabilities below this count as this, so that their logarithms stay finite."""


class IndexStudent(nn.Module):
    """Index projections and norms of a layer, fp32; with `value` also the index value and its output projection."""

    def __init__(self, hidden: int, heads: int, dim: int, eps: float, *, value: bool = False) -> None:
        super().__init__()
        self.heads, self.dim, self.eps = heads, dim, eps
        self.q_proj = nn.Parameter(torch.empty(heads * dim, hidden))
        self.k_proj = nn.Parameter(torch.empty(dim, hidden))
        self.q_norm = nn.Parameter(torch.ones(dim))
        self.k_norm = nn.Parameter(torch.ones(dim))
        self.v_proj = nn.Parameter(torch.empty(dim, hidden)) if value else None
        self.o_proj = nn.Parameter(torch.zeros(hidden, heads * dim)) if value else None

    @torch.no_grad()
    def start_from(self, attention: Attention, generator: torch.Generator) -> None:
        """Start as the mean of each group's query heads, of all key heads, and of all value heads.

        Channels beyond the main heads' start small and random: zeros would never learn.
        """
        group, keys, values = (attention.groups[i] for i in range(3))
        rows = attention.qkv_proj.weight.dense(torch.float32)
        q, k, v = torch.split(rows, [each.heads * each.dim for each in attention.groups])
        self._start(self.q_proj, q.reshape(keys.heads, -1, group.dim, q.shape[1]).mean(1), self.heads, generator)
        self._start(self.k_proj, k.reshape(1, keys.heads, keys.dim, -1).mean(1), 1, generator)
        if self.v_proj is not None:
            self._start(self.v_proj, v.reshape(1, values.heads, values.dim, -1).mean(1), 1, generator)

    def _start(self, weight: nn.Parameter, rows: Tensor, heads: int, generator: torch.Generator) -> None:
        """`rows` [heads, D, C] into the first channels of each head."""
        spread = float(rows.std())
        target = weight.reshape(heads, self.dim, -1)
        target.copy_(torch.randn(target.shape, generator=generator) * spread)
        used = min(self.dim, rows.shape[1])
        target[:, :used] = rows[:, :used]

    @torch.no_grad()
    def calibrate(self, hidden: Tensor) -> None:
        """Set the norms' weights so that heads start as large as their projections of `hidden` [T, C] are."""
        for weight, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm)):
            projected = F.linear(hidden, weight.to(hidden.dtype)).float()
            norm.fill_(float(projected.reshape(-1, self.dim).pow(2).mean(-1).sqrt().mean()))

    def queries(self, hidden: Tensor, rope: Rope) -> Tensor:
        """Normed hidden states of some tokens [n, C] and their rotation -> [n, H, d]."""
        return self._head(hidden, self.q_proj, self.q_norm, rope)

    def keys(self, hidden: Tensor, rope: Rope) -> Tensor:
        """Normed hidden states [T, C] -> [T, d]."""
        return self._head(hidden, self.k_proj, self.k_norm, rope)[:, 0]

    def _head(self, hidden: Tensor, weight: Tensor, norm: Tensor, rope: Rope) -> Tensor:
        heads = F.linear(hidden, weight.to(hidden.dtype)).float().reshape(len(hidden), -1, self.dim)
        return apply_rope(F.rms_norm(heads, (self.dim,), norm, self.eps), rope)

    def scores(self, queries: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """Of queries [n, H, d] at `positions` for the keys within their `reach`, [H, n, t]; the future is -inf."""
        seen = keys[: reach(positions, len(keys))]
        scores = (queries * self.dim**-0.5).transpose(0, 1).flatten(0, 1) @ seen.T
        return hide_future(scores.reshape(self.heads, len(positions), -1), positions)

    def repairs(self, scores: Tensor, hidden: Tensor) -> Tensor:
        """What the index value adds to the layer's output, [n, C], from scores [H, n, t] and hidden states [T, C]."""
        assert self.v_proj is not None
        assert self.o_proj is not None
        values = F.linear(hidden[: scores.shape[-1]], self.v_proj.to(hidden.dtype)).float()
        return F.linear((scores.softmax(-1) @ values).transpose(0, 1).flatten(1), self.o_proj)


def token_loss(scores: Tensor, teaching: Tensor) -> Tensor:
    """KL(teacher || student) over tokens, the mean over heads and queries; both [H, n, t]."""
    gap = teaching.clamp(min=SMALL).log() - scores.log_softmax(-1)
    # A key in the future has no probability, and no finite logarithm.
    return torch.where(teaching > 0, teaching * gap, 0.0).sum(-1).mean()


def block_loss(scores: Tensor, teaching: Tensor, positions: Tensor, selection: Selection) -> Tensor:
    """KL over the blocks that selection is free to choose, a block's score being its best token's.

    That is how selection sees them. Queries are weighted by the teacher's mass in these blocks: where the forced ones
    hold all of it, there is nothing to choose.
    """
    mass, best = block_sum(teaching, selection.block_size), block_max(scores, selection.block_size)
    closed = selection.forced(positions, mass.shape[-1]) | (best == -torch.inf)
    mass = mass.masked_fill(closed, 0.0)
    logs = best.masked_fill(closed, -1e4).log_softmax(-1)
    total = mass.sum(-1, keepdim=True).clamp(min=SMALL)
    gap = (mass / total).clamp(min=SMALL).log() - logs
    return torch.where(mass > 0, mass * gap, 0.0).sum(-1).mean()


@torch.no_grad()
def captured(scores: Tensor, teaching: Tensor, positions: Tensor, selection: Selection) -> tuple[float, float]:
    """The attention mass in the blocks that are chosen by token scores, and in the best ones there are."""
    mass = block_sum(teaching, selection.block_size)
    chosen = selection.choose(block_max(scores, selection.block_size), positions)
    oracle = selection.choose(mass, positions)
    return float((mass * chosen).sum(-1).mean()), float((mass * oracle).sum(-1).mean())
