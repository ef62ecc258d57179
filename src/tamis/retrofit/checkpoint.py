"""What an interrupted run goes on from: one file of tensors, replaced whole, with the run's figures in its header."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from tamis.errors import ConfigError, CorruptFileError

CHECKPOINT = "checkpoint.safetensors"
WINDOWS = "windows.safetensors"
_KEY = "tamis"


@dataclass
class State:
    """How far a run is."""

    plan: dict[str, Any]
    """Settings, base and corpus; a run with another plan cannot go on from here."""
    done: int = 0
    """Windows learned from."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """For each window: loss, mass and oracle, each a number for every layer that learned."""
    repaired: int = 0
    """Windows that the index values learned from."""
    repairs: list[dict[str, Any]] = field(default_factory=list)
    """For each of those: the share of the error that is left, for every layer."""


def write_tensors(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write a file whole or not at all. Raises OSError, with the file's name, where the disk is full."""
    data = safetensors.torch.save(
        {name: value.contiguous() for name, value in tensors.items()}, {_KEY: json.dumps(facts)}
    )
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of such a file. Raises CorruptFileError."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads(file.metadata()[_KEY])
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{path}: cannot be read: {error}; --restart begins anew") from None
    return tensors, facts


def check_plan(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise ConfigError, naming the first difference, where a checkpoint belongs to another plan."""
    for key in sorted(found.keys() | wanted.keys()):
        old, new = found.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            check_plan(path, old, new)
        elif old != new:
            shown = f" {old!r}, now {new!r}" if len(repr(old)) + len(repr(new)) < 200 else ""
            raise ConfigError(f"{path} was made with another {key}{shown}; --restart begins anew")
