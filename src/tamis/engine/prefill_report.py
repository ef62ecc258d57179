"""How far the prompts of one call are, told to a `Progress`."""

from collections.abc import Sequence

from tamis.progress import Progress
from tamis.request import PrefillProgress


class PrefillReport:
    """Shows how far the prompts of one call are, and is done as soon as they are.

    A Progress hears of one task at a time: while one call's prompts are shown, those of others are not. `reporting` is
    shared by all calls and names the one that is shown; a dictionary, because taking it cannot be interrupted half-way.
    """

    def __init__(self, progress: Progress, reporting: dict[str, object], prompts: Sequence[int]) -> None:
        """`prompts`: how many tokens each has."""
        self._progress, self._reporting = progress, reporting
        self._missing = list(prompts)
        self._total = sum(prompts)

    def start(self) -> None:
        """Begin; raises what the Progress raises. `finish` must follow, whatever happens."""
        if self._reporting.setdefault("call", self) is self:
            self._progress.start("reading the prompt", self._total, "tokens")

    def advance(self, place: int, prefill: PrefillProgress) -> None:
        """So far is the prompt of request `place`."""
        missing = prefill.total - prefill.processed
        if self._is_shown and missing < self._missing[place]:
            self._progress.advance(self._missing[place] - missing)
            self._missing[place] = missing
            if not any(self._missing):
                self.finish()

    def finish(self) -> None:
        """The end; only the first call does anything."""
        if self._is_shown:
            try:
                self._progress.finish()
            finally:
                # Only now: the next task must not begin before this one's end was told.
                self._reporting.pop("call", None)

    @property
    def _is_shown(self) -> bool:
        return self._reporting.get("call") is self
