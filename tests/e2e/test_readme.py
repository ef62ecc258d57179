"""The README says first what it is, and shows what is printed. Its code blocks are tried by `test_docs_blocks.py`."""

import textwrap
from pathlib import Path

from support.cli import invoke

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_plan_shown_is_the_plan_printed() -> None:
    printed = invoke("plan", "minimax-m3", "--memory", "1GiB", "--page-size", "128").out
    shown = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    assert textwrap.indent(shown, "    ") in README


def test_the_first_screen_says_what_it_is_and_how_to_run_it() -> None:
    first = "\n".join(README.splitlines()[:25])
    for words in ("block-sparse attention", "MiniMax-M3", "MiniMaxSparseKVPool", "make serve", "make run", "make test"):
        assert words in first
