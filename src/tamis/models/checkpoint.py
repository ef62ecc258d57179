"""Weights on disk, mapped and read tensor by tensor: safetensors (one file or shards) and GGUF."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tamis.errors import ConfigError, CorruptFileError, MissingTensorError, ModelNotFoundError, TensorDtypeError
from tamis.kernels.quant import BLOCK_FORMATS, Format, Matrix, from_blocks
from tamis.models.gguf_file import GGUFFile
from tamis.models.hub import ModelSource

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_READABLE: Mapping[str, int] = MappingProxyType({"F32": 4, "BF16": 2, "F16": 2})


class Checkpoint(Protocol):
    """The stored tensors of a model, by the names the checkpoint gives them."""

    def names(self) -> frozenset[str]:
        """All tensor names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, rows first. Raises MissingTensorError for an unknown name, as all the following do."""

    def file(self, name: str) -> Path:
        """The file that holds the tensor."""

    def nbytes(self, name: str) -> int:
        """Bytes the tensor takes in its file."""

    def read(self, name: str, part: slice | None = None) -> torch.Tensor:
        """The tensor, or part of its first dimension, in fp32, bf16 or fp16 as stored; fp32 where it is quantised.

        It may share the file's mapping: not to be written to. Raises TensorDtypeError for any other stored type.
        """

    def block_format(self, name: str) -> Format | None:
        """The format in which `read_blocks` gives a quantised tensor; None where only `read` can."""

    def read_blocks(self, name: str, part: slice | None = None) -> Matrix:
        """A quantised tensor, or part of its first dimension, as it is stored."""

    def close(self) -> None:
        """Give the files back; tensors already read stay valid."""


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Map the weights of `source` and check what the files say about themselves.

    Raises ModelNotFoundError where there are none in a form that can be read, MissingTensorError for a missing shard,
    CorruptFileError for a broken file, ConfigError for a source that is a configuration only.
    """
    if source.kind == "gguf":
        return GGUFCheckpoint(source.path)
    if source.kind == "config":
        raise ConfigError(f"{source.name} is a configuration only: it has no weights")
    return SafetensorsCheckpoint(source.path)


class SafetensorsCheckpoint:
    """A directory with model.safetensors.index.json and its shards, or else with model.safetensors; or one file."""

    def __init__(self, path: Path) -> None:
        index, single = path / INDEX_FILE, path
        self._shards: dict[Path, Any] = {}
        if index.is_file():
            self._files = self._open_shards(index, _read_index(index))
            return
        if path.is_dir():
            check_has_weights(path)
            single = path / SINGLE_FILE
        self._files = dict.fromkeys(self._open(single), single)

    def names(self) -> frozenset[str]:
        """All tensor names."""
        return frozenset(self._files)

    def file(self, name: str) -> Path:
        """The file that holds the tensor."""
        if name not in self._files:
            where = ", ".join(sorted(str(path) for path in self._shards))
            raise MissingTensorError(f"tensor {name!r} is missing in {where}")
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, rows first."""
        return tuple(self._slice(name).get_shape())

    def nbytes(self, name: str) -> int:
        """Bytes the tensor takes in its file."""
        return math.prod(self.shape(name)) * _READABLE[self._dtype(name)]

    def read(self, name: str, part: slice | None = None) -> torch.Tensor:
        """The tensor as stored, a view of the mapped file; TensorDtypeError unless it is fp32, bf16 or fp16."""
        self._dtype(name)
        tensor: torch.Tensor = self._shards[self.file(name)].get_tensor(name)
        return tensor if part is None else tensor[part]

    def block_format(self, name: str) -> Format | None:
        """None: safetensors hold no blocks that we read."""
        self.file(name)
        return None

    def read_blocks(self, name: str, part: slice | None = None) -> Matrix:
        """Not to be called: `block_format` is None."""
        raise NotImplementedError(f"{self.file(name)} holds no blocks")

    def close(self) -> None:
        """Give the files back; tensors already read stay valid."""
        for handle in self._shards.values():
            handle.__exit__(None, None, None)
        self._shards = {}

    def _slice(self, name: str) -> Any:
        return self._shards[self.file(name)].get_slice(name)

    def _dtype(self, name: str) -> str:
        stored = str(self._slice(name).get_dtype())
        if stored not in _READABLE:
            raise TensorDtypeError(
                f"tensor {name!r} in {self.file(name)} is stored as {stored}; only {', '.join(_READABLE)} can be read"
            )
        return stored

    def _open_shards(self, index: Path, weight_map: dict[str, str]) -> dict[str, Path]:
        """Where each tensor is. One that a shard holds and the index does not list is there too."""
        held: dict[str, Path] = {}
        try:
            for shard in sorted(set(weight_map.values())):
                listed = {name for name, file in weight_map.items() if file == shard}
                names = self._open_shard(index, index.parent / shard, listed)
                held |= dict.fromkeys(listed | (names - weight_map.keys()), index.parent / shard)
        except BaseException:
            self.close()
            raise
        return held

    def _open_shard(self, index: Path, path: Path, listed: set[str]) -> set[str]:
        if not path.is_file():
            raise MissingTensorError(
                f"{path}: no such file, but {index.name} places {len(listed)} tensors in it, such as {min(listed)!r}"
            )
        names = set(self._open(path))
        if listed - names:
            missing = min(listed - names)
            raise MissingTensorError(f"tensor {missing!r} is missing in {path}, where {index.name} places it")
        return names

    def _open(self, path: Path) -> list[str]:
        from safetensors import SafetensorError, safe_open

        try:
            handle: Any = safe_open(path, framework="pt")
        except SafetensorError as error:
            what = (
                "the file is empty" if path.stat().st_size == 0 else f"corrupt or truncated safetensors file: {error}"
            )
            raise CorruptFileError(f"{path}: {what}") from None
        except OSError as error:
            raise ModelNotFoundError(f"{path}: cannot be read: {error}") from None
        self._shards[path] = handle
        return list(handle.keys())


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path}: not valid JSON: {error}") from None
    except OSError as error:
        raise ModelNotFoundError(f"{path}: cannot be read: {error.strerror}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(f"{path}: it has no weight_map of tensor names to shard files")
    for name, shard in weight_map.items():
        # A shard is a file beside its index; a path could reach anywhere on the machine.
        if not isinstance(shard, str) or not shard or shard in (".", "..") or set(shard) & set("/\\\0"):
            raise CorruptFileError(f"{path}: tensor {name!r} has the shard {shard!r}, which is not a plain file name")
    return weight_map


def check_has_weights(directory: Path) -> None:
    """Raise ModelNotFoundError, saying what is missing, unless there are safetensors weights in `directory`."""
    if (directory / INDEX_FILE).is_file() or (directory / SINGLE_FILE).is_file():
        return
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    if pickled:
        raise ModelNotFoundError(f"{directory}: the weights are in {pickled[0]}; tamis reads safetensors or GGUF only")
    raise ModelNotFoundError(f"{directory}: there is no {SINGLE_FILE} and no {INDEX_FILE}")


class GGUFCheckpoint:
    """The tensors of a GGUF file, under GGUF's own names and in its own row order."""

    def __init__(self, path: Path) -> None:
        self._gguf = GGUFFile(path)

    def names(self) -> frozenset[str]:
        """All tensor names."""
        return frozenset(self._gguf.tensors)

    def file(self, name: str) -> Path:
        """The file that holds the tensor."""
        if name not in self._gguf.tensors:
            raise MissingTensorError(f"tensor {name!r} is missing in {self._gguf.path}")
        return self._gguf.path

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, rows first."""
        self.file(name)
        return self._gguf.tensors[name].shape

    def nbytes(self, name: str) -> int:
        """Bytes the tensor takes in its file."""
        self.file(name)
        return self._gguf.tensors[name].nbytes

    def read(self, name: str, part: slice | None = None) -> torch.Tensor:
        """The tensor, a copy: as stored where that is fp32, bf16 or fp16, else dequantised to fp32."""
        self.file(name)
        return read_gguf_tensor(self._gguf, name, part)

    def block_format(self, name: str) -> Format | None:
        """Of Q8_0, Q4_0 and Q4_1 tensors."""
        self.file(name)
        return BLOCK_FORMATS.get(self._gguf.tensors[name].type.name)

    def read_blocks(self, name: str, part: slice | None = None) -> Matrix:
        """A quantised tensor whose type has a `block_format`."""
        form = self.block_format(name)
        assert form is not None, "asked for blocks of a tensor that has none"
        return from_blocks(torch.from_numpy(_stored_rows(self._gguf, name)[part or slice(None)].copy()), form)

    def close(self) -> None:
        """Give the file back; tensors already read stay valid."""
        self._gguf.close()


def _stored_rows(file: GGUFFile, name: str) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor, uint8 [..., rows, bytes of a row]."""
    from gguf import quants

    tensor = file.tensors[name]
    return file.data(name).reshape(quants.quant_shape_to_byte_shape(tensor.shape, tensor.type))


def read_gguf_tensor(file: GGUFFile, name: str, part: slice | None = None) -> torch.Tensor:
    """A tensor of `file`, or part of its first dimension: fp32, bf16 or fp16 as stored, a quantised one in fp32.

    Raises TensorDtypeError for a type that the gguf package cannot dequantise.
    """
    from gguf import GGMLQuantizationType, quants

    tensor, part = file.tensors[name], part or slice(None)
    if tensor.type is GGMLQuantizationType.BF16:
        bits = file.data(name).view(np.int16).reshape(tensor.shape)[part]
        return torch.from_numpy(bits.copy()).view(torch.bfloat16)
    if tensor.type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        stored = np.float32 if tensor.type is GGMLQuantizationType.F32 else np.float16
        return torch.from_numpy(file.data(name).view(stored).reshape(tensor.shape)[part].copy())
    rows = _stored_rows(file, name)[part]
    try:
        # Scales may be any bits, infinities and NaN too; what to think of such values is the reader's business.
        with np.errstate(all="ignore"):
            values = quants.dequantize(rows, tensor.type)
    except NotImplementedError:
        raise TensorDtypeError(
            f"tensor {name!r} in {file.path} is stored as {tensor.type.name}, which cannot be dequantised"
        ) from None
    return torch.from_numpy(values)
