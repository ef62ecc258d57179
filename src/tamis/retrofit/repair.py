"""Training the index value of K+V layers: its output repairs what block selection loses (facts.md section 1).

The queries and keys of the index stay as they are; the value and its output projection, which starts at zero, learn to
give the difference between the layer's dense output and its sparse one.
"""

import torch
from torch import Tensor

from tamis.kernels.dense import project
from tamis.kernels.linear import Linear, Rope
from tamis.retrofit.choose import sparse_attention
from tamis.retrofit.learner import STRIPS, Learner, sample_positions, set_rate
from tamis.retrofit.selection import Selection, block_max
from tamis.retrofit.settings import RetrofitSettings
from tamis.retrofit.student import IndexStudent
from tamis.retrofit.teacher import LayerView


def repair(
    learner: Learner, selection: Selection, settings: RetrofitSettings, view: LayerView, o_proj: Linear, rope: Rope,
    window: int,
) -> float:  # fmt: skip
    """One step of one layer's index value on the window number `window`.

    Returns the share of the squared error of sparse attention that was left before the step.
    """
    student, optimizer = learner.student, learner.value_optimizer
    assert optimizer is not None
    set_rate(optimizer, settings.value_rate, window / settings.windows)
    positions = sample_positions(
        len(view.hidden), settings, learner.generator(settings.windows * settings.steps_per_window + window)
    )
    optimizer.zero_grad()
    left = lost = 0.0
    for strip in positions.chunk(STRIPS):
        wanted, scores = _wanted(student, selection, view, o_proj, rope, strip)
        error = (student.repairs(scores, view.hidden) - wanted).pow(2).sum()
        size = float(wanted.pow(2).sum()) + 1e-12
        # Relative to what was lost, so that one learning rate serves all layers.
        (error / size / STRIPS).backward()  # type: ignore[no-untyped-call]
        left, lost = left + float(error.detach()), lost + size
    optimizer.step()
    return left / lost


@torch.no_grad()
def _wanted(
    student: IndexStudent, selection: Selection, view: LayerView, o_proj: Linear, rope: Rope, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """What selection takes from the layer's output at `positions`, fp32 [n, C]; and the index scores [H, n, t]."""
    queries = student.queries(view.hidden[positions], (rope[0][positions], rope[1][positions]))
    scores = student.scores(queries, student.keys(view.hidden, rope), positions)
    chosen = selection.choose(block_max(scores, selection.block_size), positions)
    probabilities = view.probabilities(positions)
    mask = selection.token_mask(chosen, positions, probabilities.shape[-1])
    sparse = sparse_attention(view, probabilities, mask)
    difference = (view.attended[positions].float() - sparse).to(view.hidden.dtype)
    return project(difference.flatten(1), o_proj).float(), scores
