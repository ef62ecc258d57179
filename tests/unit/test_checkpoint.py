"""Weights on disk: safetensors in one file and in shards, GGUF, and broken files of each kind."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tamis.errors import (
    ConfigError,
    CorruptFileError,
    MissingTensorError,
    ModelNotFoundError,
    TensorDtypeError,
)
from tamis.models import ModelSource, open_checkpoint
from tamis.models.checkpoint import GGUFCheckpoint, SafetensorsCheckpoint

Type = gguf.GGMLQuantizationType

WEIGHTS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "c.weight": torch.arange(5, dtype=torch.float16),
    "scalar": torch.tensor(3.5),
}


def directory(path: Path) -> ModelSource:
    return ModelSource("m", path, "directory")


def write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    """Shards and the index over them; the weight map."""
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def two_shards(folder: Path) -> dict[str, str]:
    names = list(WEIGHTS)
    return write_shards(
        folder,
        {
            "model-00001-of-00002.safetensors": {name: WEIGHTS[name] for name in names[:2]},
            "model-00002-of-00002.safetensors": {name: WEIGHTS[name] for name in names[2:]},
        },
    )


def check_weights(checkpoint: Any) -> None:
    assert checkpoint.names() == frozenset(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        read = checkpoint.read(name)
        assert read.dtype is tensor.dtype
        assert torch.equal(read, tensor)
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.nbytes(name) == tensor.nbytes


def test_a_single_file_reads_back(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(directory(tmp_path))
    check_weights(checkpoint)
    assert checkpoint.file("a.weight") == tmp_path / "model.safetensors"
    read = checkpoint.read("a.weight")
    checkpoint.close()
    assert torch.equal(read, WEIGHTS["a.weight"])


def test_shards_read_back(tmp_path: Path) -> None:
    two_shards(tmp_path)
    checkpoint = open_checkpoint(directory(tmp_path))
    check_weights(checkpoint)
    assert checkpoint.file("a.weight").name == "model-00001-of-00002.safetensors"
    assert checkpoint.file("scalar").name == "model-00002-of-00002.safetensors"
    checkpoint.close()


def test_the_index_wins_over_a_single_file(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"stale": torch.zeros(1)}, tmp_path / "model.safetensors")
    check_weights(open_checkpoint(directory(tmp_path)))


def test_a_tensor_that_the_index_does_not_list_is_seen(tmp_path: Path) -> None:
    weight_map = two_shards(tmp_path)
    del weight_map["scalar"]
    write_index(tmp_path, weight_map)
    checkpoint = open_checkpoint(directory(tmp_path))
    assert "scalar" in checkpoint.names()
    assert checkpoint.file("scalar").name == "model-00002-of-00002.safetensors"


def test_the_index_decides_between_two_copies(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x": {"t": torch.zeros(1), "u": torch.zeros(1)}, "y": {"t": torch.ones(1)}})
    write_index(tmp_path, {"t": "y", "u": "x"})
    assert open_checkpoint(directory(tmp_path)).read("t").item() == 1


def test_a_missing_shard_is_named_with_what_it_should_hold(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingTensorError, match=r"model-00002-of-00002\.safetensors: no such file.* 2 .*'c\.weight'"):
        open_checkpoint(directory(tmp_path))


def test_a_tensor_missing_in_its_shard_is_named_with_the_file(tmp_path: Path) -> None:
    weight_map = two_shards(tmp_path)
    write_index(tmp_path, weight_map | {"d.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(MissingTensorError, match=r"'d\.weight' is missing in .*model-00001-of-00002\.safetensors"):
        open_checkpoint(directory(tmp_path))


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "sub/x.safetensors", "/etc/passwd", "sub\\x", "..", ".", "", "a\0", 7, None]
)
def test_a_shard_name_cannot_leave_the_directory(tmp_path: Path, shard: object) -> None:
    write_index(tmp_path, {"t": shard})
    with pytest.raises(CorruptFileError, match=r"index\.json: tensor 't' has the shard .* not a plain file name"):
        open_checkpoint(directory(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_a_malformed_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"model\.safetensors\.index\.json: "):
        open_checkpoint(directory(tmp_path))


def change_header(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def bad_shape(header: dict[str, Any]) -> None:
    header["a.weight"]["shape"] = [300, 4]


def bad_offset(header: dict[str, Any]) -> None:
    header["a.weight"]["data_offsets"] = [0, 1 << 40]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:5],
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: struct.pack("<Q", 1 << 62) + data[8:],
        lambda data: b"PK\x03\x04" + bytes(1000),
        lambda data: change_header(data, bad_shape),
        lambda data: change_header(data, bad_offset),
    ],
)
def test_a_broken_safetensors_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptFileError, match=r"model\.safetensors: ") as caught:
        open_checkpoint(directory(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float8_e4m3fn, torch.bool])
def test_a_tensor_that_is_no_weight_type_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"odd": torch.zeros(2).to(dtype)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(directory(tmp_path))
    assert checkpoint.shape("odd") == (2,)
    with pytest.raises(TensorDtypeError, match=r"'odd' in .*model\.safetensors is stored as .*; only F32, BF16, F16"):
        checkpoint.read("odd")


def test_an_unknown_tensor_is_named_with_the_files(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    path = write_gguf(tmp_path, {"x": (np.zeros((1, 32), np.float32), Type.F32)})
    for checkpoint, where in ((SafetensorsCheckpoint(tmp_path), "safetensors"), (GGUFCheckpoint(path), "gguf")):
        for call in (checkpoint.shape, checkpoint.read, checkpoint.file, checkpoint.nbytes):
            with pytest.raises(MissingTensorError, match=rf"'nope' is missing in .*\.{where}"):
                call("nope")


def test_sources_without_readable_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        open_checkpoint(directory(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"the weights are in pytorch_model\.bin"):
        open_checkpoint(directory(tmp_path))
    with pytest.raises(ConfigError, match="m is a configuration only"):
        open_checkpoint(ModelSource("m", tmp_path / "config.json", "config"))


def write_gguf(folder: Path, tensors: dict[str, tuple[np.ndarray[Any, Any], Type]]) -> Path:
    """A GGUF with each array stored as the type beside it (uint8 arrays: as they are)."""
    path = folder / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, (array, kind) in tensors.items():
        raw = array if array.dtype == np.uint8 else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_quantised_tensors_are_dequantised(tmp_path: Path, kind: Type) -> None:
    values = np.random.default_rng(0).standard_normal((2, 3, 64), dtype=np.float32)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path, {"x": (values, kind)}))
    raw = gguf.quants.quantize(values, kind)
    read = checkpoint.read("x")
    assert read.dtype is torch.float32
    assert checkpoint.shape("x") == (2, 3, 64) == tuple(read.shape)
    assert checkpoint.nbytes("x") == raw.nbytes
    assert np.array_equal(read.numpy(), gguf.quants.dequantize(raw, kind))
    assert np.abs(read.numpy() - values).max() < {Type.Q8_0: 0.03}.get(kind, 0.4)


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS])
def test_types_that_can_only_be_read_are_read(tmp_path: Path, kind: Type) -> None:
    """Random bytes: some scales are infinite or NaN, which must pass without a warning."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 256, (40, 512 // block * size), dtype=np.uint8)
    read = GGUFCheckpoint(write_gguf(tmp_path, {"x": (raw, kind)})).read("x")
    assert tuple(read.shape) == (40, 512)
    with np.errstate(all="ignore"):
        assert np.array_equal(read.numpy(), gguf.quants.dequantize(raw, kind), equal_nan=True)


def test_float_tensors_are_read_as_stored(tmp_path: Path) -> None:
    values = np.random.default_rng(2).standard_normal((3, 32), dtype=np.float32)
    path = write_gguf(tmp_path, {kind.name: (values, kind) for kind in (Type.F32, Type.F16, Type.BF16)})
    checkpoint = open_checkpoint(ModelSource("m", path, "gguf"))
    wanted = torch.from_numpy(values)
    assert torch.equal(checkpoint.read("F32"), wanted)
    assert torch.equal(checkpoint.read("F16"), wanted.half())
    assert torch.equal(checkpoint.read("BF16"), wanted.bfloat16())
    read = checkpoint.read("F32")
    checkpoint.close()
    assert torch.equal(read, wanted)


@pytest.mark.parametrize("kind", [Type.F64, Type.I32, Type.Q8_1, Type.Q8_K])
def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path, kind: Type) -> None:
    raw = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path, {"x": (raw, kind)}))
    with pytest.raises(TensorDtypeError, match=rf"'x' in .*m\.gguf is stored as {kind.name}"):
        checkpoint.read("x")
