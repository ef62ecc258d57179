"""Printing tables and JSON on standard output."""

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDE = 200
"""Columns for output that goes to a file or a pipe: enough that no cell is folded."""


def print_json(value: dict[str, Any]) -> None:
    """Print `value` as one JSON object, in ASCII."""
    print(json.dumps(value, indent=2))


def print_table(table: Table) -> None:
    """Print `table`; as wide as it needs to be where standard output is not a terminal."""
    console = Console(highlight=False, width=None if sys.stdout is not None and sys.stdout.isatty() else WIDE)
    console.print(table)


def new_table(title: str, columns: Iterable[tuple[str, bool]]) -> Table:
    """An empty table; a column is its heading and whether it holds numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, numbers in columns:
        table.add_column(heading, justify="right" if numbers else "left")
    return table


def key_values(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and right-aligned values, without headings."""
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    return table
