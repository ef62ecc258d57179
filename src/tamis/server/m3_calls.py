"""Tool calls in MiniMax-M3's format (docs/facts.md, section 3): XML whose every tag carries a namespace token.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris]<]minimax[>[</city>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

A parameter is an element named after it; objects are elements in it, lists are <item> elements, the rest is plain text.
"""

import re
from collections.abc import Callable, Sequence

from tamis.server.call_parser import Tool, ToolCallParser, new_call_id
from tamis.server.markers import held_back
from tamis.server.tool_values import Element, Schemas, to_json, value_of_all

NAMESPACE = "]<]minimax[>["
BEGIN, END = "<tool_call>", "</tool_call>"
_INVOKE = re.compile(r'invoke\s+name="([^"]*)"\s*')
_MAX_TAG = 256
"""Characters that a tag may have."""
_MAX_DEPTH = 64
"""Elements in elements; deeper ones are read as text."""


class M3Calls(ToolCallParser):
    """Finds calls written as XML and tells their arguments as JSON: texts as they come, other values once complete.

    What type a value has is looked up in the tool's schema. Elements of one name in a row make a list.
    """

    markers = (NAMESPACE, BEGIN, END)
    begins = (NAMESPACE + BEGIN, BEGIN)

    def __init__(self, tools: Sequence[Tool] = (), new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools, new_id)
        self._schema = Schemas({})
        self._invoked = False
        """Whether an <invoke> is open."""
        self._open: list[Element] = []
        """The parameter that is being read, and the elements in it that are open."""
        self._streamed = False
        """Whether that parameter is text that is told as it comes."""
        self._complete: list[Element] = []
        """Parameters of one name that are complete and were not told: another may follow."""
        self._names: set[str] = set()
        """Parameters that were told."""
        self._block_calls = 0

    def _in_call(self) -> bool:
        """Take the next tag, or the text before it."""
        place = self._buffer.find(NAMESPACE)
        if place != 0:
            certain = place if place > 0 else len(self._buffer) - held_back(self._buffer, [NAMESPACE])
            return certain > 0 and self._take(certain, self._text)
        behind = self._buffer[len(NAMESPACE) : len(NAMESPACE) + _MAX_TAG]
        end = behind.find(">")
        if not behind or (behind[0] == "<" and end < 0 and len(behind) < _MAX_TAG):
            return False
        if behind[0] != "<" or end < 0:
            return self._take(len(NAMESPACE), self._text)
        return self._take(len(NAMESPACE) + end + 1, self._tag)

    def _take(self, length: int, read: Callable[[str], None]) -> bool:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        if not self._block_calls:
            self._raw += taken
        read(taken)
        return True

    def _break_off(self) -> None:
        if not self._block_calls:
            self._raw += self._buffer
            self._not_a_call()

    def _leave(self) -> None:
        super()._leave()
        self._block_calls = 0

    def _text(self, text: str) -> None:
        if self._open:
            self._open[-1].text.append(text)
            if self._streamed:
                self._argue(_quoted(text))
        elif not self._invoked and (rest := text.lstrip()):
            if self._block_calls:
                self._say(text)
            else:
                # It may hold the marker of a block that is one.
                self._raw, self._buffer = self._raw.removesuffix(rest), rest + self._buffer
                self._not_a_call()

    def _tag(self, tag: str) -> None:
        name = tag[len(NAMESPACE) + 1 : -1]
        if self._open:
            self._tag_in_parameter(tag, name)
        elif (invoke := _INVOKE.fullmatch(name)) is not None:
            self._end_invoke()
            self._begin_invoke(invoke[1])
        elif f"<{name}>" == END:
            self._end_invoke()
            if self._block_calls:
                self._leave()
            else:
                self._not_a_call()
        elif name == "/invoke":
            self._end_invoke()
        elif not self._invoked:
            if not self._block_calls:
                self._not_a_call()
        elif not name.startswith("/"):
            self._begin_parameter(name)

    def _tag_in_parameter(self, tag: str, name: str) -> None:
        if name == "/invoke" or f"<{name}>" == END:
            # Whatever is open ends with what it stands in.
            self._end_parameter()
            self._tag(tag)
        elif self._streamed and name != f"/{self._open[0].name}":
            self._text(tag)
        elif name.startswith("/"):
            self._end_element(name[1:])
        elif len(self._open) < _MAX_DEPTH:
            child = Element(name)
            self._open[-1].children.append(child)
            self._open.append(child)
        else:
            self._text(tag)

    def _begin_invoke(self, name: str) -> None:
        self._invoked, self._names = True, set()
        self._schema = Schemas(self._schemas.get(name))
        self._block_calls += 1
        self._open_call(name)
        self._argue("{")

    def _end_invoke(self) -> None:
        if self._invoked:
            self._tell_complete()
            self._argue("}")
        self._invoked = False

    def _begin_parameter(self, name: str) -> None:
        if self._complete and self._complete[0].name != name:
            self._tell_complete()
        self._open = [Element(name)]
        types = self._schema.types(self._schema.property(self._schema.root, name))
        self._streamed = types == {"string"} and name not in self._names
        if self._streamed:
            self._argue(f'{self._key(name)}"')

    def _end_element(self, name: str) -> None:
        depth = next((i for i in range(len(self._open) - 1, -1, -1) if self._open[i].name == name), None)
        if depth == 0:
            self._end_parameter()
        elif depth is not None:
            del self._open[depth:]

    def _end_parameter(self) -> None:
        if self._streamed:
            self._argue('"')
        elif self._open[0].name not in self._names:
            self._complete.append(self._open[0])
        self._open, self._streamed = [], False

    def _tell_complete(self) -> None:
        """Tell the parameters of one name that are complete: no other of it follows."""
        if self._complete:
            name = self._complete[0].name
            schema = self._schema.property(self._schema.root, name)
            value = value_of_all(self._complete, schema, self._schema)
            self._argue(self._key(name) + to_json(value))
        self._complete = []

    def _key(self, name: str) -> str:
        comma = ", " if self._names else ""
        self._names.add(name)
        return f"{comma}{to_json(name)}: "


def _quoted(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return to_json(text)[1:-1]
