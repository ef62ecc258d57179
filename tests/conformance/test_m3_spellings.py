"""One M3 model in every spelling of its configuration and weights gives the same logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support import spellings, tiny
from support.running import chunked_logits, random_ids
from tamis.config import LayerKind
from tamis.errors import CorruptFileError, MissingTensorError, TensorShapeError, UnexpectedTensorError
from tamis.models import load_config
from tamis.models.checkpoint import SafetensorsCheckpoint
from tamis.models.decoder import CausalLM
from tamis.models.hub import ModelSource
from tamis.models.loader import load_model
from tamis.progress import NoProgress, Unit


def load(path: Path) -> CausalLM:
    source = ModelSource(path.name, path, "gguf" if path.is_file() else "directory")
    return load_model(source, load_config(source), dtype=torch.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build(tiny.m3_config(3), seed=1), tmp_path_factory.mktemp("m3"))


def same_logits(oracle: object, model: CausalLM) -> None:
    ids = random_ids(60, model.config, 2)
    got = chunked_logits(model, ids, [13, 40, 7], page_size=2)
    torch.testing.assert_close(got, tiny.oracle_logits(oracle, ids), atol=1e-4, rtol=0)


def test_released_names_and_config(tmp_path: Path) -> None:
    oracle = tiny.build(tiny.m3_config(3), seed=1)
    same_logits(oracle, load(spellings.write_released(oracle, tmp_path)))


def test_released_config_with_transformers_names(tmp_path: Path, saved: Path) -> None:
    oracle = tiny.build(tiny.m3_config(3), seed=1)
    (tmp_path / "config.json").write_text(json.dumps(spellings.released_config(oracle.config)))
    save_file(load_file(saved / "model.safetensors"), tmp_path / "model.safetensors")
    same_logits(oracle, load(tmp_path))


def test_gguf(tmp_path: Path, saved: Path) -> None:
    oracle = tiny.build(tiny.m3_config(3), seed=1)
    same_logits(oracle, load(spellings.write_m3_gguf(saved, tmp_path / "tiny.gguf")))


def test_index_value_layers_equal_a_hooked_transformers_model(tmp_path: Path) -> None:
    oracle = tiny.build(tiny.m3_config(4), seed=3)
    spellings.add_index_value(oracle, [2, 3])
    model = load(spellings.write_released(oracle, tmp_path, index_value=[2, 3]))
    kinds = [LayerKind.DENSE, LayerKind.SPARSE_K, LayerKind.SPARSE_KV, LayerKind.SPARSE_KV]
    assert list(model.config.layer_kinds) == kinds
    same_logits(oracle, model)


def test_weights_that_contradict_the_index_value_setting_are_refused(tmp_path: Path) -> None:
    oracle = tiny.build(tiny.m3_config(2), seed=3)
    lacking = spellings.write_released(oracle, tmp_path / "lacking", index_value=[1])
    with pytest.raises(MissingTensorError, match=r"layers\.1\.self_attn\.index_[vo]_proj"):
        load(lacking)
    spellings.add_index_value(oracle, [1])
    surplus = spellings.write_released(oracle, tmp_path / "surplus")
    with pytest.raises(UnexpectedTensorError, match=r"layers\.1\.self_attn\.index_[vo]_proj"):
        load(surplus)


def damaged(saved: Path, out: Path, name: str, tensor: torch.Tensor | None, renamed: str | None = None) -> Path:
    """A copy of `saved` with one tensor replaced, renamed or removed."""
    weights = load_file(saved / "model.safetensors")
    old = weights.pop(name)
    if tensor is not None or renamed is not None:
        weights[renamed or name] = old if tensor is None else tensor
    (out / "config.json").write_text((saved / "config.json").read_text())
    save_file(weights, out / "model.safetensors")
    return out


NAME = "model.layers.1.self_attn.k_proj.weight"


def test_missing_tensor_is_named(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(MissingTensorError, match=rf"'{NAME}' is missing in {tmp_path}$"):
        load(damaged(saved, tmp_path, NAME, None))


def test_misnamed_tensor_is_named(tmp_path: Path, saved: Path) -> None:
    """Beside the one that is missing: the one that stands in its place, whatever else is there."""
    renamed = "model.layers.1.self_attn.key_proj.weight"
    damaged(saved, tmp_path, NAME, None, renamed=renamed)
    surplus = {"model.a.weight": torch.zeros(1), "model.layers.10.self_attn.k_proj.weights": torch.zeros(1)}
    save_file(load_file(tmp_path / "model.safetensors") | surplus, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensorError) as caught:
        load(tmp_path)
    assert str(caught.value) == (
        f"tensor {NAME!r} is missing in {tmp_path}, but there is {renamed!r}, which has no place"
    )


def test_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(TensorShapeError, match=rf"{NAME}.*model\.safetensors has shape \[64, 63\].*\[64, 64\]"):
        load(damaged(saved, tmp_path, NAME, torch.zeros(64, 63)))


def test_surplus_tensor_is_named(tmp_path: Path, saved: Path) -> None:
    weights = load_file(saved / "model.safetensors") | {"model.layers.9.input_layernorm.weight": torch.zeros(64)}
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnexpectedTensorError, match=r"model\.layers\.9\.input_layernorm\.weight"):
        load(tmp_path)


def test_the_progress_of_a_load_that_fails_is_finished(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Told(NoProgress):
        def start(self, task: str, total: int | None, unit: Unit) -> None:
            told.append("start")

        def finish(self) -> None:
            told.append("finish")

    def broken(*_: object) -> Tensor:
        raise CorruptFileError("cut short")

    monkeypatch.setattr(SafetensorsCheckpoint, "read", broken)
    source = ModelSource("saved", saved, "directory")
    with pytest.raises(CorruptFileError):
        load_model(source, load_config(source), dtype=torch.float32, progress=Told())
    assert told == ["start", "finish"]
