"""A record of the error catalogue as text for a terminal."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tamis.errors.catalog import ErrorRecord

WIDTH = 96
_INDENT = "  "


def page(record: "ErrorRecord") -> Iterator[str]:
    """The lines of a record's page; what nobody has written is left out."""
    yield f"{record.error_class}  ({record.slug}, id {record.id})"
    yield from _wrapped(record.error_message)
    yield from _place(record)
    if record.documentation is None:
        yield from ("", "Nobody has written down what it means. Where it is raised:")
        yield from _code(record.source_code)
        return
    yield from _section("What it means", _wrapped(record.documentation))
    yield from _section("When it happens", _wrapped(record.trigger_scenarios))
    yield from _section("How one gets there", _wrapped(record.common_situations))
    yield from _section("What helps", _items(record.solutions))
    yield from _section("Example", _example(record))
    yield from _section("A check to run", _code(record.validation_code))
    yield from _section("A test of a value", _code(record.type_guard))
    yield from _section("Where it may happen", _code(record.try_catch_pattern))
    yield from _section("How to keep it from happening", _items(record.prevention_tips))


def _place(record: "ErrorRecord") -> Iterator[str]:
    if record.http_status is not None:
        code = f", code {record.error_code}" if record.error_code else ""
        yield f"{_INDENT}HTTP {record.http_status}{code}"
    if record.file_path is not None:
        yield f"{_INDENT}raised in {record.file_path}, line {record.line_number}"
    if record.github_url is not None:
        yield f"{_INDENT}{record.github_url}"


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    body = list(lines)
    if body:
        yield from ("", title, *body)


def _wrapped(text: str | None) -> Iterator[str]:
    for paragraph in (text or "").split("\n\n"):
        yield from textwrap.wrap(
            paragraph, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip


def _items(texts: Sequence[str]) -> Iterator[str]:
    for number, text in enumerate(texts, 1):
        yield from textwrap.wrap(
            text, WIDTH, initial_indent=f"{_INDENT}{number}. ", subsequent_indent=f"{_INDENT}   ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip


def _example(record: "ErrorRecord") -> Iterator[str]:
    if record.example_fix is not None:
        if record.example_setup is not None:
            yield from _code(record.example_setup)
            yield ""
        yield from _code(record.example_fix)


def _code(text: str | None) -> Iterator[str]:
    yield from textwrap.indent(textwrap.dedent(text or "").strip("\n"), _INDENT * 2).splitlines()
