"""Tool calls in a reply's text, told as they arrive."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tamis.server.markers import find_first, held_back

Tool = Mapping[str, Any]
"""As the OpenAI API has it: {"type": "function", "function": {"name", "description", "parameters", "strict"}}."""


@dataclass(frozen=True)
class Delta:
    """A piece of a reply: text, or a part of one of its tool calls."""

    content: str = ""
    index: int | None = None
    """Which call, from 0; None where this is text."""
    id: str | None = None
    """With a call's first piece, as its name."""
    name: str | None = None
    arguments: str = ""
    """More of the JSON text of the call's arguments."""


def new_call_id() -> str:
    """An id for a tool call that no other has."""
    return f"call_{secrets.token_hex(12)}"


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, always an object; an empty one where the tool does not say."""
    given = tool["function"].get("parameters")
    return {"type": "object", **({"properties": {}, "additionalProperties": False} if given is None else given)}


class ToolCallParser(ABC):
    """Divides one reply, which may call `tools`, as it arrives. The pieces joined do not depend on how it was cut.

    What looked like a call and is none comes as text. White space before calls, and after them where no text follows or
    has come before, belongs to nothing. The arguments of a call that the reply breaks off stay a broken JSON text, so
    that nobody runs half a call.
    """

    markers: ClassVar[tuple[str, ...]]
    """Texts that calls are recognised by: where the vocabulary has them as special tokens, a reply must show these."""
    begins: ClassVar[tuple[str, ...]]
    """Those before calls."""

    def __init__(self, tools: Sequence[Tool] = (), new_id: Callable[[], str] = new_call_id) -> None:
        self.calls = 0
        """How many calls have begun."""
        self._schemas = {tool["function"]["name"]: parameters_of(tool) for tool in tools}
        self._new_id = new_id
        self._buffer = ""
        """Text that has not been looked at, or not been understood yet."""
        self._inside = False
        self._raw = ""
        """What has been taken since the marker, as long as it may turn out to be no call."""
        self._space = ""
        self._behind_call = False
        """Whether nothing but white space has come since the last call."""
        self._said = False
        """Whether any text was told."""
        self._deltas: list[Delta] = []

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece of the reply; returns what is certain now."""
        self._buffer += text
        while self._in_call() if self._inside else self._in_text():
            pass
        return self._told()

    def finish(self) -> list[Delta]:
        """The reply has ended; returns what was held back."""
        if self._inside:
            self._break_off()
        else:
            self._say(self._buffer)
        self._buffer = ""
        if not self._behind_call:
            self._add(Delta(content=self._space))
        self._space = ""
        return self._told()

    @abstractmethod
    def _in_call(self) -> bool:
        """Understand more of the buffer, behind a marker; whether that led anywhere."""

    @abstractmethod
    def _break_off(self) -> None:
        """The reply ends behind a marker: what is no call yet is text."""

    def _in_text(self) -> bool:
        """Take text up to the next marker; whether there was one."""
        found = find_first(self._buffer, self.begins)
        if found is None:
            certain = len(self._buffer) - held_back(self._buffer, self.begins)
            self._say(self._buffer[:certain])
            self._buffer = self._buffer[certain:]
            return False
        place, marker = found
        self._say(self._buffer[:place])
        self._buffer = self._buffer[place + len(marker) :]
        self._inside, self._raw = True, marker
        return True

    def _not_a_call(self) -> None:
        """What was taken since the marker is text after all."""
        self._leave()
        self._say(self._raw)

    def _leave(self) -> None:
        self._inside = False

    def _say(self, text: str) -> None:
        """Text outside calls. White space waits for what follows it."""
        text = self._space + text
        told = text.rstrip()
        self._space = text[len(told) :]
        if told:
            self._add(Delta(content=told if self._said or not self._behind_call else told.lstrip()))
            self._behind_call, self._said = False, True

    def _open_call(self, name: str) -> None:
        self._space, self._behind_call = "", True
        self._add(Delta(index=self.calls, id=self._new_id(), name=name))
        self.calls += 1

    def _argue(self, arguments: str) -> None:
        """More of the arguments of the call that was opened last."""
        self._add(Delta(index=self.calls - 1, arguments=arguments))

    def _add(self, delta: Delta) -> None:
        last = self._deltas[-1] if self._deltas else None
        if delta == Delta() or (delta.index is not None and delta.id is None and not delta.arguments):
            return
        if last is not None and last.index == delta.index and delta.id is None:
            self._deltas[-1] = Delta(
                last.content + delta.content, last.index, last.id, last.name, last.arguments + delta.arguments
            )
        else:
            self._deltas.append(delta)

    def _told(self) -> list[Delta]:
        told, self._deltas = self._deltas, []
        return told
