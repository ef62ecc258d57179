import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from support.replies import BYTES, accepts, grammars, parse, walk
from support.vocab import SPELLING
from tamis.engine.grammar import GrammarConstraint
from tamis.engine.tokenizer import Tokenizer
from tamis.engine.tokenizer_parts import TokenizerParts
from tamis.errors import GrammarError
from tamis.server.answer_format import answer_format
from tamis.server.hermes_calls import HermesCalls
from tamis.server.m3_calls import NAMESPACE, M3Calls
from tamis.server.reasoning import MARKERS
from tamis.server.tool_calls import ToolCallParser, choose_parser

PARSERS: list[type[HermesCalls] | type[M3Calls]] = [HermesCalls, M3Calls]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "mode": {"enum": ["fast", "slow mode", ""]},
        "when": {"$ref": "#/$defs/when"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        "exact": {"type": ["boolean", "null"]},
    },
    "required": ["city", "when", "mode"],
    "additionalProperties": False,
    "$defs": {"when": {"type": "object", "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23},
                                                        "odd": {"type": "array", "items": {"const": 7}, "maxItems": 2}},
                       "required": ["hour"], "additionalProperties": False}},
}  # fmt: skip


def tool(name: str, schema: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, **({} if schema is None else {"parameters": schema}), **more}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", SCHEMA), tool("time")]
WEATHER = {"type": "function", "function": {"name": "weather"}}


def make(parser: type[ToolCallParser] = HermesCalls, **options: Any) -> Mapping[str, Any]:
    made = answer_format(BYTES, parser=parser, **options)
    assert made is not None
    return made


def checked(parser: type[ToolCallParser], text: str) -> tuple[str, list[str]]:
    """The content and the names of the calls in `text`, whose arguments are checked against the schemas."""
    content, calls = parse(parser(TOOLS), [text])
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMA if name == "weather" else {"maxProperties": 0})
    return content, [name for name, _ in calls]


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("choice", ["required", WEATHER, "auto"], ids=["required", "named", "auto"])
def test_replies_that_the_grammar_allows_are_calls_that_the_parser_reads(
    parser: type[ToolCallParser], choice: Any
) -> None:
    """Random replies: every call the grammar lets through has a name and arguments that fit."""
    rng, seen = random.Random(1), set()
    hints = ["<tool_call>", f"{NAMESPACE}<tool_call>", f"{NAMESPACE}</city>"]
    for _ in range(25):
        content, names = checked(parser, walk(make(parser, tools=TOOLS, tool_choice=choice), rng, hints))
        seen.update(names)
        if choice != "auto":
            assert names and content == ""
        if choice == WEATHER:
            assert names == ["weather"]
    assert seen == {"weather"} | ({"time"} if choice != WEATHER else set())


HERMES_TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
M3_TIME = f'{NAMESPACE}<tool_call>\n{NAMESPACE}<invoke name="time">{NAMESPACE}</invoke>\n{NAMESPACE}</tool_call>'


@pytest.mark.parametrize(("parser", "call"), [(HermesCalls, HERMES_TIME), (M3Calls, M3_TIME)])
def test_what_each_choice_allows(parser: type[ToolCallParser], call: str) -> None:
    text = "It is late. <b> <tool"
    broken = call.replace("time", "tome")
    auto = make(parser, tools=TOOLS)
    assert all(accepts(auto, reply) for reply in ("", text, call, f"{text} {call}\n{call} bye"))
    assert not accepts(auto, broken) and not accepts(auto, f"{text} {broken}")
    required = make(parser, tools=TOOLS, tool_choice="required")
    assert accepts(required, call)
    assert not any(accepts(required, reply) for reply in ("", text, broken, call + text))
    named = make(parser, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "time"}})
    assert accepts(named, call)
    assert not accepts(named, f"{call}\n{call}")
    assert not accepts(make(parser, tools=TOOLS, tool_choice=WEATHER), call)
    assert answer_format(BYTES, parser=parser, tools=TOOLS, tool_choice="none") is None


def test_several_calls_or_one() -> None:
    several, one = (make(tools=TOOLS, tool_choice="required", parallel=parallel) for parallel in (True, False))
    assert accepts(several, f"{HERMES_TIME}\n{HERMES_TIME}") and not accepts(one, f"{HERMES_TIME}\n{HERMES_TIME}")
    assert not accepts(several, "\n".join([HERMES_TIME] * 17)), "no call after call without end"
    auto = make(tools=TOOLS, parallel=False)
    assert accepts(auto, f"a {HERMES_TIME}") and not accepts(auto, f"{HERMES_TIME}\n{HERMES_TIME}")
    many = make(tools=TOOLS)
    assert accepts(many, f"a {HERMES_TIME} b" * 15) and not accepts(many, HERMES_TIME * 17)
    invoke = f'{NAMESPACE}<invoke name="time">{NAMESPACE}</invoke>'
    assert accepts(make(M3Calls, tools=TOOLS, tool_choice="required"), M3_TIME.replace(invoke, invoke * 2))
    assert not accepts(make(M3Calls, tools=TOOLS, parallel=False), M3_TIME.replace(invoke, invoke * 2))


def test_json_or_calls() -> None:
    both = make(tools=TOOLS, response_format={"type": "json_object"})
    assert accepts(both, '{"a": 1}') and accepts(both, HERMES_TIME)
    assert not accepts(both, "text") and not accepts(both, '{"a": 1}' + HERMES_TIME)
    as_it_is = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    assert answer_format(BYTES, parser=HermesCalls, response_format=as_it_is) is as_it_is
    assert answer_format(BYTES, parser=HermesCalls) is None
    assert answer_format(BYTES, parser=HermesCalls, markers=MARKERS[0]) is None


@pytest.mark.parametrize("markers", MARKERS, ids=["m3", "common"])
def test_thinking_comes_first(markers: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    thought = "I <b>think</b> {"
    begins = make(response_format=schema, markers=markers)
    assert accepts(begins, "12") and accepts(begins, f"{markers.begin}{thought}{markers.end}\n\n12")
    assert not accepts(begins, f"{thought}{markers.end}12") and not accepts(begins, f"{markers.begin}{thought}")
    inside = make(response_format=schema, markers=markers, inside=True)
    assert accepts(inside, f"{thought}{markers.end}12") and not accepts(inside, "12")
    calls = make(tools=TOOLS, tool_choice="required", markers=markers)
    assert accepts(calls, f"{markers.begin}{HERMES_TIME} no{markers.end}{HERMES_TIME}")
    json_only = make(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"}, markers=markers)
    assert accepts(json_only, "{}") and not accepts(json_only, HERMES_TIME)


@pytest.mark.parametrize("parser", PARSERS)
def test_a_strict_tool_is_exact_or_refused_and_another_as_exact_as_can_be(parser: type[ToolCallParser]) -> None:
    unique = {
        "type": "object",
        "properties": {"x": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    }
    broken = {"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}}
    for schema, reason in ((unique, 'Unimplemented keys: ["uniqueItems"]'), (broken, "unclosed group")):
        with pytest.raises(GrammarError) as caught:
            make(parser, tools=[tool("f", schema, strict=True)])
        assert str(caught.value).startswith("tools: the parameters of 'f': the grammar cannot be compiled: ")
        assert reason in str(caught.value)
        assert grammars().constraint(make(parser, tools=[tool("f", schema)])) is not None


def test_a_lenient_tool_keeps_what_can_be_kept() -> None:
    unique = {"type": "object", "properties": {"x": {"type": "integer"}}, "not": {}, "additionalProperties": False}
    choice = make(tools=[tool("f", unique)], tool_choice="required")
    call = '<tool_call>{"name": "f", "arguments": {"x": %s}}</tool_call>'
    assert accepts(choice, call % "1") and not accepts(choice, call % '"a"')
    nonsense = make(tools=[tool("f", {"type": "object", "properties": 7})], tool_choice="required")
    assert accepts(nonsense, call % '"a"')


def test_a_choice_of_no_tool_is_refused() -> None:
    with pytest.raises(GrammarError, match="tool_choice names 'nobody', and there is no such tool"):
        make(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "nobody"}})


def test_a_hundred_tools_compile() -> None:
    many = [tool(f"tool_{i}", {**SCHEMA, "title": f"Tool {i}"}) for i in range(100)]
    for parser in PARSERS:
        for choice in ("auto", "required"):
            grammars().check(make(parser, tools=many, tool_choice=choice))


def test_names_are_spelled_as_they_are() -> None:
    odd = 'a"b\\c\u00e9/*#\n'
    choice = make(tools=[tool(odd)], tool_choice="required")
    assert accepts(choice, f'<tool_call>{{"name": {json.dumps(odd)}, "arguments": {{}}}}</tool_call>')


SPECIAL = [NAMESPACE, "<tool_call>", "</tool_call>", "<mm:think>", "</mm:think>"]


def special_tokenizer() -> Tokenizer:
    """Bytes, then the markers as special tokens 256 to 260, then the end."""
    backend = Backend(models.BPE(vocab={SPELLING[byte]: byte for byte in range(256)}, merges=[]))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in [*SPECIAL, "<|end|>"]])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(TokenizerParts(backend, "test"))


def test_markers_that_are_special_tokens_are_written_as_those() -> None:
    tokenizer = special_tokenizer()
    made = answer_format(tokenizer, parser=M3Calls, tools=TOOLS, tool_choice="required", markers=MARKERS[0])
    constraint = grammars(tokenizer, 261).constraint(made)
    assert isinstance(constraint, GrammarConstraint)
    text = f"<mm:think>so</mm:think>\n{M3_TIME}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert sum(token > 255 for token in ids) == 8
    for token in ids:
        assert not constraint.done
        constraint.accept(token)
    assert constraint.done
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert parse(M3Calls(TOOLS), [shown.partition("</mm:think>")[2]]) == ("", [("time", "{}")])


def test_which_parser_a_template_needs() -> None:
    assert choose_parser(None) is HermesCalls
    assert choose_parser("{{ messages }}") is HermesCalls
    assert choose_parser(f"{{{{ tools }}}}{NAMESPACE}<tool_call>") is M3Calls


@pytest.mark.parametrize("parser", [HermesCalls, M3Calls])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": ["a"]}, {"properties": {"a": {}}, "required": 3}, {"properties": {"a": {"enum": 3}}},
        {"type": 3, "properties": {"a": []}}, {"properties": {"a": {"type": "array", "items": 1}}},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_schema_is_any_object_or_refused(parser: type[ToolCallParser], schema: Any) -> None:
    """Never an error that would be the server's fault."""
    try:
        assert make(parser, tools=[tool("f", schema)])
    except GrammarError as error:
        assert "f" in str(error)


@pytest.mark.timeout(60)
def test_objects_that_refer_to_themselves_stay_small() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"$ref": "#"} for i in range(15)}}
    assert len(str(make(M3Calls, tools=[tool("f", schema)]))) < 1 << 20
