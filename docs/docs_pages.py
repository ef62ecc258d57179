"""Pages that are made from the program: the commands with their options, and a page for every error.

`python docs/docs_pages.py` writes `cli.md`, which is kept in the repository and checked by a test, and the pages under
`errors/`, which are not: line numbers and excerpts in them follow the code.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tamis.cli.app import app
from tamis.errors.catalog import Catalog, ErrorRecord, load_catalog

DOCS = Path(__file__).parent


def cli_page() -> str:
    """All commands, as `--help` describes them."""
    root = typer.main.get_command(app)
    parts = [
        "# Commands\n",
        "This page is made from `--help`; `make docs` writes it.\n",
        *_command(root, root.context_class(root, info_name="tamis")),
    ]
    return "\n".join(parts)


# Commands, contexts and parameters are those of click, whichever click typer brings.


def _command(command: Any, context: Any) -> Iterator[str]:
    """A command and those below it, each a section."""
    if context.parent is not None:
        yield f"{'#' * (1 + context.command_path.count(' '))} {context.command_path}\n"
    yield f"{_prose(command.help or '')}\n"
    yield f"    {context.command_path} {' '.join(command.collect_usage_pieces(context))}\n"
    yield from _parameters(command, context)
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from _command(child, child.context_class(child, info_name=name, parent=context))


def _prose(text: str) -> str:
    return re.sub(r"\n\n+", "\n\n", text.strip())


def _parameters(command: Any, context: Any) -> Iterator[str]:
    """Arguments and options as definitions: how each is written, what it does."""
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or "--help" in parameter.opts:
            continue
        names, text = (re.sub(r"\s+", " ", part).strip() for part in record)
        if parameter.param_type_name == "argument":
            names = parameter.metavar or names
        yield f"`{names}`\n: {_escaped(text)}\n"


def _escaped(text: str) -> str:
    """Text as Markdown shows it, character by character."""
    return re.sub(r"[\\*<\[{|~]|\b_|_\b", r"\\\g<0>", text)


def error_pages(catalog: Catalog) -> dict[str, str]:
    """File name -> page: one for every fault in all its wordings, and the list of them all."""
    faults = _faults(catalog)
    pages = {f"{name}.md": _error_page(name, records) for name, records in faults.items()}
    return {"index.md": _error_index(faults), **pages}


def _faults(catalog: Catalog) -> dict[str, list[ErrorRecord]]:
    """Records that share their prose are wordings of one fault; by the slug that a person gave it, where one did."""
    found: dict[tuple[str | None, str | None, str | None], list[ErrorRecord]] = {}
    for record in catalog.records:
        found.setdefault((record.background_tag, record.documentation, record.example_fix), []).append(record)
    return {min((record.slug for record in records), key=_slug_order): records for records in found.values()}


def _slug_order(slug: str) -> tuple[bool, str]:
    """Slugs that were made from a message end with four digits of its hash."""
    return re.search(r"-[0-9a-f]{4}$", slug) is not None, slug


def _error_index(faults: dict[str, list[ErrorRecord]]) -> str:
    lines = [
        "# Errors\n",
        "Every error that tamis raises on purpose and every answer of 4xx and 5xx of its server has a record here.",
        'From a log, `tamis explain "<the line>"` finds the record; it also takes an id or the name of a page.',
        "Messages are written as templates: what stands in braces is filled in.\n",
        "The records are also a data set, one JSON object a line: [the format](../error-data.md).\n",
    ]
    topics: dict[str, list[str]] = {}
    for name, records in faults.items():
        topics.setdefault(records[0].background_tag or "other", []).append(name)
    for topic, names in sorted(topics.items()):
        lines += [f"## {topic.replace('-', ' ').capitalize()}\n", "| page | class | message |", "|---|---|---|"]
        for name in sorted(names):
            for place, record in enumerate(faults[name]):
                link = f"[{name}]({name}.md)" if place == 0 else ""
                lines.append(f"| {link} | {_code(record.error_class)} | {_code(record.error_message)} |")
        lines.append("")
    return "\n".join(lines)


def _code(text: str) -> str:
    """Inline code, in a table too."""
    text = re.sub(r"\s+", " ", text)
    ticks = "``" if "`" in text else "`"
    pad = " " if ticks == "``" else ""
    return f"{ticks}{pad}{text}{pad}{ticks}".replace("|", "\\|")


def _error_page(name: str, records: list[ErrorRecord]) -> str:
    """One fault. It is reached from the list: hundreds of pages in every page's navigation would help nobody."""
    record = records[0]
    classes = ", ".join(f"`{name}`" for name in dict.fromkeys(entry.error_class for entry in records))
    lines = ["---", "orphan: true", "---\n", f"# {name}\n", f"{classes}{_status(record)}\n"]
    lines += ["```text", *(entry.error_message for entry in records), "```\n"]
    for heading, text in (
        ("", record.documentation), ("When", record.trigger_scenarios), ("Often because", record.common_situations)
    ):  # fmt: skip
        if text:
            lines += [f"## {heading}\n"] if heading else []
            lines.append(f"{_escaped(text.strip())}\n")
    lines += _bullets("What helps", record.solutions)
    for heading, code in (
        ("Before and after", record.example_fix), ("To check", record.validation_code),
        ("To tell beforehand", record.type_guard), ("To catch", record.try_catch_pattern),
        ("Names used above", record.example_setup),
    ):  # fmt: skip
        if code:
            lines += [f"## {heading}\n", "```python", code.strip("\n"), "```\n"]
    lines += _bullets("So that it does not come back", record.prevention_tips)
    lines += ["## Where\n"]
    lines += [f"- {_code(entry.id)}: {_code(_place(entry))}" for entry in records]
    return "\n".join([*lines, ""])


def _status(record: ErrorRecord) -> str:
    if record.http_status is None:
        return ""
    code = f", code `{record.error_code}`" if record.error_code else ""
    return f", HTTP {record.http_status}{code}"


def _bullets(heading: str, entries: tuple[str, ...]) -> list[str]:
    return [f"## {heading}\n", *(f"- {_escaped(entry)}" for entry in entries), ""] if entries else []


def _place(record: ErrorRecord) -> str:
    return f"{record.file_path}, line {record.line_number}" if record.file_path else record.repo


def main() -> None:
    """Write all generated pages."""
    (DOCS / "cli.md").write_text(cli_page(), encoding="utf-8")
    errors = DOCS / "errors"
    shutil.rmtree(errors, ignore_errors=True)
    errors.mkdir()
    for name, page in error_pages(load_catalog()).items():
        (errors / name).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
