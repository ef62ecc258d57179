"""Llama-family models with an index branch, all layer kinds mixed, against the same model written out once more."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support import tiny
from support.branch_oracle import retrofit_oracle
from support.branches import retrofitted
from support.llama_gguf import write_llama_gguf
from support.running import chunked_logits, random_ids
from tamis import LLM, SamplingParams
from tamis.config import LayerKind
from tamis.kernels import Ops, ReferenceOps
from tamis.kernels.cpu.ops import CpuOps
from tamis.models import load_config
from tamis.models.loader import load_model

LENGTH = 90
K, D, KV = LayerKind.SPARSE_K, LayerKind.DENSE, LayerKind.SPARSE_KV
SHAPES: dict[str, dict[str, Any]] = {
    "the heads' dim": {},
    "K-only": {"layer_kinds": (D, K, K)},
    "K+V": {"layer_kinds": (KV, KV, KV), "init_blocks": 0, "local_blocks": 2},
    "smaller heads": {"index_head_dim": 8, "index_rotary_dim": 8},
    "larger heads that turn in part, another base": {
        "index_head_dim": 32,
        "index_rotary_dim": 16,
        "rope_theta": 500.0,
        "norm_eps": 1e-3,
    },
    "blocks that are no power of two": {"block_size": 6, "topk": 4},
}


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Any:
    backend: Ops = ReferenceOps() if request.param == "reference" else CpuOps(2)
    yield backend
    backend.close()


@pytest.mark.parametrize("blocks_a_page", [0, 1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_the_model_written_out(tmp_path: Path, ops: Ops, shape: str, blocks_a_page: int) -> None:
    """On pages of two tokens, and of one or several blocks."""
    base = tiny.build(tiny.llama_config("llama", attention_bias=True), seed=3)
    source = retrofitted(tiny.save(base, tmp_path / "base"), tmp_path / "branch", **SHAPES[shape])
    model = load_model(source, load_config(source), dtype=torch.float32)
    ids = random_ids(LENGTH, model.config, 4)
    wanted = tiny.oracle_logits(retrofit_oracle(base, tmp_path / "branch"), ids)
    assert model.config.sparse is not None
    page_size = blocks_a_page * model.config.sparse.block_size or 2
    got = chunked_logits(model, ids, [1, 40, 1, 7, LENGTH - 49], page_size, ops)
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_every_dialect_of_the_family_takes_a_branch(tmp_path: Path, kind: str) -> None:
    """With as many blocks as there are, what differs from the dense model is nothing but the index values."""
    base = tiny.build(tiny.llama_config(kind), seed=5)
    path = tiny.save(base, tmp_path / "base")
    source = retrofitted(path, tmp_path / "branch", layer_kinds=(K, D, K), topk=LENGTH)
    model = load_model(source, load_config(source), dtype=torch.float32)
    ids = random_ids(LENGTH, model.config, 6)
    got = chunked_logits(model, ids, [50, 40], page_size=2)
    torch.testing.assert_close(got, tiny.oracle_logits(base, ids), atol=2e-4, rtol=0)


def test_a_gguf_base_and_a_safetensors_base_give_the_same(tmp_path: Path) -> None:
    base = tiny.build(tiny.llama_config("llama"), seed=7)
    path = tiny.save(base, tmp_path / "base")
    gguf = write_llama_gguf(base, tmp_path / "base.gguf")
    models = []
    for number, place in enumerate((path, gguf)):
        source = retrofitted(place, tmp_path / f"branch{number}")
        models.append(load_model(source, load_config(source), dtype=torch.float32))
    ids = random_ids(LENGTH, models[0].config, 8)
    one, other = (chunked_logits(model, ids, [LENGTH], page_size=2) for model in models)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_a_retrofitted_directory_runs_as_any_model(tmp_path: Path) -> None:
    base = tiny.build(tiny.llama_config("llama"), seed=9)
    source = retrofitted(tiny.save(base, tmp_path / "base"), tmp_path / "branch")
    ids = random_ids(LENGTH, load_config(source), 10)
    beside = tiny.save(base, tmp_path / "both")
    retrofitted(tmp_path / "base", beside)
    wanted = tiny.oracle_greedy(retrofit_oracle(base, tmp_path / "branch"), ids, 1)
    for path in (tmp_path / "branch", beside):
        with LLM(path, dtype="fp32", kv_budget="4MiB") as llm:
            assert llm.config.layer_kinds == (K, D, KV)
            (done,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        assert list(done.token_ids) == wanted
