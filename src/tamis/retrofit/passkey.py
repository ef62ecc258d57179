"""Passkey retrieval: a number is told somewhere in a long, dull text, and asked for at its end.

A haystack is one text with one number in it. It is asked at several lengths, each time cut there and followed by the
question: an engine that keeps prefixes reads the text once for all of them and, since the filler is always the same,
what stands before the number once for all haystacks.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tamis.errors import ConfigError
from tamis.request import SamplingParams

HEAD = "There is an important piece of information hidden inside a lot of irrelevant text. Find it and memorize it.\n\n"
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
ANSWER_TOKENS = 8
"""What a reply may take: a space and five digits, some of which may be tokens of their own."""
STEPS = 16
"""Into how many steps of length a context is divided; asked from the fourth on."""
DENSE_ENOUGH = 0.8
"""A model is judged at the lengths where its dense base finds at least this share."""
DEPTHS = ("0-20%", "20-40%", "40-60%", "60-80%", "80-100%")
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""


@dataclass(frozen=True)
class Question:
    """One trial."""

    length: int
    """Tokens of prompt and answer."""
    depth: float
    """How far into the text the number is told: 0 at its beginning, 1 at its end."""
    key: str
    token_ids: tuple[int, ...]

    def is_answered(self, reply: str) -> bool:
        """Whether a reply begins with the number."""
        return reply.strip().startswith(self.key)


def asked_lengths(context: int) -> list[int]:
    """At which lengths a model of so many tokens is asked, ascending: from a quarter of the context to all of it."""
    return [context * step // STEPS for step in range(STEPS // 4, STEPS + 1)]


def make_haystacks(encode: Encode, lengths: Sequence[int], trials: int, seed: int = 0) -> list[list[Question]]:
    """At least `trials` questions, by haystack, longest first; numbers lie evenly between begin and end of the text.

    In this order every haystack begins like the one before it up to its own number. Raises ConfigError where even the
    longest text has no room for head, number and question.
    """
    parts = _Parts(encode, max(lengths))
    count = 1
    while sum(len(parts.places(length, count)) for length in lengths) < trials:
        count += 1
    digits = random.Random(seed)
    keys = [f"{digits.randrange(10_000, 100_000)}" for _ in range(count)]
    stacks = [parts.haystack(lengths, place, key) for place, key in zip(parts.spread(count), keys, strict=True)]
    return [stack for stack in stacks if stack]


class _Parts:
    """The pieces of a haystack as token ids."""

    def __init__(self, encode: Encode, longest: int) -> None:
        self._encode = encode
        self._head, self._question, filler = (list(encode(text)) for text in (HEAD, QUESTION, FILLER))
        self._needle = len(encode(NEEDLE.format(key=10_000)))
        self._room = self._filler_in(longest)
        if self._room < 1:
            raise ConfigError(
                f"passkey retrieval needs {longest - self._room + 1} tokens at least, the longest text asked for has "
                f"{longest}"
            )
        self._filler = (filler * (1 + self._room // len(filler)))[: self._room]

    def _filler_in(self, length: int) -> int:
        """Tokens of filler that a text of so many tokens has."""
        return length - len(self._head) - self._needle - len(self._question) - ANSWER_TOKENS

    def spread(self, count: int) -> list[int]:
        """Where numbers are told, in tokens of filler before them; the last first, so that prefixes are shared."""
        return [int(self._room * (2 * i + 1) / (2 * count)) for i in reversed(range(count))]

    def places(self, length: int, count: int) -> list[int]:
        """Those that a text of so many tokens reaches."""
        return [place for place in self.spread(count) if place < self._filler_in(length)]

    def haystack(self, lengths: Sequence[int], place: int, key: str) -> list[Question]:
        """The questions of one text."""
        before = self._head + self._filler[:place] + list(self._encode(NEEDLE.format(key=key)))
        asked = []
        for length in sorted(lengths, reverse=True):
            room = self._filler_in(length)
            if place < room:
                ids = (*before, *self._filler[place:room], *self._question)
                asked.append(Question(length, place / room, key, ids))
        return asked


@dataclass(frozen=True)
class Found:
    """The numbers found in some trials."""

    trials: int
    dense: float
    """Share that the dense base found."""
    sparse: float


@dataclass(frozen=True)
class Retrieval:
    """How often both models found the number."""

    total: Found
    judged: Found | None
    """At the lengths where the dense base finds `DENSE_ENOUGH` or more; None: there are none."""
    by_length: dict[int, Found]
    """By tokens of prompt and answer."""
    by_depth: dict[str, Found]
    """By how far into the text the number is told, in fifths."""
    cells: dict[int, dict[str, Found]]
    """By length, then depth."""


def compare_retrieval(
    haystacks: Sequence[Sequence[Question]], dense: Sequence[Sequence[bool]], sparse: Sequence[Sequence[bool]]
) -> Retrieval:
    """The shares of answers, given by haystack and question."""
    trials = [
        _Trial(question.length, _fifth(question.depth), a, b)
        for questions, first, second in zip(haystacks, dense, sparse, strict=True)
        for question, a, b in zip(questions, first, second, strict=True)
    ]
    lengths = sorted({trial.length for trial in trials})
    by_length = {length: _found([t for t in trials if t.length == length]) for length in lengths}
    good = {length for length, found in by_length.items() if found.dense >= DENSE_ENOUGH}
    cells = {length: _by_depth([t for t in trials if t.length == length]) for length in lengths}
    judged = [trial for trial in trials if trial.length in good]
    return Retrieval(_found(trials), _found(judged) if judged else None, by_length, _by_depth(trials), cells)


@dataclass(frozen=True)
class _Trial:
    length: int
    depth: str
    dense: bool
    sparse: bool


def _fifth(depth: float) -> str:
    return DEPTHS[int(depth * len(DEPTHS))]


def _by_depth(trials: Sequence[_Trial]) -> dict[str, Found]:
    grouped = {depth: [trial for trial in trials if trial.depth == depth] for depth in DEPTHS}
    return {depth: _found(group) for depth, group in grouped.items() if group}


def _found(trials: Sequence[_Trial]) -> Found:
    count = len(trials)
    return Found(count, sum(trial.dense for trial in trials) / count, sum(trial.sparse for trial in trials) / count)
