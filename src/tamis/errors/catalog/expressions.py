"""From an expression in source code to the texts it may become: f-strings, sums, `%`, `format`, names of such."""

import ast
import builtins
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from string import Formatter

MAX_TEXTS = 12
"""Alternatives of one message; more are left out."""
Piece = tuple[str, bool]
"""A text, and whether it is a hole (then: its expression)."""
Text = tuple[Piece, ...]
Place = ast.stmt | ast.expr
"""Where in the source something is asked for."""
BUILTIN_ERRORS = {name for name, value in vars(builtins).items()
                  if isinstance(value, type) and issubclass(value, BaseException)}  # fmt: skip
_PERCENT = re.compile(r"%(?:\((\w+)\))?[-#0 +]*(?:\d+|\*)?(?:\.(?:\d+|\*))?([a-zA-Z%])")
_SAME_TEXT = {"dedent", "cleandoc", "strip", "lstrip", "rstrip", "str"}
"""Calls that leave a message's words as they are."""


@dataclass
class Scope:
    """What names mean where an expression stands: constants of the module, parameters and variables of a function."""

    constants: dict[str, ast.expr]
    name: str = ""
    """The function's dotted name in its module; "" outside of any."""
    parameters: tuple[str, ...] = ()
    assignments: dict[str, list[tuple[ast.stmt, ast.expr]]] = field(default_factory=dict)

    def values(self, name: str, before: Place) -> Iterator[ast.expr]:
        """What a variable may hold at `before`, the last assignment first, up to one that is always made."""
        for statement, value in reversed(self.assignments.get(name, [])):
            if statement.lineno < before.lineno:
                yield value
                if statement.col_offset <= before.col_offset:
                    return
        if name not in self.parameters and name not in self.assignments and name in self.constants:
            yield self.constants[name]


def texts_of(expression: ast.expr, scope: Scope, at: Place, depth: int = 6) -> list[Text]:
    """The texts that `expression` may become, in the statement `at`; what is not known is a hole."""
    found = list(itertools.islice(_texts(expression, scope, at, depth), MAX_TEXTS)) if depth else []
    return found or [((ast.unparse(expression), True),)]


def _texts(expression: ast.expr, scope: Scope, at: Place, depth: int) -> Iterable[Text]:
    match expression:
        case ast.Constant(value=str(text)):
            return [((text, False),)]
        case ast.JoinedStr(values=values):
            return _f_string(values, scope, at, depth)
        case ast.IfExp(body=body, orelse=other):
            return [*texts_of(body, scope, at, depth - 1), *texts_of(other, scope, at, depth - 1)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _sums(texts_of(left, scope, at, depth - 1), texts_of(right, scope, at, depth - 1))
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            return [_percent(text, right) for text in texts_of(left, scope, at, depth - 1)]
        case ast.Call(func=ast.Attribute(value=text, attr="format")):
            return [_format(pieces, expression) for pieces in texts_of(text, scope, at, depth - 1)]
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(glue)), attr="join"), args=[ast.List(elts=parts)]
        ):
            return _joined(glue, [texts_of(part, scope, at, depth - 1) for part in parts])
        case ast.Call(func=ast.Attribute(value=text, attr=name), args=[]) if name in _SAME_TEXT:
            return _known(text, scope, at, depth)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[text]) if name in _SAME_TEXT:
            return _known(text, scope, at, depth)
        case ast.NamedExpr(value=value):
            return texts_of(value, scope, at, depth - 1)
        case ast.Name(id=name):
            return [text for value in scope.values(name, at) for text in texts_of(value, scope, at, depth - 1)]
        case _:
            return []


def _known(expression: ast.expr, scope: Scope, at: Place, depth: int) -> list[Text]:
    """The texts of `expression` that say something; of none, the whole call is the hole."""
    return [text for text in texts_of(expression, scope, at, depth - 1) if any(not hole for _, hole in text)]


def _f_string(values: list[ast.expr], scope: Scope, at: Place, depth: int) -> list[Text]:
    """The text; where it has no words of its own, with what its variables hold."""
    pieces = [_f_string_piece(value) for value in values]
    if any(character.isalpha() for words, hole in pieces if not hole for character in words):
        return [tuple(pieces)]
    parts = [_variable(value, piece, scope, at, depth) for value, piece in zip(values, pieces, strict=True)]
    return _joined("", parts)


def _variable(value: ast.expr, piece: Piece, scope: Scope, at: Place, depth: int) -> list[Text]:
    match value:
        case ast.FormattedValue(value=ast.Name() as name, conversion=-1, format_spec=None):
            return _known(name, scope, at, depth) or [(piece,)]
    return [(piece,)]


def _f_string_piece(value: ast.expr) -> Piece:
    if isinstance(value, ast.Constant):
        return str(value.value), False
    if isinstance(value, ast.FormattedValue):
        # Written as an f-string writes it, conversion and format included.
        return ast.unparse(ast.JoinedStr([value])).split("{", 1)[1].rsplit("}", 1)[0].strip(), True
    return ast.unparse(value), True


def _sums(lefts: list[Text], rights: list[Text]) -> list[Text]:
    return [left + right for left in lefts for right in rights]


def _joined(glue: str, parts: list[list[Text]]) -> list[Text]:
    texts: list[Text] = [()]
    for place, part in enumerate(parts):
        between: Text = ((glue, False),) if place else ()
        texts = [text + between + choice for text in texts for choice in part][:MAX_TEXTS]
    return texts


def _percent(text: Text, values: ast.expr) -> Text:
    names = [ast.unparse(value) for value in values.elts] if isinstance(values, ast.Tuple) else [ast.unparse(values)]
    left = iter(names)
    pieces: list[Piece] = []
    for literal, hole in text:
        if hole:
            pieces.append((literal, True))
            continue
        end = 0
        for match in _PERCENT.finditer(literal):
            pieces.append((literal[end : match.start()], False))
            pieces.append(("%", False) if match[2] == "%" else (match[1] or next(left, "value"), True))
            end = match.end()
        pieces.append((literal[end:], False))
    return tuple(pieces)


def _format(text: Text, call: ast.Call) -> Text:
    names = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}
    names |= {str(place): ast.unparse(value) for place, value in enumerate(call.args)}
    count = itertools.count()
    pieces: list[Piece] = []
    for literal, hole in text:
        if hole:
            pieces.append((literal, True))
            continue
        try:
            parsed = list(Formatter().parse(literal))
        except ValueError:  # not written for format: the call would raise
            return text
        for words, name, _, _ in parsed:
            pieces.append((words, False))
            if name is not None:
                key = name or str(next(count))
                pieces.append((names.get(key, key), True))
    return tuple(pieces)
