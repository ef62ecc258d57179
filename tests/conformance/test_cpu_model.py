"""Whole models whose own path runs in Numba: fp32 against transformers, quantised weights against plain torch."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support import spellings, tiny
from support.running import PoolRun, chunked_logits, random_ids
from tamis.kernels.cpu.model import CpuModelOps
from tamis.kernels.cpu.threads import ThreadTeam
from tamis.models import load_config
from tamis.models.decoder import CausalLM
from tamis.models.hub import ModelSource
from tamis.models.loader import load_model

CHUNKS = [1, 9, 1, 3, 30, 8, 1, 1, 26]
"""Few rows and many, in turn."""


@pytest.fixture(scope="module")
def ops() -> Iterator[CpuModelOps]:
    team = ThreadTeam(2)
    yield CpuModelOps(team)
    team.close()


def load(path: Path, dtype: torch.dtype = torch.float32, quant: str = "none") -> CausalLM:
    source = ModelSource(path.name, path, "gguf" if path.is_file() else "directory")
    return load_model(source, load_config(source), dtype=dtype, quant=quant)


def in_numba(model: CausalLM, ids: list[int], ops: CpuModelOps) -> Tensor:
    """Logits [len(ids), vocab] of one sequence fed in CHUNKS; attention is the reference's."""
    run, starts = PoolRun(model, 2, len(ids)), itertools.accumulate(CHUNKS, initial=0)
    run.model_ops = ops
    return torch.cat([run.feed([ids[start : start + size]])[0] for start, size in zip(starts, CHUNKS, strict=False)])


def oracle_of(kind: str) -> Any:
    if kind.startswith("m3"):
        oracle = tiny.build(tiny.m3_config(3), seed=1)
        if kind == "m3 K+V":
            spellings.add_index_value(oracle, [2])
        return oracle
    changes = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else {}
    return tiny.build(tiny.llama_config(kind, **changes), seed=2)


def written(oracle: Any, kind: str, path: Path) -> Path:
    if kind == "m3 K+V":
        return spellings.write_released(oracle, path, index_value=[2])
    return tiny.save(oracle, path)


@pytest.mark.parametrize("kind", ["m3", "m3 K+V", "llama", "qwen2", "qwen3"])
def test_logits_equal_transformers(tmp_path: Path, ops: CpuModelOps, kind: str) -> None:
    oracle = oracle_of(kind)
    model = load(written(oracle, kind, tmp_path))
    ids = random_ids(sum(CHUNKS), model.config, 5)
    got = in_numba(model, ids, ops)
    torch.testing.assert_close(got, tiny.oracle_logits(oracle, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["m3", "llama"])
def test_quantised_logits_equal_plain_torch(tmp_path: Path, ops: CpuModelOps, kind: str, quant: str) -> None:
    model = load(written(oracle_of(kind), kind, tmp_path), quant=quant)
    ids = random_ids(sum(CHUNKS), model.config, 6)
    wanted = chunked_logits(model, ids, [len(ids)], page_size=2)
    got = in_numba(model, ids, ops)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["m3", "llama"])
def test_bf16_stays_near_fp32(tmp_path: Path, ops: CpuModelOps, kind: str) -> None:
    """Keeping more of the numbers between in fp32 than plain torch does must not lose anything."""
    path = written(oracle_of(kind), kind, tmp_path)
    ids = random_ids(sum(CHUNKS), load_config(ModelSource("x", path, "directory")), 7)
    wanted = chunked_logits(load(path), ids, [len(ids)], page_size=2)
    got = in_numba(load(path, torch.bfloat16), ids, ops)
    plain = chunked_logits(load(path, torch.bfloat16), ids, [len(ids)], page_size=2)
    # The median: a token whose router or block scores are nearly equal flips on either path, and moves means at random;
    # it differs by 2% between prompts.
    ours, theirs = ((logits - wanted).abs().median() for logits in (got, plain))
    assert ours <= 1.05 * theirs
