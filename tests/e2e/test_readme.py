"""What the README shows works."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from support.cli import invoke

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("console") for line in block.splitlines() if line.startswith("tamis ")]


def comments(code: str) -> list[str]:
    """What the code says its print calls print."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)


def test_there_is_something_to_check() -> None:
    assert len(blocks("python")) == 2
    assert len(commands()) == 4


@pytest.mark.parametrize("code", blocks("python"))
def test_the_python_examples_run_and_print_what_they_say(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed
    for line in comments(code):
        assert line in printed


@pytest.mark.parametrize("command", commands())
def test_the_commands_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = invoke(*shlex.split(command)[1:])
    assert result.code == 0, result.err
    assert result.out


def test_the_plan_shown_is_the_plan_printed() -> None:
    printed = invoke("plan", "minimax-m3", "--memory", "1GiB", "--page-size", "128").out
    shown = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    assert textwrap.indent(shown, "    ") in README


def test_the_first_screen_says_what_it_is_and_how_to_run_it() -> None:
    first = "\n".join(README.splitlines()[:25])
    for words in ("block-sparse attention", "MiniMax-M3", "MiniMaxSparseKVPool", "make serve", "make run", "make test"):
        assert words in first
