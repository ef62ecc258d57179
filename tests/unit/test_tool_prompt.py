import json
from typing import Any

import pytest

from tamis.engine.chat_template import ChatTemplates
from tamis.engine.tool_prompt import ToolStyle, tool_style
from tamis.errors import RequestError

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
HERMES = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>{% endif %}{% for m in messages %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
    {"role": "assistant", "content": "Well,", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "snow"},
]


def render(template: str, messages: Any, **extra: Any) -> str:
    return ChatTemplates({"default": template}, special_tokens={}, origin="toy").render(messages, **extra)


def test_a_template_without_tools_is_given_them_as_text() -> None:
    text = render(PLAIN, CHAT[:1], tools=[TOOL])
    assert text.startswith("[system]# Tools")
    assert json.dumps(TOOL) in text
    assert text.endswith("</tool_call>[user]Hi")
    text = render(PLAIN, [{"role": "system", "content": "Be brief."}, *CHAT[:1]], tools=[TOOL])
    assert text.startswith("[system]Be brief.\n\n# Tools")
    assert text.count("[system]") == 1


def test_calls_and_results_become_text() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert render(PLAIN, CHAT) == (
        f"[user]Hi[assistant]{call}\n{call}"
        "[user]<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
        f"[assistant]Well,\n{call}[user]<tool_response>\nsnow\n</tool_response>"
    )


def test_a_template_with_tools_gets_them_and_arguments_as_objects() -> None:
    text = render(HERMES, CHAT, tools=[TOOL])
    assert text.startswith(json.dumps(TOOL) + "<tool_call>Hi")
    assert text.count('weather:{"city": "Zürich"}') == 3
    assert render(HERMES, CHAT[:1]) == "Hi"


def test_arguments_may_be_objects_or_nothing() -> None:
    for arguments, shown in (({"x": 1}, '{"x": 1}'), ("", "{}"), ("{}", "{}")):
        call = {"function": {"name": "f", "arguments": arguments}}
        assert render(HERMES, [{"role": "assistant", "tool_calls": [call]}]) == f"f:{shown}"
    assert render(HERMES, [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]) == "f:{}"


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([{"id": "x"}], "messages[0].tool_calls[0] has no function with a name"),
        (["f"], "messages[0].tool_calls[0] has no function with a name"),
        (7, "messages[0].tool_calls must be a list, not int"),
        ([CALL, {"function": {"name": "f", "arguments": '{"a'}}],
         "messages[0].tool_calls[1]: the arguments of 'f' are not JSON"),
        ([{"function": {"name": "f", "arguments": "[1]"}}],
         "messages[0].tool_calls[0]: the arguments of 'f' are not a JSON object"),
        ([{"function": {"name": "f", "arguments": "[" * 100_000}}],
         "messages[0].tool_calls[0]: the arguments of 'f' are not JSON"),
    ],
)  # fmt: skip
def test_calls_of_another_form_are_refused(calls: Any, message: str) -> None:
    for template in (PLAIN, HERMES):
        with pytest.raises(RequestError) as caught:
            render(template, [{"role": "assistant", "tool_calls": calls}])
        assert str(caught.value) == message


def test_the_callers_messages_and_tools_are_left_as_they_were() -> None:
    before = json.dumps([CHAT, TOOL])
    for template in (PLAIN, HERMES):
        render(template, CHAT, tools=[TOOL])
    assert json.dumps([CHAT, TOOL]) == before


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (None, None),
        (PLAIN, None),
        (HERMES, ToolStyle.HERMES),
        ("{{ tools }}{{ ']<]minimax[>[<tool_call>' }}", ToolStyle.M3),
        ("{% set ns = ']<]minimax[>[' %}{% if tools %}{{ ns ~ '<tool_call>' }}<invoke name=", ToolStyle.M3),
        ("{{ tools }}<tool_call><function=f>", None),
        ("{{ tools }}<tool_call>f<arg_key>", None),
        ("{{ tools }}[TOOL_CALLS]", None),
    ],
)
def test_which_format_a_template_teaches(template: str | None, style: ToolStyle | None) -> None:
    assert tool_style(template) is style
