"""The built-in model, held to schemas and tools: what it writes is what was asked for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema import FormatChecker

from support.replies import parse
from tamis import LLM, SamplingParams
from tamis.errors import GrammarError
from tamis.request import Completion, FinishReason
from tamis.server.answer_format import answer_format
from tamis.server.tool_calls import choose_parser

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20},
                   "age": {"type": "integer", "minimum": 0, "maximum": 120},
                   "tags": {"type": "array", "items": {"enum": ["kind", "loud", "shy"]}, "maxItems": 2}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}  # fmt: skip
ANSWER = {
    "$defs": {"side": {"anyOf": [{"const": "left"}, {"const": "right"}, {"type": "null"}]}},
    "type": "object",
    "properties": {"side": {"$ref": "#/$defs/side"}, "sure": {"type": "boolean"},
                   "why": {"type": "string", "maxLength": 30}, "when": {"type": "string", "format": "date"},
                   "share": {"type": "number", "minimum": 0, "maximum": 1}},
    "required": ["side", "sure", "when"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city", "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "get_time", "description": "The time of day"}},
]  # fmt: skip

FORMATS = FormatChecker()


@pytest.fixture(scope="module")
def llm(builtin_gguf: Path) -> Iterator[LLM]:
    with LLM(str(builtin_gguf), kv_budget=200 << 20) as llm:
        yield llm


def ask(llm: LLM, question: str, **options: Any) -> list[Completion]:
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": question}], tools=options.pop("tools", None))
    return llm.generate([prompt], SamplingParams(**{"max_tokens": 160, **options}))


@pytest.mark.parametrize("schema", [PERSON, ANSWER], ids=["person", "answer"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1, "n": 2},
        {"temperature": 1.5, "seed": 2, "n": 3, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    ],
    ids=["greedy", "drawn", "penalties"],
)
def test_replies_follow_their_schema(llm: LLM, schema: dict[str, Any], options: dict[str, Any]) -> None:
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    question = "Describe a person, then say what you decide, as JSON."
    replies = ask(llm, question, response_format=response_format, **options)
    assert len(replies) == options.get("n", 1)
    for reply in replies:
        assert reply.finish_reason is FinishReason.STOP
        # The year 0, which a grammar allows, is no date for Python; so formats are checked as far as grammars can.
        jsonschema.validate(json.loads(reply.text.replace('"0000-', '"0001-')), schema, format_checker=FORMATS)
    if options["temperature"] == 1.0:
        # Twice more: what a cached prompt rounds otherwise may change what is drawn, in bf16, but only once.
        warm, again = (ask(llm, question, response_format=response_format, **options) for _ in range(2))
        assert [reply.token_ids for reply in again] == [reply.token_ids for reply in warm]


def test_json_mode_gives_an_object(llm: LLM) -> None:
    question = "Give a JSON object with a name."
    (reply,) = ask(llm, question, temperature=0, max_tokens=40, response_format={"type": "json_object"})
    # Nothing bounds such an object: it may be cut, but is never anything else.
    assert reply.text.startswith("{")
    if reply.finish_reason is FinishReason.STOP:
        assert isinstance(json.loads(reply.text), dict)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ],
    ids=["required", "weather", "time"],
)
def test_tools_are_called_where_they_must_be(llm: LLM, choice: Any, names: set[str]) -> None:
    parser = choose_parser(llm.tokenizer.chat_template(tools=True))
    bound = answer_format(llm.tokenizer, tools=TOOLS, tool_choice=choice, parallel=False, parser=parser)
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3, "n": 2}):
        for reply in ask(llm, "What is the weather in Paris?", tools=TOOLS, response_format=bound, **options):
            content, calls = parse(parser(TOOLS), [reply.text])
            assert content == ""
            ((name, arguments),) = calls
            assert name in names
            schema = TOOLS[0]["function"]["parameters"] if name == "get_weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(arguments), schema)


def test_a_free_choice_leaves_text_as_it_would_be(llm: LLM) -> None:
    """Greedy text without a call is the same with and without the grammar of the calls."""
    parser = choose_parser(llm.tokenizer.chat_template(tools=True))
    auto = answer_format(llm.tokenizer, tools=TOOLS, parser=parser)
    question = "What is the capital of France?"
    (free,) = ask(llm, question, temperature=0)
    (bound,) = ask(llm, question, temperature=0, response_format=auto)
    assert "Paris" in free.text
    assert (bound.token_ids, bound.finish_reason) == (free.token_ids, free.finish_reason)


def test_a_schema_that_cannot_be_compiled_is_refused_at_the_call(llm: LLM) -> None:
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    with pytest.raises(GrammarError, match=r"^prompt 1: the grammar cannot be compiled: Invalid type: nonsense$"):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(response_format=bad)])
    with pytest.raises(GrammarError, match="Invalid type: nonsense"):
        llm.stream("a", SamplingParams(response_format=bad))
