"""Telling that kernels are compiled, which takes long, and happens only until they are in the cache."""

import contextlib
from collections.abc import Iterator
from typing import Any

from numba.core import event

from tamis.progress import Progress

TASK = "compiling kernels for this machine, once (it may take a minute or two)"


class _Report(event.Listener):  # type: ignore[misc]
    """Begins its task with the first kernel."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.begun = False

    def on_start(self, _event: Any) -> None:
        if not self.begun:
            self.begun = True
            self._progress.start(TASK, None, "steps")

    def on_end(self, _event: Any) -> None:
        """More may follow."""


@contextlib.contextmanager
def report_to(progress: Progress) -> Iterator[None]:
    """Tell `progress` when something has to be compiled inside the block."""
    report = _Report(progress)
    try:
        with event.install_listener("numba:compile", report):
            yield
    finally:
        if report.begun:
            progress.finish()
