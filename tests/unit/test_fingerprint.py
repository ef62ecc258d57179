import os
from dataclasses import replace
from pathlib import Path

import pytest

from support.model_dirs import write_model
from tamis.config import EngineConfig
from tamis.errors import ModelNotFoundError
from tamis.models import load_config
from tamis.models.fingerprint import model_fingerprint
from tamis.models.hub import ModelSource

SETTINGS = EngineConfig(dtype="fp32", quant="none")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAMIS_CACHE", str(tmp_path / "cache"))


def source_of(path: Path) -> ModelSource:
    return ModelSource(path.name, path, "directory")


def fingerprint(path: Path, settings: EngineConfig = SETTINGS) -> str:
    source = source_of(path)
    return model_fingerprint(source, load_config(source), settings)


def test_the_same_model_has_one_fingerprint_wherever_it_lies(tmp_path: Path) -> None:
    a, b = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    assert fingerprint(a) == fingerprint(a) == fingerprint(b)
    assert len(list((tmp_path / "cache" / "hashes").iterdir())) == 2


def test_one_bit_of_one_weight_is_another_model(tmp_path: Path) -> None:
    """Size, names and header stay the same, and so does the time of the last change."""
    path = write_model(tmp_path / "a")
    before = fingerprint(path)
    weights = path / "model.safetensors"
    raw, seen = bytearray(weights.read_bytes()), weights.stat()
    raw[-1] ^= 1
    weights.write_bytes(raw)

    os.utime(weights, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert fingerprint(path) != before


def test_rope_types_and_quantisation_count(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    config = load_config(source_of(path))
    found = {
        model_fingerprint(source_of(path), config, SETTINGS),
        model_fingerprint(source_of(path), replace(config, rope=replace(config.rope, theta=5e5)), SETTINGS),
        model_fingerprint(source_of(path), config, replace(SETTINGS, dtype="bf16")),
        model_fingerprint(source_of(path), config, replace(SETTINGS, quant="int8")),
    }
    assert len(found) == 4


def test_a_remembered_hash_that_is_none_and_a_cache_that_cannot_be_written_cost_time_only(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    before = fingerprint(path)
    (note,) = (tmp_path / "cache" / "hashes").iterdir()
    note.write_text("no hash")
    assert fingerprint(path) == before
    note.unlink()
    note.parent.rmdir()
    note.parent.write_text("a file where the directory should be")
    assert fingerprint(path) == before


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gone.gguf"
    config = load_config(source_of(write_model(tmp_path / "a")))
    with pytest.raises(ModelNotFoundError, match=r"gone\.gguf: cannot be read: No such file or directory"):
        model_fingerprint(ModelSource("gone", path, "gguf"), config, SETTINGS)
