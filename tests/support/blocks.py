"""The code blocks of README and docs, and how each kind is tried.

python          run; the blocks of a page share their names. `print(...)  # text` must print this text
console         lines behind `$ ` are commands, run; other lines are parts of what they print, in this order, and
                `(exit code N)` is how the last one ends
console parse   commands that would run for long, or serve: their options are checked
sh              requests to a running server, apart by an empty line; below `# an error` those that are refused
text            what the page's Python prints
json, toml      must be readable
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
KINDS = ("python", "console", "console parse", "sh", "text", "json", "toml")
_BLOCK = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
_PRINTED = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)
_EXIT = re.compile(r"\(exit code (\d+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    kind: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command line, what it prints in parts, and how it ends."""

    arguments: tuple[str, ...]
    printed: tuple[str, ...]
    code: int


def blocks(page: str) -> list[Block]:
    """All blocks of a page but those of the documentation generator, which are spelled {name}."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        if not match[1].startswith("{"):
            found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[1].strip(), match[2]))
    return found


def of_kind(page: str, *kinds: str) -> list[Block]:
    """The blocks of a page that are of these kinds."""
    return [block for block in blocks(page) if block.kind in kinds]


def promised(code: str) -> list[str]:
    """What the code says its print calls print."""
    return _PRINTED.findall(code)


def commands(block: Block) -> list[Command]:
    """The commands of a console block."""
    found: list[tuple[str, list[str], int]] = []
    for line in filter(None, map(str.strip, block.text.splitlines())):
        if line.startswith("$ "):
            found.append((line[2:], [], 0))
        elif (code := _EXIT.fullmatch(line)) is not None:
            found[-1] = (*found[-1][:2], int(code[1]))
        else:
            found[-1][1].append(_spaced(line))
    return [Command(tuple(shlex.split(text)), tuple(printed), code) for text, printed, code in found]


def missing_part(printed: str, parts: tuple[str, ...]) -> str | None:
    """The first of `parts` that does not stand in `printed` behind those before it; None: all do."""
    rest = _spaced(printed)
    for part in parts:
        _, found, rest = rest.partition(part)
        if not found:
            return part
    return None


def requests(block: Block) -> list[str]:
    """The requests of an sh block."""
    return [text.strip() for text in block.text.split("\n\n")]


def _spaced(text: str) -> str:
    """One space wherever there is white space: tables are as wide as they need to be."""
    return " ".join(text.split())
