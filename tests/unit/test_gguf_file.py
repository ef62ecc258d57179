"""The GGUF header reader: what the gguf package writes reads back, and files that lie are refused at once."""

import os
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tamis.errors import ConfigError, CorruptFileError, ModelNotFoundError, TamisError, TensorDtypeError
from tamis.models.gguf_file import GGUFFile

Type = gguf.GGMLQuantizationType
Value = gguf.GGUFValueType
TOKENS = ["a", "", "ünï", "漢字", " " * 40]


def write(path: Path, *, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -5)
    writer.add_uint16("t.u16", 65535)
    writer.add_int16("t.i16", -300)
    writer.add_uint32("t.u32", 1 << 31)
    writer.add_int32("t.i32", -70000)
    writer.add_uint64("t.u64", 1 << 63)
    writer.add_int64("t.i64", -(1 << 62))
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.yes", True)
    writer.add_string("t.text", "grüße")
    writer.add_array("t.texts", TOKENS)
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.5, 2.0])
    writer.add_array("t.bools", [True, False])
    writer.add_tensor("x", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    raw = gguf.quants.quantize(np.ones((5, 64), dtype=np.float32), Type.Q8_0)
    writer.add_tensor("q", raw, raw_dtype=Type.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_everything_written_reads_back(tmp_path: Path, alignment: int | None) -> None:
    path = write(tmp_path / "m.gguf", alignment=alignment)
    with GGUFFile(path) as file:
        assert [file.get(f"t.{key}", int) for key in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")] == [
            200, -5, 65535, -300, 1 << 31, -70000, 1 << 63, -(1 << 62),
        ]  # fmt: skip
        assert file.get("t.f32", float) == 0.5
        assert file.get("t.f64", float) == 0.1
        assert file.get("t.u8", float) == 200.0
        assert isinstance(file.get("t.u8", float), float)
        assert file.get("t.yes", bool) is True
        assert file.get("t.text", str) == "grüße"
        assert file.get_list("t.texts", str) == TOKENS
        assert file.get_list("t.ints", int) == [1, -2, 3]
        assert file.get_list("t.floats", float) == [0.5, 2.0]
        assert file.get_list("t.bools", bool) == [True, False]
        assert file.is_list("t.ints")
        assert not file.is_list("t.u8")
        assert file.find("nope", int) is None
        assert file.find_list("nope", str) is None
        assert {"t.u8", "t.texts", "general.architecture"} <= file.keys()


def test_tensors_are_where_the_gguf_package_says(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    with GGUFFile(path) as file:
        theirs = gguf.GGUFReader(path).tensors
        assert set(file.tensors) == {tensor.name for tensor in theirs} == {"x", "q"}
        for tensor in theirs:
            ours = file.tensors[tensor.name]
            assert ours.shape == tuple(reversed(tensor.shape.tolist()))
            assert (ours.offset, ours.nbytes, ours.type) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
            assert file.data(tensor.name).tobytes() == tensor.data.tobytes()


def test_data_outlives_the_file(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path / "m.gguf")) as file:
        data = file.data("x")
    assert data.view(np.float32).tolist() == list(range(24))
    assert not data.flags.writeable


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        ("nope", int, "the metadata key nope is missing"),
        ("t.text", int, r"the metadata key t\.text is not a whole number"),
        ("t.u8", str, r"the metadata key t\.u8 is not text"),
        ("t.f32", int, r"the metadata key t\.f32 is not a whole number"),
        ("t.u8", bool, r"the metadata key t\.u8 is not a bool"),
        ("t.yes", int, r"the metadata key t\.yes is not a whole number"),
        ("t.ints", int, r"the metadata key t\.ints is not a whole number"),
    ],
)
def test_a_missing_or_mistyped_key_is_named_with_the_file(tmp_path: Path, key: str, kind: Any, message: str) -> None:
    with GGUFFile(write(tmp_path / "m.gguf")) as file, pytest.raises(ConfigError, match=rf"m\.gguf: {message}"):
        file.get(key, kind)


def test_a_list_of_another_kind_is_refused(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path / "m.gguf")) as file:
        with pytest.raises(ConfigError, match=r"t\.ints is not a list of text"):
            file.get_list("t.ints", str)
        with pytest.raises(ConfigError, match=r"t\.u8 is not a list of a whole number"):
            file.find_list("t.u8", int)
        with pytest.raises(ConfigError, match="nope is missing"):
            file.get_list("nope", int)


# A header built by hand, each part of which a test can turn into a lie.


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def info(name: bytes, dims: list[int], kind: int, offset: int, n_dims: int | None = None) -> bytes:
    head = text(name) + struct.pack("<I", len(dims) if n_dims is None else n_dims)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def header(
    *, magic: bytes = b"GGUF", version: int = 3, tensors: int | None = None, keys: int | None = None,
    pairs: tuple[bytes, ...] = (), infos: tuple[bytes, ...] = (), data: int = 0,
) -> bytes:  # fmt: skip
    counts = (len(infos) if tensors is None else tensors, len(pairs) if keys is None else keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


HUGE = 1 << 62
ALIGNMENT = b"general.alignment"
LIES = {
    "empty file": (b"", "the file is empty"),
    "not GGUF": (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "version 1": (header(version=1), "unknown GGUF version 1"),
    "version 77": (header(version=77), "unknown GGUF version 77"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "ends in the counts": (header()[:20], "it ends inside the metadata count"),
    "key count": (header(keys=HUGE), f"it claims {HUGE} metadata keys"),
    "key count by one": (header(keys=1), r"corrupt GGUF: "),
    "tensor count": (header(tensors=HUGE), f"it claims {HUGE} tensors"),
    "tensor count by one": (header(tensors=1, data=64), "tensor .* has 0 dimensions"),
    "key length": (header(keys=1, pairs=(text(b"k", HUGE), bytes(32))), f"a metadata key claims to be {HUGE} bytes"),
    "key not UTF-8": (header(pairs=(pair(b"\xff\xfe", 0, b"\1"),)), "a metadata key is not UTF-8"),
    "duplicate key": (header(pairs=(pair(b"k", 0, b"\1"), pair(b"k", 0, b"\2"))), "the metadata key k is there twice"),
    "value type": (header(pairs=(pair(b"k", 13, bytes(8)),)), "metadata key k has the unknown type 13"),
    "value cut off": (header(pairs=(pair(b"k", 10, b""),))[:37], "more than the file"),
    "text length": (header(pairs=(pair(b"k", 8, text(b"x", HUGE)),)), "a text of metadata key k reaches past the end"),
    "array type": (header(pairs=(pair(b"k", 9, array(99, 1, bytes(8))),)), "metadata key k has the unknown type 99"),
    "nested array": (header(pairs=(pair(b"k", 9, array(9, 1, bytes(12))),)), "metadata key k is a nested array"),
    "scalar array count": (header(pairs=(pair(b"k", 9, array(4, HUGE, bytes(8))),)), f"it claims {HUGE} values of"),
    "bool array count": (header(pairs=(pair(b"k", 9, array(7, 1000, bytes(8))),)), "it claims 1000 values of"),
    "text array count": (header(pairs=(pair(b"k", 9, array(8, HUGE, text(b"x"))),)), f"it claims {HUGE} texts of"),
    "text in an array": (
        header(pairs=(pair(b"k", 9, array(8, 2, text(b"x") + text(b"y", HUGE))),)),
        "a text of metadata key k reaches past the end",
    ),
    "text before the last": (
        header(pairs=(pair(b"k", 9, array(8, 2, text(b"y", 1000) + text(b"x"))),)),
        "it ends inside the metadata key k",
    ),
    "alignment 0": (header(pairs=(pair(ALIGNMENT, 4, bytes(4)),)), "general.alignment=0 is not a power of two"),
    "alignment 24": (
        header(pairs=(pair(ALIGNMENT, 4, b"\x18\0\0\0"),)),
        "general.alignment=24 is not a power of two",
    ),
    "alignment as text": (header(pairs=(pair(ALIGNMENT, 8, text(b"32")),)), "general.alignment is not a uint32"),
    "no dimension": (header(infos=(info(b"t", [], 0, 0),), data=32), "tensor t has 0 dimensions, not 1 to 4"),
    "too many dimensions": (
        header(infos=(info(b"t", [1], 0, 0, 1 << 31),), data=64),
        f"tensor t has {1 << 31} dimensions",
    ),
    "empty dimension": (header(infos=(info(b"t", [4, 0], 0, 0),), data=64), r"tensor t has the empty shape \[0, 4\]"),
    "huge dimension": (
        header(infos=(info(b"t", [HUGE, HUGE], 0, 0),), data=64),
        "tensor t ends at byte .* past the end",
    ),
    "tensor type": (header(infos=(info(b"t", [4], 999, 0),), data=64), "tensor t has the unknown type 999"),
    "broken blocks": (header(infos=(info(b"t", [33], 8, 0),), data=64), "rows of 33 are not whole Q8_0 blocks of 32"),
    "tensor offset": (header(infos=(info(b"t", [4], 0, 1 << 20),), data=64), "tensor t ends at byte .* past the end"),
    "huge offset": (header(infos=(info(b"t", [4], 0, HUGE),), data=64), "tensor t ends at byte .* past the end"),
    "unaligned offset": (header(infos=(info(b"t", [4], 0, 8),), data=64), "its offset 8 is not a multiple of 32"),
    "one element too many": (header(infos=(info(b"t", [17], 0, 0),), data=64), "tensor t ends at byte"),
    "duplicate tensor": (
        header(infos=(info(b"t", [4], 0, 0), info(b"t", [4], 0, 32)), data=64),
        "the tensor t is there twice",
    ),
    "overlap": (
        header(infos=(info(b"t", [16], 0, 0), info(b"u", [4], 0, 32)), data=64),
        "the tensors t and u overlap",
    ),
    "same place": (
        header(infos=(info(b"t", [4], 0, 0), info(b"u", [4], 0, 0)), data=64),
        "the tensors t and u overlap",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_named_with_the_file_and_at_once(tmp_path: Path, lie: str) -> None:
    content, message = LIES[lie]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    started = time.process_time()
    with pytest.raises(CorruptFileError, match=rf"m\.gguf: (corrupt GGUF: )?.*{message}"):
        GGUFFile(path)
    assert time.process_time() - started < 1


def test_the_truth_by_the_same_hand_is_read(tmp_path: Path) -> None:
    """The helpers above make a good file where nothing lies, so that each test fails for its lie alone."""
    path = tmp_path / "m.gguf"
    pairs = (pair(b"k", 9, array(8, 2, text(b"x") + text(b"y"))), pair(ALIGNMENT, 4, b"\x20\0\0\0"))
    path.write_bytes(header(pairs=pairs, infos=(info(b"t", [4, 2], 0, 0), info(b"u", [4], 0, 32)), data=64))
    with GGUFFile(path) as file:
        assert file.get_list("k", str) == ["x", "y"]
        assert file.tensors["t"].shape == (2, 4)
        assert file.tensors["u"].offset == file.tensors["t"].offset + 32


def test_a_known_type_without_a_known_layout_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(gguf.GGML_QUANT_SIZES, Type.TQ1_0)
    path = tmp_path / "m.gguf"
    path.write_bytes(header(infos=(info(b"t", [256], int(Type.TQ1_0), 0),), data=64))
    with pytest.raises(TensorDtypeError, match="tensor t is stored as TQ1_0"):
        GGUFFile(path)


def test_text_that_is_not_utf8_is_an_error_of_its_key_only(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(pairs=(pair(b"bad", 8, text(b"\xff")), pair(b"good", 8, text(b"ok")))))
    with GGUFFile(path) as file:
        assert file.get("good", str) == "ok"
        with pytest.raises(CorruptFileError, match=r"m\.gguf: the metadata key bad holds text that is not UTF-8"):
            file.get("bad", str)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    with GGUFFile(path) as file:
        end = max(tensor.offset + tensor.nbytes for tensor in file.tensors.values())
    for length in reversed(range(end)):
        os.truncate(path, length)
        with pytest.raises(CorruptFileError, match=r"m\.gguf: "):
            GGUFFile(path)


def test_changed_bytes_never_do_more_than_raise_our_errors(tmp_path: Path) -> None:
    whole = bytearray(write(tmp_path / "m.gguf").read_bytes())
    random = np.random.default_rng(0)
    path = tmp_path / "m.gguf"
    refused = 0
    for _ in range(1500):
        changed = bytearray(whole)
        for position in random.integers(0, 900, size=random.integers(1, 4)):
            changed[position] = random.integers(0, 256)
        with path.open("r+b") as file_to_change:
            file_to_change.write(changed)
        try:
            with GGUFFile(path) as file:
                for name in file.tensors:
                    file.data(name)
        except TamisError as error:
            assert str(path) in str(error)
            refused += 1
    assert 200 < refused < 1500


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"none\.gguf: no such file"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFoundError, match="cannot be read: Is a directory"):
        GGUFFile(tmp_path)


def test_a_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    """Two lists of 49,152 texts, as in the built-in model; one array object a text would take seconds."""
    words = [f"token{i}" for i in range(49152)]
    path = tmp_path / "m.gguf"
    packed = b"".join(text(word.encode()) for word in words)
    path.write_bytes(header(pairs=tuple(pair(key, 9, array(8, len(words), packed)) for key in (b"a", b"b"))))
    started = time.process_time()
    with GGUFFile(path) as file:
        assert file.get_list("a", str) == file.get_list("b", str) == words
    assert time.process_time() - started < 1
