"""Which layers stay dense and how large blocks are: measured on texts, by what selection changes in a layer's output.

The loss of a layer is the mean square of the change, over that of the residual stream it goes into: what later layers
get to see of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.kernels.dense import project
from tamis.kernels.linear import Rope
from tamis.progress import Progress
from tamis.retrofit.learner import Learner, sample_positions
from tamis.retrofit.selection import Selection, block_max, block_sum
from tamis.retrofit.settings import RetrofitSettings
from tamis.retrofit.teacher import LayerView, Teacher, group_mean


@dataclass
class LayerLoss:
    """What one layer loses with one selection, summed over texts."""

    change: float = 0.0
    """Squares of the change of the layer's output by choosing with the index."""
    best_change: float = 0.0
    """The same, choosing by true attention mass."""
    stream: float = 0.0
    """Squares of the residual stream."""
    mass: float = 0.0
    oracle: float = 0.0
    texts: int = 0

    def record(self) -> dict[str, float]:
        """As JSON keeps it."""
        return {
            "loss": self.change / self.stream,
            "oracle_loss": self.best_change / self.stream,
            "mass": self.mass / self.texts,
            "oracle": self.oracle / self.texts,
        }


Losses = dict[int, dict[int, dict[str, float]]]
"""By block size, then by layer: a `LayerLoss.record`."""


@torch.no_grad()
def measure(
    teacher: Teacher, learners: Mapping[int, Learner], settings: RetrofitSettings, texts: Sequence[Tensor],
    progress: Progress,
) -> Losses:  # fmt: skip
    """What each layer loses with each of `settings.block_sizes`, on `texts` (int64 token ids)."""
    found = {size: {layer: LayerLoss() for layer in learners} for size in settings.block_sizes}
    progress.start("measuring layers", len(texts), "steps")
    try:
        for number, token_ids in enumerate(texts):
            generator = torch.Generator().manual_seed(settings.seed * 1000 + number)
            positions = sample_positions(len(token_ids), settings, generator)
            rope = teacher.rope(len(token_ids))

            def look(view: LayerView, positions: Tensor = positions, rope: Rope = rope) -> None:
                if view.layer in learners:
                    losses = {size: found[size][view.layer] for size in found}
                    _measure_layer(teacher, learners[view.layer], settings, view, positions, rope, losses)

            teacher.visit(token_ids, look)
            progress.advance(1)
    finally:
        progress.finish()
    return {size: {layer: loss.record() for layer, loss in by_layer.items()} for size, by_layer in found.items()}


def selection_of(settings: RetrofitSettings, block_size: int) -> Selection:
    """The selection of a run with blocks of this size."""
    return Selection(block_size, settings.budget // block_size, settings.init_blocks, settings.local_blocks)


@torch.no_grad()
def _measure_layer(
    teacher: Teacher, learner: Learner, settings: RetrofitSettings, view: LayerView, positions: Tensor, rope: Rope,
    losses: Mapping[int, LayerLoss],
) -> None:  # fmt: skip
    keys = learner.student.keys(view.hidden, rope)
    strips = positions.chunk(4)
    for strip in strips:
        queries = learner.student.queries(view.hidden[strip], (rope[0][strip], rope[1][strip]))
        scores = learner.student.scores(queries, keys, strip)
        probabilities = view.probabilities(strip)
        teaching = group_mean(probabilities, view.k.shape[1])
        for size, loss in losses.items():
            selection, mass = selection_of(settings, size), block_sum(teaching, size)
            chosen = selection.choose(block_max(scores, size), strip)
            oracle = selection.choose(mass, strip)
            share = len(strip) / len(positions)
            loss.mass += float((mass * chosen).sum(-1).mean()) * share
            loss.oracle += float((mass * oracle).sum(-1).mean()) * share
            loss.change += _change(teacher, view, probabilities, selection, chosen, strip)
            loss.best_change += _change(teacher, view, probabilities, selection, oracle, strip)
            loss.stream += float(view.residual[strip].pow(2).sum())
    for loss in losses.values():
        loss.texts += 1


def _change(
    teacher: Teacher, view: LayerView, probabilities: Tensor, selection: Selection, chosen: Tensor, positions: Tensor
) -> float:
    """Sum of squares of what the chosen blocks [H, n, b] alone change in the layer's output."""
    sparse = sparse_attention(view, probabilities, selection.token_mask(chosen, positions, probabilities.shape[-1]))
    difference = (sparse - view.attended[positions].float()).to(view.hidden.dtype)
    out = project(difference.flatten(1), teacher.attention(view.layer).o_proj)
    return float(out.float().pow(2).sum())


def sparse_attention(view: LayerView, probabilities: Tensor, mask: Tensor) -> Tensor:
    """Attention to the tokens of `mask` [Hkv, n, t] alone, from dense probabilities [Hq, n, t]: fp32 [n, Hq, D]."""
    heads = view.k.shape[1]
    kept = probabilities.reshape(heads, -1, *mask.shape[1:]) * mask[:, None]
    kept = kept / kept.sum(-1, keepdim=True).clamp(min=1e-9)
    values = view.v[: mask.shape[-1]].float()
    return torch.einsum("hgnt,thd->nhgd", kept, values).flatten(1, 2)


def choose_block_size(losses: Losses) -> int:
    """The block size with the least loss over all layers; the larger one, which is faster, among equals."""
    return min(losses, key=lambda size: (sum(each["loss"] for each in losses[size].values()), -size))


def choose_dense(losses: Mapping[int, dict[str, float]], settings: RetrofitSettings, layers: int) -> tuple[int, ...]:
    """The layers that stay dense: those asked for, or the ones that lose most."""
    if settings.dense_layers is not None:
        return tuple(sorted(set(settings.dense_layers)))
    worst = sorted(range(layers), key=lambda layer: (-losses[layer]["loss"], layer))
    return tuple(sorted(worst[: settings.dense_budget or 0]))
