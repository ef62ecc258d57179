import io
import os
import sys

import pytest
from rich.console import Console

from tamis.cli.progress import ProgressBars, ProgressLines, make_progress
from tamis.progress import NoProgress, Unit


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_progress(), ProgressBars)
    assert isinstance(make_progress(quiet=True), NoProgress)


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_file_gets_lines_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv(variable, "1")
    assert isinstance(make_progress(), ProgressLines)
    assert isinstance(make_progress(quiet=True), NoProgress)


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(), ProgressLines)


def test_no_standard_error_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert isinstance(make_progress(), NoProgress)


@pytest.mark.parametrize("quiet", [True, False])
def test_the_hub_client_shows_bars_only_where_we_do(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    make_progress(quiet=quiet)
    assert ("HF_HUB_DISABLE_PROGRESS_BARS" in os.environ) is quiet


def bars() -> tuple[ProgressBars, io.StringIO]:
    out = io.StringIO()
    return ProgressBars(Console(file=out, force_terminal=True, width=120, color_system=None)), out


def test_bytes_are_shown_with_amount_and_total() -> None:
    progress, out = bars()
    progress.start("fetching model.gguf", 3_000_000, "bytes")
    progress.advance(1_500_000)
    progress.finish()
    assert "fetching model.gguf" in out.getvalue()
    assert "1.5/3.0 MB" in out.getvalue()


def test_tokens_are_shown_with_amount_and_total() -> None:
    progress, out = bars()
    progress.start("reading the prompt", 3_000, "tokens")
    progress.advance(512)
    progress.advance(512)
    progress.finish()
    assert "1,024/3,000 tokens" in out.getvalue()


def test_a_total_that_is_not_known_is_left_out() -> None:
    progress, out = bars()
    progress.start("reading", None, "tokens")
    progress.advance(7)
    progress.finish()
    assert "7 tokens" in out.getvalue()


def test_a_finished_bar_leaves_an_empty_line_and_a_visible_cursor() -> None:
    progress, out = bars()
    progress.start("loading", 10, "bytes")
    progress.advance(10)
    progress.finish()
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")
    assert out.getvalue().rstrip("\r").endswith("\x1b[2K")


def test_calls_out_of_turn_do_no_harm() -> None:
    progress, out = bars()
    progress.finish()
    progress.advance(1)
    assert out.getvalue() == ""
    progress.start("first", 1, "bytes")
    progress.start("second", 1, "bytes")
    progress.finish()
    progress.finish()
    assert "first" in out.getvalue()
    assert "second" in out.getvalue()


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (("compiling kernels", None, "steps"), "compiling kernels ...\n"),
        (("downloading toy", 93 << 20, "bytes"), "downloading toy, 93.0 MiB ...\n"),
        (("reading the prompt", 8000, "tokens"), "reading the prompt, 8,000 tokens ...\n"),
    ],
)
def test_what_takes_long_is_told_once_where_there_is_no_bar(
    capsys: pytest.CaptureFixture[str], task: tuple[str, int | None, Unit], line: str
) -> None:
    progress = ProgressLines(after=0.01)
    progress.start(*task)
    assert progress._timer is not None
    progress._timer.join(timeout=20)
    progress.advance(1)
    progress.finish()
    progress.finish()
    assert capsys.readouterr().err == line


def test_what_is_done_soon_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLines(after=60)
    progress.start("loading", 10, "bytes")
    first = progress._timer
    progress.start("loading more", 10, "bytes")
    second = progress._timer
    progress.finish()
    for timer in (first, second):
        assert timer is not None
        timer.join(timeout=20)
    assert capsys.readouterr().err == ""
