"""Finding the records that a pasted text is about."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tamis.errors.catalog import Catalog, ErrorRecord
from tamis.errors.matching.align import Fit, fit
from tamis.errors.matching.paste import Line, joined, lines_of
from tamis.errors.matching.wording import COMMON, WORD, Wording, weight, wordings

ANCHORS = 3
"""Rare words of each half of a wording under which it is found."""
WEAK = 3.0
"""Weight under which a wording is also found by its class."""
NEAR = 1.5
"""Weight of what is offered as a near miss."""
NEAR_MISSES = 3
CLASS_BONUS = 2.0
"""What the error's class, or the server's code for it, adds to the weight of its message."""
LABEL_BONUS = 0.5
"""What the way adds in which tamis prints an error."""
MAX_FITS = 100_000
"""How often wordings are laid over lines for one text at most: seconds."""
HINTED = 1000.0
"""The score of a record that the text names by its id."""
LEAST = 0.75
"""Weight of what a message must say for itself, even where its class is named."""
_ENOUGH = {(True, True): 1.25, (True, False): 2.0, (False, True): 1.75, (False, False): 3.0}
"""Weight from which on a message is believed: by whether it is whole, and stands where a message stands."""
_SHARE = {True: 0.25, False: 0.35}
"""Of a message's texts, what a cut must have left: by whether its beginning is there."""
_BEFORE = re.compile(r"(?:^|[:\])}\"'(|>]|\b(?:error|info|warning))\s*$")
"""What may stand before a message: nothing, or what ends a log line's stamp, a class, a path."""
_AFTER = re.compile(r"\s*(?:$|[\"'`)}.,;(])")
_LEVEL = re.compile(r"(?:\w+\.)*\w*(?:error|exception|warning|failed|info|debug)")
"""What is a label rather than a value."""
_A_VALUE = re.compile(r"[\[({'\"].*|\S*$")
"""A value with which the line ends."""
_CLASS = re.compile(r"\b([A-Za-z_][\w]*(?:Error|Exception|Warning|Interrupt|Exit))\b")
_CODE = re.compile(r'"code":\s*"(\w+)"')
_HINT = re.compile(r"tamis explain ([0-9a-f]{16})\b")
_LABEL = re.compile(r'^(?:error: |.*"message": ")')
_FIRST_WORD, _LAST_WORD = re.compile(r"^\w+"), re.compile(r"\w+$")
_NUMBERS = re.compile(r"\d+")
_GENERAL = frozenset(
    ("ValueError", "RuntimeError", "TypeError", "Exception", "OSError", "FileNotFoundError", "KeyError")
)
"""Other engines raise these where tamis has a class of its own."""


@dataclass(frozen=True)
class Match:
    """A record, and the line of the text that it was found by."""

    record: ErrorRecord
    line: str
    line_number: int
    score: float
    """For the order: what was found of the message, in words, and more where the class is named too."""
    whole: bool
    """Whether all of the message is there."""


@dataclass(frozen=True)
class Findings:
    """What a text is about, the best first."""

    matches: tuple[Match, ...]
    near_misses: tuple[Match, ...]
    """Alike, but not the same; empty where something matches."""


@dataclass(frozen=True)
class _Judged:
    """A wording that lies on a line, and not by accident."""

    match: Match
    fit: Fit

    def overlaps(self, other: "_Judged") -> bool:
        return self.fit.start < other.fit.end and other.fit.start < self.fit.end


class Matcher:
    """Looks for one catalogue's messages; put together once, it takes time that grows with the text alone."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._wordings = [wording for record in catalog.records for wording in wordings(record)]
        frequency = Counter(word for wording in self._wordings for word in set(_words(wording)))
        self._by_word: dict[str, list[int]] = {}
        for number, wording in enumerate(self._wordings):
            for word in _anchors(_words(wording), frequency):
                self._by_word.setdefault(word, []).append(number)

    def find(self, text: str) -> Findings:
        """The records that `text` is about: a line, a traceback, a whole log."""
        lines = lines_of(text)
        found = {match.record.id: match for match in self._hinted(lines)}
        near: dict[str, Match] = {}
        for match, believed in self._matches(lines):
            place = found if believed else near
            if match.record.id not in place or place[match.record.id].score < match.score:
                place[match.record.id] = match
        if not found:
            alike = {match.record.id: match for match in (*self._of_classes(lines), *_in_order(near.values()))}
            return Findings((), tuple(_in_order(alike.values())[:NEAR_MISSES]))
        return Findings(tuple(_in_order(found.values())), ())

    def _hinted(self, lines: list[Line]) -> Iterator[Match]:
        """What the hints beside printed errors name."""
        for line in lines:
            for name in _HINT.findall(line.plain):
                if record := self._catalog.by_id(name):
                    yield Match(record, line.text, line.number, HINTED, True)

    def _of_classes(self, lines: list[Line]) -> Iterator[Match]:
        """For texts with a class and no message that is known: the messages of that class."""
        for line in reversed(lines):
            names = set(_CLASS.findall(line.text)) - _GENERAL
            for record in self._catalog.records if names else ():
                if record.error_class in names:
                    yield Match(record, line.text, line.number, 0.0, False)

    def _matches(self, lines: list[Line]) -> Iterator[tuple[Match, bool]]:
        """The best of each line, and whether it is believed, or only alike."""
        left = MAX_FITS
        seen: set[str] = set()
        for at in reversed(range(len(lines))):  # where it is too much, the end of a log counts most
            shape = _NUMBERS.sub("0", lines[at].plain)
            candidates = [] if shape in seen else self._candidates(lines[at])
            seen.add(shape)
            if not candidates:
                continue
            longer = joined(lines, at)
            left -= len(candidates) * (1 + len(longer))
            if left < 0:
                return
            laid = (_lay(wording, lines[at], longer) for wording in candidates)
            judged = (_judge(*one) for one in laid if one is not None)
            best = _best([one for one in judged if one is not None])
            yield from ((match, True) for match in best)
            if not best and (alike := _most_alike(candidates, lines[at])):
                yield alike, False

    def _candidates(self, line: Line) -> list[Wording]:
        """The wordings that share a rare word with the line."""
        words = set(WORD.findall(line.plain))
        numbers = {number for word in words if word in self._by_word for number in self._by_word[word]}
        return [self._wordings[number] for number in sorted(numbers)]


def _lay(wording: Wording, own: Line, longer: list[Line]) -> tuple[Wording, Fit, Line] | None:
    """A wording over a line, and where that lacks something over it and its neighbours together."""
    laid = _laid(wording, [own])
    if not (laid and laid[0][0].whole):
        laid += _laid(wording, longer)
    if not laid:
        return None
    found, line = max(laid, key=lambda pair: (pair[0].whole, pair[0].weight))
    return wording, found, line


def _laid(wording: Wording, lines: list[Line]) -> list[tuple[Fit, Line]]:
    fits = ((fit(wording, line.plain), line) for line in lines)
    return [(found, line) for found, line in fits if found is not None]


def _judge(wording: Wording, found: Fit, line: Line) -> _Judged | None:
    """None: that little may be chance."""
    tight = _stands_alone(wording, found, line.plain)
    bonus = _bonus(wording.record, found, line.text)
    if found.weight < LEAST or found.weight + bonus < _ENOUGH[found.whole, tight]:
        return None
    if not found.whole and found.share < _SHARE[found.begun]:
        return None
    score = found.weight + bonus + 0.25 * found.whole + 0.5 * tight + found.length / 1000
    return _Judged(Match(wording.record, line.text, line.number, round(score, 3), found.whole), found)


def _bonus(record: ErrorRecord, found: Fit, line: str) -> float:
    """What the class and code that the line names add to a message, or take from it."""
    classes = _CLASS.findall(line)
    if record.error_class in classes:
        return CLASS_BONUS if found.begun else 0.0  # between a class and its message nothing is cut off
    if record.error_code is not None and record.error_code in _CODE.findall(line):
        return CLASS_BONUS
    if _LABEL.search(line[: found.start]):
        return LABEL_BONUS
    return -CLASS_BONUS if classes and not _GENERAL.intersection(classes) else 0.0


def _stands_alone(wording: Wording, found: Fit, line: str) -> bool:
    """Whether nothing stands around a message but what logs put there, and around what a cut has left nothing."""
    before = line[: found.start]
    if wording.opens or found.first > 0:
        value = before[_value_start(before) :]  # that the message begins with, or what a cut has left of one
        if _LEVEL.fullmatch(value) or value in COMMON:
            return False
        before = before.removesuffix(value)
    if before.strip("\"'`>. ") and (found.first > 0 or not _BEFORE.search(before)):
        return False
    if found.ended:
        return wording.closes or _AFTER.match(line[found.end :]) is not None
    return _A_VALUE.match(found.rest) is not None


def _value_start(before: str) -> int:
    """Where the value begins that `before` ends with: a word, or what stands in brackets or quotes."""
    opener = {")": "(", "]": "[", "}": "{", "'": "'", '"': '"'}.get(before[-1:], " ")
    place = before.rfind(opener, 0, len(before) - 1)
    return place if place >= 0 and opener != " " else before.rfind(" ") + 1


def _best(judged: Iterable[_Judged]) -> list[Match]:
    """The best of what lies on one line; two things only where they lie apart, or nothing tells which it is."""
    kept: list[_Judged] = []
    for one in sorted(judged, key=lambda one: -one.match.score):
        if all(not other.overlaps(one) or other.match.score == one.match.score for other in kept):
            kept.append(one)
    return [one.match for one in kept]


def _most_alike(candidates: list[Wording], line: Line) -> Match | None:
    """The wording of which a line has the most words, where that is half of it."""
    heard = set(WORD.findall(line.plain))
    best, most = None, NEAR
    for wording in candidates:
        shared = sum(weight(word) for text in wording.texts for word in WORD.findall(text) if word in heard)
        if shared >= max(most, wording.weight / 2):
            best, most = wording, shared
    return None if best is None else Match(best.record, line.text, line.number, round(most, 3), False)


def _in_order(matches: Iterable[Match]) -> list[Match]:
    return sorted(matches, key=lambda match: (-match.score, -match.line_number, match.record.id))


def _words(wording: Wording) -> list[str]:
    """The words of a wording, in order; its class too, where it says little else."""
    words = [word for text in _bounded(wording) for word in WORD.findall(text)]
    return [*words, wording.record.error_class.lower()] if wording.weight < WEAK else words


def _bounded(wording: Wording) -> Iterator[str]:
    """The texts without the words that run into a value: in a message they are parts of other words."""
    last = len(wording.texts) - 1
    for number, text in enumerate(wording.texts):
        if number > 0 or wording.opens:
            text = _FIRST_WORD.sub("", text)
        if number < last or wording.closes:
            text = _LAST_WORD.sub("", text)
        yield text


def _anchors(words: list[str], frequency: Counter[str]) -> set[str]:
    """The rarest telling words of each half, so that one is left whichever end is cut off, and the rarest other."""
    middle = (len(words) + 1) // 2
    found: set[str] = set()
    for half in (words[:middle], words[middle:]):
        ordered = sorted(half, key=frequency.__getitem__)
        found.update([word for word in ordered if weight(word) >= 1.0][:ANCHORS])
        found.update([word for word in ordered if weight(word) < 1.0 and len(word) > 2][:1])
    return found or set(words)
