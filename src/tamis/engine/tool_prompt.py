"""Tools in a prompt, for models whose chat template has no place for them: in the words of the Hermes format."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from tamis.errors import RequestError

M3_NAMESPACE = "]<]minimax[>["
_OTHER_STYLES = ("<function=", "<arg_key>", "<invoke")
"""What templates hold that write something other than JSON between <tool_call> tags."""
_INTRODUCTION = """# Tools

You may call one or more functions to answer the user. Their signatures are between <tools> tags:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and arguments between <tool_call> tags:
<tool_call>
{{"name": "<name>", "arguments": {{"<parameter>": <value>}}}}
</tool_call>"""


class ToolStyle(StrEnum):
    """How a model writes its tool calls."""

    M3 = "m3"
    HERMES = "hermes"


def tool_style(template: str | None) -> ToolStyle | None:
    """What a chat template teaches; None where it knows no tools, or another way that is not read here."""
    if template is None or "tools" not in template or "<tool_call>" not in template:
        return None
    if M3_NAMESPACE in template:
        return ToolStyle.M3
    return None if any(mark in template for mark in _OTHER_STYLES) else ToolStyle.HERMES


def with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with the arguments of tool calls as objects, which templates expect, and not as JSON texts.

    Raises RequestError naming the message where a call has no name or its arguments are no JSON object.
    """
    plain = [dict(message) for message in messages]
    for place, message in enumerate(plain):
        if message.get("tool_calls"):
            where = f"messages[{place}].tool_calls"
            if not isinstance(message["tool_calls"], Sequence):
                raise RequestError(f"{where} must be a list, not {type(message['tool_calls']).__name__}")
            calls = [_with_object(call, f"{where}[{number}]") for number, call in enumerate(message["tool_calls"])]
            message["tool_calls"] = calls
    return plain


def as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` (of `with_objects`) as any template takes them: `tools`, calls and results are text in the Hermes
    format. Results that follow one another become one message of the user."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message.get('content', '')}\n</tool_response>"
            if plain and plain[-1].get("results"):
                plain[-1]["content"] += f"\n{result}"
            else:
                plain.append({"role": "user", "content": result, "results": True})
        elif message.get("tool_calls"):
            calls = [_call_text(call["function"]) for call in message["tool_calls"]]
            plain.append(
                {"role": message["role"], "content": "\n".join(filter(None, [message.get("content"), *calls]))}
            )
        else:
            plain.append(dict(message))
    plain = [{key: value for key, value in message.items() if key != "results"} for message in plain]
    return _introduced(plain, tools) if tools else plain


def _introduced(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0].get('content', '')}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _with_object(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} has no function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(f"{where}: the arguments of {function['name']!r} are not JSON") from None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}: the arguments of {function['name']!r} are not a JSON object")
    return {**call, "function": {**function, "arguments": dict(arguments)}}
