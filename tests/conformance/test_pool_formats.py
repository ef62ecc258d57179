"""A model run on pools of every storage type and under scales: nothing but rounding changes its logits."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support import spellings, tiny
from support.running import PoolRun, random_ids
from tamis import LLM, SamplingParams
from tamis.config import KV_DTYPES
from tamis.kernels import Ops, ReferenceOps
from tamis.kernels.cpu.ops import CpuOps
from tamis.kv import LayerScales
from tamis.models import load_config
from tamis.models.decoder import CausalLM
from tamis.models.hub import ModelSource
from tamis.models.loader import load_model

LENGTH = 60
SCALES = LayerScales(k=0.5, v=2.0, index_k=4.0, index_v=0.25)
"""Powers of two, all different: exact in every type, and none can stand in for another."""


@pytest.fixture(scope="module", params=["dense", "K-only", "K+V"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    if request.param == "dense":
        return tiny.save(tiny.build(tiny.llama_config("llama"), seed=1), directory)
    oracle = tiny.build(tiny.m3_config(3), seed=1)
    index_value = [2] if request.param == "K+V" else []
    spellings.add_index_value(oracle, index_value)
    # A wrong scale of the index key does not change which block has the largest score, but moves sums of exponentials.
    return spellings.write_released(oracle, directory, index_value=index_value, sparse_score_type="lse")


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    source = ModelSource(path.name, path, "directory")
    return load_model(source, load_config(source), dtype=torch.float32)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    backend: Ops = ReferenceOps() if request.param == "reference" else CpuOps(2)
    yield backend
    backend.close()


def logits(model: CausalLM, ops: Ops, *, scales: LayerScales | None = None, dtype: torch.dtype) -> Tensor:
    """A prompt in two chunks, then single steps."""
    layers = None if scales is None else (scales,) * model.config.num_layers
    run = PoolRun(model, 2, LENGTH, ops=ops, scales=layers, dtype=dtype)
    ids = random_ids(LENGTH, model.config, 1)
    chunks = [ids[:20], ids[20:57], *([token] for token in ids[57:])]
    return torch.cat([run.feed([chunk])[0] for chunk in chunks])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_that_are_powers_of_two_change_no_bit(model: CausalLM, ops: Ops, dtype: torch.dtype) -> None:
    plain = logits(model, ops, dtype=dtype)
    assert torch.equal(logits(model, ops, scales=SCALES, dtype=dtype), plain)


@pytest.mark.parametrize("plane", ["k", "v", "index_k", "index_v"])
def test_every_plane_that_a_model_has_is_stored_under_its_scale(model: CausalLM, ops: Ops, plane: str) -> None:
    """So large a divisor leaves only zeros in fp8: the logits change exactly where there is such a plane."""
    huge = dataclasses.replace(LayerScales(), **{plane: 2.0**40})
    fp8 = torch.float8_e4m3fn
    run = PoolRun(model, 2, LENGTH, ops=ops, dtype=fp8, index_dtype=fp8, scales=(huge,) * model.config.num_layers)
    plain = PoolRun(model, 2, LENGTH, ops=ops, dtype=fp8, index_dtype=fp8)
    used = any(plane in run.layout.planes(layer) for layer in run.layout.local_layers)
    ids = random_ids(LENGTH, model.config, 1)
    assert torch.equal(run.feed([ids])[0], plain.feed([ids])[0]) is not used


@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.bfloat16, 0.98), (torch.float16, 0.98), (torch.float8_e4m3fn, 0.9)], ids=str
)
def test_a_rounded_pool_keeps_the_most_probable_tokens(
    model: CausalLM, ops: Ops, dtype: torch.dtype, least: float
) -> None:
    wanted, got = logits(model, ops, dtype=torch.float32), logits(model, ops, scales=SCALES, dtype=dtype)
    assert not torch.equal(got, wanted)
    assert float((got.argmax(-1) == wanted.argmax(-1)).float().mean()) >= least


@pytest.mark.parametrize(("kv_dtype", "mean"), [("fp16", 0.001), ("bf16", 0.01), ("fp8_e4m3", 0.1), ("fp8_e5m2", 0.2)])
def test_the_engine_on_a_rounded_pool_stays_close_to_fp32(
    path: Path, model: CausalLM, kv_dtype: str, mean: float
) -> None:
    """Log-probabilities of the prompt's own tokens, about -5.7 on average."""
    ids = random_ids(LENGTH, model.config, 2)
    wanted, got = prompt_logprobs(path, ids, "fp32"), prompt_logprobs(path, ids, kv_dtype)
    assert not torch.equal(got, wanted)
    assert float((got - wanted).abs().mean()) < mean


def prompt_logprobs(path: Path, ids: list[int], kv_dtype: str) -> Tensor:
    with LLM(str(path), dtype="fp32", kv_dtype=kv_dtype, kv_budget="2MiB", max_batch_tokens=7) as llm:
        assert llm.layout.dtype is KV_DTYPES[kv_dtype]
        (done,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    assert done.prompt_logprobs is not None
    return torch.tensor([entry.logprob for entry in done.prompt_logprobs if entry is not None])
