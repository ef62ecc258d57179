import errno
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.cli import invoke
from tamis.cli import describe, main
from tamis.errors import ConfigError, DownloadError, ModelNotFoundError


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `tamis pull` end with `error`."""

    def pull(model: str | None = None, progress: object = None) -> Path:
        raise error

    monkeypatch.setattr("tamis.models.pull", pull)


def test_version_and_help_do_not_load_torch() -> None:
    script = (
        "import sys; from tamis.cli import main; codes = [main(a.split()) for a in "
        "('--version', '--help', 'generate --help', 'chat --help', 'serve --help', 'bench --help', 'inspect --help', "
        "'plan --help', 'pull --help', 'explain --help', 'doctor --help', 'kv --help', 'kv ls --help', '')]; "
        "heavy = {'torch', 'numpy', 'httpx', 'tamis.engine', 'tamis.models', 'tamis.kv'} & set(sys.modules); "
        "sys.exit(f'{codes} {heavy}' if heavy or any(codes) else 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("tamis 0.1.0\n")
    commands = ("generate", "chat", "serve", "bench", "inspect", "plan", "pull", "explain", "doctor", "kv", "errors")
    assert all(command in result.stdout for command in commands)
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (ConfigError("page_size=3 is odd"), "page_size=3 is odd", 2),
        (DownloadError("first\n  second\r\n\tthird"), "first second third", 2),
        (ModelNotFoundError("no model 'x'"), "no model 'x'", 2),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "a.txt: No such file or directory", 2),
        (OSError("disk on fire"), "disk on fire", 2),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device", 2),
        (MemoryError(), "not enough memory", 2),
        (ZeroDivisionError("by 0"), "this is a bug in tamis: ZeroDivisionError: by 0 (--debug shows where)", 1),
        (NotImplementedError(), "this is a bug in tamis: NotImplementedError (--debug shows where)", 1),
    ],
)
def test_an_error_is_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, line: str, code: int
) -> None:
    assert describe(error) == (line, code)
    failing(monkeypatch, error)
    result = invoke("pull")
    assert (result.code, result.out, result.err) == (code, "", f"error: {line}\n")


@pytest.mark.parametrize("arguments", [("--debug", "pull"), ("pull", "--debug"), ("pull", "some-model", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    failing(monkeypatch, ConfigError("broken"))
    result = invoke(*arguments)
    assert result.code == 2
    assert "Traceback (most recent call last)" in result.err
    assert result.err.endswith("error: broken\n")


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    result = invoke("pull")
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_to_end_is_heard_once_and_cleanly(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    number = getattr(signal, name)
    cleaned: list[bool] = []

    def pull(model: str | None = None, progress: object = None) -> Path:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)  # somebody is impatient
            cleaned.append(True)
        return Path()

    monkeypatch.setattr("tamis.models.pull", pull)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        result = invoke("pull")
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert (result.code, result.out, result.err, cleaned) == (code, "", f"ended by {name}\n", [True])


def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup."""

    def pull(model: str | None = None, progress: object = None) -> Path:
        signal.raise_signal(signal.SIGHUP)
        return Path("here")

    monkeypatch.setattr("tamis.models.pull", pull)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert invoke("pull").out == "here\n"
    finally:
        signal.signal(signal.SIGHUP, before)


PULL_WITH_A_SLOW_PIP = """
import os, sys
from tamis.cli import main
from tamis.models import builtin
slow = "import os, sys, time; print(os.getpid(), flush=True, file=open(sys.argv[1], 'w')); time.sleep(60)"
builtin.default_pip = lambda: (sys.executable, "-S", "-c", slow, os.environ["PID_FILE"])
sys.exit(main(["pull", "--quiet"]))
"""


def test_a_pull_that_is_ended_takes_pip_with_it_and_leaves_nothing(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    environment = {**os.environ, "TAMIS_CACHE": str(tmp_path / "cache"), "PID_FILE": str(pid_file)}
    with subprocess.Popen(
        [sys.executable, "-c", PULL_WITH_A_SLOW_PIP], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (143, "ended by SIGTERM\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_reader_that_goes_away_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, BrokenPipeError(32, "Broken pipe"))
    result = invoke("pull")
    assert (result.code, result.out, result.err) == (141, "", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fly",), "fly"),
        (("--fly",), "--fly"),
        (("plan", "--fly"), "--fly"),
        (("plan", "a", "b"), "b"),
        (("plan", "--memory"), "--memory"),
        (("plan", "--page-size", "many"), "--page-size"),
        (("generate", "--prompt", "x", "--temperature", "warm"), "--temperature"),
    ],
)
def test_a_usage_error_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    result = invoke(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert words in result.err
    assert result.err.count("\n") == 1


def test_pull_prints_the_path_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str | None] = []

    def pull(model: str | None = None, progress: object = None) -> Path:
        asked.append(model)
        return tmp_path / "model.gguf"

    monkeypatch.setattr("tamis.models.pull", pull)
    assert invoke("pull").out == f"{tmp_path / 'model.gguf'}\n"
    assert invoke("pull", "org/name", "--json").out.split() == [
        "{", '"model":', '"org/name",', '"path":', f'"{tmp_path / "model.gguf"}"', "}",
    ]  # fmt: skip
    assert asked == [None, "org/name"]


class Full(io.StringIO):
    """A disk without room."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_output_that_cannot_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tamis.models.pull", lambda model, progress: tmp_path)
    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["pull"]) == 2
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


def test_a_usage_error_says_where_help_is() -> None:
    assert invoke("plan", "--fly").err.endswith(" (see tamis plan --help)\n")


@pytest.mark.parametrize(
    "command",
    [
        "",
        "generate",
        "chat",
        "serve",
        "bench",
        "inspect",
        "plan",
        "pull",
        "kv",
        "kv ls",
        "kv stat",
        "kv verify",
        "kv gc",
    ],
)
def test_help_shows_flags_without_a_value(command: str) -> None:
    shown = invoke(*command.split(), "--help").out
    assert "--help" in shown
    assert "bool" not in shown.lower()
