from datetime import datetime
from typing import Any

import pytest

from tamis.engine.chat_template import ROLES, ChatTemplates
from tamis.errors import RequestError, TokenizerError

USER = [{"role": "user", "content": "Hi"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<b>A & B's</b>"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]


def render(template: str, messages: Any = USER, **extra: Any) -> str:
    templates = ChatTemplates(
        {"default": template},
        special_tokens={"bos_token": "<s>"},
        origin="toy",
        now=lambda: datetime(2026, 3, 4),
    )
    return templates.render(messages, **extra)


CHATML = """
{%- for message in messages %}
    <|im_start|>{{ message.role }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


def test_block_tags_leave_no_space_of_their_own() -> None:
    expected = "    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML) == expected
    assert render(CHATML, add_generation_prompt=False) == expected.removesuffix("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}x", "<s>x"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<é & \'>"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "<é & \'>"\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=True, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ {'b': 'é'} | tojson(ensure_ascii=True) }}", '{"b": "\\u00e9"}'),
        ("{{ strftime_now('%d %b %Y') }}", "04 Mar 2026"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}"
         "{{ i }}{% endfor %}", "013"),
        ("a{% generation %}{% set x = 1 %}b{% endgeneration %}c{{ x }}", "abc"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ mode }}", "deep"),
        ("{{ tools is defined and tools is not none }}", "False"),
    ],
)  # fmt: skip
def test_templates_have_what_model_authors_rely_on(template: str, expected: str) -> None:
    assert render(template, [{"role": "user", "content": "<é & '>"}], mode="deep") == expected


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list of {role, content}, not str"),
        ({"role": "user"}, "messages must be a list of {role, content}, not dict"),
        (None, "messages must be a list of {role, content}, not NoneType"),
        ([], "messages is empty"),
        (["Hi"], "messages[0] must be a {role, content}, not str"),
        ([*USER, {"content": "x"}], "messages[1] has no role"),
        ([{"role": 3, "content": "x"}], "messages[0].role is 3, not text"),
        ([{"role": "user"}], "messages[0] has no content"),
        ([{"role": "assistant", "content": None}], "messages[0] has no content"),
        ([{"role": "user", "content": 5}], "messages[0].content must be text, not int"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0] is 'image_url', and only text parts are supported",
        ),
        (
            [{"role": "user", "content": ["x"]}],
            "messages[0].content[0] is 'str', and only text parts are supported",
        ),
    ],
)
def test_messages_of_another_form_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(CHATML, messages)
    assert str(caught.value) == message


@pytest.mark.parametrize("role", ["wizard", "User", "", "x" * 1000])
def test_a_role_that_nobody_knows_is_refused_with_its_place_and_the_ones_there_are(role: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(CHATML, [*USER, {"role": role, "content": "x"}])
    assert str(caught.value).startswith(f"messages[1].role is {role!r}"[:90])
    assert str(caught.value).endswith(", not one of system, developer, user, assistant, tool")
    assert len(str(caught.value)) < 200


def test_a_role_that_the_template_names_is_taken() -> None:
    template = CHATML + "{% if messages[0].role in ('observation', \"root\") %}{% endif %}"
    for role in ("observation", "root", *ROLES):
        assert role in render(template, [{"role": role, "content": "x"}]) or role == "tool"


def test_text_parts_are_joined_and_tool_calls_may_stand_alone() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    call = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]
    template = "{{ messages[0].tool_calls[0].function.name }}{{ 'content' in messages[0] }}"
    assert render(template, call) == "fFalse"


def test_the_callers_messages_are_left_as_they_were() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    render(CHATML, messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]


def test_a_template_may_refuse_messages() -> None:
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('System\nfirst!') }}{% endif %}"
    with pytest.raises(RequestError, match=r"^the chat template refuses these messages: System first!$"):
        render(template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for x in %}", r"^toy: the chat template is malformed at line 1: "),
        ("a\n{% nonsense %}", r"^toy: the chat template is malformed at line 2: .*nonsense"),
        ("{{ nothing.at.all }}", r"^toy: the chat template failed: 'nothing' is undefined$"),
        ("{{ 1 / 0 }}", r"^toy: the chat template failed: division by zero$"),
        ("{{ messages + none }}", r"^toy: the chat template failed: .*NoneType"),
        ("{{ messages.append(1) }}", r"^toy: the chat template failed: .*append.* is unsafe"),
        ("{{ ''.__class__.__mro__ }}", r"^toy: the chat template failed: .*__class__.* is unsafe"),
        ("{{ raise_exception.__globals__.os }}", r"^toy: the chat template failed: .*__globals__.* is unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", r"^toy: the chat template failed: Range too big"),
        ("{% include 'x' %}", r"^toy: the chat template failed: no loader"),
    ],
)
def test_a_bad_template_is_one_clear_error(template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        render(template)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(TokenizerError, match=r"^toy: the model has no chat template$"):
        ChatTemplates({}, special_tokens={}, origin="toy").render(USER)
    with pytest.raises(TokenizerError, match=r"^toy: the model has no chat template called 'default' \(only rag\)$"):
        ChatTemplates({"rag": "x"}, special_tokens={}, origin="toy").render(USER)


def test_a_broken_template_only_matters_to_chats_that_use_it() -> None:
    templates = ChatTemplates({"default": "ok", "tool_use": "{% if %}"}, special_tokens={}, origin="toy")
    assert templates.render(USER) == "ok"
    with pytest.raises(TokenizerError, match="malformed at line 1"):
        templates.render(USER, tools=[{}])


@pytest.mark.parametrize(
    "template",
    ["{% break %}", "{% for i in [1] %}" * 25 + "{% endfor %}" * 25, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
     "{% if 1 %}" * 300 + "{% endif %}" * 300, "{{ " + "1" * 5000 + " }}", "{{ " + "not " * 3000 + "1 }}"],
    ids=["break", "for", "parentheses", "if", "digits", "not"],
)  # fmt: skip
def test_a_template_that_cannot_be_compiled_is_malformed(template: str) -> None:
    with pytest.raises(TokenizerError, match=r"^toy: the chat template is malformed: ") as caught:
        render(template)
    assert "\n" not in str(caught.value)


GROWING = "{%% set ns = namespace(x=%s) %%}{%% for i in range(50) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"
LONG = "{% set x = 'a' * 100000 %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * (3 * 10 ** 9) }}", "it makes more than 16777216 characters"),
        ("{{ (3 * 10 ** 9) * [0] }}", "it makes more than 16777216 characters"),
        ("{{ (10 ** 1000) ** 1000 }}", "it computes a number of more than 65536 bits"),
        ("{{ '%1000000000d' % 1 }}", "it pads text to a width of more than 99999"),
        ("{{ '%*d' % (1000000000, 1) }}", "it pads text to a width of more than 99999"),
        ("{{ '%1000000000d' | format(1) }}", "it pads text to a width of more than 99999"),
        ("{{ '{:>2000000000}'.format(1) }}", "it pads text to a width of more than 99999"),
        ("{{ '{:{}}'.format(1, 2000000000) }}", "it pads text to a width of more than 99999"),
        (GROWING % ("'a'", "ns.x ~ ns.x"), "it makes more than 16777216 characters"),
        (GROWING % ("'a'", "ns.x + ns.x"), "it makes more than 16777216 characters"),
        (GROWING % ("['a']", "[ns.x, ns.x]"), "it makes more than 16777216 characters"),
        (LONG + "{{ x.replace('a', x) }}", "it makes more than 16777216 characters"),
        (LONG + "{{ x | replace('a', x) }}", "it makes more than 16777216 characters"),
        (LONG + "{{ x.join(range(9000) | map('string')) }}", "it makes more than 16777216 characters"),
        (LONG + "{{ range(9000) | join(x) }}", "it makes more than 16777216 characters"),
        (LONG + "{{ ([x] * 9000) | join }}", "it makes more than 16777216 characters"),
        ("{{ ['a'] | map('center', 10 ** 10) | list }}", "it calls center with 10000000000, more than 100000"),
        ("{{ 'a'.ljust(10 ** 10) }}", "it calls ljust with 10000000000, more than 100000"),
        ("{{ (1).to_bytes(10 ** 10, 'big') }}", "it calls to_bytes with 10000000000, more than 100000"),
        ("{{ 'a'.translate({97: 'b'}) }}", "it calls translate, which is not available"),
        ("{% for i in range(99999) %}" + "y" * 1000 + "{% endfor %}", "it makes more than 16777216 characters"),
        ("{% set z %}{% for i in range(99999) %}" + "y" * 20000 + "{% endfor %}{% endset %}",
         "it makes more than 1073741824 characters"),
        (LONG + "{% macro f(x) %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endmacro %}{{ f(x) }}",
         "it makes more than 1073741824 characters"),
    ],
)  # fmt: skip
def test_a_template_cannot_make_texts_without_end(template: str, reason: str) -> None:
    with pytest.raises(TokenizerError, match=f"^toy: the chat template failed: {reason}$"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_cannot_run_without_end(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr("tamis.engine.template_sandbox.MAX_SECONDS", 0.05)
    with pytest.raises(TokenizerError, match=r"^toy: the chat template failed: it takes longer than 0\.05 seconds$"):
        render(template)


def test_what_is_counted_works_as_ever() -> None:
    template = (
        "{{ 'a' ~ 1 ~ none ~ x }}|{{ 'a{}b'.format(3) }}|{{ '%s-%3d' % ('x', 3) }}|{{ 7 % 4 }}|{{ 2 ** 3 }}|"
        "{{ [1] + [2] }}|{{ '-' * 3 }}|{{ 'a,b'.split(',') | join(';') }}|{{ 'aXa' | replace('X', '-') }}|"
        "{% for i in range(3) %}{{ loop.index }}{{ '' if loop.last else '/' }}{% endfor %}|"
        "{% for k, v in {'p': 1}.items() %}{{ k }}{{ v }}{% endfor %}|{% for i in [] %}{% else %}none{% endfor %}|"
        "{% for i in [1, [2, 3]] recursive %}{{ i if i is number else loop(i) }}{% endfor %}|"
        "{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(1, b=3) }}"
    )
    assert render(template) == "a1None|a3b|x-  3|3|8|[1, 2]|---|a;b|a-a|1/2/3|p1|none|123|1213"


def test_messages_too_long_for_any_model_are_refused() -> None:
    half = {"role": "user", "content": "x" * (1 << 23)}
    with pytest.raises(RequestError, match=r"^the messages have 25165824 characters, more than 16777216$"):
        render(CHATML, [half] * 3)
