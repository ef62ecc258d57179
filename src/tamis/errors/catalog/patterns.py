"""Regular expressions that people write, checked before anybody has to wait for one."""

import re
import warnings
from re import _constants as sre
from re import _parser as sre_parser
from typing import Any

MAX_CHOICES = 24
"""Open-ended repeats, alternatives and optional parts in one pattern: each multiplies the time that a line may take."""
_SOME = 64
"""A repeat of one character up to this count is no open-ended one."""
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
_CHARACTERS = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)


def pattern_fault(pattern: str) -> str | None:
    """Why `pattern` is refused, or None: it does not compile, or could backtrack without end on some line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(pattern)
            tree = sre_parser.parse(pattern)
        walk = _Walk()
        walk.sequence(tree, touching=False)
    except _RefusedError as error:
        return f"it could backtrack without end: {error}"
    except (re.error, RecursionError, OverflowError, Warning) as error:
        return f"it does not compile: {error}"
    if walk.choices > MAX_CHOICES:
        return f"it could backtrack without end: it has {walk.choices} repeats and choices, more than {MAX_CHOICES}"
    return None


class _RefusedError(Exception):
    """The pattern has a part whose time is not bounded."""


class _Walk:
    """Holds the parts that are allowed: what is repeated is one character, and two open-ended repeats never touch."""

    def __init__(self) -> None:
        self.choices = 0

    def sequence(self, items: Any, *, touching: bool) -> bool:
        """Check `items` after an open-ended repeat (`touching`) or not; whether the end may still touch one."""
        for op, argument in items:
            touching = self._item(op, argument, touching=touching)
        return touching

    def _item(self, op: Any, argument: Any, *, touching: bool) -> bool:
        if op in _REPEATS:
            return self._repeat(*argument, touching=touching)
        if op is sre.SUBPATTERN:
            return self.sequence(argument[-1], touching=touching)
        if op is sre.BRANCH:
            self.choices += len(argument[1]) - 1
            ends = [self.sequence(branch, touching=touching) for branch in argument[1]]
            return any(ends)
        if op is sre.AT:
            return touching
        if op in _CHARACTERS:
            return False
        raise _RefusedError(f"{str(op).lower()} is not allowed")

    def _repeat(self, least: int, most: int, body: Any, *, touching: bool) -> bool:
        if most == 1:
            self.choices += 1
            return self.sequence(body, touching=touching) or touching
        if not _is_one_character(body):
            raise _RefusedError("a repeat of more than one character")
        if most <= _SOME:
            return touching and least == 0
        if touching:
            raise _RefusedError("two open-ended repeats that touch")
        self.choices += 1
        return True


def _is_one_character(body: Any) -> bool:
    if len(body) != 1:
        return False
    op, argument = body[0]
    return op in _CHARACTERS or (op is sre.SUBPATTERN and _is_one_character(argument[-1]))
