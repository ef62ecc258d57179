"""The members of a JSON object that arrives in pieces."""

from dataclasses import dataclass, field
from enum import Enum, auto

_SPACE = " \t\n\r"


class _At(Enum):
    OPENING = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()
    END = auto()
    BROKEN = auto()


@dataclass
class Member:
    """A key and the JSON text of its value, as far as they have arrived."""

    key: str = ""
    value: list[str] = field(default_factory=list)
    """Characters."""
    ended: bool = False


class MemberReader:
    """Reads one JSON object character by character and keeps its members in order.

    It finds where values begin and end; whether they are JSON is left to others: brackets are counted, not paired.
    """

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._at = _At.OPENING
        self._depth = 0
        self._quoted = self._escaped = False

    @property
    def ended(self) -> bool:
        """Whether the object is complete."""
        return self._at is _At.END

    @property
    def broken(self) -> bool:
        """Whether this is no object."""
        return self._at is _At.BROKEN

    def push(self, char: str) -> bool:
        """Take the next character; False, and not taken, where the object has ended or this cannot be part of one."""
        if self._at is _At.IN_VALUE:
            self._in_value(char)
        elif self._at is _At.IN_KEY:
            self._in_key(char)
        elif char not in _SPACE:
            self._between(char)
        return not self.broken

    def _between(self, char: str) -> None:
        wanted = {_At.OPENING: "{", _At.KEY: '"}', _At.COLON: ":", _At.COMMA: ",}", _At.VALUE: ""}
        if self._at is _At.VALUE and char not in ",:]}":
            self._at, self._depth, self._quoted = _At.IN_VALUE, 0, False
            self._in_value(char)
        elif char not in wanted.get(self._at, "") or self._at is _At.VALUE:
            self._at = _At.BROKEN
        elif char == "}":
            self._at = _At.END
        elif char == '"':
            self._at = _At.IN_KEY
            self.members.append(Member())
        else:
            self._at = _At.VALUE if char == ":" else _At.KEY

    def _in_key(self, char: str) -> None:
        if char == '"' and not self._escaped:
            self._at = _At.COLON
            return
        self._escaped = char == "\\" and not self._escaped
        self.members[-1].key += char

    def _in_value(self, char: str) -> None:
        value = self.members[-1].value
        if self._quoted:
            self._quoted = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
            ends = not self._quoted and self._depth == 0
        elif self._depth == 0 and value and (char in _SPACE or char in ",}"):
            # The end of a number, true, false or null.
            self._end_value()
            if char not in _SPACE:
                self._between(char)
            return
        else:
            self._quoted = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            ends = self._depth == 0 and char in "}]"
        value.append(char)
        if ends:
            self._end_value()

    def _end_value(self) -> None:
        self.members[-1].ended = True
        self._at = _At.COMMA
