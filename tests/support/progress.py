"""A progress that remembers what it was told."""

from typing import Any


class Recorder:
    """`tamis.progress.Progress` as a list: tasks as tuples, amounts, "done"."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, task: str, total: int | None, unit: str) -> None:
        self.calls.append((task, total, unit))

    def advance(self, amount: int) -> None:
        self.calls.append(amount)

    def finish(self) -> None:
        self.calls.append("done")
