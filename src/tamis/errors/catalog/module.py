"""What one module's syntax tree says of errors: classes, places where one is made, and who calls a function.

Large packages have millions of nodes: only functions with lines that look like errors, or like the calls that are asked
for, are looked at.
"""

import ast
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from tamis.errors.catalog.expressions import BUILTIN_ERRORS, Scope

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_ERROR_LINE = re.compile(r"\braise\b|\w(?:Error|Exception)\(|^\s*class\s", re.MULTILINE)


@dataclass(frozen=True)
class Call:
    """A call, and where it stands."""

    name: str
    """What is called, without what it is taken from."""
    node: ast.Call
    statement: ast.stmt
    scope: Scope

    @property
    def line(self) -> int:
        """Where it stands: of what is raised, the line of the raise."""
        return self.statement.lineno if isinstance(self.statement, ast.Raise) else self.node.lineno

    @property
    def is_raised(self) -> bool:
        """Whether it is what a raise statement raises."""
        return isinstance(self.statement, ast.Raise) and self.statement.exc is self.node


@dataclass(frozen=True)
class ClassFacts:
    """A class: its bases by name, and how it calls its base's `__init__`, where it has its own."""

    bases: tuple[str, ...]
    init: tuple[ast.Call, Scope] | None = None
    parameters: tuple[str, ...] = ()


@dataclass
class Findings:
    """What was found in the parts of a module that were looked at."""

    makings: list[Call] = field(default_factory=list)
    """Calls that may make an error."""
    calls: list[Call] = field(default_factory=list)
    """Of the function that was asked for."""
    classes: dict[str, ClassFacts] = field(default_factory=dict)
    functions: dict[str, list[ast.arguments]] = field(default_factory=dict)
    """By dotted name; a name may be defined more than once."""


class Module:
    """A module's source."""

    def __init__(self, text: str, tree: ast.Module | None = None) -> None:
        """`tree`: what could be parsed, where not all can. Raises SyntaxError where there is none."""
        self._text, self._given = text, tree
        self._calls: dict[str, list[Call]] = {}
        # Not kept: of a large package the trees would be gigabytes.
        self.findings = _Reader(self._lines_with(_ERROR_LINE), None).read(tree or parse(text))

    def calls_of(self, name: str) -> list[Call]:
        """The calls of functions and methods of this name."""
        if name not in self._calls:
            found = Findings()
            if f"{name}(" in self._text:  # mostly not, and a pattern takes much longer to say so
                found = _Reader(self._lines_with(re.compile(rf"\b{name}\(")), name).read(self._tree)
            self._calls[name] = found.calls
        return self._calls[name]

    @cached_property
    def _tree(self) -> ast.Module:
        return self._given or parse(self._text)

    def _lines_with(self, pattern: re.Pattern[str]) -> list[int]:
        lines = self._text.split("\n")
        return [number for number, line in enumerate(lines, 1) if pattern.search(line)]


def parse(text: str) -> ast.Module:
    """The syntax tree. Raises SyntaxError, and what else the parser gives up with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the code that is read: invalid escapes and the like
        return ast.parse(text)


class _Reader:
    """Goes through the functions that hold one of `lines`."""

    def __init__(self, lines: list[int], wanted: str | None) -> None:
        self._lines, self._wanted = lines, wanted
        self._found = Findings()
        self._constants: dict[str, ast.expr] = {}

    def read(self, tree: ast.Module) -> Findings:
        """What the module holds."""
        if self._lines:
            self._block(tree.body, Scope(self._constants))
        return self._found

    def _holds_a_line(self, node: ast.stmt) -> bool:
        place = bisect_left(self._lines, node.lineno)
        return place < len(self._lines) and self._lines[place] <= (node.end_lineno or node.lineno)

    def _block(self, statements: list[ast.stmt], scope: Scope) -> None:
        for statement in statements:
            if isinstance(statement, ast.ClassDef):
                self._class(statement, scope)
            elif isinstance(statement, _Function):
                if self._holds_a_line(statement):
                    self._function(statement, scope)
            else:
                self._statement(statement, scope)

    def _function(self, node: _Function, outer: Scope) -> Scope:
        name = f"{outer.name}.{node.name}" if outer.name else node.name
        scope = Scope(self._constants, name, parameters(node.args))
        self._found.functions.setdefault(name, []).append(node.args)
        self._block(node.body, scope)
        return scope

    def _class(self, node: ast.ClassDef, outer: Scope) -> None:
        inner = Scope(self._constants, f"{outer.name}.{node.name}" if outer.name else node.name)
        init: tuple[ast.Call, Scope] | None = None
        names: tuple[str, ...] = ()
        for statement in node.body:
            if isinstance(statement, _Function) and statement.name == "__init__":
                scope = self._function(statement, inner)
                calls = [part for part in ast.walk(statement) if isinstance(part, ast.Call) and _is_base_init(part)]
                names = scope.parameters[1:]
                init = (calls[0], scope) if calls else None
            elif self._holds_a_line(statement):
                self._block([statement], inner)
        bases = tuple(base for base in map(last_name, node.bases) if base)
        self._found.classes[node.name] = ClassFacts(bases, init, names)

    def _statement(self, statement: ast.stmt, scope: Scope) -> None:
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            _note_assignments(statement, scope if scope.name else None, self._constants)
        is_looked_at = self._holds_a_line(statement)
        if not is_looked_at and not hasattr(statement, "body"):
            return
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt):
                self._block([child], scope)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                self._block(child.body, scope)
            elif is_looked_at:
                self._expression(child, statement, scope)

    def _expression(self, expression: ast.AST, statement: ast.stmt, scope: Scope) -> None:
        for node in ast.walk(expression):
            name = last_name(node.func) if isinstance(node, ast.Call) else None
            if name is None or not isinstance(node, ast.Call):
                continue
            call = Call(name, node, statement, scope)
            if name == self._wanted:
                self._found.calls.append(call)
            elif self._wanted is None and (call.is_raised or name in BUILTIN_ERRORS or name[:1].isupper()):
                self._found.makings.append(call)


def parameters(arguments: ast.arguments) -> tuple[str, ...]:
    """The names of a function's parameters that a caller can give, in order."""
    return tuple(entry.arg for entry in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def last_name(expression: ast.expr) -> str | None:
    """`a.b.Name` and `Name` -> "Name"."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return last_name(value)
    return None


def _note_assignments(statement: ast.stmt, scope: Scope | None, constants: dict[str, ast.expr]) -> None:
    for name, value in _assigned(statement):
        if scope is None:
            constants[name] = value
        elif isinstance(statement, ast.AugAssign):
            before = [expression for _, expression in scope.assignments.get(name, [])]
            whole = ast.BinOp(before[-1], statement.op, value) if before else value
            scope.assignments.setdefault(name, []).append((statement, whole))
        else:
            scope.assignments.setdefault(name, []).append((statement, value))


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Names and the expressions they are set to."""
    match statement:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                match target, value:
                    case ast.Name(id=name), _:
                        yield name, value
                    case ast.Tuple(elts=names), ast.Tuple(elts=values) if len(names) == len(values):
                        yield from ((name.id, part) for name, part in zip(names, values, strict=True)
                                    if isinstance(name, ast.Name))  # fmt: skip
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value
        case ast.AugAssign(target=ast.Name(id=name), value=value):
            yield name, value


def _is_base_init(call: ast.Call) -> bool:
    """`super().__init__(...)` or `Base.__init__(self, ...)`."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "__init__"
