import json
import re
from typing import Any

import pytest

from support.replies import cuts, ids, parse
from tamis.server.m3_calls import NAMESPACE, M3Calls
from tamis.server.tool_values import Schemas

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "ratio": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"type": ["string", "null"]},
            "mode": {"enum": ["fast", "slow"]},
            "when": {"$ref": "#/$defs/when"},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "table": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "$defs": {"when": {"type": "object", "properties": {
            "from": {"type": "string"}, "to": {"type": "integer"},
            "parts": {"type": "array", "items": {"$ref": "#/$defs/when"}}}}},
    }}},
    {"type": "function", "function": {"name": "time"}},
]  # fmt: skip


def spell(text: str) -> str:
    """M3's markup from a short form: [name] is a tag with the namespace before it, {NS} the namespace alone."""
    tags = re.sub(r'\[(/?[\w-]+(?: name="[^"]*")?)\]', r"{NS}<\1>", text)
    return tags.replace("{NS}", NAMESPACE)


def block(*calls: str) -> str:
    parts = [call.partition(":") for call in calls]
    inside = "".join(f'[invoke name="{name}"]{body}[/invoke]\n' for name, _, body in parts)
    return spell(f"[tool_call]\n{inside}[/tool_call]")


PARAMETERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a text, as it is": ("[city] Paris <b>\n\"x\" \\ {NS} 1[/city]", {"city": spell(' Paris <b>\n"x" \\ {NS} 1')}),
    "a text that looks like a number": ("[city]75001[/city]", {"city": "75001"}),
    "an empty text": ("[city][/city]", {"city": ""}),
    "a text with tags in it": ("[city]a[b]c[/b][/days]d[/city]", {"city": spell("a[b]c[/b][/days]d")}),
    "other types": ("[days] 3\n[/days][exact]True[/exact][ratio]2[/ratio]", {"days": 3, "exact": True, "ratio": 2}),
    "space between": ("\n[days]3[/days]\n [ratio]2.5[/ratio]\n", {"days": 3, "ratio": 2.5}),
    "a value of another type": ("[days]soon[/days][ratio]1e999[/ratio]", {"days": "soon", "ratio": "1e999"}),
    "null or text": ("[note]null[/note]", {"note": None}),
    "text or null": ("[note]12[/note]", {"note": "12"}),
    "one of several": ("[mode]fast[/mode]", {"mode": "fast"}),
    "any of": ("[limit]none[/limit]", {"limit": None}),
    "any of, the other": ("[limit]7[/limit]", {"limit": 7}),
    "a list": ("[tags][item]a[/item]\n[item]1[/item][/tags]", {"tags": ["a", "1"]}),
    "an empty list": ("[tags][/tags]", {"tags": []}),
    "a list of one text": ("[tags]a[/tags]", {"tags": ["a"]}),
    "a list as JSON": ('[tags]["a", "b"][/tags]', {"tags": ["a", "b"]}),
    "repeated elements": ("[tags]a[/tags][tags]b[/tags][days]1[/days]", {"tags": ["a", "b"], "days": 1}),
    "an object": ("[when][from]1[/from][to]2[/to][/when]", {"when": {"from": "1", "to": 2}}),
    "an object in a list in an object": (
        "[when][parts][item][to]1[/to][/item][item][from]x[/from][/item][/parts][/when]",
        {"when": {"parts": [{"to": 1}, {"from": "x"}]}}),
    "an object as JSON": ('[when]{"to": 4}[/when]', {"when": {"to": 4}}),
    "an empty object": ("[when][/when]", {"when": {}}),
    "an object of any keys": ("[table][a-b]1[/a-b][c]x[/c][/table]", {"table": {"a-b": 1, "c": "x"}}),
    "text beside elements": ("[when]about[to]2[/to][/when]", {"when": {"to": 2, "$text": "about"}}),
    "a parameter nobody knows": ("[-A]3[/-A][x]{}[/x][y]abc[/y][z][k]1[/k][/z]",
                                 {"-A": 3, "x": {}, "y": "abc", "z": {"k": 1}}),
    "elements that are not closed": ("[when][to]2[/when][days]1", {"when": {"to": 2}, "days": 1}),
    "a text that is not closed": ("[city]Par", {"city": "Par"}),
    "a text that is told twice": ("[city]a[/city][city]b[/city]", {"city": "a"}),
    "stray text and tags": ("x[/days]y[days]1[/days]z", {"days": 1}),
    "nothing": ("", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", PARAMETERS)
def test_arguments_do_not_depend_on_how_the_reply_is_cut(case: str) -> None:
    body, expected = PARAMETERS[case]
    text = block(f"weather:{body}")
    for pieces in cuts(text):
        content, calls = parse(M3Calls(TOOLS), pieces)
        assert content == ""
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", expected)], pieces


REPLIES: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "two calls in a block": (block("time:", "weather:[city]Paris[/city][days]2[/days]"), "",
                             [("time", "{}"), ("weather", '{"city": "Paris", "days": 2}')]),
    "two blocks": (block("time:") + "\n" + block("time:"), "", [("time", "{}"), ("time", "{}")]),
    "text around": (f"I look.\n{block('time:')}\nDone.", "I look.\nDone.", [("time", "{}")]),
    "no namespace before a block": (block("time:").removeprefix(NAMESPACE), "", [("time", "{}")]),
    "no end of the call": (spell('[tool_call][invoke name="time"][/tool_call]'), "", [("time", "{}")]),
    "the next call ends one": (spell('[tool_call][invoke name="time"][invoke name="b"][/invoke][/tool_call]'), "",
                               [("time", "{}"), ("b", "{}")]),
    "text between calls": (spell('[tool_call][invoke name="time"][/invoke] and [invoke name="b"][/invoke][/tool_call]'),
                           "and", [("time", "{}"), ("b", "{}")]),
    "the tag in prose": ("the <tool_call> tag " + block("time:"), "the <tool_call> tag", [("time", "{}")]),
    "two tags": ("<tool_call> a " + block("time:"), "<tool_call> a", [("time", "{}")]),
    "an empty block": (spell("[tool_call][/tool_call]"), spell("[tool_call][/tool_call]"), []),
    "another tag": (spell("[tool_call][x]1[/x][/tool_call]"), spell("[tool_call][x]1[/x][/tool_call]"), []),
    "the namespace in prose": (f"a {NAMESPACE} b{NAMESPACE[:5]}", f"a {NAMESPACE} b{NAMESPACE[:5]}", []),
    "no call": ("1 < 2 ] > [", "1 < 2 ] > [", []),
    "broken off in the marker": (f"Hm {NAMESPACE}<tool_c", f"Hm {NAMESPACE}<tool_c", []),
    "broken off behind the marker": (spell("Hm [tool_call]\n"), spell("Hm [tool_call]\n"), []),
    "broken off in the name": (spell('[tool_call][invoke name="ti'), spell('[tool_call][invoke name="ti'), []),
    "broken off in a text": (spell('[tool_call][invoke name="weather"][city]Par') + NAMESPACE[:4], "",
                             [("weather", '{"city": "Par')]),
    "broken off in a value": (spell('[tool_call][invoke name="weather"][city]a[/city][days]1'), "",
                              [("weather", '{"city": "a"')]),
    "broken off behind a value": (spell('[tool_call][invoke name="weather"][days]1[/days]'), "", [("weather", "{")]),
    "a namespace alone in a text": (block("weather:[city]a{NS} b{NS}c[/city]"), "",
                                    [("weather", json.dumps({"city": f"a{NAMESPACE} b{NAMESPACE}c"}))]),
    "nothing": ("", "", []),
}  # fmt: skip


@pytest.mark.parametrize("case", REPLIES)
def test_calls_do_not_depend_on_how_the_reply_is_cut(case: str) -> None:
    """Field case E10 for MiniMax-M3's own format."""
    text, content, calls = REPLIES[case]
    for pieces in cuts(text):
        assert parse(M3Calls(TOOLS), pieces) == (content, calls), pieces


def test_texts_are_told_as_they_come_and_other_values_once_complete() -> None:
    parser = M3Calls(TOOLS, ids())
    (opened,) = parser.feed(spell('[tool_call][invoke name="weather"]'))
    assert (opened.index, opened.id, opened.name, opened.arguments) == (0, "call_0", "weather", "{")
    pieces = [spell("[city]Pa"), 'r"', "is" + NAMESPACE, spell("[/city]").removeprefix(NAMESPACE), spell("[days]1"),
              "2", spell("[/days]"), spell("[/invoke]")]  # fmt: skip
    told = ["".join(delta.arguments for delta in parser.feed(piece)) for piece in pieces]
    assert told == ['"city": "Pa', 'r\\"', "is", '"', "", "", "", ', "days": 12}']


def test_elements_in_elements_without_end_do_no_harm() -> None:
    deep = block("weather:[when]" + "[x]" * 5000 + "[/when]")
    ((_, arguments),) = parse(M3Calls(TOOLS), [deep])[1]
    assert "when" in json.loads(arguments)
    long = block(f"weather:[city]{{NS}}<{'y' * 5000}[/city]")
    ((_, arguments),) = parse(M3Calls(TOOLS), [long])[1]
    assert json.loads(arguments) == {"city": f"{NAMESPACE}<{'y' * 5000}"}


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"type": 3, "properties": {"x": {"enum": 5}}},
     {"properties": {"x": {"anyOf": {"type": "integer"}}}}, {"properties": {"x": {"$ref": "http://x.org"}}},
     {"properties": {"x": True}}],
)  # fmt: skip
def test_a_schema_that_makes_no_sense_binds_nothing(schema: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert parse(M3Calls(tools), [block("f:[x]1[/x]")])[1] == [("f", '{"x": 1}')]


@pytest.mark.timeout(20)
def test_schemas_that_refer_to_themselves_are_read_once() -> None:
    """Three branches that lead back, sixteen deep, were 43 million looks."""
    loop: dict[str, Any] = {
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 3}},
        "properties": {"a": {"$ref": "#/$defs/a"}},
    }
    schemas = Schemas(loop)
    assert schemas.types(loop["properties"]["a"]) == frozenset()
    assert schemas.property(loop["properties"]["a"], "x") is None
    mixed = Schemas({"$defs": {"b": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "string"}, {"type": "null"}]}}})
    assert mixed.types({"$ref": "#/$defs/b"}) == {"string", "null"}
