"""Typed access to the fields of a JSON object that somebody else wrote."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tamis.errors import ConfigError, ModelNotFoundError
from tamis.units import show

_MAX_INTEGER = 2**31 - 1
"""No count, size or id of a real model is larger; a larger one would ask for absurd memory further on."""


class Fields:
    """A JSON object and where it stands in its file, for messages. A null counts as an absent key.

    Every method raises ConfigError, naming the key and the value, for a value of the wrong type or out of range, and
    where the key is absent and no default is given.
    """

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0) -> int:
        """A whole number, `minimum` <= value < 2**31."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(key, value, "a whole number")
        if not minimum <= value <= _MAX_INTEGER:
            self._refuse(key, value, f"a whole number from {minimum} to {_MAX_INTEGER}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        """A finite number; an int as the float next to it."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(key, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or (positive and number <= 0):
            self._refuse(key, value, "a finite number above 0" if positive else "a finite number")
        return number

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            self._refuse(key, value, "text")
        return value

    def section(self, key: str) -> "Fields | None":
        """A nested object, None where it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._refuse(key, value, "an object")
        return Fields(value, f"{self.prefix}{key}.")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where absent."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                self._refuse(key, value, "a token id or a list of token ids")
        return tuple(ids)

    def layer_flags(self, key: str, layers: int) -> tuple[bool, ...]:
        """A list with a 0 or 1 for each of `layers` layers."""
        return self.layer_choices(key, layers, {0: False, 1: True})

    def layer_choices(self, key: str, layers: int, choices: Mapping[Any, bool]) -> tuple[bool, ...]:
        """A list with one of `choices` for each of `layers` layers, translated."""
        items = self._value(key, None)
        if not isinstance(items, list):
            self._refuse(key, items, "a list")
        if len(items) != layers:
            raise ConfigError(f"{self.prefix}{key} has {len(items)} entries for {layers} layers")
        known: dict[object, bool] = dict(choices)
        for item in items:
            if not isinstance(item, str | int) or item not in known:
                self._refuse(key, item, "a list of " + " and ".join(repr(choice) for choice in choices), "entry ")
        return tuple(known[item] for item in items)

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"the key {self.prefix}{key} is missing")
        return value

    def _refuse(self, key: str, value: object, wanted: str, part: str = "") -> NoReturn:
        raise ConfigError(f"{self.prefix}{key}: {part}{show(value)} is not {wanted}")


def read_json_object(path: Path) -> Fields:
    """The object in a JSON file.

    Raises ModelNotFoundError where the file cannot be read; ConfigError, naming the file and the line, for anything
    that is not a JSON object in UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelNotFoundError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{path}: malformed JSON: it is nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise ConfigError(f"{path}: malformed JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: it holds a {type(values).__name__}, not an object")
    return Fields(values)
