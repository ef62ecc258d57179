"""Chat messages to prompt text, through the model's own Jinja template.

Templates come with models and are not trusted: they run in a sandbox with a budget (`template_sandbox`). What they may
use beyond Jinja is what model authors rely on: raise_exception, strftime_now, tojson without HTML escapes, loop
controls, the `{% generation %}` tag (which only marks text for training), and the model's special tokens by name
(bos_token, ...).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from tamis.engine.template_sandbox import MAX_CHARS, TemplateSandbox
from tamis.engine.tool_prompt import as_text, tool_style, with_objects
from tamis.errors import RequestError, TokenizerError
from tamis.units import show

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who speaks in a chat; a template may know others, and then names them."""


class ChatTemplates:
    """The chat templates of one model, by name; "default" is the one used unless tools are given to a model that has a
    "tool_use" one.

    `special_tokens` are the texts of the model's special tokens under their names in templates, `origin` names the
    model in messages, `now` is the clock of strftime_now. A template is compiled when it is first used, so that a
    broken one only matters to chats.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str],
        origin: str,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.templates = dict(templates)
        self.special_tokens = dict(special_tokens)
        self.origin = origin
        self._environment = _environment(now)
        self._compiled: dict[str, jinja2.Template] = {}

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt text of `messages`, a list of {"role": ..., "content": ...}.

        Content is text, or a list of text parts ({"type": "text", "text": ...}), which are joined by line ends. It may
        be absent only beside tool_calls. `extra` (tools, enable_thinking, ...) is handed to the template; where that
        cannot write tools, they, and calls and results in the messages, become text (`tool_prompt`). Raises
        RequestError where the messages are not of that form, too long, of a role that neither ROLES nor the template
        has, or the template refuses them; TokenizerError where there is no template, or it fails or takes too much
        time or memory.
        """
        plain = with_objects(check_messages(messages))
        tools = extra.pop("tools", None) or []
        name = self._name(bool(tools))
        template = self._template(name)
        source = self.templates[name]
        _check_roles(plain, source)
        if tool_style(source) is None and (tools or "tool_calls" not in source):
            plain = as_text(plain, tools)
        elif tools:
            extra["tools"] = tools
        values = {**self.special_tokens, **extra, "messages": plain, "add_generation_prompt": add_generation_prompt}
        try:
            return self._environment.render(template, values, len(source))
        except _RefusedError as error:
            raise RequestError(f"the chat template refuses these messages: {_line(error)}") from None
        except Exception as error:
            # Anything can go wrong in a template: undefined names, None + str, forbidden attributes.
            raise TokenizerError(f"{self.origin}: the chat template failed: {_line(error)}") from error

    def source(self, *, tools: bool = False) -> str | None:
        """The text of the template that is used for chats, with or without tools; None where there is none."""
        return self.templates.get(self._name(tools))

    def _name(self, tools: bool) -> str:
        return "tool_use" if tools and "tool_use" in self.templates else "default"

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            if name not in self.templates:
                others = f" called {name!r} (only {', '.join(sorted(self.templates))})" if self.templates else ""
                raise TokenizerError(f"{self.origin}: the model has no chat template{others}")
            try:
                self._compiled[name] = self._environment.compile_template(self.templates[name])
            except jinja2.TemplateSyntaxError as error:
                message = f"the chat template is malformed at line {error.lineno}: {_line(error)}"
                raise TokenizerError(f"{self.origin}: {message}") from error
            except Exception as error:
                # Jinja and Python give up in many ways: nesting, numbers of thousands of digits, break outside a loop.
                raise TokenizerError(f"{self.origin}: the chat template is malformed: {_line(error)}") from error
        return self._compiled[name]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as plain dicts with text contents, keys whose value is None left out.

    Raises RequestError naming the message and what is wrong with it.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of {{role, content}}, not {type(messages).__name__}")
    if not messages:
        raise RequestError("messages is empty")
    plain = [_plain_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    length = sum(len(message.get("content", "")) for message in plain)
    if length > MAX_CHARS:
        raise RequestError(f"the messages have {length} characters, more than {MAX_CHARS}")
    return plain


def _plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be a {{role, content}}, not {type(message).__name__}")
    plain = {key: value for key, value in message.items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise RequestError(
            f"{where}.role is {show(plain['role'])}, not text" if "role" in plain else f"{where} has no role"
        )
    if "content" in plain:
        plain["content"] = _text(plain["content"], where)
    elif not plain.get("tool_calls"):
        raise RequestError(f"{where} has no content")
    return plain


def _check_roles(messages: Sequence[Mapping[str, Any]], template: str) -> None:
    """Most templates would write any role into the prompt, where the model can make nothing of it."""
    for place, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise RequestError(f"messages[{place}].role is {show(role)}, not one of {', '.join(ROLES)}")


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where}.content must be text, not {type(content).__name__}")
    parts = []
    for place, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"{where}.content[{place}] is {show(kind)}, and only text parts are supported")
        parts.append(part["text"])
    return "\n".join(parts)


class _RefusedError(jinja2.TemplateError):
    """A template called raise_exception."""


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: the body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment(now: Callable[[], datetime]) -> TemplateSandbox:
    environment = TemplateSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = environment.guarded("tojson", _to_json)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _refuse(message: str) -> None:
    raise _RefusedError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML, which models have never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _line(error: Exception) -> str:
    """What `error` says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
