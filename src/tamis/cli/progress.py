"""Progress on standard error: bars on a terminal, elsewhere a line for what takes a while."""

import contextlib
import os
import sys
import threading

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

from tamis.progress import NoProgress, NotedProgress, Unit
from tamis.units import format_size

LINE_AFTER_S = 2.0
"""Seconds that a task may take in silence where there is no bar."""


def make_progress(*, quiet: bool = False) -> NotedProgress:
    """Bars where standard error is a terminal that can draw them, elsewhere lines; nothing where `quiet`."""
    silent = quiet or sys.stderr is None
    # rich would let FORCE_COLOR overrule what standard error is.
    if not silent and sys.stderr.isatty():
        console = Console(stderr=True)
        if not console.is_dumb_terminal:
            return ProgressBars(console)
    # The hub client draws bars of its own and looks here when it is imported.
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    return NoProgress() if silent else ProgressLines()


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
            TextColumn("{task.fields[note]}"),
            console=self._console, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._task = self._bars.add_task(task, total=total, note="")
        self._bars.start()

    def advance(self, amount: int) -> None:
        """Move the bar by `amount` units."""
        if self._bars is not None:
            self._bars.advance(self._task, amount)

    def note(self, text: str) -> None:
        """Show `text` behind the bar."""
        if self._bars is not None:
            self._bars.update(self._task, note=text)

    def finish(self) -> None:
        """Take the bar down."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


class ProgressLines:
    """`tamis.progress.Progress` as one plain line for each task that is not done after `after` seconds."""

    def __init__(self, after: float = LINE_AFTER_S) -> None:
        self._after = after
        self._timer: threading.Timer | None = None

    def start(self, task: str, total: int | None, unit: Unit) -> None:
        """Say so if it takes long; what still stands is over."""
        self.finish()
        amount = "" if total is None else f", {format_size(total) if unit == 'bytes' else f'{total:,} {unit}'}"
        self._timer = threading.Timer(self._after, _say, [f"{task}{amount} ..."])
        self._timer.daemon = True
        self._timer.start()

    def advance(self, amount: int) -> None:
        """Nothing: a file is no place for a bar."""

    def note(self, text: str) -> None:
        """Nothing either."""

    def finish(self) -> None:
        """A line that has not come yet will not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be gone or closed
        print(line, file=sys.stderr, flush=True)


class TokensColumn(ProgressColumn):
    """Tokens done, of how many, and how many a second."""

    def render(self, task: Task) -> Text:
        """`1,024/3,000 tokens, 512 tokens/s`."""
        total = f"/{task.total:,.0f}" if task.total is not None else ""
        speed = f", {task.speed:,.0f} tokens/s" if task.speed else ""
        return Text(f"{task.completed:,.0f}{total} tokens{speed}")
