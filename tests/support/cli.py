"""Running the command line inside the test process."""

import contextlib
import io
import logging
import re
from dataclasses import dataclass

from tamis.cli import main

_HINT = re.compile(r"^hint: tamis explain [0-9a-f]{16}\n", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What one command line left behind."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> str:
        """Standard error without the hint that stands below an error."""
        return _HINT.sub("", self.err)


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
