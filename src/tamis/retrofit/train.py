"""The training run behind `tamis retrofit`: every layer's index branch from one teacher pass a window.

The teacher shows layer after layer; each learns at once from what it is shown, so nothing is kept but one window.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tamis.progress import NoProgress, NotedProgress
from tamis.retrofit.checkpoint import CHECKPOINT, State, check_plan, read_tensors, write_tensors
from tamis.retrofit.learner import Learner, Measures
from tamis.retrofit.settings import RetrofitSettings
from tamis.retrofit.teacher import LayerView, Teacher

CHECKPOINT_SECONDS = 60.0
"""Between checkpoints."""


@dataclass
class Run:
    """One run in the directory `folder`."""

    teacher: Teacher
    settings: RetrofitSettings
    windows: Sequence[Tensor]
    """int64 token ids, `settings.windows` of them."""
    folder: Path
    plan: dict[str, Any]
    progress: NotedProgress = field(default_factory=NoProgress)
    checkpoint_seconds: float = CHECKPOINT_SECONDS

    def __post_init__(self) -> None:
        never = set(self.settings.dense_layers or ())
        self.learners = {
            number: Learner(number, layer.attention, self.teacher.config, self.settings)
            for number, layer in enumerate(self.teacher.layers)
            if number not in never
        }
        self.state = State(self.plan)
        self._saved = time.monotonic()

    @property
    def checkpoint(self) -> Path:
        """The file a run goes on from."""
        return self.folder / CHECKPOINT

    def resume(self) -> None:
        """Go on from the checkpoint, where there is one. Raises ConfigError for one of another plan."""
        if not self.checkpoint.exists():
            return
        tensors, facts = read_tensors(self.checkpoint)
        check_plan(self.checkpoint, facts["plan"], self.plan)
        self.state = State(**facts)
        for learner in self.learners.values():
            learner.load(tensors)

    def save(self) -> None:
        """Write the checkpoint. Raises OSError where the disk is full; the one before it stays."""
        tensors = {name: value for each in self.learners.values() for name, value in each.state().items()}
        write_tensors(self.checkpoint, tensors, vars(self.state))
        self._saved = time.monotonic()

    def save_if_due(self) -> None:
        """Write a checkpoint, where the last one is old enough."""
        if time.monotonic() - self._saved >= self.checkpoint_seconds:
            self.save()

    def train(self) -> None:
        """Learn from the windows that are left, with checkpoints on the way and one at the end."""
        total = self.settings.windows
        self.progress.start("training", total, "steps")
        try:
            self.progress.advance(self.state.done)
            while self.state.done < total and not self._has_settled():
                self._step(self.windows[self.state.done])
                self.save_if_due()
                self.progress.advance(1)
                self.progress.note(self._standing())
        finally:
            self.progress.finish()
        self.save()

    def _step(self, token_ids: Tensor) -> None:
        rope = self.teacher.rope(len(token_ids))
        found: list[Measures] = []

        def learn(view: LayerView) -> None:
            learner = self.learners.get(view.layer)
            if learner is not None:
                found.append(learner.learn(view, rope, self.state.done))

        self.teacher.visit(token_ids, learn)
        self.state.history.append(
            {name: [round(getattr(each, name), 5) for each in found] for name in ("loss", "mass", "oracle")}
        )
        self.state.done += 1

    def gaps(self) -> list[float]:
        """Of each window: the mass that the best blocks hold and the chosen ones do not, the mean over layers."""
        return [
            sum(map(float.__sub__, entry["oracle"], entry["mass"])) / len(entry["mass"]) for entry in self.state.history
        ]

    def _has_settled(self) -> bool:
        """Whether `patience` windows have gone by without the mean gap of so many getting smaller."""
        patience, gaps = self.settings.patience, self.gaps()
        if not patience or len(gaps) < 2 * patience:
            return False
        means = [sum(gaps[end - patience : end]) / patience for end in range(patience, len(gaps) + 1)]
        return min(means[-patience:]) >= min(means[:-patience], default=float("inf"))

    def _standing(self) -> str:
        entry = self.state.history[-1]
        loss, mass, oracle = (sum(entry[name]) / len(entry[name]) for name in ("loss", "mass", "oracle"))
        return f"loss {loss:.3f}, mass {mass:.3f} of {oracle:.3f}"
