"""The command line: `tamis generate`, `chat`, `serve`, `bench`, `inspect`, `plan`, `pull`, `explain`, `doctor`, ...

Nothing heavy is imported here: `tamis --help` and `--version` answer without loading torch.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

__all__ = ["CommonOptions", "main"]

EXIT_BUG = 1
"""An exception nobody planned for."""
EXIT_ERROR = 2
"""What was asked for cannot be done: usage, input, files, network."""
EXIT_INTERRUPTED = 130
"""Ctrl-C, as shells count it: 128 + SIGINT."""
EXIT_BROKEN_PIPE = 141
"""The reader of standard output went away: 128 + SIGPIPE."""


@dataclass
class CommonOptions:
    """What every command shares; filled in while the command line is read."""

    debug: bool = False
    """Show tracebacks and logs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tamis` with the arguments `argv` (None: those of the process) and return the exit code.

    0: done. 1: a bug. 2: an error, printed in one line, and in the next the command that explains it. 130: interrupted.
    141: the output's reader went away. 128 + its number: ended by SIGTERM or SIGHUP.
    """
    options = CommonOptions()
    # The tokenizers library's own report of what becomes an error message here.
    os.environ.setdefault("RUST_BACKTRACE", "0")
    try:
        with _ending_cleanly():
            from tamis.cli.app import run  # here, so that Ctrl-C during imports ends as cleanly as later

            code = run(sys.argv[1:] if argv is None else argv, options)
            if sys.stdout is not None:
                sys.stdout.flush()
    except _EndedError as ended:
        _say(f"ended by {ended.signal.name}", options)
        return 128 + ended.signal
    except KeyboardInterrupt:
        _say("interrupted", options)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        message, code = describe(error)
        _say(f"error: {message}", options)
        _say_hint(error)
    return code


class _EndedError(BaseException):
    """Somebody wants the process to end; like KeyboardInterrupt, it passes what handles errors."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def _ending_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP raise _EndedError inside the block: child processes are ended and temporary files removed."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    in_main_thread = threading.current_thread() is threading.main_thread()  # elsewhere Python refuses handlers
    # Whoever ignores a signal (nohup) or handles it knows why.
    numbers = [number for number in numbers if in_main_thread and signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _frame: FrameType | None) -> None:
        for other in numbers:  # once is enough: a second one must not keep the first from cleaning up
            signal.signal(other, signal.SIG_IGN)
        raise _EndedError(number)

    try:
        for number in numbers:
            signal.signal(number, end)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def describe(error: Exception) -> tuple[str, int]:
    """One line that says what went wrong, and the exit code."""
    from tamis.errors import TamisError

    code = EXIT_ERROR
    if isinstance(error, TamisError):
        message = str(error)
    elif hasattr(error, "format_message"):  # a usage error of click, whichever click typer brings
        message = _usage_message(error)
    elif isinstance(error, OSError):
        message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    elif isinstance(error, MemoryError):
        message = f"not enough memory: {error}" if str(error) else "not enough memory"
    else:
        detail = f": {error}" if str(error) else ""
        message = f"this is a bug in tamis: {type(error).__name__}{detail} (--debug shows where)"
        code = EXIT_BUG
    return " ".join(message.split()) or type(error).__name__, code


def _usage_message(error: Exception) -> str:
    message = str(error.format_message())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    return f"{message} (see {context.command_path} --help)" if context is not None else message


def _say(line: str, options: CommonOptions) -> None:
    with contextlib.suppress(OSError):  # standard error may be gone as well
        if options.debug:
            traceback.print_exc()
        print(line, file=sys.stderr, flush=True)


def _say_hint(error: Exception) -> None:
    """The command that tells more, on a line of its own."""
    from tamis.errors.hint import hint_for

    try:
        hint = hint_for(error)
    except Exception as broken:  # a catalogue that cannot be read must not hide the error itself
        hint = f"the catalogue of errors cannot be read: {' '.join(str(broken).split())}"
    if hint is not None:
        with contextlib.suppress(OSError):
            print(f"hint: {hint}", file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Point the broken streams at nothing, so that the interpreter's last flush does not complain."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(devnull, stream.fileno())
    os.close(devnull)
