"""`tamis errors`: the catalogue of errors as a data set, of tamis or of any other Python package."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tamis.cli.commands import Command, Group
from tamis.cli.options import Debug

if TYPE_CHECKING:
    from tamis.errors.catalog.build import Built

errors = typer.Typer(cls=Group, help="Make and check data sets of error records.", no_args_is_help=True)
_FAULTY = 1
"""Exit code where a data set is not as the schema says."""


_PACKAGE_HELP = "A package's directory, a file, or an installed package's name; tamis itself without one."
Package = Annotated[str | None, typer.Argument(metavar="[PATH]", help=_PACKAGE_HELP)]
Records = Annotated[Path | None, typer.Option(metavar="DIR", help="Record files (*.toml) to join; of tamis, its own.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write; standard output without.")]
Repo = Annotated[str | None, typer.Option(metavar="NAME", help="Where the records say they are from: owner/name.")]
DataSet = Annotated[Path, typer.Argument(metavar="FILE", help="A data set of `tamis errors build`, or another's.")]


@errors.command(cls=Command)
def build(
    path: Package = None,
    records: Records = None,
    out: Out = None,
    repo: Repo = None,
    _debug: Debug = False,
) -> None:
    """Find every error that a package's source raises, and write a data set: JSON lines. Nothing is imported."""
    from tamis.errors.catalog import build as builder
    from tamis.errors.catalog.dataset import write_dataset

    own = path is None and records is None and repo is None
    place = builder.PACKAGE if path is None else _package(path)
    built = builder.build_own(with_commit=True) if own else builder.build(place, records=records, repo=repo)
    if out is None:
        write_dataset(built.catalog, sys.stdout)
    else:
        with out.open("w", encoding="utf-8") as file:
            write_dataset(built.catalog, file)
    _report(built)


@errors.command(cls=Command)
def check(file: DataSet, _debug: Debug = False) -> None:
    """Hold a data set against the schema; exit code 1 where it differs."""
    from tamis.errors.catalog.dataset import check_dataset

    count, faults = check_dataset(file)
    for fault in faults:
        print(f"{file}: {fault}")
    if faults:
        raise typer.Exit(_FAULTY)
    print(f"{file}: {count:,} records, all as they should be")


def _package(path: str) -> Path:
    """The directory or file; a name that is neither may be an installed package's."""
    from importlib.util import find_spec

    if Path(path).exists() or not path.isidentifier():
        return Path(path)
    spec = find_spec(path)  # of a name without dots: nothing is imported
    if spec is None or spec.origin is None:
        return Path(path)
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin


def _report(built: "Built") -> None:
    """Say on standard error what was read and what was not."""
    lines = [f"warning: {path}: {fault}" for path, fault in built.problems]
    lines += [
        f"warning: record {record.slug!r}: the source raises no {record.error_class} with this message"
        for record in built.unraised
    ]
    lines += [
        f"warning: {record.file_path}:{record.line_number}: left out, its pattern could backtrack without end"
        for record in built.refused
    ]
    lines.append(f"{len(built.catalog.records):,} records; {built.wordless:,} errors have no words of their own")
    print("\n".join(lines), file=sys.stderr)
