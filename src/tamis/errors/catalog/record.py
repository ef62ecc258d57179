"""One record of the catalogue: what is known of one error message."""

import re
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from tamis.errors.catalog.template import Template, parse_template

SCHEMA_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """An error message, where it is raised, what it means and what helps.

    What the code says is filled in by `tamis errors build`; the prose is written by people and None where nobody has.
    """

    id: str
    """16 hexadecimal digits, a hash of repo, class and wording."""
    repo: str
    """The package or GitHub repository the message comes from."""
    slug: str
    error_code: str | None = None
    """The `code` of the server's error object, where it is always the same."""
    error_message: str
    """The template in the notation of f-strings."""
    message_pattern: str
    """A regular expression, for `re.search` with re.MULTILINE; its end is the end of a line."""
    error_type: str | None = None
    error_class: str
    http_status: int | None = None
    severity: str | None = None
    file_path: str | None = None
    line_number: int | None = None
    """The line of the raise, counted from 1."""
    source_code: str | None = None
    """The lines around it, from source_code_start to source_code_end."""
    source_code_start: int | None = None
    source_code_end: int | None = None
    github_url: str | None = None
    documentation: str | None = None
    trigger_scenarios: str | None = None
    common_situations: str | None = None
    solutions: tuple[str, ...] = ()
    example_setup: str | None = None
    """Code that makes the names which the code fields below use."""
    example_fix: str | None = None
    """Code that raises the error, after "# before", and code that does not, after "# after"."""
    handling_strategy: str | None = None
    validation_code: str | None = None
    type_guard: str | None = None
    try_catch_pattern: str | None = None
    prevention_tips: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    background_tag: str | None = None
    """The topic: what it has to do with. Other wordings of one fault share it, and all their prose."""
    analyzed_sha: str | None = None
    analyzed_at: str | None = None
    schema_version: int = SCHEMA_VERSION

    @cached_property
    def template(self) -> Template:
        """The message's texts and holes; a message whose braces do not pair is all text."""
        try:
            return parse_template(self.error_message)
        except ValueError:
            return Template(((self.error_message, ""),))

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern."""
        return re.compile(self.message_pattern, re.MULTILINE)

    def fits(self, message: str) -> bool:
        """Whether `message`, one line, ends as this record's does."""
        if self.message_pattern == self.template.pattern:
            return self.template.fits(message)
        return self.regex.search(message) is not None

    @property
    def example_message(self) -> str | None:
        """A message that the pattern finds: 7 for every value, or no last value; None where it finds neither."""
        full = "".join(text + ("7" if hole else "") for text, hole in self.template.parts)
        return next((message for message in (full, full.removesuffix("7")) if self.regex.search(message)), None)

    def to_json(self) -> dict[str, Any]:
        """The record with the names of the data set (camelCase), for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {camel_case(name): list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ErrorRecord":
        """The record that a line of a checked data set holds; names that are not known here are passed over."""
        names = {camel_case(field.name): field.name for field in fields(cls)}
        own: dict[str, Any] = {
            names[name]: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name in names
        }
        return cls(**own)


def camel_case(name: str) -> str:
    """A field's name in the data set: "http_status" -> "httpStatus"."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
