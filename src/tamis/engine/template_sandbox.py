"""Where chat templates run. They come with models and are not trusted: not with names, memory or time.

Jinja's immutable sandbox keeps a template from everything but its own values. On top of that every rendering has a
budget: characters it may make, one text's length, and seconds. What makes long texts out of short ones (`*`, `**`,
`%`, `+`, `~`, format, replace, join, padding) is looked at before it is done; loops and calls count what they print.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tamis.units import show

MAX_CHARS = 1 << 24
"""The longest text a template may make: several times what any model's context holds."""
MAX_TOTAL_CHARS = 1 << 30
"""All texts it makes on the way; a long chat that is put together piece by piece makes its length many times over."""
MAX_SECONDS = 10.0
"""Real templates take milliseconds."""
_MAX_BITS = 1 << 16
_TOO_WIDE = "it pads text to a width of more than 99999"
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{6})")
_WIDE_FORMAT = re.compile(r":[^{}]*(\{|\d{6})")
_TEXT_FILTERS = frozenset({"batch", "center", "format", "indent", "join", "pprint", "replace", "slice", "string",
                           "tojson", "urlencode", "xmlattr"})  # fmt: skip
_NO_FILTERS = ("urlize", "wordwrap")
_NO_METHODS = ("expandtabs", "translate")
_MAX_COUNT = 100_000
"""What a template may ask for by number: columns, repetitions in a filter."""
_ITEM_CHARS = 16
"""What an item of a list counts for, however short it prints: it takes that much memory and time at least."""


class TooMuchError(SecurityError):
    """A template has used up its budget."""


class _Budget:
    def __init__(self) -> None:
        self._chars = MAX_TOTAL_CHARS
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, chars: int) -> None:
        self._chars -= chars
        if self._chars < 0 or chars > MAX_CHARS:
            raise TooMuchError(f"it makes more than {MAX_CHARS if chars > MAX_CHARS else MAX_TOTAL_CHARS} characters")
        if time.monotonic() > self._deadline:
            raise TooMuchError(f"it takes longer than {MAX_SECONDS:g} seconds")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates have a budget; compile with `compile_template`, run with `render`."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=self._printed)
        # Nothing a chat needs, and none of it says beforehand how much it makes.
        del self.globals["lipsum"]
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters.update({name: self.guarded(name, self.filters[name]) for name in self.filters})
        self.filters |= {" counted": self._counted, " concat": self._concat}
        self._running = threading.local()

    def compile_template(self, source: str) -> Template:
        """The template, its loops and concatenations counted. Raises whatever Jinja and Python make of `source`."""
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            literal = sum(len(text.data) for text in loop.find_all(nodes.TemplateData))
            loop.iter = nodes.Filter(loop.iter, " counted", [nodes.Const(literal)], [], None, None)
        self._replace_concats(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    def render(self, template: Template, values: Mapping[str, Any], literal: int) -> str:
        """The text. `literal` is the length of the template, which a macro may print. Raises TooMuchError."""
        self._running.budget, self._running.literal = _Budget(), literal
        try:
            pieces, length = [], 0
            for piece in template.generate(values):
                length += len(piece)
                if length > MAX_CHARS:
                    raise TooMuchError(f"it makes more than {MAX_CHARS} characters")
                pieces.append(piece)
            return "".join(pieces)
        finally:
            del self._running.budget

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, where the result is not too large."""
        if operator == "%" and isinstance(left, str):
            if _WIDE_PERCENT.search(left):
                raise TooMuchError(_TOO_WIDE)
            self._spend(len(left) + left.count("%") * _size(right))
        elif operator == "+" and _sized(left) and _sized(right):
            self._spend(len(left) + len(right))
        elif operator == "*" and (_sized(left) or _sized(right)):
            text, times = (left, right) if _sized(left) else (right, left)
            self._spend(len(text) * times if isinstance(times, int) and times > 0 else 0)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise TooMuchError(f"it computes a number of more than {_MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, macro or method of a template's values."""
        self._spend(self._running.literal if isinstance(obj, Macro) else 1)
        method = getattr(obj, "__wrapped__", obj)  # str.format comes in the sandbox's own wrapping
        if isinstance(method, BuiltinMethodType):
            args = tuple(_listed(value) for value in args) if method.__name__ == "join" else args
            self._check_method(method.__name__, method.__self__, [*args, *kwargs.values()])
        return super().call(context, obj, *args, **kwargs)

    def _check_method(self, name: str, target: object, arguments: list[Any]) -> None:
        if isinstance(target, str) and name in ("format", "format_map"):
            if _WIDE_FORMAT.search(target):
                raise TooMuchError(_TOO_WIDE)
            self._spend(len(target) + target.count("{") * _size(arguments))
        elif isinstance(target, str) and name == "replace" and len(arguments) > 1:
            self._spend(_replaced(target, arguments[0], arguments[1]))
        elif isinstance(target, str) and name == "join" and arguments:
            self._spend(_joined(arguments[0], target))
        elif isinstance(target, str) and name in _NO_METHODS:
            raise SecurityError(f"it calls {name}, which is not available")
        elif isinstance(target, str | bytes | int):
            _check_counts(name, arguments)

    def guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter `function`, which spends what it makes; Jinja sees the marks of the original."""

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if name in _TEXT_FILTERS:
                args = tuple(_listed(value) for value in args)
                values = [*args, *kwargs.values()]
                texts = [value for value in values if isinstance(value, str)]
                self._spend(sum(_size(value) for value in values))
                if name not in ("string", "tojson"):
                    _check_counts(name, values)
                if name == "replace" and len(texts) > 2:
                    self._spend(_replaced(*texts[:3]))
                if name == "join" and texts:
                    self._spend(sum(_joined(value, texts[-1]) for value in values if value is not texts[-1]))
                if name == "format" and texts and _WIDE_PERCENT.search(texts[0]):
                    raise TooMuchError(_TOO_WIDE)
            return function(*args, **kwargs)

        return guarded

    def _replace_concats(self, node: nodes.Node) -> None:
        """Let `a ~ b` go through `_concat`, all over the tree."""
        for field, value in node.iter_fields():
            items = value if isinstance(value, list) else [value]
            for place, item in enumerate(items):
                if not isinstance(item, nodes.Node):
                    continue
                self._replace_concats(item)
                if isinstance(item, nodes.Concat):
                    items[place] = nodes.Filter(nodes.List(item.nodes), " concat", [], [], None, None)
            if items and not isinstance(value, list):
                setattr(node, field, items[0])

    @pass_context
    def _counted(self, _context: Context, items: Iterable[Any], literal: int) -> Iterator[Any]:
        for item in items:
            self._spend(1 + literal)
            yield item

    @pass_context
    def _concat(self, _context: Context, parts: list[Any]) -> str:
        self._spend(_size(parts))
        return "".join(map(str, parts))

    @pass_context
    def _printed(self, _context: Context, value: Any) -> Any:
        self._spend(_size(value))
        return value

    def _spend(self, chars: int) -> None:
        # Jinja works constants out when it compiles, where nothing runs yet.
        budget = getattr(self._running, "budget", None)
        (budget or _Budget()).spend(chars)


def _check_counts(name: str, arguments: list[Any]) -> None:
    for value in arguments:
        if isinstance(value, int) and value > _MAX_COUNT:
            raise TooMuchError(f"it calls {name} with {show(value)}, more than {_MAX_COUNT}")


def _listed(value: Any) -> Any:
    """What comes item by item as a list, whose size is known."""
    return list(value) if isinstance(value, range | Iterator) else value


def _sized(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple)


def _size(value: Any) -> int:
    """About how long `value` is as text; no more than just above MAX_CHARS is counted."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if not isinstance(value, list | tuple | set | frozenset):
        return 1
    total = 0
    for item in value:
        total += _ITEM_CHARS + _size(item)
        if total > MAX_CHARS:
            break
    return total


def _replaced(text: str, old: Any, new: Any) -> int:
    if not isinstance(old, str) or not isinstance(new, str):
        return 0
    return len(text) + text.count(old) * len(new)


def _joined(items: Any, separator: str) -> int:
    return len(items) * len(separator) + _size(items) if isinstance(items, list | tuple | Mapping) else 0
