"""The commands put together, and what they share before they start."""

import io
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

import tamis
from tamis.cli import CommonOptions
from tamis.cli.bench import bench
from tamis.cli.chat import chat
from tamis.cli.commands import Command, Group
from tamis.cli.doctor import doctor
from tamis.cli.errors import errors
from tamis.cli.eval import evaluate
from tamis.cli.explain import explain
from tamis.cli.generate import generate
from tamis.cli.inspect import inspect
from tamis.cli.kv import kv
from tamis.cli.options import Debug
from tamis.cli.plan import plan
from tamis.cli.pull import pull
from tamis.cli.retrofit import retrofit
from tamis.cli.serve import serve

app = typer.Typer(
    cls=Group,
    help="Run language models with block-sparse attention on a sparse KV pool.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, serve, bench, inspect, plan, pull, retrofit, explain, doctor):
    app.command(cls=Command)(command)
app.command(name="eval", cls=Command)(evaluate)
app.add_typer(kv, name="kv")
app.add_typer(errors, name="errors")


def run(argv: Sequence[str], options: CommonOptions) -> int:
    """Parse `argv`, run the command it names, and return its exit code. Errors pass through to the caller."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("tamis", list(argv), obj=options) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return 0


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tamis {tamis.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _tamis(
    context: typer.Context,
    _wants_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    _debug: Debug = False,
) -> None:
    _quiet_libraries()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks must not end a reply
    if context.invoked_subcommand is None:
        print(context.get_help())


def _quiet_libraries() -> None:
    """Keep other libraries' warnings and chatter off standard error; `python -W` brings the warnings back."""
    for library in ("huggingface_hub", "httpx", "filelock", "urllib3", "torch"):
        logging.getLogger(library).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
