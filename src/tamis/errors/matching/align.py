"""Laying a wording over a line: which of its texts are there in order, and whether the line ends where they do."""

from collections.abc import Iterator
from dataclasses import dataclass

from tamis.errors.matching.wording import Wording, weight

MAX_VALUE = 2000
"""Characters a value may have."""
_CUT = 2
"""Characters of a text that is cut off at an end of the line, at least."""
_TRIES = 4
"""Places a text is begun at, where the line has it more than once."""


@dataclass(frozen=True)
class Fit:
    """How a wording lies on a line."""

    weight: float
    """Of the texts found."""
    share: float
    """Of all the wording's texts."""
    first: int
    """The text it begins with: before any but the first stood something that is lost."""
    start: int
    """Where in the line it begins."""
    end: int
    begun: bool
    """Nothing is missing at its beginning."""
    whole: bool
    """Nothing of it is missing; otherwise the line was cut, and what is there follows the wording to the line's end."""
    ended: bool
    """Nothing is missing at its end."""
    rest: str
    """The last value, of a message that ends in it too soon."""
    length: int
    """Characters of the texts found."""


def fit(wording: Wording, line: str) -> Fit | None:
    """The heaviest way to lay `wording` over `line` without a contradiction; None: there is none."""
    best: Fit | None = None
    for first in range(len(wording.texts)):
        for start, found, end in _starts(wording, first, line):
            candidate = _follow(wording, first, line, start, found, end)
            if candidate is not None and (best is None or _rank(candidate) > _rank(best)):
                best = candidate
        if best is not None and best.whole:
            break
    return best


def _rank(found: Fit) -> tuple[bool, float]:
    return found.whole, found.weight


def _starts(wording: Wording, first: int, line: str) -> Iterator[tuple[int, str, int]]:
    """Where the line may enter the wording at text `first`: start, what of the text is there, end."""
    text = wording.texts[first]
    place = line.find(text)
    for _ in range(_TRIES):
        if place < 0:
            break
        yield place, text, place + len(text)
        place = line.find(text, place + 1)
    else:
        place = line.rfind(text)
        yield place, text, place + len(text)
    bare = text.strip()
    if len(line) < len(bare) and line in bare:  # cut at both ends inside of one text
        yield 0, line, len(line)
    if cut := _overlap(text, line):
        yield 0, cut, len(cut)
    if cut := _beginning(text, line):
        yield len(line) - len(cut.rstrip()), cut, len(line)


def _overlap(text: str, line: str) -> str:
    """The longest end of `text`, not all of it, that `line` begins with."""
    place = text.find(line[:_CUT], 1)
    while place >= 0:
        if line.startswith(text[place:]):
            return text[place:] if len(text) - place >= _CUT else ""
        place = text.find(line[:_CUT], place + 1)
    return ""


def _follow(wording: Wording, first: int, line: str, start: int, found: str, end: int) -> Fit | None:
    """Go on from text `first`, which was found up to `end`, to the end of the wording or of the line."""
    texts = wording.texts
    begun = first == 0 and texts[0].startswith(found) and (start > 0 or not wording.opens)
    rest, ended, parts = "", texts[first].endswith(found), [found]
    for text in texts[first + 1 :]:
        place = line.find(text, end + 1, end + MAX_VALUE + len(text))
        if place < 0 and text[-1] == " ":  # the last text of a line has lost its space
            bare = text.rstrip()
            place = len(line) - len(bare) if bare and line.endswith(bare) and len(line) - len(bare) > end else -1
        if place < 0:
            rest = line[end:]
            if len(rest) > MAX_VALUE:
                return None
            parts.append(_beginning(text, rest))
            ended, end, rest = False, len(line), "" if parts[-1] else rest
            break
        parts.append(text)
        end = place + len(text)
    heavy = sum(map(weight, filter(None, parts)))
    return Fit(
        weight=heavy,
        share=heavy / wording.weight,
        first=first,
        start=start,
        end=end,
        begun=begun,
        whole=begun and ended,
        ended=ended,
        rest=rest,
        length=sum(map(len, parts)),
    )


def _beginning(text: str, line: str) -> str:
    """The longest beginning of `text`, not all of it, that `line` ends with."""
    last = line[-_CUT:]
    place = text.rfind(last, 0, len(text) - 1)
    while place >= 0 and len(last) == _CUT:
        if line.endswith(text[: place + _CUT]):
            return text[: place + _CUT]
        place = text.rfind(last, 0, place + _CUT - 1)
    return ""
