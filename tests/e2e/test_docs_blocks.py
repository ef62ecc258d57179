"""Every code block of README and docs does what it says; how blocks are marked stands in `support/blocks.py`."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from support.blocks import (
    KINDS,
    PAGES,
    ROOT,
    Block,
    Command,
    blocks,
    commands,
    missing_part,
    of_kind,
    promised,
    requests,
)
from support.cli import invoke
from support.server_process import running
from tamis.cli import CommonOptions
from tamis.cli.app import app


def pages_with(*kinds: str) -> list[str]:
    return [page for page in PAGES if of_kind(page, *kinds)]


def all_blocks(*kinds: str) -> list[Any]:
    return [pytest.param(block, id=f"{page}:{block.line}") for page in PAGES for block in of_kind(page, *kinds)]


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.kind in KINDS, f"{page}:{block.line}: ```{block.kind}"
    assert len(all_blocks("python")) > 20
    assert len(all_blocks("console")) > 10
    assert len(all_blocks("sh")) > 8


def test_what_is_shown_and_not_printed_is_found() -> None:
    assert missing_part("one  two\nthree", ("one two", "three")) is None
    assert missing_part("one two three", ("three", "one")) == "one"
    assert missing_part("one two", ("one", "one")) == "one"
    assert promised("print(1)  # 1\nx = 2  # two\n    print(x, end='')  # 2\n") == ["1", "2"]
    shown = Block("page", 1, "console", "$ tamis plan 'a b'\nKV  pool\n(exit code 1)\n$ tamis pull\n")
    assert commands(shown) == [Command(("tamis", "plan", "a b"), ("KV pool",), 1), Command(("tamis", "pull"), (), 0)]


@pytest.mark.parametrize("arguments", ["tamis serve --nothing", "tamis nothing", "tamis kv ls", "tamis serve --port x"])
def test_commands_and_options_that_do_not_exist_are_found(arguments: str) -> None:
    with pytest.raises(Exception, match=r"No such option|no command|Missing parameter|valid integer"):
        check_options(tuple(arguments.split()))


@pytest.mark.parametrize("page", pages_with("python", "text"))
def test_the_python_of_a_page_runs_and_prints_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__page__"}
    whole = ""
    for block in of_kind(page, "python", "text"):
        if block.kind == "text":
            assert missing_part(whole, tuple(block.text.splitlines())) is None, f"{page}:{block.line}"
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * block.line + block.text, page, "exec"), names)
        lines = printed.getvalue()
        assert missing_part(lines, tuple(promised(block.text))) is None, f"{page}:{block.line} printed {lines}"
        whole += lines


@pytest.mark.parametrize("block", all_blocks("console"))
def test_the_commands_run_and_print_what_is_shown(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert commands(block)
    for command in commands(block):
        assert command.arguments[0] == "tamis"
        result = invoke(*command.arguments[1:])
        assert result.code == command.code, result.err
        missing = missing_part(result.out + result.err, command.printed)
        assert missing is None, f"{command.arguments} did not print {missing!r} but {result.out}{result.err}"


@pytest.mark.parametrize("block", all_blocks("console parse"))
def test_the_options_of_commands_that_run_for_long_exist(block: Block) -> None:
    for command in commands(block):
        check_options(command.arguments)


def check_options(arguments: tuple[str, ...]) -> None:
    """Parse a command line and run nothing of it."""
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name="tamis", obj=CommonOptions())
    name, *rest = arguments[1:]
    while (child := group.get_command(context, name)) is not None:
        if not hasattr(child, "commands"):
            child.make_context(name, rest, parent=context)
            return
        group, (name, *rest) = child, rest
    raise AssertionError(f"there is no command {name!r}: {arguments}")


@pytest.mark.parametrize("block", all_blocks("json", "toml"))
def test_data_can_be_read(block: Block) -> None:
    assert json.loads(block.text) if block.kind == "json" else tomllib.loads(block.text)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server with the built-in model and a tier."""
    with running("--kv-budget", "64MiB", "--kv-tier", "host:64MiB", "--quiet") as (_, ready):
        yield ready[2]


@pytest.mark.parametrize("block", all_blocks("sh"))
def test_the_requests_are_answered(server: str, block: Block) -> None:
    assert shutil.which("curl"), "the examples need curl"
    assert requests(block)
    for text in requests(block):
        assert "http://127.0.0.1:8000" in text
        shown = text.replace("http://127.0.0.1:8000", server)
        done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, timeout=60, check=True)
        check_answer(text, done.stdout)
        if text.startswith("# an error"):
            assert json.loads(done.stdout) in [json.loads(shown.text) for shown in of_kind(block.page, "json")]


def check_answer(request: str, answer: str) -> None:
    if "/metrics" in request:
        assert "tamis_kv_pages" in answer
        return
    if "-N" in request:
        events = [line[6:] for line in answer.splitlines() if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] > 5
        return
    reply = json.loads(answer)
    refused = request.startswith("# an error")
    assert ("error" in reply) == refused, answer
    if refused:
        assert reply["error"]["explain"].startswith("tamis explain ")
    elif "capital of France" in request:
        assert "Paris" in reply["choices"][0]["message"]["content"]
    elif "json_schema" in request:
        wanted = re.search(r'"required": (\[.*?\])', request)
        assert wanted is not None
        assert sorted(json.loads(reply["choices"][0]["message"]["content"])) == sorted(json.loads(wanted[1]))
    elif '"tools"' in request:
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"]


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    told = re.compile(r"(?:^    |`)make ([a-z]+)", re.MULTILINE)
    named = {name for page in PAGES for name in told.findall((ROOT / page).read_text())}
    assert {"serve", "test", "docs"} <= named
    assert named <= targets
