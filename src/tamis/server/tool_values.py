"""From texts and elements to the JSON values that a tool's schema calls for."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Schema = Mapping[str, Any]
_MAX_HOPS = 16
"""References that are followed, one after another."""
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array",
          dict: "object"}  # fmt: skip


@dataclass
class Element:
    """A tag, the text in it and the elements in it."""

    name: str
    text: list[str] = field(default_factory=list)
    children: list["Element"] = field(default_factory=list)


class Schemas:
    """A tool's schema and the parts it refers to ("#/...")."""

    def __init__(self, root: Any) -> None:
        self.root: Schema = root if isinstance(root, Mapping) else {}

    def resolve(self, schema: Any) -> Schema:
        """`schema`, or what it refers to; anything goes where that is not there."""
        for _ in range(_MAX_HOPS):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._target(schema["$ref"])
        return schema if isinstance(schema, Mapping) else {}

    def types(self, schema: Any) -> frozenset[str]:
        """The JSON types that `schema` allows; empty: any."""
        return self._types(schema, {}) or frozenset()

    def _types(self, schema: Any, known: dict[int, frozenset[str] | None]) -> frozenset[str] | None:
        """As `types`; None for a schema that is still being looked at, which a branch of its own refers to.

        `known`, by identity: branches that refer to one another are read once, not as often as there are ways to them.
        """
        schema = self.resolve(schema)
        if id(schema) not in known:
            known[id(schema)] = None
            known[id(schema)] = self._own_types(schema, known)
        return known[id(schema)]

    def _own_types(self, schema: Schema, known: dict[int, frozenset[str] | None]) -> frozenset[str]:
        if "type" in schema:
            named = schema["type"]
            return frozenset([named] if isinstance(named, str) else filter(_is_text, _list(named)))
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else _list(schema["enum"])
            return frozenset(_TYPES.get(type(value), "string") for value in values)
        branches = [found for branch in _branches(schema) if (found := self._types(branch, known)) is not None]
        if branches:
            return frozenset().union(*branches) if all(branches) else frozenset()
        inner = {"properties": "object", "items": "array"}
        return frozenset(kind for key, kind in inner.items() if key in schema)

    def property(self, schema: Any, name: str) -> Any:
        """The schema of an object's member."""
        holder = self._holder(schema, "properties")
        more = self._holder(schema, "additionalProperties").get("additionalProperties")
        return holder.get("properties", {}).get(name, more)

    def items(self, schema: Any) -> Any:
        """The schema of a list's items."""
        return self._holder(schema, "items").get("items")

    def _holder(self, schema: Any, key: str) -> Schema:
        """`schema`, or the first of its branches, that has `key`; empty where none has."""
        seen: set[int] = set()
        rest = [schema]
        while rest:
            plain = self.resolve(rest.pop())
            if isinstance(plain.get(key), Mapping):
                return plain
            if id(plain) not in seen:
                seen.add(id(plain))
                rest += reversed(_branches(plain))
        return {}

    def _target(self, reference: str) -> Any:
        place: Any = self.root
        for part in reference.removeprefix("#").strip("/").split("/") if reference.startswith("#") else ["?"]:
            if part:
                place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        return place


def value_of(element: Element, schema: Any, schemas: Schemas) -> Any:
    """The JSON value of `element` under `schema`: text by its type, <item> elements as a list, others as an object."""
    types = schemas.types(schema)
    if not element.children:
        return _leaf(element, schema, schemas)
    if types == {"array"} or all(child.name == "item" for child in element.children):
        return [value_of(child, schemas.items(schema), schemas) for child in element.children]
    groups: dict[str, list[Element]] = {}
    for child in element.children:
        groups.setdefault(child.name, []).append(child)
    value = {name: value_of_all(group, schemas.property(schema, name), schemas) for name, group in groups.items()}
    text = "".join(element.text).strip()
    return {**value, "$text": text} if text else value


def value_of_all(elements: Sequence[Element], schema: Any, schemas: Schemas) -> Any:
    """The value of elements of one name: a list where there are several."""
    if len(elements) == 1:
        return value_of(elements[0], schema, schemas)
    inner = schemas.items(schema) if "array" in schemas.types(schema) else schema
    return [value_of(element, inner, schemas) for element in elements]


def _leaf(element: Element, schema: Any, schemas: Schemas) -> Any:
    types = schemas.types(schema)
    value = text_value("".join(element.text), types)
    if types == {"array"} and not isinstance(value, list):
        return [text_value(value, schemas.types(schemas.items(schema)))] if value else []
    return {} if types == {"object"} and value == "" else value


def text_value(text: str, types: frozenset[str]) -> Any:
    """`text` as the first of `types` that it can be; where it can be none, as JSON, else as it is.

    Without types what is JSON, and no string, is taken as that.
    """
    value = _parse(text)
    if not types:
        return text if (value is None and text.strip() != "null") or isinstance(value, str) else value
    if "boolean" in types and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    if "null" in types and text.strip().lower() in ("null", "none"):
        return None
    kind = _TYPES[type(value)]
    if value is not None and kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
        return value
    return text if "string" in types or value is None else value


def _parse(text: str) -> Any:
    """The JSON value of `text`; None where it is none."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(digits: str) -> float:
    """Python reads NaN, Infinity and 1e999 as numbers, and JSON has none of them."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(digits)
    return value


def to_json(value: Any) -> str:
    """The JSON text of `value`, readable where it can be encoded as UTF-8."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if any("\ud800" <= char <= "\udfff" for char in text) else text


def _branches(schema: Schema) -> list[Any]:
    return [branch for key in ("anyOf", "oneOf", "allOf") for branch in _list(schema.get(key))]


def _list(value: Any) -> list[Any]:
    """`value`, where a schema has the list that it should."""
    return value if isinstance(value, list) else []


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
