import json

import pytest

from support.replies import cuts, ids, parse
from tamis.server.hermes_calls import HermesCalls

WEATHER_ARGUMENTS = '{"city": "Par\\"is }</tool_call>", "days": [1, {"x": 2}]}'
WEATHER = '<tool_call>\n{"name": "weather", "arguments": ' + WEATHER_ARGUMENTS + "}\n</tool_call>"
TIME = '<tool_call>{"name":"time","arguments":{}}</tool_call>'

CASES = {
    "two calls": (f"{WEATHER}\n{TIME}", "", [("weather", WEATHER_ARGUMENTS), ("time", "{}")]),
    "text around": (f"I look.\n{WEATHER}\n Done. ", "I look.\n Done. ", [("weather", WEATHER_ARGUMENTS)]),
    "no call": ("a < b <tool </tool_call> ", "a < b <tool </tool_call> ", []),
    "the tag in prose": ("the <tool_call> tag", "the <tool_call> tag", []),
    "prose, then a call": (f"the <tool_call> tag {TIME}", "the <tool_call> tag", [("time", "{}")]),
    "two objects in a block": (
        '<tool_call>{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {"x": 1}}</tool_call>', "",
        [("a", "{}"), ("b", '{"x": 1}')]),
    "arguments first": ('<tool_call>{"arguments": {"x": "y"}, "name": "a"}</tool_call>', "", [("a", '{"x": "y"}')]),
    "parameters": ('<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', "", [("a", '{"x": 1}')]),
    "a string of JSON": (
        '<tool_call>{"name": "a", "arguments": "{\\"x\\": \\"\\u00e9\\"}"}</tool_call>', "",
        [("a", '{"x": "\u00e9"}')]),
    "no arguments": ('<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}")]),
    "null arguments": ('<tool_call>{"name": "a", "arguments": null }</tool_call>', "", [("a", "{}")]),
    "more members": ('<tool_call>{"id": 7, "name": "a", "arguments": {"x": 1}, "z": [tru]}</tool_call>', "",
                     [("a", '{"x": 1}')]),
    "an escaped name": ('<tool_call>{"name": "\\u0061\\"", "arguments": {}}</tool_call>', "", [('a"', "{}")]),
    "no end tag": (f"{TIME.removesuffix('</tool_call>')} Bye", "Bye", [("time", "{}")]),
    "no name": ('<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    "a name that is no text": ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    "half a pair": ('<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', []),
    "no JSON": ("<tool_call>{name: a}</tool_call>", "<tool_call>{name: a}</tool_call>", []),
    "no value": ('<tool_call>{"name":, "a": 1}</tool_call>', '<tool_call>{"name":, "a": 1}</tool_call>', []),
    "broken off in the tag": ("Hm <tool_c", "Hm <tool_c", []),
    "broken off behind the tag": ("Hm <tool_call> \n", "Hm <tool_call> \n", []),
    "broken off before the name": ('<tool_call>\n{"name": "a', '<tool_call>\n{"name": "a', []),
    "broken off in the arguments": ('<tool_call>{"name": "a", "arguments": {"x": [1, "b', "", [("a", '{"x": [1, "b')]),
    "broken off behind a call": (f"{TIME[:-3]}", "", [("time", "{}")]),
    "space": (" \n ", " \n ", []),
    "space before a call": (f" \n{TIME} ", "", [("time", "{}")]),
    "nothing": ("", "", []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_calls_do_not_depend_on_how_the_reply_is_cut(case: str) -> None:
    """Field case E10, for markers, names, arguments and text cut at every place."""
    text, content, calls = CASES[case]
    for pieces in cuts(text):
        assert parse(HermesCalls(), pieces) == (content, calls), pieces


def test_arguments_are_told_as_they_come() -> None:
    parser = HermesCalls(new_id=ids())
    assert parser.feed('Hi <tool_call>\n{"name": "f", "argum')[-1].name == "f"
    told = [parser.feed(piece) for piece in ('ents": {"a', '": "b', 'c"', "}", "}\n</tool_call>")]
    assert [[delta.arguments for delta in deltas] for deltas in told] == [['{"a'], ['": "b'], ['c"'], ["}"], []]
    assert {delta.index for deltas in told for delta in deltas} == {0}


def test_every_call_has_an_id_of_its_own() -> None:
    deltas = HermesCalls().feed(TIME * 3)
    found = [delta.id for delta in deltas if delta.id]
    assert len(set(found)) == 3
    assert all(call_id.startswith("call_") for call_id in found)


def test_long_nonsense_is_read_in_linear_time() -> None:
    nested = '<tool_call>{"a": "' * 20_000
    content, calls = parse(HermesCalls(), [nested])
    assert content == nested
    assert calls == []


def test_text_is_told_at_once() -> None:
    parser = HermesCalls()
    assert [delta.content for delta in parser.feed("Hello <to")] == ["Hello"]
    assert [delta.content for delta in parser.feed("ols>")] == [" <tools>"]
    assert json.loads(parse(HermesCalls(), [WEATHER])[1][0][1])["city"] == 'Par"is }</tool_call>'
