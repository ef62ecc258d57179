"""Index branches on disk: what is read and written, and what is refused, by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.branches import random_branch, retrofitted, write_branch
from support.model_dirs import write_model
from tamis import LLM
from tamis.config import EngineConfig, LayerKind
from tamis.errors import (
    BaseMismatchError,
    ConfigError,
    CorruptFileError,
    MissingTensorError,
    ModelNotFoundError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
)
from tamis.models import load_config, resolve
from tamis.models.fingerprint import base_fingerprint, model_fingerprint
from tamis.models.index_branch import branch_shapes, read_index_branch, write_index_branch
from tamis.models.loader import load_model

K, D, KV = LayerKind.SPARSE_K, LayerKind.DENSE, LayerKind.SPARSE_KV
TENSORS = "index_branch.safetensors"
JSON = "index_branch.json"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAMIS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base", num_hidden_layers=3)


@pytest.fixture
def branch(base: Path, tmp_path: Path) -> Path:
    """A branch for the base: K-only, dense, K+V."""
    retrofitted(base, tmp_path / "branch")
    return tmp_path / "branch"


def edit(directory: Path, **changes: Any) -> None:
    """Change keys of the JSON; None removes one."""
    values = json.loads((directory / JSON).read_text()) | changes
    (directory / JSON).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def load(directory: Path) -> Any:
    source = resolve(str(directory))
    return load_model(source, load_config(source), dtype=torch.float32)


def test_what_is_written_is_read(base: Path, tmp_path: Path) -> None:
    branch = random_branch(
        resolve(str(base)), rope_theta=500.0, score_type="max", training={"seed": 1, "corpus": [{"sha256": "0"}]}
    )
    write_branch(tmp_path / "out", branch)
    assert read_index_branch(tmp_path / "out") == branch
    stored = load_file(tmp_path / "out" / TENSORS)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == branch_shapes(branch)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [JSON, TENSORS]


def test_the_model_is_the_base_with_the_branch(base: Path, branch: Path) -> None:
    source, dense = resolve(str(branch)), load_config(resolve(str(base)))
    assert (source.name, source.path, source.kind, source.branch) == (str(branch), base, "directory", branch)
    config = load_config(source)
    assert config.layer_kinds == (K, D, KV)
    assert config.sparse is not None
    assert (config.sparse.block_size, config.sparse.topk, config.sparse.init_blocks) == (16, 3, 1)
    assert replace(config, layer_kinds=dense.layer_kinds, sparse=None, index_branch=None) == dense
    assert resolve(str(branch), weights=False).branch == branch


def test_without_weights_a_branch_beside_a_config_counts_too(base: Path) -> None:
    retrofitted(base, base)
    for name in (base, base / "config.json"):
        assert load_config(resolve(str(name), weights=False)).layer_kinds == (K, D, KV)
    assert resolve(str(base)).branch == base


@pytest.mark.parametrize("place", ["../base", "base"])
def test_a_relative_base_counts_from_the_branch_then_from_the_working_directory(
    base: Path, branch: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(branch, base=place)
    monkeypatch.chdir(base.parent if place == "base" else "/")
    assert resolve(str(branch)).path.resolve() == base
    load(branch)


def test_two_seeds_two_models_for_tiers_and_one_base(base: Path, tmp_path: Path) -> None:
    settings = EngineConfig(dtype="fp32", quant="none")
    sources = [retrofitted(base, tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 1), ("c", 0))]
    a, b, c = (model_fingerprint(source, load_config(source), settings) for source in sources)
    assert a == c != b
    dense = resolve(str(base))
    assert model_fingerprint(dense, load_config(dense), settings) not in (a, b)
    before = base_fingerprint(dense)
    retrofitted(base, base)
    assert base_fingerprint(resolve(str(base))) == before  # a branch beside the weights is not part of the base


# What is refused


def test_other_weights_of_the_same_shape_are_another_base(base: Path, branch: Path) -> None:
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, base / "model.safetensors")
    with pytest.raises(BaseMismatchError, match=r"index_branch\.json: the index branch was made for other weights"):
        load(branch)
    with pytest.raises(BaseMismatchError):
        LLM(branch)


def test_a_base_of_another_shape_is_told_by_what_differs(base: Path, branch: Path) -> None:
    write_model(base, num_hidden_layers=2)
    message = f"{branch / JSON}: base_architecture.num_layers=3, but base={str(base)!r} has 2"
    with pytest.raises(ConfigError) as caught:
        load(branch)
    assert str(caught.value) == message


BAD_JSON: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": 2}, "format=2 is not implemented; known: 1"),
    "no format": ({"format": None}, "the key format is missing"),
    "an unknown key": ({"blocksize": 16}, "the key 'blocksize' is not known"),
    "no base": ({"base": None}, "the key base is missing"),
    "an empty base": ({"base": ""}, "base is empty"),
    "no architecture": ({"base_architecture": None}, "the key base_architecture is missing"),
    "half an architecture": ({"base_architecture": {"num_layers": 3}}, "hidden_size is missing"),
    "too few layers": ({"layer_kinds": ["dense", "sparse_k"]}, "layer_kinds has 2 entries for 3 layers"),
    "a kind": ({"layer_kinds": ["dense", "sparse", "dense"]}, "is not a list of dense, sparse_k, sparse_kv"),
    "all dense": ({"layer_kinds": ["dense"] * 3}, "layer_kinds: there is no sparse layer"),
    "no blocks": ({"block_size": 0}, "block_size: 0 is not a whole number from 1"),
    "half a block": ({"block_size": 1.5}, "block_size: 1.5 is not a whole number"),
    "topk": ({"topk": 1}, "topk=1 is less than init_blocks=1 + local_blocks=1, which are always selected"),
    "heads": ({"index_heads": 0}, "index_heads: 0 is not"),
    "an odd rotation": ({"index_rotary_dim": 3}, "rotary_dim=3 of the index branch must be even"),
    "a rotation past the head": ({"index_rotary_dim": 64}, "index_head_dim=8 is less than rotary_dim=64"),
    "eps": ({"norm_eps": 0}, "norm_eps: 0 is not a finite number above 0"),
    "theta": ({"rope_theta": 0.5}, "theta=0.5 is not between 1 and"),
    "a score": ({"score_type": "mean"}, "score_type='mean' is not 'max' or 'lse'"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_a_number_that_makes_no_sense_is_named(branch: Path, case: str) -> None:
    changes, message = BAD_JSON[case]
    edit(branch, **changes)
    with pytest.raises(ConfigError) as caught:
        load(branch)
    assert str(caught.value).startswith(f"{branch / JSON}: ")
    assert message in str(caught.value)


def test_heads_that_do_not_suit_the_base_are_refused(tmp_path: Path) -> None:
    base = write_model(tmp_path / "wide", num_key_value_heads=2)
    branch = random_branch(resolve(str(base)), index_heads=3)
    write_branch(tmp_path / "out", branch)
    with pytest.raises(ConfigError, match="index_heads=3 is not a multiple of kv_heads="):
        load(tmp_path / "out")


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_a_file_that_is_no_json_object_is_named(branch: Path, text: str) -> None:
    (branch / JSON).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"index_branch\.json: "):
        load(branch)


def test_half_a_branch_is_told_what_is_missing(branch: Path) -> None:
    kept = (branch / TENSORS).read_bytes()
    (branch / TENSORS).unlink()
    with pytest.raises(ModelNotFoundError, match=r"the directory has no index_branch\.safetensors"):
        load(branch)
    assert load_config(resolve(str(branch), weights=False)).sparse is not None
    (branch / TENSORS).write_bytes(kept)
    (branch / JSON).unlink()
    with pytest.raises(ModelNotFoundError, match=r"index_branch\.json: no such file"):
        load(branch)


def _drop(tensors: dict[str, Any]) -> None:
    del tensors["layers.0.self_attn.index_k_norm.weight"]


def _cut(tensors: dict[str, Any]) -> None:
    tensors["layers.0.self_attn.index_q_proj.weight"] = torch.zeros(8, 15)


def _add(tensors: dict[str, Any]) -> None:
    tensors["layers.1.self_attn.index_q_proj.weight"] = torch.zeros(8, 16)


def _round(tensors: dict[str, Any]) -> None:
    tensors["layers.0.self_attn.index_q_proj.weight"] = torch.zeros(8, 16, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "error", "tensor"),
    [
        (_drop, MissingTensorError, "layers.0.self_attn.index_k_norm.weight"),
        (_cut, TensorShapeError, "layers.0.self_attn.index_q_proj.weight"),
        (_add, UnexpectedTensorError, "layers.1.self_attn.index_q_proj.weight"),
        (_round, TensorDtypeError, "layers.0.self_attn.index_q_proj.weight"),
    ],
)
def test_a_bad_tensor_is_named_with_its_file(
    branch: Path, change: Callable[[dict[str, Any]], None], error: type[Exception], tensor: str
) -> None:
    tensors = load_file(branch / TENSORS)
    change(tensors)
    save_file(tensors, branch / TENSORS)
    with pytest.raises(error) as caught:
        load(branch)
    assert repr(tensor) in str(caught.value)
    assert str(branch / TENSORS) in str(caught.value)


@pytest.mark.parametrize("size", [0, 100])
def test_a_truncated_file_is_named(branch: Path, size: int) -> None:
    (branch / TENSORS).write_bytes((branch / TENSORS).read_bytes()[:size])
    with pytest.raises(CorruptFileError, match=r"index_branch\.safetensors: "):
        load(branch)


@pytest.mark.parametrize("name", [".", "../branch", "../other", "smollm2-135m-msa"])
def test_a_base_that_has_a_branch_itself_is_refused(branch: Path, tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "other", num_hidden_layers=3)
    retrofitted(tmp_path / "other", tmp_path / "other")
    edit(branch, base=name)
    with pytest.raises(ConfigError, match=f"base='{name}': the base has an index branch itself"):
        resolve(str(branch))


@pytest.mark.parametrize("name", ["no-such-model", "./gone", "~nobody-of-this-name/x", "a\0b"])
def test_a_base_that_is_not_there_is_named(branch: Path, name: str) -> None:
    edit(branch, base=name)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(str(branch))
    assert str(caught.value).startswith(f"{branch / JSON}: base={name!r}: ")


def test_a_model_that_is_sparse_already_is_no_base(branch: Path) -> None:
    edit(branch, base="minimax-m3")
    with pytest.raises(ConfigError, match="base='minimax-m3' is a minimax_m3_vl_text model, not one of the Llama"):
        load_config(resolve(str(branch), weights=False))


def test_only_tensors_that_belong_are_written(base: Path, tmp_path: Path) -> None:
    branch = random_branch(resolve(str(base)))
    tensors = {name: torch.ones(shape) for name, shape in branch_shapes(branch).items()}
    name = "layers.0.self_attn.index_q_norm.weight"
    for change, message in (
        ({name: torch.ones(9)}, r"has shape \[9\], not \[8\]"),
        ({name: torch.full((8,), torch.nan)}, "holds a number that is not finite"),
        ({"extra": torch.ones(1)}, "tensor 'extra' is superfluous"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_index_branch(tmp_path / "out", branch, tensors | change)
    with pytest.raises(ConfigError, match=f"tensor '{name}' is missing"):
        write_index_branch(tmp_path / "out", branch, {k: v for k, v in tensors.items() if k != name})
    assert not (tmp_path / "out").exists()
