"""From the places where errors are made to class and message: constructors are followed, and callers of helpers."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tamis.errors.catalog.expressions import BUILTIN_ERRORS, MAX_TEXTS, Place, Scope, Text, texts_of
from tamis.errors.catalog.module import Call, ClassFacts, Module, last_name, parameters
from tamis.errors.catalog.template import Template, make_template

LEAST_WEIGHT = 4
"""Letters and digits a message must have of its own; below, it is what somebody else said."""
_SUFFIXES = ("Error", "Exception")
_MESSAGE_NAMES = ("message", "msg", "detail", "reason", "description")
_MAX_DEPTH = 3


@dataclass(frozen=True)
class Found:
    """A message that an error is made with."""

    error_class: str
    template: Template
    line: int
    function: str
    """The dotted name in the module of the function that makes it."""

    @property
    def speaks(self) -> bool:
        """Whether the message has words of its own."""
        return self.template.weight >= LEAST_WEIGHT


class Classes:
    """The classes of a package, by name, and which of them are errors."""

    def __init__(self, modules: list[Module]) -> None:
        self._facts: dict[str, ClassFacts] = {}
        for module in modules:
            self._facts.update(module.findings.classes)

    def is_error(self, name: str, depth: int = 12) -> bool:
        """Whether `name` is an error's class: by its bases, or by its name where the package does not define it."""
        facts = self._facts.get(name)
        if facts is None or depth == 0:
            return name in BUILTIN_ERRORS or name.endswith(_SUFFIXES)
        return any(self.is_error(base, depth - 1) for base in facts.bases)

    def constructor(self, name: str, depth: int = 12) -> ClassFacts | None:
        """The class, or the first base, that has an `__init__` of its own which calls its base's."""
        facts = self._facts.get(name)
        if facts is None or facts.init is not None or depth == 0:
            return facts if facts is not None and facts.init is not None else None
        return next(filter(None, (self.constructor(base, depth - 1) for base in facts.bases)), None)


class Messages:
    """The messages of a package's errors. What only a function's callers know is looked up at its callers."""

    def __init__(self, modules: list[Module]) -> None:
        self._classes = Classes(modules)
        self._modules = modules

    def of(self, module: Module) -> Iterator[Found]:
        """Every message that the module makes an error with, in the order of the source."""
        for making in sorted(module.findings.makings, key=lambda making: making.line):
            if making.is_raised and making.name in making.scope.parameters:
                for kind in sorted(self._kinds(module, making.scope, making.name, _MAX_DEPTH)):
                    yield from self._found(module, making, kind)
            elif self._classes.is_error(making.name) or (making.is_raised and making.name[:1].isupper()):
                yield from self._found(module, making, making.name)

    def _found(self, module: Module, making: Call, kind: str) -> Iterator[Found]:
        for text in _texts(self._classes, making, kind):
            plain = Found(kind, make_template(list(text)), making.line, making.scope.name)
            known = [] if plain.speaks else list(self._by_callers(module, making.scope, text, _MAX_DEPTH))
            if not known:
                yield plain
            for call, filled in known:
                template = make_template(list(filled))
                if call.scope.constants is making.scope.constants:  # in the same module
                    yield Found(kind, template, call.line, call.scope.name)
                else:
                    yield replace(plain, template=template)

    def _by_callers(self, module: Module, scope: Scope, text: Text, depth: int) -> Iterator[tuple[Call, Text]]:
        """The text as the callers of the function complete it, and from where."""
        if depth == 0 or not any(hole and piece in scope.parameters for piece, hole in text):
            return
        for call in self._callers(module, scope):
            given = _bind(call.node, _given_parameters(scope, call.node))
            for full in _filled(text, given, call.scope, call.statement):
                if make_template(list(full)).weight >= LEAST_WEIGHT:
                    yield call, full
                else:
                    yield from self._by_callers(module, call.scope, full, depth - 1)

    def _callers(self, module: Module, scope: Scope, *, everywhere: bool = False) -> list[Call]:
        """In the module; of a function that nobody there calls, or `everywhere`, in the whole package."""
        name = scope.name.rpartition(".")[2]
        own = module.calls_of(name)
        if scope.name != name or (own and not everywhere):
            return own
        return [call for other in self._modules for call in other.calls_of(name)]

    def _kinds(self, module: Module, scope: Scope, parameter: str, depth: int) -> set[str]:
        """The classes that callers give for a parameter, its default among them."""
        kinds = set()
        for arguments in module.findings.functions.get(scope.name, []):
            defaults = dict(zip(reversed(parameters(arguments)), reversed(arguments.defaults), strict=False))
            if parameter in defaults and (name := last_name(defaults[parameter])):
                kinds.add(name)
        for call in self._callers(module, scope, everywhere=True) if depth else ():
            argument = _bind(call.node, _given_parameters(scope, call.node)).get(parameter)
            name = last_name(argument) if argument is not None else None
            if name in call.scope.parameters and name is not None:
                kinds |= self._kinds(module, call.scope, name, depth - 1)
            elif name is not None:
                kinds.add(name)
        return kinds


def _texts(classes: Classes, making: Call, kind: str) -> list[Text]:
    """What str(error) may be."""
    facts = classes.constructor(kind)
    if facts is None or facts.init is None:
        return _own_message(making)
    init, scope = facts.init
    is_unbound = isinstance(init.func, ast.Attribute) and not isinstance(init.func.value, ast.Call)
    arguments = init.args[1:] if is_unbound else init.args
    if not arguments:
        return []
    given = _bind(making.node, facts.parameters)
    texts = texts_of(arguments[0], scope, init) if not isinstance(arguments[0], ast.Starred) else []
    return [full for text in texts for full in _filled(text, given, making.scope, making.statement)]


def _own_message(making: Call) -> list[Text]:
    """The first argument that has words, else the first."""
    arguments = [argument for argument in making.node.args if not isinstance(argument, ast.Starred)]
    arguments += [keyword.value for keyword in making.node.keywords if keyword.arg in _MESSAGE_NAMES]
    choices = [texts_of(argument, making.scope, making.statement) for argument in arguments]
    speaking = [texts for texts in choices if any(not hole for text in texts for _, hole in text)]
    return next(iter(speaking or choices), [])


def _bind(call: ast.Call, names: tuple[str, ...]) -> dict[str, ast.expr]:
    bound = dict(zip(names, call.args, strict=False))
    return bound | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in names and keyword.arg}


def _filled(text: Text, given: dict[str, ast.expr], scope: Scope, at: Place) -> list[Text]:
    """`text` with the holes that are parameters replaced by what a caller gives."""
    texts: list[Text] = [()]
    for piece, hole in text:
        choices = texts_of(given[piece], scope, at) if hole and piece in given else [((piece, hole),)]
        texts = [head + choice for head in texts for choice in choices][:MAX_TEXTS]
    return texts


def _given_parameters(scope: Scope, call: ast.Call) -> tuple[str, ...]:
    """The parameters that a call's arguments are for: without self where it is called as a method."""
    is_method = isinstance(call.func, ast.Attribute) and scope.parameters[:1] in (("self",), ("cls",))
    return scope.parameters[1:] if is_method else scope.parameters
