"""Whole models with settings that transformers lacks against a second implementation in double precision."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import spellings, tiny
from support.m3_oracle import M3Oracle
from support.running import PoolRun, random_ids
from tamis.kernels import Ops, ReferenceOps
from tamis.kernels.cpu.ops import CpuOps
from tamis.models import load_config
from tamis.models.hub import ModelSource
from tamis.models.loader import load_model

LENGTH = 75
KV_HEADS, INDEX_DIM, HIDDEN = 2, 32, 64


@dataclass(frozen=True)
class Case:
    """A sparse branch: block size 4, so that 75 tokens are 19 blocks."""

    score_type: str
    init: int
    local: int
    topk: int
    heads: int
    """Index heads for each KV head."""
    index_value: tuple[int, ...] = ()
    """Layers with an index value."""


CASES = {
    "lse, init, two heads": Case("lse", 1, 2, 4, 2, (2,)),
    "max, two init, four heads": Case("max", 2, 1, 4, 4, (1, 2)),
    "lse, nothing forced": Case("lse", 0, 0, 2, 1),
    "max, init, no local": Case("max", 1, 0, 3, 2),
}


def write(case: Case, path: Path) -> Path:
    """Three layers, the last two sparse, in the released spelling."""
    model = tiny.build(tiny.m3_config(3, 4, KV_HEADS), seed=40)
    spellings.add_index_value(model, list(case.index_value))
    heads = KV_HEADS * case.heads
    spellings.write_released(
        model, path, index_value=list(case.index_value), sparse_score_type=case.score_type, sparse_init_block=case.init,
        sparse_local_block=case.local, sparse_topk_blocks=case.topk, sparse_num_index_heads=heads,
    )  # fmt: skip
    weights = load_file(path / "model.safetensors")
    for layer in (1, 2):
        start = f"language_model.model.layers.{layer}.self_attn.index_"
        # Twice as large as usual, so that scores differ by more than rounding moves them.
        weights[f"{start}q_proj.weight"] = torch.randn(heads * INDEX_DIM, HIDDEN) * 2 * HIDDEN**-0.5
        if layer in case.index_value:
            weights[f"{start}o_proj.weight"] = torch.randn(HIDDEN, heads * INDEX_DIM) * (heads * INDEX_DIM) ** -0.5
    save_file(weights, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_oracle(tmp_path: Path, name: str) -> None:
    """In one chunk, in several, one token at a time, with every backend."""
    source = ModelSource(name, write(CASES[name], tmp_path), "directory")
    model = load_model(source, load_config(source), dtype=torch.float32)
    ids = random_ids(LENGTH, model.config, 1)
    wanted = M3Oracle(tmp_path).logits(ids)
    cpu = CpuOps(2)
    backends: tuple[Ops, ...] = (ReferenceOps(), cpu)
    for ops in backends:
        for page_size, chunks in ((2, [LENGTH]), (1, [30, 1, 1, LENGTH - 32]), (4, [1] * LENGTH)):
            run, at, got = PoolRun(model, page_size, LENGTH, ops=ops), 0, []
            for size in chunks:
                got += run.feed([ids[at : at + size]])
                at += size
            torch.testing.assert_close(torch.cat(got).double(), wanted, atol=2e-5, rtol=0)
    cpu.close()


def test_the_oracle_itself_equals_transformers(tmp_path: Path) -> None:
    model = tiny.build(tiny.m3_config(3, 4, KV_HEADS, local=2), seed=41)
    spellings.write_released(model, tmp_path)
    ids = random_ids(LENGTH, load_config(ModelSource("m3", tmp_path, "directory")), 2)
    torch.testing.assert_close(
        M3Oracle(tmp_path).logits(ids), tiny.oracle_logits(model, ids).double(), atol=1e-4, rtol=0
    )
