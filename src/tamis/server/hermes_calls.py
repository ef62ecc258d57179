"""Tool calls in the Hermes format, which Qwen and many others write:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

import json
from collections.abc import Callable, Sequence

from tamis.server.call_parser import Tool, ToolCallParser, new_call_id
from tamis.server.json_members import Member, MemberReader

BEGIN, END = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")


class HermesCalls(ToolCallParser):
    """Finds calls written as JSON; the text of the arguments is told as the model wrote it.

    A block may hold several objects. Arguments that come before the name wait for it; arguments that are themselves a
    string of JSON are unpacked.
    """

    markers = (BEGIN, END)
    begins = (BEGIN,)

    def __init__(self, tools: Sequence[Tool] = (), new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools, new_id)
        self._reader: MemberReader | None = None
        """Of the object that is being read; None between objects."""
        self._named = False
        self._told_chars: int | None = None
        """Characters of the arguments that were told; None: none yet."""
        self._block_calls = 0

    def _in_call(self) -> bool:
        return self._between() if self._reader is None else self._object(self._reader)

    def _break_off(self) -> None:
        # Without an object: the marker alone, and what came behind it, unless a call has just ended.
        if (self._reader is None and not self._block_calls) or (self._reader is not None and not self._named):
            self._raw += self._buffer
            self._not_a_call()

    def _between(self) -> bool:
        """Behind the marker, or behind an object: another object, the end of the block, or text."""
        seen = self._buffer.lstrip()
        if not seen or (END.startswith(seen) and seen != END):
            return False
        if seen[0] == "{":
            self._raw += self._buffer[: len(self._buffer) - len(seen)]
            self._buffer = seen
            self._reader, self._named, self._told_chars = MemberReader(), False, None
        elif not self._block_calls:
            self._not_a_call()
        else:
            self._buffer = seen.removeprefix(END)
            self._leave()
        return True

    def _leave(self) -> None:
        super()._leave()
        self._reader, self._block_calls = None, 0

    def _object(self, reader: MemberReader) -> bool:
        """Read on in an object; whether it has ended, well or not."""
        taken = 0
        for char in self._buffer:
            if not reader.push(char):
                break
            taken += 1
            if reader.ended:
                break
        if not self._named:
            self._raw += self._buffer[:taken]
        self._buffer = self._buffer[taken:]
        self._tell(reader)
        if reader.ended and self._named:
            if self._told_chars is None:
                self._argue("{}")
            self._reader, self._raw = None, ""
            self._block_calls += 1
        elif reader.ended or reader.broken:
            self._give_up()
        return reader.ended or reader.broken

    def _give_up(self) -> None:
        """The object is no call, or cannot be read on: what was told of it stays broken."""
        if self._named:
            self._leave()
        else:
            self._not_a_call()

    def _tell(self, reader: MemberReader) -> None:
        """Tell what is known of the call."""
        if not self._named:
            name = _text(next((member for member in reader.members if member.key == "name"), None))
            if not name:
                return
            self._named = True
            self._open_call(name)
        member = next((member for member in reader.members if member.key in _ARGUMENTS and member.value), None)
        if member is None:
            return
        if member.value[0] == "{":
            self._argue("".join(member.value[self._told_chars or 0 :]))
            self._told_chars = len(member.value)
        elif member.ended and self._told_chars is None:
            value = "".join(member.value)
            self._argue(_text(member) or ("{}" if value in ("null", '""') else value))
            self._told_chars = len(member.value)


def _text(member: Member | None) -> str | None:
    """The value of a member that is a complete string."""
    if member is None or not member.ended or member.value[0] != '"':
        return None
    try:
        value = json.loads("".join(member.value))
        value.encode()
    except ValueError:  # no JSON, or half a surrogate pair
        return None
    return str(value)
