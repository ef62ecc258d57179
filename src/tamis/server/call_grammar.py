"""Grammars of single tool calls, in the formats that the parsers read."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from tamis.engine.grammar import check_rule, json_rule
from tamis.errors import GrammarError
from tamis.server import hermes_calls, m3_calls
from tamis.server.call_parser import Tool, ToolCallParser, parameters_of
from tamis.server.lark import Rules
from tamis.server.tool_values import Schemas

MOST_CALLS = 16
"""Calls that a reply may make: a small model does not always find an end."""
SPACE = r"/[ \n]{0,2}/"
_DEEPEST = 4
"""Objects in objects that are written out as elements; what is deeper is JSON in an element."""


_MOST_ELEMENTS = 256
"""Elements of one tool after which those inside others are JSON too: objects that refer to themselves multiply."""


class CallFormat(Protocol):
    """How calls are written."""

    begin: str
    end: str
    """What stands around a block of calls."""
    shared_block: bool
    """Whether several calls stand in one block."""

    def call(self, rules: Rules, tool: Tool) -> str:
        """A call of `tool`."""


def call_format(parser: type[ToolCallParser]) -> CallFormat:
    """The format that `parser` reads."""
    return M3Format() if issubclass(parser, m3_calls.M3Calls) else HermesFormat()


class HermesFormat:
    """JSON objects with a name and arguments, each in a block of its own."""

    begin, end = hermes_calls.BEGIN, hermes_calls.END
    shared_block = False

    def call(self, rules: Rules, tool: Tool) -> str:
        """A call of `tool`."""
        name = json.dumps(tool["function"]["name"])
        head, tail = rules.literal(f'{{"name": {name}, "arguments": '), rules.literal("}")
        return rules.add(f"{head} {_json_term(parameters_of(tool), tool)} {tail}")


class M3Format:
    """Elements named after the parameters, several calls in one block.

    What texts may hold beyond `enum` (pattern, length) is not enforced; objects have the properties that are listed.
    """

    begin, end = m3_calls.NAMESPACE + m3_calls.BEGIN, m3_calls.NAMESPACE + m3_calls.END
    shared_block = True

    def call(self, rules: Rules, tool: Tool) -> str:
        """A call of `tool`."""
        schema = parameters_of(tool)
        _json_term(schema, tool)  # raises where a strict tool's schema cannot be compiled
        members = _Elements(rules, tool, Schemas(schema)).members(schema, 0)
        begin = rules.literal(f'{m3_calls.NAMESPACE}<invoke name="{tool["function"]["name"]}">')
        return rules.add(f"{begin} {members} {rules.literal(f'{m3_calls.NAMESPACE}</invoke>')}")


class _Elements:
    """The elements of one tool's parameters."""

    def __init__(self, rules: Rules, tool: Tool, schemas: Schemas) -> None:
        self._rules, self._tool, self._schemas = rules, tool, schemas
        self._written = 0

    def members(self, schema: Any, depth: int) -> str:
        """The properties of an object, in order, those left out that need not be there."""
        schema = self._schemas.resolve(schema)
        # Not every schema is one; what cannot be read allows nothing in particular.
        required = schema["required"] if isinstance(schema.get("required"), list) else []
        listed = schema["properties"] if isinstance(schema.get("properties"), Mapping) else {}
        terms = [
            self._element(name, inner, depth) + ("" if name in required else "?") for name, inner in listed.items()
        ]
        return f"{SPACE} " + " ".join(f"{term} {SPACE}" for term in terms)

    def _element(self, name: str, schema: Any, depth: int) -> str:
        self._written += 1
        begin = self._rules.literal(f"{m3_calls.NAMESPACE}<{name}>")
        end = f"{m3_calls.NAMESPACE}</{name}>"
        return self._rules.add(f"{begin} {self._value(schema, end, depth + 1)}")

    def _value(self, schema: Any, end: str, depth: int) -> str:
        """A value and the end of its element."""
        schema = self._schemas.resolve(schema)
        types = self._schemas.types(schema)
        close = self._rules.literal(end)
        values = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
        deeper = depth < _DEEPEST and self._written < _MOST_ELEMENTS
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return f"({' | '.join(self._rules.literal(value) or json.dumps('') for value in values)}) {close}"
        if not types or "string" in types:
            return self._rules.until(end)
        if types == {"object"} and isinstance(schema.get("properties"), Mapping) and schema["properties"] and deeper:
            return f"{self.members(schema, depth)} {close}"
        if types == {"array"} and schema.get("items") and deeper:
            return f"{SPACE} ({self._element('item', schema['items'], depth)} {SPACE}){_times(schema)} {close}"
        shared = {key: self._schemas.root[key] for key in ("$defs", "definitions") if key in self._schemas.root}
        return f"{_json_term({**shared, **schema}, self._tool)} {close}"


def _times(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minItems"), schema.get("maxItems")
    return f"{{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}}"


def _json_term(schema: Mapping[str, Any], tool: Tool) -> str:
    """JSON under `schema`; where that cannot be compiled and the tool is not strict, any JSON of its type."""
    function = tool["function"]
    strict = function.get("strict") is True
    term = json_rule(schema, lenient=not strict)
    try:
        check_rule(term)
    except GrammarError as error:
        if strict:
            raise GrammarError(f"tools: the parameters of {function['name']!r}: {error}") from None
        return json_rule({"type": schema["type"]} if "type" in schema else {})
    return term
