"""The prompt of `tamis generate`: an argument, a file or standard input, always text."""

import sys
from pathlib import Path

from tamis.errors import EmptyPromptError, RequestError

MAX_BYTES = 64 << 20
"""Of a prompt from a file: many times what any model's context holds. /dev/zero has no end."""


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The text of `--prompt`, or of the file `--file` names (- is standard input), without a byte order mark.

    Raises RequestError unless exactly one is given and it is UTF-8 of at most MAX_BYTES, EmptyPromptError where there
    is no text, OSError where the file cannot be read.
    """
    if (prompt is None) == (file is None):
        more = ", not both" if prompt is not None else "; --file - reads standard input"
        raise RequestError(f"give the prompt with --prompt TEXT or --file PATH{more}")
    if prompt is not None:
        text, origin = _checked(prompt), "--prompt"
    else:
        assert file is not None
        text, origin = _decoded(file), "standard input" if file == "-" else file
    if not text:
        raise EmptyPromptError(f"the prompt is empty: {origin} has no text")
    return text


def _checked(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # how Python carries bytes of the command line that are not UTF-8
        raise RequestError(f"the prompt is not UTF-8 text at character {error.start}") from error
    return prompt


def _decoded(file: str) -> str:
    name = "standard input" if file == "-" else file
    if file == "-":
        content = sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        with Path(file).open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise RequestError(f"{name} has more than {MAX_BYTES} bytes, too many for a prompt")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}") from error
