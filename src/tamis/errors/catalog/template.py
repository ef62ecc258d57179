"""Message templates in the notation of f-strings: `layer_id={layer_id} is not a sparse attention layer`.

From a template come the pattern that finds its messages, the skeleton by which a written record and the code are
joined, the id and the slug.
"""

import hashlib
import re
from dataclasses import dataclass

_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")
_SLUG_LENGTH = 50
HOLE = "(.+?)"
"""What a value matches: something, on one line."""
HOLE_AT_START = "(.*?)"


@dataclass(frozen=True)
class Template:
    """A message with holes for values. Two holes never touch: nobody could say where one ends."""

    parts: tuple[tuple[str, str], ...]
    """Pairs of a literal text, which may be empty only at the start, and the hole after it: its expression, or ""."""

    @property
    def text(self) -> str:
        """The template as it is written: literal braces are doubled."""
        return "".join(
            literal.replace("{", "{{").replace("}", "}}") + (f"{{{hole}}}" if hole else "")
            for literal, hole in self.parts
        )

    @property
    def skeleton(self) -> str:
        """The template without the names of its values: equal for equal wordings. Runs of spaces count as one."""
        return " ".join("".join(literal + ("{}" if hole else "") for literal, hole in self.parts).split())

    @property
    def literals(self) -> tuple[str, ...]:
        """The texts between the values, in order."""
        return tuple(literal for literal, _ in self.parts if literal)

    @property
    def weight(self) -> int:
        """Letters and digits that are the same in every message: how much the template says of its own."""
        return sum(character.isalnum() for literal in self.literals for character in literal)

    @property
    def pattern(self) -> str:
        """A regular expression for the end of a message; it is open at the start, for what others write before it.

        A value at the start may be empty: a prefix that is not always there, or what was cut off with the line's start.
        """
        holes = [HOLE if hole else "" for _, hole in self.parts]
        if self._begins_with_hole:
            holes[0] = HOLE_AT_START
        texts = [_escape(literal) for literal, _ in self.parts]
        return "".join(text + hole for text, hole in zip(texts, holes, strict=True)) + "$"

    @property
    def _begins_with_hole(self) -> bool:
        return bool(self.parts) and not self.parts[0][0]

    def fits(self, message: str) -> bool:
        """Whether `message` ends as this wording does: what `pattern` finds, in time that grows with the length alone.

        For one line. Clients of a server have a say in some messages, and a pattern may take the square of the length.
        """
        start = 0
        *parts, (last, hole) = self.parts
        for number, (literal, _) in enumerate(parts):
            place = message.find(literal, start)
            if place < 0:
                return False
            start = place + len(literal) + (number > 0 or not self._begins_with_hole)
        if hole:
            place = message.find(last, start)
            return 0 <= place < len(message) - len(last)
        return message.endswith(last) and len(message) - len(last) >= start

    @property
    def slug(self) -> str:
        """The first words of the text, up to 50 characters, for addresses."""
        slug = ""
        for word in re.findall(r"[a-z0-9]+", self.text.lower()):
            if slug and len(slug) + 1 + len(word) > _SLUG_LENGTH:
                break
            slug = f"{slug}-{word}" if slug else word[:_SLUG_LENGTH]
        return slug


def parse_template(text: str) -> Template:
    """The template that `text` writes. Raises ValueError where braces do not pair."""
    pieces: list[tuple[str, bool]] = []
    literal, place = "", 0
    while place < len(text):
        sign = text[place]
        if sign in "{}" and text[place : place + 2] == sign * 2:
            literal, place = literal + sign, place + 2
        elif sign == "{":
            end = _closing(text, place)
            pieces += [(literal, False), (text[place + 1 : end], True)]
            literal, place = "", end + 1
        elif sign == "}":
            raise ValueError(f"the brace at character {place} closes nothing")
        else:
            literal, place = literal + sign, place + 1
    return make_template([*pieces, (literal, False)])


def make_template(pieces: list[tuple[str, bool]]) -> Template:
    """A template of texts and whether each is a hole; of holes that touch, the first stands for all."""
    parts: list[tuple[str, str]] = []
    for text, is_hole in pieces:
        if not text:
            continue
        if is_hole and parts and not parts[-1][1]:
            parts[-1] = (parts[-1][0], text)
        elif is_hole and not parts:
            parts.append(("", text))
        elif not is_hole and parts and not parts[-1][1]:
            parts[-1] = (parts[-1][0] + text, "")
        elif not is_hole:
            parts.append((text, ""))
    return Template(tuple(parts))


def record_id(repo: str, error_class: str, template: Template) -> str:
    """16 hexadecimal digits that stay the same as long as class and wording do, wherever the code moves."""
    return hashlib.sha256("\n".join((repo, error_class, template.skeleton)).encode()).hexdigest()[:16]


def _closing(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"the brace at character {start} is not closed")


def _escape(literal: str) -> str:
    """`literal` for a regular expression; any white space with a line break in it matches any other."""
    escaped = _SPECIAL.sub(lambda match: "\\" + match[0], literal)
    return re.sub(r"\s*\n\s*", lambda _: r"\s{1,64}", escaped)
