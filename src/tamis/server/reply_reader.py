"""One chat reply, divided as it arrives: what the model thinks, what it says, which tools it calls."""

from dataclasses import dataclass, field
from typing import Any

from tamis.server.call_parser import Delta, ToolCallParser
from tamis.server.reasoning import ReasoningSplitter, Split
from tamis.server.replies import FunctionReply, MessageReply, ToolCallReply


@dataclass
class Piece:
    """What is new of a reply."""

    reasoning: str = ""
    content: str = ""
    calls: list[Delta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def add(self, other: "Piece") -> None:
        """Append what came later."""
        self.reasoning += other.reasoning
        self.content += other.content
        self.calls += other.calls

    def delta(self) -> MessageReply:
        """As a stream tells it."""
        fields: dict[str, Any] = {}
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning
        if self.content:
            fields["content"] = self.content
        if self.calls:
            fields["tool_calls"] = [_call_delta(call) for call in self.calls]
        return MessageReply(**fields)

    def message(self) -> MessageReply:
        """As a whole turn."""
        # Beside calls nothing said is null; a reply without either is an empty one.
        fields: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning
        if self.calls:
            fields["tool_calls"] = _whole_calls(self.calls)
        return MessageReply(**fields, refusal=None)


class ReplyReader:
    """Reads one reply. The pieces joined do not depend on how it was cut."""

    def __init__(self, splitter: ReasoningSplitter, parser: ToolCallParser | None) -> None:
        self._splitter, self._parser = splitter, parser

    @property
    def calls(self) -> int:
        """Tool calls that have begun."""
        return 0 if self._parser is None else self._parser.calls

    def feed(self, text: str) -> Piece:
        """What is certain once `text` has come."""
        return self._piece(self._splitter.feed(text))

    def finish(self) -> Piece:
        """What was held back until the end."""
        piece = self._piece(self._splitter.finish())
        if self._parser is not None:
            piece.add(_sorted(self._parser.finish()))
        return piece

    def _piece(self, split: Split) -> Piece:
        if self._parser is None:
            return Piece(split.reasoning, split.content)
        piece = _sorted(self._parser.feed(split.content)) if split.content else Piece()
        piece.reasoning = split.reasoning
        return piece


def _sorted(deltas: list[Delta]) -> Piece:
    content = "".join(delta.content for delta in deltas)
    return Piece(content=content, calls=[delta for delta in deltas if delta.index is not None])


def _call_delta(delta: Delta) -> ToolCallReply:
    if delta.id is None:
        return ToolCallReply(index=delta.index, function=FunctionReply(arguments=delta.arguments))
    function = FunctionReply(name=delta.name, arguments=delta.arguments)
    return ToolCallReply(index=delta.index, id=delta.id, type="function", function=function)


def _whole_calls(deltas: list[Delta]) -> list[ToolCallReply]:
    calls: dict[int | None, ToolCallReply] = {}
    for delta in deltas:
        if delta.id is not None:
            function = FunctionReply(name=delta.name, arguments="")
            calls[delta.index] = ToolCallReply(id=delta.id, type="function", function=function)
        function = calls[delta.index].function
        function.arguments = (function.arguments or "") + delta.arguments
    return list(calls.values())
