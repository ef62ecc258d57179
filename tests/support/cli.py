"""Running the command line inside the test process."""

import contextlib
import io
import logging
from dataclasses import dataclass

from tamis.cli import main


@dataclass(frozen=True)
class Result:
    """What one command line left behind."""

    code: int
    out: str
    err: str


def invoke(*arguments: str) -> Result:
    """Run `tamis` with these arguments; log levels are afterwards as they were."""
    out, err = io.StringIO(), io.StringIO()
    logger = logging.getLogger("tamis")
    level = logger.level
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    finally:
        logger.setLevel(level)
    return Result(code, out.getvalue(), err.getvalue())
