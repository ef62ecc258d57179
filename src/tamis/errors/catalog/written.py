"""The records that people write: `errors/records/*.toml`.

A file holds `[[record]]` tables and, in `[defaults]`, fields for all of them. A record is one fault. `error_message` is
its wording, in the notation of f-strings with any names for the values; `also` lists further wordings of the same
fault. Code and record are joined by class and wording. A message that is made somewhere else has `raised_in` instead:
the function, as "server.errors._http_error".
"""

import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from tamis.errors import CatalogError
from tamis.errors.catalog.patterns import pattern_fault
from tamis.errors.catalog.record import ErrorRecord
from tamis.errors.catalog.template import Template, parse_template, record_id

RECORDS = Path(__file__).parents[1] / "records"
"""tamis's own."""


@dataclass(frozen=True, kw_only=True)
class WrittenRecord:
    """One fault as a record file tells it. The fields are those of ErrorRecord, except as said."""

    slug: str
    error_class: str
    error_message: str
    also: tuple[str, ...] = ()
    message_pattern: str | None = None
    """For the first wording, where the one made from it is not right: a value that may be empty, say."""
    raised_in: tuple[str, ...] = ()
    error_code: str | None = None
    error_type: str
    http_status: int | None = None
    severity: str = "error"
    documentation: str
    trigger_scenarios: str
    common_situations: str
    solutions: tuple[str, ...]
    example_setup: str | None = None
    before: str
    """Code that raises."""
    after: str
    """Code that does not."""
    handling_strategy: str
    validation_code: str
    type_guard: str | None = None
    try_catch_pattern: str | None = None
    prevention_tips: tuple[str, ...]
    tags: tuple[str, ...]
    background_tag: str | None = None

    def records(self, repo: str) -> Iterator[tuple[Template, ErrorRecord]]:
        """A record for every wording, without what only the code can say."""
        first = parse_template(self.error_message)
        yield first, self._record(repo, first, self.message_pattern or first.pattern, self.slug)
        for template in map(parse_template, self.also):
            yield template, self._record(repo, template, template.pattern, None)

    def _record(self, repo: str, template: Template, pattern: str, slug: str | None) -> ErrorRecord:
        number = record_id(repo, self.error_class, template)
        shared = {name: getattr(self, name) for name in _SHARED}
        return ErrorRecord(
            **shared, id=number, repo=repo, slug=slug or f"{template.slug}-{number[:4]}", error_class=self.error_class,
            error_message=template.text, message_pattern=pattern,
            example_fix=f"# before\n{self.before.strip()}\n# after\n{self.after.strip()}",
            background_tag=self.background_tag or self.slug,
        )  # fmt: skip


_FIELDS = {field.name: field for field in fields(WrittenRecord)}
_SHARED = ({field.name for field in fields(ErrorRecord)} & set(_FIELDS)) - {
    "slug", "error_class", "error_message", "message_pattern", "background_tag"}  # fmt: skip
_NEEDED = {name for name, field in _FIELDS.items() if field.default is MISSING}


def read_records(directory: Path = RECORDS) -> tuple[WrittenRecord, ...]:
    """The records of all `*.toml` files in `directory`, by file name.

    Raises CatalogError naming the file and record: not TOML, a field that is unknown, missing or of the wrong type, a
    pattern that is refused, a slug or a wording that is there twice.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix == ".toml")
    except OSError as error:
        raise CatalogError(f"{directory}: cannot be read: {error.strerror}") from error
    found = [(f"{path}: record {slug!r}", record) for path in paths for slug, record in _read_file(path)]
    _refuse_doubles(found)
    return tuple(record for _, record in found)


def _read_file(path: Path) -> Iterator[tuple[str, WrittenRecord]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{path}: not TOML in UTF-8: {error}") from error
    for key in table:
        if key not in ("defaults", "record"):
            raise CatalogError(f"{path}: {key!r} is neither [defaults] nor [[record]]")
    defaults, entries = table.get("defaults", {}), table.get("record", [])
    if not isinstance(defaults, dict) or not isinstance(entries, list):
        raise CatalogError(f"{path}: defaults must be one table and record a list of tables")
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise CatalogError(f"{path}: record number {place + 1} is not a table")
        slug = str(entry.get("slug", f"number {place + 1}"))
        yield slug, _record(f"{path}: record {slug!r}", defaults | entry)


def _record(where: str, table: dict[str, Any]) -> WrittenRecord:
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in _FIELDS:
            raise CatalogError(f"{where} has the unknown field {name!r}")
        values[name] = _value(f"{where}: {name}", str(_FIELDS[name].type), value)
    missing = _NEEDED - set(values)
    if missing:
        raise CatalogError(f"{where} has no {min(missing)}")
    for message in (values["error_message"], *values.get("also", ())):
        try:
            text_says = parse_template(message).weight
        except ValueError as error:
            raise CatalogError(f"{where}: the message {message!r} is no template: {error}") from error
        if not text_says and not values.get("raised_in"):
            raise CatalogError(f"{where}: the message {message!r} has no text of its own")
    fault = pattern_fault(values["message_pattern"]) if values.get("message_pattern") else None
    if fault is not None:
        raise CatalogError(f"{where}: message_pattern {values['message_pattern']!r}: {fault}")
    return WrittenRecord(**values)


def _value(where: str, kind: str, value: Any) -> Any:
    """`value` as the field of this type keeps it."""
    if kind.startswith("tuple"):
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise CatalogError(f"{where} is {value!r}, not a list of texts")
        return tuple(value)
    wanted = int if kind.startswith("int") else str
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise CatalogError(f"{where} is {value!r}, not {'a number' if wanted is int else 'a text'}")
    return value


def _refuse_doubles(found: list[tuple[str, WrittenRecord]]) -> None:
    seen: dict[tuple[str, str], str] = {}
    for where, record in found:
        wordings = {(entry.error_class, template.skeleton) for template, entry in record.records("")}
        for key in (("slug", record.slug), *wordings):
            if key in seen:
                raise CatalogError(f"{where}: {' '.join(key)!r} is there already, in {seen[key]}")
            seen[key] = where
