"""What a reply may be, as a grammar: thinking, then text, JSON or tool calls, as the request wants it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tamis.engine.grammar import json_rule
from tamis.engine.tokenizer import Tokenizer
from tamis.errors import GrammarError
from tamis.server.call_grammar import MOST_CALLS, SPACE, CallFormat, call_format
from tamis.server.call_parser import Tool, ToolCallParser
from tamis.server.lark import ANY_TEXT, Rules
from tamis.server.reasoning import Markers

ToolChoice = Literal["none", "auto", "required"] | Mapping[str, Any]
"""As the OpenAI API has it; a mapping names the function: {"type": "function", "function": {"name": ...}}."""


def answer_format(
    tokenizer: Tokenizer,
    *,
    response_format: Mapping[str, Any] | None = None,
    tools: Sequence[Tool] = (),
    tool_choice: ToolChoice = "auto",
    parallel: bool = True,
    parser: type[ToolCallParser],
    markers: Markers | None = None,
    inside: bool = False,
) -> Mapping[str, Any] | None:
    """SamplingParams.response_format for a reply that may begin with thinking between `markers` (`inside`: in the
    middle of it) and is then what `response_format` says, or calls of `tools` that `parser` can read.

    "auto": text or calls; "required": one call or more; a named function: exactly one call of it; "none": no calls.
    Without `parallel` there is one call at most. Where a tool is not `strict`, keywords of its schema that a grammar
    cannot express are passed over. Raises GrammarError naming the tool or schema that cannot be compiled.
    """
    wants_json = response_format is not None and response_format["type"] != "text"
    if tool_choice == "none" or not tools:
        if not wants_json or markers is None:
            return response_format
        tools = ()
    rules = Rules(tokenizer, [*parser.markers, *([markers.begin, markers.end] if markers else [])])
    answers = [_json_answer(rules, response_format)] if response_format is not None and wants_json else []
    if tools:
        answers += _calls(rules, call_format(parser), _callable(tools, tool_choice), tool_choice, parallel, answers)
    rules.add(f"{_thinking(rules, markers, inside)} ({' | '.join(answers)})", "start")
    return {"type": "grammar", "grammar": rules.text()}


def _json_answer(rules: Rules, response_format: Mapping[str, Any]) -> str:
    if response_format["type"] == "json_object":
        return rules.add(json_rule({"type": "object"}))
    return rules.add(json_rule(response_format["json_schema"]["schema"]))


def _callable(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
    """The tools that may be called."""
    if isinstance(choice, str):
        return tools
    name = choice["function"]["name"]
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise GrammarError(f"tool_choice names {name!r}, and there is no such tool")
    return named[:1]


def _calls(
    rules: Rules, form: CallFormat, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, others: Sequence[str]
) -> list[str]:
    """Replies that call tools, and those that need not where the choice is free and nothing else is wanted."""
    call = rules.add(" | ".join(form.call(rules, tool) for tool in tools))
    most = MOST_CALLS if parallel and isinstance(choice, str) else 1
    calls = _several(call, most) if form.shared_block else call
    body = rules.add(f"{SPACE} {calls} {SPACE} {rules.literal(form.end)}")
    if choice == "auto" and not others:
        # The last call that is allowed ends the reply: text behind it could hold another one.
        chat = f"{rules.until(form.begin)} {body}"
        before = f"({chat}){{0,{most - 1}}}" if most > 1 else ""
        return [rules.add(f"{before} ({chat} | {rules.add(ANY_TEXT)})")]
    block = rules.add(f"{rules.literal(form.begin)} {body}")
    return [block if form.shared_block else rules.add(_several(block, most))]


def _several(term: str, most: int) -> str:
    return f"{term} ({SPACE} {term}){{0,{most - 1}}}" if most > 1 else term


def _thinking(rules: Rules, markers: Markers | None, inside: bool) -> str:
    if markers is None:
        return ""
    thought = rules.until(markers.end)
    if inside:
        return f"{thought} {SPACE}"
    return f"({rules.literal(markers.begin)} {thought} {SPACE})?"
