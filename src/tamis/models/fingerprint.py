"""What makes the K and V of two models differ, as one text: KV tiers keep pages under it."""

import dataclasses
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from tamis.cache import cache_dir
from tamis.config import EngineConfig, ModelConfig
from tamis.errors import ModelNotFoundError
from tamis.models.builtin import file_sha256
from tamis.models.hub import ModelSource
from tamis.models.index_branch import BRANCH_TENSORS

logger = logging.getLogger(__name__)

_PURPOSE = "tamis model 1"


def model_fingerprint(source: ModelSource, config: ModelConfig, settings: EngineConfig) -> str:
    """A sha256, in hex, over all that K and V depend on beside the tokens and the layout of the pool.

    That is every byte of every weight file (an index branch among them) whatever its name, the configuration with RoPE
    and the sparse branch, and the types in which weights are kept and computed with. Files' hashes are remembered in
    the cache directory under path, size, times and inode, so that a model is read for this only once.
    Raises ModelNotFoundError for a file that cannot be read.
    """
    files = sorted(_file_hash(path) for path in _weight_files(source))
    fields = {
        "purpose": _PURPOSE,
        "files": files,
        "config": _plain(dataclasses.asdict(config)),
        "dtype": settings.dtype,
        "quant": settings.quant,
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def base_fingerprint(source: ModelSource) -> str:
    """What an index branch knows its base by: a sha256, in hex, over the contents of the weight files, whatever their
    names; without an index branch that lies beside them. Raises ModelNotFoundError for a file that cannot be read.
    """
    hashes = sorted(_file_hash(path) for path in _base_files(source))
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _weight_files(source: ModelSource) -> list[Path]:
    return _base_files(source) + ([] if source.branch is None else [source.branch / BRANCH_TENSORS])


def _base_files(source: ModelSource) -> list[Path]:
    if source.kind == "gguf":
        return [source.path]
    return [path for path in source.path.glob("*.safetensors") if path.name != BRANCH_TENSORS]


def _file_hash(path: Path) -> str:
    """The sha256 of a file; of one that was seen before and has not been touched since, as remembered."""
    try:
        seen = path.stat()
        identity = f"{path.resolve()}|{seen.st_size}|{seen.st_mtime_ns}|{seen.st_ctime_ns}|{seen.st_ino}|{seen.st_dev}"
        note = cache_dir() / "hashes" / hashlib.sha256(identity.encode()).hexdigest()
        known = _read_note(note)
        if known is not None:
            return known
        logger.info("reading %s once, to tell its KV pages from those of other models", path)
        found = file_sha256(path)
    except OSError as error:
        raise ModelNotFoundError(f"{path}: cannot be read: {error.strerror or error}") from error
    _write_note(note, found)
    return found


def _read_note(note: Path) -> str | None:
    try:
        text = note.read_text("ascii")
    except (OSError, ValueError):
        return None
    return text if len(text) == 64 and set(text) <= set("0123456789abcdef") else None


def _write_note(note: Path, text: str) -> None:
    """Whole or not at all; a cache that cannot be written to costs time only."""
    temporary = note.with_name(f"{note.name}.{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, "ascii")
        temporary.replace(note)
    except OSError as error:
        logger.info("%s cannot be written: %s", note, error)


def _plain(value: Any) -> Any:
    """`value` as JSON takes it: enumerations and torch types by name."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else str(value)
