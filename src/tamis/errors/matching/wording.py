"""What a message pattern says in so many words: the literal texts in it, in order, and how much each tells.

Patterns are not run on pasted text: texts are looked for one after the other, in time that grows with the text's length
alone, and so a message can also be found that was cut off.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from re import _constants as sre
from re import _parser as sre_parser
from typing import Any

from tamis.errors.catalog import ErrorRecord
from tamis.errors.matching.paste import plain

WORD = re.compile(r"[a-z0-9_]+")
_FEW = 16
"""Alternatives of one pattern that are told apart; beyond, they count as values."""
COMMON = frozenset((
    "a", "all", "an", "and", "any", "are", "as", "at", "be", "been", "but", "by", "can", "cannot", "could", "did",
    "do", "does", "each", "error", "expected", "failed", "for", "from", "given", "got", "had", "has", "have", "if",
    "in", "into", "invalid", "is", "it", "its", "must", "no", "not", "of", "on", "one", "only", "or", "out", "set",
    "should", "so", "such", "than", "that", "the", "then", "there", "this", "to", "unable", "use", "used", "using",
    "value", "values", "was", "were", "will", "with", "without", "you",
))  # fmt: skip


@dataclass(frozen=True)
class Wording:
    """One way a record's message may read."""

    record: ErrorRecord
    texts: tuple[str, ...]
    """Literal texts in order, as `plain` makes them; between them, and around them, stand values."""
    opens: bool
    """A value comes first."""
    closes: bool
    """A value comes last."""
    weight: float
    """Of all texts together."""


def wordings(record: ErrorRecord) -> list[Wording]:
    """All wordings of a record; none where it has no text of its own at all."""
    found = []
    for sequence in _sequences(sre_parser.parse(record.message_pattern)):
        texts = tuple(filter(None, (_trim(part) for part in _split(sequence))))
        if texts:
            opens, closes = sequence[0] is None, sequence[-1] is None
            found.append(Wording(record, texts, opens, closes, sum(map(weight, texts))))
    return found


def weight(text: str) -> float:
    """How much finding `text` tells: about one for a word, less for one that any message may have, or for a sign."""
    words = WORD.findall(text)
    return sum(map(_word_weight, words)) if words else 0.25


def _word_weight(word: str) -> float:
    if word in COMMON or len(word) < 3 or word.isdigit():
        return 0.25
    return 1.5 if "_" in word else 1.0


def _trim(text: str) -> str:
    """As `plain`, but a space at an end stays: it is where a word ends."""
    head, tail = text[:1].isspace(), text[-1:].isspace()
    core = plain(text)
    return f"{' ' * head}{core}{' ' * tail}" if core else ""


def _split(sequence: list[str | None]) -> Iterator[str]:
    """Runs of characters between values."""
    run = ""
    for item in sequence:
        if item is not None:
            run += item
        elif run:
            yield run
            run = ""
    if run:
        yield run


def _sequences(items: Any) -> list[list[str | None]]:
    """What a parsed pattern spells, character by character, None for what may differ; one list an alternative."""
    found: list[list[str | None]] = [[]]
    for op, argument in items:
        choices = _spelled(op, argument)
        if len(found) * len(choices) > _FEW:
            choices = [[None]]
        found = [before + choice for before in found for choice in choices]
    return found


def _spelled(op: Any, argument: Any) -> list[list[str | None]]:
    if op is sre.LITERAL:
        return [[chr(argument)]]
    if op is sre.AT:
        return [[]]
    if op is sre.SUBPATTERN:
        return _sequences(argument[-1])
    if op is sre.BRANCH:
        return [sequence for branch in argument[1] for sequence in _sequences(branch)]
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT) and argument[1] == 1 and argument[0] == 0:
        return [[], *_sequences(argument[2])]
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT) and _is_space(argument[2]):
        return [[" "]]
    return [[None]]


def _is_space(items: Any) -> bool:
    """Whether a repeated part is white space, as `\\s`."""
    (op, argument), *rest = items
    return not rest and op is sre.IN and list(argument) == [(sre.CATEGORY, sre.CATEGORY_SPACE)]
