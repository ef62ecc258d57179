"""One layer's index branch and its optimizer: a step for each window that the teacher shows."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tamis.config import ModelConfig
from tamis.kernels.linear import Rope
from tamis.models.attention import Attention
from tamis.retrofit.selection import Selection
from tamis.retrofit.settings import RetrofitSettings
from tamis.retrofit.student import IndexStudent, block_loss, captured, token_loss
from tamis.retrofit.teacher import LayerView

STRIPS = 4
"""Queries are taken in so many runs of neighbouring positions, each with the keys it can see: less memory and work."""
WARM_UP = 5
"""Steps over which the learning rate rises."""
BETAS = (0.9, 0.95)
MOMENTUM = 0.9
SPREAD = 2654435761
"""Odd, and about the golden ratio of 2**32: neighbouring seeds are far apart."""
NORM_RATE = 0.05
"""Learning rate of the norms' weights, in that of the projections."""


@dataclass(frozen=True)
class Measures:
    """How a layer did on a window, before it learned from it."""

    loss: float
    mass: float
    """Attention mass in the blocks it chose."""
    oracle: float
    """In the best blocks."""


class Learner:
    """The student of one layer."""

    def __init__(self, layer: int, attention: Attention, config: ModelConfig, settings: RetrofitSettings) -> None:
        self.layer, self.settings = layer, settings
        self.student = IndexStudent(
            config.hidden_size, config.kv_heads, settings.index_head_dim, config.norm_eps, value=settings.index_value
        )
        self.student.start_from(attention, self.generator(-1))
        student, rate = self.student, settings.learning_rate
        # Matrices learn several times faster from orthogonal steps than from Adam's; vectors cannot be orthogonal.
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon([student.q_proj, student.k_proj], lr=rate, weight_decay=0.0, momentum=MOMENTUM),
            torch.optim.Adam([student.q_norm, student.k_norm], lr=rate, betas=BETAS),
        ]
        values = [each for each in (student.v_proj, student.o_proj) if each is not None]
        self.value_optimizer = torch.optim.Adam(values, lr=rate, betas=BETAS) if values else None
        """For the index value, which learns after the rest (`repair.py`)."""
        size = min(settings.block_sizes)
        self.selection = Selection(size, settings.budget // size, settings.init_blocks, settings.local_blocks)

    def generator(self, step: int) -> torch.Generator:
        """Random numbers that depend on nothing but the seed, the layer and the step, so that a run can resume."""
        mixed = (self.settings.seed * SPREAD) ^ ((self.layer << 24) + step + 1)
        return torch.Generator().manual_seed(mixed % (1 << 32))  # of more bits it would take no notice

    def learn(self, view: LayerView, rope: Rope, window: int) -> Measures:
        """The steps on the window number `window`; measured is the first, which sees a new text."""
        if window == 0:
            self.student.calibrate(view.hidden)
        settings, first = self.settings, None
        for step in range(window * settings.steps_per_window, (window + 1) * settings.steps_per_window):
            done = step / (settings.windows * settings.steps_per_window)
            rate = settings.learning_rate * min(1.0, (step + 1) / WARM_UP)
            self.student.zero_grad()
            found = list(self._strips(view, rope, step, on_tokens=done < settings.token_share, measures=first is None))
            for optimizer, share in zip(self.optimizers, (1.0, NORM_RATE), strict=True):
                set_rate(optimizer, rate * share, done)
                optimizer.step()
            first = first or Measures(*(sum(values) / len(found) for values in zip(*found, strict=True)))
        assert first is not None
        return first

    def _strips(
        self, view: LayerView, rope: Rope, step: int, *, on_tokens: bool, measures: bool
    ) -> Iterator[tuple[float, float, float]]:
        """Gradients of the mean loss, strip by strip; yields loss, mass and oracle of each where it `measures`."""
        positions = sample_positions(len(view.hidden), self.settings, self.generator(step))
        keys = self.student.keys(view.hidden, rope)
        # The keys' own graph is walked once, at the end, with what all strips ask of them.
        shared = keys.detach().requires_grad_()
        for strip in positions.chunk(STRIPS):
            queries = self.student.queries(view.hidden[strip], (rope[0][strip], rope[1][strip]))
            scores = self.student.scores(queries, shared, strip)
            with torch.no_grad():
                teaching = view.teaching(strip)
            loss = token_loss(scores, teaching) if on_tokens else block_loss(scores, teaching, strip, self.selection)
            (loss * len(strip) / len(positions)).backward()  # type: ignore[no-untyped-call]
            if measures:
                yield float(loss.detach()), *captured(scores.detach(), teaching, strip, self.selection)
        assert shared.grad is not None
        keys.backward(shared.grad)  # type: ignore[no-untyped-call]

    def state(self) -> dict[str, Tensor]:
        """All that learning goes on from, by name."""
        tensors = {name: value.detach() for name, value in self.student.state_dict().items()}
        for name, parameter, optimizer in self._learning():
            tensors |= {f"{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
        return {f"layers.{self.layer}.{name}": value for name, value in tensors.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        for name, parameter, optimizer in self._learning():
            prefix = f"layers.{self.layer}.{name}"
            parameter.data.copy_(tensors[prefix])
            kept = {
                key.removeprefix(f"{prefix}."): value for key, value in tensors.items() if key.startswith(f"{prefix}.")
            }
            if kept:
                optimizer.state[parameter] = kept

    def _learning(self) -> Iterator[tuple[str, nn.Parameter, torch.optim.Optimizer]]:
        """Every parameter, with its name and the optimizer that moves it."""
        optimizers = [*self.optimizers, *([self.value_optimizer] if self.value_optimizer else [])]
        owners = {
            id(each): optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        }
        for name, parameter in self.student.named_parameters():
            yield name, parameter, owners[id(parameter)]


def set_rate(optimizer: torch.optim.Optimizer, highest: float, done: float) -> None:
    """The learning rate after the share `done` of all steps: it falls along a cosine."""
    for group in optimizer.param_groups:
        group["lr"] = highest * 0.5 * (1 + math.cos(math.pi * done))


def sample_positions(tokens: int, settings: RetrofitSettings, generator: torch.Generator) -> Tensor:
    """Positions of queries, ascending, beyond the budget where that leaves enough: before it nothing is left out."""
    first = min(settings.budget, tokens - settings.queries)
    first = max(first, 0)
    picked = torch.randperm(tokens - first, generator=generator)[: settings.queries]
    return (picked + first).sort().values
