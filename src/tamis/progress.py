"""How long work reports that it moves: downloads and weights in bytes, prefill in tokens, preparations in steps."""

from typing import Literal, Protocol

Unit = Literal["bytes", "tokens", "steps"]


class Progress(Protocol):
    """Told about one task at a time: `start`, any number of `advance`, then `finish`, also when the task fails."""

    def start(self, task: str, total: int | None, unit: Unit) -> None:
        """A task begins; `total` in `unit`s, None where it is not known beforehand."""

    def advance(self, amount: int) -> None:
        """`amount` more units are done."""

    def finish(self) -> None:
        """The task is over, whether it succeeded or not."""


class NotedProgress(Progress, Protocol):
    """One that can show figures beside the amount."""

    def note(self, text: str) -> None:
        """How the task is doing, for whoever looks on: replaces the note before."""


class NoProgress:
    """Reports nothing."""

    def start(self, task: str, total: int | None, unit: Unit) -> None:
        """Do nothing."""

    def advance(self, amount: int) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""
