"""Taking what a model thinks apart from what it answers."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from tamis.server.markers import held_back


@dataclass(frozen=True)
class Markers:
    """What stands before and after a model's thinking."""

    begin: str
    end: str


MARKERS = (Markers("<mm:think>", "</mm:think>"), Markers("<think>", "</think>"))
"""MiniMax-M3's (docs/facts.md, section 3), and what most other models write."""


class Split(NamedTuple):
    """A piece of a reply, divided."""

    reasoning: str
    content: str


class _Place(Enum):
    START = auto()
    REASONING = auto()
    BETWEEN = auto()
    """Behind the thinking, no content yet."""
    CONTENT = auto()


def reasoning_markers(template: str | None) -> Markers | None:
    """The markers of the model that comes with this chat template; None for one that does not think."""
    return next((markers for markers in MARKERS if markers.end in (template or "")), None)


def opens_reasoning(prompt: str, markers: Markers | None) -> bool:
    """Whether a reply to the text `prompt` begins in the middle of thinking: the template has written the marker."""
    return markers is not None and prompt.rstrip().endswith(markers.begin)


class ReasoningSplitter:
    """Divides one reply as it arrives: thinking stands at its start, between `markers`, or not at all.

    With `inside` the reply begins in the middle of thinking. White space around the thinking belongs to neither part.
    Without markers all is content. The pieces joined do not depend on how the reply was cut.
    """

    def __init__(self, markers: Markers | None, *, inside: bool = False) -> None:
        self._markers = markers
        self._inside = inside
        self._place = _Place.CONTENT if markers is None else _Place.START
        self._held = ""
        self._begun = False
        """Whether any thinking was told."""

    def feed(self, text: str) -> Split:
        """Take the next piece of the reply; returns what is certain now."""
        self._held += text
        reasoning = ""
        if self._place is _Place.START:
            self._start()
        if self._place is _Place.REASONING:
            reasoning = self._reasoning()
        if self._place is _Place.BETWEEN:
            self._held = self._held.lstrip()
            self._place = _Place.CONTENT if self._held else _Place.BETWEEN
        return Split(reasoning, self._take() if self._place is _Place.CONTENT else "")

    def finish(self) -> Split:
        """The reply has ended; returns what was held back."""
        held = self._take()
        if self._place is _Place.REASONING or (self._place is _Place.START and self._inside):
            return Split((held if self._begun else held.lstrip()).rstrip(), "")
        return Split("", held)

    def _start(self) -> None:
        """Look whether the reply begins with the first marker, and drop it."""
        assert self._markers is not None
        begin, seen = self._markers.begin, self._held.lstrip()
        if seen.startswith(begin):
            self._held, self._place = seen[len(begin) :], _Place.REASONING
        elif not begin.startswith(seen):
            self._place = _Place.REASONING if self._inside else _Place.CONTENT

    def _reasoning(self) -> str:
        """What is certainly thinking; where it ends, its marker goes too."""
        assert self._markers is not None
        if not self._begun:
            self._held = self._held.lstrip()
        end = self._markers.end
        place = self._held.find(end)
        if place >= 0:
            told, self._held = self._held[:place].rstrip(), self._held[place + len(end) :]
            self._place = _Place.BETWEEN
        else:
            told = self._held[: len(self._held) - held_back(self._held, [end])].rstrip()
            self._held = self._held[len(told) :]
        self._begun = self._begun or bool(told)
        return told

    def _take(self) -> str:
        held, self._held = self._held, ""
        return held
