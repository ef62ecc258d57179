"""Choosing blocks as the kernels do (facts.md section 1), for many queries at a time, in plain torch.

Shapes: H index heads, n queries, t keys, b blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Selection:
    """How many blocks of which size a query gets, and which of them it always gets."""

    block_size: int
    topk: int
    init_blocks: int = 1
    local_blocks: int = 1

    @property
    def tokens(self) -> int:
        """Tokens a query attends to at most."""
        return self.block_size * self.topk

    def forced(self, positions: Tensor, blocks: int) -> Tensor:
        """Which blocks the queries at `positions` [n] get in any case, bool [n, b]."""
        block, own = torch.arange(blocks), positions[:, None] // self.block_size
        return ((block < self.init_blocks) | (block > own - self.local_blocks)) & (block <= own)

    def choose(self, scores: Tensor, positions: Tensor) -> Tensor:
        """The blocks chosen by scores [H, n, b] (-inf: not to be seen), bool [H, n, b]."""
        forced = self.forced(positions, scores.shape[-1])
        visible = torch.arange(scores.shape[-1]) <= positions[:, None] // self.block_size
        ranked = scores.masked_fill(forced, torch.inf)
        best = ranked.topk(min(self.topk, scores.shape[-1]), -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & visible

    def token_mask(self, chosen: Tensor, positions: Tensor, tokens: int) -> Tensor:
        """Chosen blocks [H, n, b] -> which of `tokens` are attended to, bool [H, n, t]."""
        mask = chosen.repeat_interleave(self.block_size, -1)[..., :tokens]
        return mask & (torch.arange(tokens) <= positions[:, None])


def block_max(scores: Tensor, block_size: int) -> Tensor:
    """Token scores [..., t], -inf where they do not count -> the best of each block, [..., b]."""
    return _blocks(scores, block_size, -torch.inf).amax(-1)


def block_sum(mass: Tensor, block_size: int) -> Tensor:
    """Probabilities of tokens [..., t] -> of blocks [..., b]."""
    return _blocks(mass, block_size, 0.0).sum(-1)


def _blocks(values: Tensor, block_size: int, fill: float) -> Tensor:
    missing = -values.shape[-1] % block_size
    whole = F.pad(values, (0, missing), value=fill) if missing else values
    return whole.reshape(*values.shape[:-1], -1, block_size)
