"""`tamis explain`: the page of an error, found by what a log says of it."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.options import AsJson, Debug

if TYPE_CHECKING:
    from tamis.errors.catalog import Catalog, ErrorRecord
    from tamis.errors.matching import Findings, Match

NOT_FOUND = 1
"""Exit code where nothing matches."""
NAMED = 0.0
"""The score of what was asked for by name: nothing was compared."""
SHOWN = 8
"""Further errors of one text that are listed by name."""
_CHUNK = 1 << 20
_KEPT = 64
"""Chunks of standard input that are kept, the last ones: more than is looked at."""


def explain(
    text: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT]",
            help="A line of a log, or the id, slug, class or code of an error. Without it, or as -, standard input is "
            "read: a traceback, a whole log.",
        ),
    ] = None,
    catalog: Annotated[
        Path | None,
        typer.Option("--catalog", metavar="FILE", help="Look in this data set (JSON lines) instead of tamis's errors."),
    ] = None,
    as_json: AsJson = False,
    _debug: Debug = False,
) -> None:
    """Say what an error means, when it happens and what helps. Exit code 1 where nothing matches."""
    from tamis.cli.output import print_json
    from tamis.errors.catalog import load_catalog

    asked = " ".join(text or ()) if text and text != ["-"] else _standard_input()
    records = load_catalog(catalog)
    findings = find(records, asked)
    if as_json:
        print_json(_facts(findings))
    else:
        for line in _lines(findings):
            print(line)
    if not findings.matches:
        raise typer.Exit(NOT_FOUND)


def find(catalog: "Catalog", asked: str) -> "Findings":
    """What `asked` is about: a record it names, else the messages in it. Raises RequestError where it is empty."""
    from tamis.errors import RequestError
    from tamis.errors.matching import Findings, Match, Matcher

    name = asked.strip()
    if not name:
        raise RequestError("there is nothing to explain: give a line of a log, an id or a slug, or pipe a text in")
    named = [Match(record, name, 1, NAMED, True) for record in _named(catalog, name)]
    return Findings(tuple(named), ()) if named else Matcher(catalog).find(asked)


def _named(catalog: "Catalog", name: str) -> "list[ErrorRecord]":
    """The records that `name` is the id or the slug of, else those of this class or this code of the server."""
    one = catalog.by_id(name) or catalog.by_slug(name)
    if one is not None or len(name.split()) > 1:
        return [] if one is None else [one]
    plain = name.rpartition(".")[2]
    return [record for record in catalog.records if plain in (record.error_class, record.error_code)]


def _standard_input() -> str:
    """Standard input, its end where it is very long, what is not UTF-8 replaced; "" at a keyboard."""
    from collections import deque

    if sys.stdin is None or sys.stdin.isatty():
        return ""
    chunks: deque[bytes] = deque(iter(lambda: sys.stdin.buffer.read(_CHUNK), b""), maxlen=_KEPT)
    return b"".join(chunks).decode(errors="replace")


def _facts(findings: "Findings") -> dict[str, Any]:
    return {
        "matches": [_match_facts(match) | {"record": match.record.to_json()} for match in findings.matches],
        "near_misses": [
            _match_facts(match) | {"id": match.record.id, "slug": match.record.slug} for match in findings.near_misses
        ],
    }


def _match_facts(match: "Match") -> dict[str, Any]:
    return {"line": match.line, "line_number": match.line_number, "score": match.score, "whole": match.whole}


def _lines(findings: "Findings") -> Iterator[str]:
    from tamis.cli.error_page import page

    if not findings.matches:
        yield "Nothing in the catalogue matches this text."
        if findings.near_misses:
            yield from ("", "Alike, but not the same:", *_listed(findings.near_misses))
        return
    best, *others = findings.matches
    if others and best.score == NAMED:
        yield from (f"{len(findings.matches):,} errors go by this name:", *_listed(findings.matches))
        return
    yield from page(best.record)
    if others:
        yield from ("", "Also found here:", *_listed(others[:SHOWN]))
        if len(others) > SHOWN:
            yield f"  ... and {len(others) - SHOWN:,} more (--json shows all)"


def _listed(matches: "Sequence[Match]") -> Iterator[str]:
    for match in matches:
        yield f"  tamis explain {match.record.id}   {match.record.error_class}: {match.record.error_message}"
