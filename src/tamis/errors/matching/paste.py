"""Pasted text as lines that messages can be looked for in: colours, quotes and escapes undone, long ones cut."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

MAX_TEXT = 1 << 24
"""Characters that are looked at, the last ones: in a log the error that ended it comes last."""
MAX_LINES = 200_000
"""Lines that are looked at, the last ones."""
MAX_LINE = 4000
"""Characters of a line looked at in a piece; pieces overlap by a quarter."""
MAX_MARGIN = 200
"""Characters at a line's start that are looked at for what is not its own."""
WRAPPED = 5
"""Lines that one message may have been broken into."""
NARROW = 30
"""Characters of a line that was wrapped, at least."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u00a0\ufeff", "''\"\"  ")
_MARGIN = re.compile(r"^(?:[>|\u2502\s]|[\w.-]{1,40}\s*\|\s)*")
"""What mail, terminals and `docker compose` put before a line."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
_NEW = re.compile(
    r"[\[({]|\d{4}-\d\d|\w+(?:Error|Exception|Warning)\b|(?:error|info|warning|debug|fatal)\b|File \"", re.I
)
"""How an entry of its own begins."""
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class Line:
    """A line, or several that may have been one."""

    number: int
    """Of its first line in the text, from 1."""
    text: str
    """As it was pasted, without colours and margins."""
    plain: str
    """For comparing: in lower case, white space as single spaces."""


def lines_of(text: str) -> list[Line]:
    """The lines of `text` that are not empty; only its end where it is very long."""
    rows = _tail(text).splitlines()
    skipped = max(0, len(rows) - MAX_LINES)
    lines = []
    for number, raw in enumerate(rows[skipped:], first_number(text) + skipped):
        if not raw.strip():
            continue
        clean = _without_margin(_COLOURS.sub("", raw)).translate(_QUOTES)
        for piece in _pieces(clean.strip()):
            lines.append(Line(number, piece, plain(piece)))
            if "\\" in piece:
                lines.append(Line(number, piece, plain(_unescape(piece))))
    return lines


def joined(lines: list[Line], at: int) -> list[Line]:
    """Lines of which `lines[at]` is a part, where several look as if one had been wrapped to a width."""
    found = []
    for first in range(max(0, at + 1 - WRAPPED), at + 1):
        for end in range(max(first + 2, at + 1), min(first + WRAPPED, len(lines)) + 1):
            parts = lines[first:end]
            if not _is_wrapped(parts):
                continue
            found += [_join(parts, " ")]
            if len({len(part.text) for part in parts[:-1]}) == 1:  # by a terminal, which does not care for words
                found += [_join(parts, "")]
    return found


def _is_wrapped(parts: list[Line]) -> bool:
    """Whether no line would have had room for the first word of the next, and none begins something new."""
    width = max(len(part.text) for part in parts)
    return width >= NARROW and all(
        after.number == before.number + 1
        and len(before.text) + 1 + len(after.text.split(maxsplit=1)[0]) > width
        and not _NEW.match(after.text)
        for before, after in pairwise(parts)
    )


def _join(parts: list[Line], between: str) -> Line:
    text = between.join(part.text for part in parts)
    return Line(parts[0].number, text, plain(text))


def plain(text: str) -> str:
    """`text` for comparing: case and the kind of white space do not count."""
    return _SPACES.sub(" ", text).strip().lower()


def first_number(text: str) -> int:
    """The number of the line in which the part begins that is looked at."""
    return 1 if len(text) <= MAX_TEXT else 1 + text.count("\n", 0, len(text) - MAX_TEXT)


def _without_margin(line: str) -> str:
    return _MARGIN.sub("", line[:MAX_MARGIN], count=1) + line[MAX_MARGIN:]


def _tail(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[-MAX_TEXT:]


def _pieces(line: str) -> Iterator[str]:
    if len(line) <= MAX_LINE:
        if line:
            yield line
        return
    for start in range(0, len(line) - MAX_LINE // 4, MAX_LINE * 3 // 4):
        yield line[start : start + MAX_LINE]


def _unescape(text: str) -> str:
    """The text of a JSON string."""
    return _ESCAPE.sub(
        lambda found: chr(int(found[1], 16)) if found[1] else " " if found[2] in "nrt" else found[2], text
    )
