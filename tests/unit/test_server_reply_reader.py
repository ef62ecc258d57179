import json
from typing import Any

import pytest

from tamis.server.hermes_calls import HermesCalls
from tamis.server.reasoning import Markers, ReasoningSplitter
from tamis.server.reply_reader import Piece, ReplyReader

THINK = Markers("<think>", "</think>")
TEXT = (
    "<think>\nHm.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "f", "arguments": {"x": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)


def read(text: str, size: int, *, tools: bool = True) -> tuple[Piece, list[Piece], int]:
    """The whole of a reply, its pieces, and its calls, fed `size` characters at a time."""
    reader = ReplyReader(ReasoningSplitter(THINK), HermesCalls() if tools else None)
    pieces = [reader.feed(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(reader.finish())
    whole = Piece()
    for piece in pieces:
        whole.add(piece)
    return whole, pieces, reader.calls


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_thinking_text_and_calls_come_out_whatever_the_pieces(size: int) -> None:
    """Field case E10."""
    whole, pieces, calls = read(TEXT, size)
    message = whole.message()
    assert (message.reasoning_content, message.content, calls) == ("Hm.", "Let me see.", 2)
    told = message.tool_calls or []
    assert [call.function.name for call in told] == ["f", "g"]
    assert [json.loads(call.function.arguments or "") for call in told] == [{"x": [1, 2]}, {}]
    assert len({call.id for call in told}) == 2

    deltas = [piece.delta() for piece in pieces if piece]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "".join(delta.reasoning_content or "" for delta in deltas) == message.reasoning_content
    streamed = [call for delta in deltas for call in delta.tool_calls or []]
    for index, call in enumerate(told):
        parts = [part for part in streamed if part.index == index]
        assert [part.id for part in parts if part.id] == [call.id]
        assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments


def test_without_tools_a_call_is_text() -> None:
    whole, _, calls = read(TEXT, 5, tools=False)
    assert calls == 0
    assert whole.content.count("<tool_call>") == 2


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", {"role": "assistant", "content": "", "refusal": None}),
        ("hi", {"role": "assistant", "content": "hi", "refusal": None}),
        ("<think>a</think>", {"role": "assistant", "content": "", "reasoning_content": "a", "refusal": None}),
    ],
)
def test_a_message_has_content_unless_it_only_calls(text: str, fields: dict[str, Any]) -> None:
    assert read(text, 2)[0].message().model_dump(exclude_unset=True) == fields


def test_a_message_that_only_calls_has_none() -> None:
    whole, _, _ = read('<tool_call>{"name": "f", "arguments": {}}</tool_call>', 4)
    assert whole.message().content is None
