"""Progress bars on standard error."""

import os
import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from tamis.progress import NoProgress, Progress, Unit


def make_progress(*, quiet: bool = False) -> Progress:
    """Bars where standard error is a terminal that can draw them; otherwise nothing at all."""
    # rich would let FORCE_COLOR overrule what standard error is.
    if not quiet and sys.stderr is not None and sys.stderr.isatty():
        console = Console(stderr=True)
        if not console.is_dumb_terminal:
            return ProgressBars(console)
    # The hub client draws bars of its own and looks here when it is imported.
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    return NoProgress()


class ProgressBars:
    """`tamis.progress.Progress` as a bar that disappears when its task ends: done, speed, time left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: RichProgress | None = None
        self._task = TaskID(0)

    def start(self, task: str, total: int | None, unit: Unit) -> None:
        """Show a bar for `task`; one that still stands is taken down first."""
        self.finish()
        amounts: dict[Unit, tuple[ProgressColumn, ...]] = {
            "bytes": (DownloadColumn(), TransferSpeedColumn()), "tokens": (TokensColumn(),), "steps": (),
        }  # fmt: skip
        self._bars = RichProgress(
            TextColumn("{task.description}"), BarColumn(), *amounts[unit], TimeRemainingColumn(),
            console=self._console, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._task = self._bars.add_task(task, total=total)
        self._bars.start()

    def advance(self, amount: int) -> None:
        """Move the bar by `amount` units."""
        if self._bars is not None:
            self._bars.advance(self._task, amount)

    def finish(self) -> None:
        """Take the bar down."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


class TokensColumn(ProgressColumn):
    """Tokens done, of how many, and how many a second."""

    def render(self, task: Task) -> Text:
        """`1,024/3,000 tokens, 512 tokens/s`."""
        total = f"/{task.total:,.0f}" if task.total is not None else ""
        speed = f", {task.speed:,.0f} tokens/s" if task.speed else ""
        return Text(f"{task.completed:,.0f}{total} tokens{speed}")
