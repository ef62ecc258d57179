"""Reading a Python package's source for the errors it raises. Nothing of it is imported or run."""

import ast
import io
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tamis.errors import CatalogError
from tamis.errors.catalog.messages import Found, Messages
from tamis.errors.catalog.module import Module, parse

MAX_SOURCE = 16 << 20
"""Bytes of one source file."""
AROUND = 18
"""Lines of the excerpt before and after the line of the raise."""
_LONGEST_RAISE = 40
"""Lines that are tried for one raise in a file that does not parse."""


@dataclass(frozen=True)
class Source:
    """A source file: where it lies, its name in the data set, its lines."""

    path: Path
    name: str
    lines: tuple[str, ...]

    def excerpt(self, line: int) -> tuple[str, int, int]:
        """The lines around `line`, the first and the last one's number."""
        first, last = max(1, line - AROUND), min(len(self.lines), line + AROUND)
        return "\n".join(self.lines[first - 1 : last]), first, last


@dataclass(frozen=True)
class Site:
    """A place in the source where an error is made."""

    source: Source
    found: Found

    @property
    def place(self) -> str:
        """The function, with its module: "kv/pool.py" and "SparseKVPool.f" -> "kv.pool.SparseKVPool.f"."""
        module = self.source.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"{module}.{self.found.function}".rstrip(".")


@dataclass(frozen=True)
class Scan:
    """What a package's source says, and which files could not be read whole: (path, why)."""

    sites: tuple[Site, ...]
    problems: tuple[tuple[Path, str], ...]
    files: int


def scan(path: Path, base: Path) -> Scan:
    """Read the file or all `*.py` under the directory `path`; names are relative to `base`.

    A file that cannot be read is reported, and the rest goes on. Raises CatalogError where there is no such path.
    """
    problems: list[tuple[Path, str]] = []
    read: list[tuple[Source, Module]] = []
    files = _python_files(path)
    for file in files:
        try:
            source = _read(file, base)
            module, fault = _parse(source)
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            problems.append((file, " ".join(str(error).split()) or type(error).__name__))
            continue
        if fault is not None:
            problems.append((file, fault))
        read.append((source, module))
    messages = Messages([module for _, module in read])
    sites = tuple(Site(source, found) for source, module in read for found in messages.of(module))
    return Scan(sites, tuple(problems), len(files))


def _python_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CatalogError(f"{path}: no such file or directory")
    # A link that leads nowhere is told of; what is no file at all, a pipe say, is never opened.
    return sorted(file for file in path.rglob("*.py") if file.is_file() or (file.is_symlink() and not file.exists()))


def _read(path: Path, base: Path) -> Source:
    if path.stat().st_size > MAX_SOURCE:
        raise ValueError(f"it has more than {MAX_SOURCE} bytes")
    content = path.read_bytes()
    if b"\0" in content:
        raise ValueError("it is binary: it holds zero bytes")
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    text = content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    # Not splitlines(): the parser does not count form feeds and the like as ends of lines.
    return Source(path, path.relative_to(base).as_posix(), tuple(text.removesuffix("\n").split("\n")))


def _parse(source: Source) -> tuple[Module, str | None]:
    """The module; of one with a syntax error the raises that can be read on their own, and what is wrong."""
    text = "\n".join(source.lines) + "\n"
    try:
        return Module(text), None
    except SyntaxError as error:
        raises = list(_lone_raises(source.lines))
        fault = f"syntax error at line {error.lineno}: {error.msg}; {len(raises)} raises were read on their own"
        return Module(text, ast.Module(raises, [])), fault


def _lone_raises(lines: tuple[str, ...]) -> Iterator[ast.stmt]:
    """The raise statements that parse by themselves, with the line numbers they have in the file."""
    for start, line in enumerate(lines):
        if not line.lstrip().startswith("raise "):
            continue
        for end in range(start + 1, min(len(lines), start + _LONGEST_RAISE) + 1):
            try:
                tree = parse(textwrap.dedent("\n".join(lines[start:end])))
            except SyntaxError:
                continue
            yield ast.increment_lineno(tree, start).body[0]
            break
