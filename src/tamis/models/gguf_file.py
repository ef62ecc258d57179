"""Reading the header of a GGUF file: metadata and where the tensors are."""

import contextlib
import itertools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from tamis.errors import ConfigError, CorruptFileError, ModelNotFoundError, TensorDtypeError

Scalar = TypeVar("Scalar", str, int, float, bool)

# The header is parsed here and not by gguf.GGUFReader: that one trusts every count, length and offset of the file
# (a scalar array with a lying count never ends), and builds an array object for each of 100,000 strings.

_SCALARS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}
_KINDS: Mapping[type, str] = MappingProxyType({str: "s", int: "BbHhIiQq", float: "fdBbHhIiQq", bool: "?"})
_WORDS: Mapping[type, str] = MappingProxyType({str: "text", int: "a whole number", float: "a number", bool: "a bool"})
_MAX_DIMS = 4
_MAX_NAME = 65535
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as torch writes it (GGUF stores the reverse)."""
    type: gguf.GGMLQuantizationType
    offset: int
    """Of its first byte in the file."""
    nbytes: int


@dataclass(frozen=True)
class _Value:
    code: str
    """A struct format character, or "s" for text."""
    offset: int
    count: int | None
    """None: a single value; else an array of so many."""


class GGUFFile:
    """A mapped GGUF file (version 2 or 3, little-endian), its header read and checked.

    `tensors` maps names to places. Raises ModelNotFoundError where there is no such file and CorruptFileError,
    naming the file and what lies, where a count, length, offset, type or shape cannot be true.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        try:
            self._values, self.tensors = _HeaderParser(path, self._map).parse()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; arrays that `data` gave out keep it mapped until they go."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def keys(self) -> frozenset[str]:
        """The metadata keys of the file."""
        return frozenset(self._values)

    def is_list(self, key: str) -> bool:
        """Whether there is a metadata key `key` and it holds an array."""
        return key in self._values and self._values[key].count is not None

    def get(self, key: str, kind: type[Scalar]) -> Scalar:
        """The value under `key`, `kind` one of str, int, float, bool (float takes whole numbers too).

        Raises ConfigError where it is missing or of another kind.
        """
        found = self.find(key, kind)
        if found is None:
            raise ConfigError(f"{self.path}: the metadata key {key} is missing")
        return found

    def find(self, key: str, kind: type[Scalar]) -> Scalar | None:
        """As `get`, but None where the key is missing."""
        value = self._typed(key, kind, array=False)
        return None if value is None else kind(self._decode(key, value, 1)[0])

    def get_list(self, key: str, kind: type[Scalar]) -> list[Scalar]:
        """The array under `key`; ConfigError where it is missing or not an array of `kind`."""
        found = self.find_list(key, kind)
        if found is None:
            raise ConfigError(f"{self.path}: the metadata key {key} is missing")
        return found

    def find_list(self, key: str, kind: type[Scalar]) -> list[Scalar] | None:
        """As `get_list`, but None where the key is missing."""
        value = self._typed(key, kind, array=True)
        if value is None:
            return None
        return [kind(item) for item in self._decode(key, value, value.count or 0)]

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, uint8 [nbytes], a read-only view of the mapped file."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)

    def _typed(self, key: str, kind: type, *, array: bool) -> _Value | None:
        value = self._values.get(key)
        if value is None:
            return None
        if value.code not in _KINDS[kind] or (value.count is not None) is not array:
            wanted = f"a list of {_WORDS[kind]}" if array else _WORDS[kind]
            raise ConfigError(f"{self.path}: the metadata key {key} is not {wanted}")
        return value

    def _decode(self, key: str, value: _Value, count: int) -> list[Any]:
        if value.code != "s":
            return list(struct.unpack_from(f"<{count}{value.code}", self._map, value.offset))
        texts, position = [], value.offset
        try:
            for _ in range(count):
                (length,) = _U64.unpack_from(self._map, position)
                position += 8 + length
                texts.append(self._map[position - length : position].decode("utf-8"))
        except UnicodeDecodeError:
            raise CorruptFileError(f"{self.path}: the metadata key {key} holds text that is not UTF-8") from None
        return texts


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: no such file") from None
    except ValueError:
        raise CorruptFileError(f"{path}: the file is empty") from None
    except OSError as error:
        raise ModelNotFoundError(f"{path}: cannot be read: {error.strerror}") from None


class _HeaderParser:
    """Walks the header once. Every length is held against what is left of the file before anything is done with it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def parse(self) -> tuple[dict[str, _Value], dict[str, GGUFTensor]]:
        if self.data[:4] != b"GGUF":
            raise self.corrupt(f"not a GGUF file (it starts with {self.data[:4]!r})")
        self.position = 4
        version = self.take("I", "version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            raise self.corrupt("big-endian files are not supported" if swapped else f"unknown GGUF version {version}")
        tensor_count = self.take("Q", "tensor count")
        key_count = self.take("Q", "metadata count")
        # The shortest entries: an empty name, a type and one byte; an empty name, no dimension, a type and an offset.
        self.check_fits(key_count, 8 + 4 + 1, "metadata keys")
        self.check_fits(tensor_count, 8 + 4 + 4 + 8, "tensors")
        values = self.parse_values(key_count)
        places = [self.parse_tensor() for _ in range(tensor_count)]
        return values, self.place_tensors(places, self.alignment(values))

    def parse_values(self, count: int) -> dict[str, _Value]:
        values: dict[str, _Value] = {}
        for _ in range(count):
            key = self.name("metadata key")
            if key in values:
                raise self.corrupt(f"the metadata key {key} is there twice")
            values[key] = self.parse_value(key)
        return values

    def parse_value(self, key: str) -> _Value:
        what = f"metadata key {key}"
        kind = self.value_type(what)
        if kind is not gguf.GGUFValueType.ARRAY:
            return self.skip_items(kind, None, what)
        kind = self.value_type(what)
        if kind is gguf.GGUFValueType.ARRAY:
            raise self.corrupt(f"{what} is a nested array")
        return self.skip_items(kind, self.take("Q", what), what)

    def skip_items(self, kind: gguf.GGUFValueType, count: int | None, what: str) -> _Value:
        offset, items = self.position, 1 if count is None else count
        if kind is not gguf.GGUFValueType.STRING:
            code = _SCALARS[kind]
            self.check_fits(items, struct.calcsize("<" + code), f"values of {what}")
            self.position += items * struct.calcsize("<" + code)
            return _Value(code, offset, count)
        self.check_fits(items, 8, f"texts of {what}")
        position, size, data, unpack = offset, self.size, self.data, _U64.unpack_from
        for _ in range(items):
            if position + 8 > size:
                raise self.truncated(what)
            position += 8 + unpack(data, position)[0]
        if position > size:
            raise self.corrupt(f"a text of {what} reaches past the end of the file ({size} bytes)")
        self.position = position
        return _Value("s", offset, count)

    def parse_tensor(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        name = self.name("tensor name")
        what = f"tensor {name}"
        dims = self.take("I", what)
        if not 1 <= dims <= _MAX_DIMS:
            raise self.corrupt(f"{what} has {dims} dimensions, not 1 to {_MAX_DIMS}")
        shape = tuple(self.take("Q", what) for _ in range(dims))[::-1]
        if 0 in shape:
            raise self.corrupt(f"{what} has the empty shape {list(shape)}")
        number = self.take("I", what)
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise self.corrupt(f"{what} has the unknown type {number}") from None
        return name, shape, kind, self.take("Q", what)

    def place_tensors(
        self, places: list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]], alignment: int
    ) -> dict[str, GGUFTensor]:
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in places:
            if name in tensors:
                raise self.corrupt(f"the tensor {name} is there twice")
            if offset % alignment:
                raise self.corrupt(f"tensor {name}: its offset {offset} is not a multiple of {alignment}")
            tensor = GGUFTensor(name, shape, kind, start + offset, self.stored_bytes(name, shape, kind))
            if tensor.offset + tensor.nbytes > self.size:
                raise self.corrupt(
                    f"tensor {name} ends at byte {tensor.offset + tensor.nbytes}, past the end of the file "
                    f"({self.size} bytes)"
                )
            tensors[name] = tensor
        self.check_overlap(tensors)
        return tensors

    def stored_bytes(self, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
        if kind not in gguf.GGML_QUANT_SIZES:
            raise TensorDtypeError(f"{self.path}: tensor {name} is stored as {kind.name}, whose layout is not known")
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self.corrupt(f"tensor {name}: rows of {shape[-1]} are not whole {kind.name} blocks of {block}")
        return math.prod(shape) // block * size

    def check_overlap(self, tensors: dict[str, GGUFTensor]) -> None:
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.nbytes > after.offset:
                raise self.corrupt(f"the tensors {before.name} and {after.name} overlap")

    def alignment(self, values: dict[str, _Value]) -> int:
        value = values.get("general.alignment")
        if value is None:
            return gguf.GGUF_DEFAULT_ALIGNMENT
        if value.code != "I" or value.count is not None:
            raise self.corrupt("general.alignment is not a uint32")
        alignment: int = struct.unpack_from("<I", self.data, value.offset)[0]
        if alignment.bit_count() != 1:
            raise self.corrupt(f"general.alignment={alignment} is not a power of two")
        return alignment

    def value_type(self, what: str) -> gguf.GGUFValueType:
        number = self.take("I", what)
        try:
            return gguf.GGUFValueType(number)
        except ValueError:
            raise self.corrupt(f"{what} has the unknown type {number}") from None

    def name(self, what: str) -> str:
        length = self.take("Q", what)
        if length > min(_MAX_NAME, self.size - self.position):
            raise self.corrupt(f"a {what} claims to be {length} bytes long")
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.corrupt(f"a {what} is not UTF-8: {raw[:40]!r}") from None

    def take(self, code: str, what: str) -> int:
        size = struct.calcsize("<" + code)
        if self.position + size > self.size:
            raise self.truncated(what)
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return int(value)

    def check_fits(self, count: int, size: int, what: str) -> None:
        if count * size > self.size - self.position:
            raise self.corrupt(f"it claims {count} {what}, more than the file ({self.size} bytes) can hold")

    def corrupt(self, what: str) -> CorruptFileError:
        return CorruptFileError(f"{self.path}: corrupt GGUF: {what}")

    def truncated(self, what: str) -> CorruptFileError:
        return self.corrupt(f"it ends inside the {what} ({self.size} bytes)")
