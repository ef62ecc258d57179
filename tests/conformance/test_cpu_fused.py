"""Layers that run in one call give bit for bit what the same kernels give one by one, in logits and in every plane."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from support import spellings, tiny
from support.branches import retrofitted
from support.running import PoolRun, random_ids
from tamis.config import EngineConfig, LayerKind
from tamis.kernels import LayerPlanes, choose_layers, choose_model_ops, choose_ops
from tamis.kernels.cpu import amx
from tamis.kernels.cpu.fused import FusedLayers
from tamis.kernels.cpu.ops import CpuOps
from tamis.kernels.linear import LayerWeights
from tamis.models import load_config
from tamis.models.decoder import CausalLM, DecoderLayer
from tamis.models.hub import ModelSource
from tamis.models.loader import load_model

pytestmark = pytest.mark.skipif(not amx.available(), reason="this machine has no AMX tiles")


@pytest.fixture(scope="module", params=[1, 2], ids=["1thread", "2threads"])
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    ops, _ = choose_ops(EngineConfig(kernels="cpu", threads=request.param))
    assert isinstance(ops, CpuOps)
    yield ops
    ops.close()


class Counting:
    """Passes layers on and counts those that were taken."""

    def __init__(self, layers: FusedLayers) -> None:
        self.layers, self.taken, self.left = layers, 0, 0

    def run(self, weights: Sequence[LayerWeights], *args: Any) -> int:
        taken = self.layers.run(weights, *args)
        self.taken, self.left = self.taken + taken, self.left + (not taken)
        return taken


def load(tmp_path: Path, kind: str, quant: str) -> CausalLM:
    source = None
    if kind in ("llama", "index branch"):
        config = tiny.llama_config("llama", head_dim=32, attention_bias=True, mlp_bias=True)
        path = tiny.save(tiny.build(config, seed=2), tmp_path)
        if kind == "index branch":
            kinds = (LayerKind.SPARSE_K, LayerKind.DENSE, LayerKind.SPARSE_K)
            source = retrofitted(path, tmp_path / "branch", layer_kinds=kinds, index_head_dim=64, index_rotary_dim=16)
    else:
        oracle = tiny.build(tiny.m3_config(4, q_heads=8 if kind == "m3 wide" else 4), seed=1)
        if kind == "m3 K+V":
            spellings.add_index_value(oracle, [2])
            path = spellings.write_released(oracle, tmp_path, index_value=[2])
        else:
            path = tiny.save(oracle, tmp_path)
    source = source or ModelSource(path.name, path, "directory")
    return load_model(source, load_config(source), dtype=torch.bfloat16, quant=quant)


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
@pytest.mark.parametrize("kind", ["m3", "m3 wide", "m3 K+V", "llama", "index branch"])
def test_a_layer_in_one_call_equals_its_parts(tmp_path: Path, ops: CpuOps, kind: str, quant: str) -> None:
    model = load(tmp_path, kind, quant)
    runs = [PoolRun(model, 4, 64, rows=3, ops=ops, dtype=torch.bfloat16) for _ in range(2)]
    plain, fused = runs
    layers = choose_layers(ops, fused.model_ops)
    assert isinstance(layers, FusedLayers)
    counting = fused.layers = Counting(layers)
    ids = [random_ids(60, model.config, seed) for seed in range(3)]
    # Rows 1 to 8 are taken; 27 are not, and leave what later rows read.
    at = [0, 0, 0]
    for sizes in ([9, 9, 9], [1, 1, 1], [1, 0, 0], [3, 0, 5], [8, 0, 0], [0, 1, 1], [2, 2, 2]):
        chunks = [tokens[start : start + size] for tokens, start, size in zip(ids, at, sizes, strict=True)]
        at = [start + size for start, size in zip(at, sizes, strict=True)]
        for one, other in zip(plain.feed(chunks), fused.feed(chunks), strict=True):
            assert torch.equal(one, other)
    for layer in fused.layout.local_layers:
        for one, other in zip(plain.pool.get_kv_buffer(layer), fused.pool.get_kv_buffer(layer), strict=True):
            assert torch.equal(one[1:], other[1:])
    for layer in fused.layout.sparse_layers:
        assert torch.equal(plain.pool.get_index_k_buffer(layer)[1:], fused.pool.get_index_k_buffer(layer)[1:])
    eligible = len(model.config.layer_kinds) - len(fused.layout.index_kv_layers)
    assert counting.taken >= 6 * eligible  # quantised weights are taken with more rows too
    assert counting.taken + counting.left == 7 * eligible


def test_what_does_not_fit_is_left_alone(tmp_path: Path, ops: CpuOps) -> None:
    """Planes in fp32, or with a scale: nothing is taken, and the result is the ordinary one."""
    model = load(tmp_path, "m3", "none")
    run = PoolRun(model, 4, 16, ops=ops)
    layers = choose_layers(ops, run.model_ops)
    assert isinstance(layers, FusedLayers)
    counting = run.layers = Counting(layers)
    run.feed([[5]])
    assert (counting.taken, counting.left) == (0, 4)
    slots = run.pool.check_loc(torch.tensor([4]))
    planes = run.pool.open_layer(1, slots)
    assert planes.plain
    scaled = LayerPlanes(planes.k.bfloat16(), planes.v.bfloat16(), None, planes.rows, planes.index_rows, plain=False)
    x = torch.zeros(1, 64)
    layer = model.layers[0]
    assert isinstance(layer, DecoderLayer)
    assert not layers.run([layer.weights], x, ((torch.zeros(1, 8),) * 2,) * 2, lambda _: scaled, None)  # type: ignore[arg-type]


def test_reference_backends_run_no_whole_layers() -> None:
    reference, _ = choose_ops(EngineConfig(kernels="reference"))
    assert choose_layers(reference, choose_model_ops(reference)) is None
