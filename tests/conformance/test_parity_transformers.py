"""tamis against transformers in fp32: random models of every family, chunked anyhow, logits and greedy tokens."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from support import tiny
from support.running import chunked_logits, greedy, random_chunks, random_ids
from tamis.models import load_config
from tamis.models.decoder import CausalLM
from tamis.models.hub import ModelSource
from tamis.models.loader import load_model


def load(path: Path) -> CausalLM:
    source = ModelSource(path.name, path, "gguf" if path.is_file() else "directory")
    return load_model(source, load_config(source), dtype=torch.float32)


def check(oracle: Any, model: CausalLM, length: int, page_size: int, seed: int, steps: int = 64) -> None:
    """Logits of a random prompt within 1e-4 for random chunks, the same greedy tokens one at a time."""
    ids = random_ids(length, model.config, seed)
    wanted = tiny.oracle_logits(oracle, ids)
    got = chunked_logits(model, ids, random_chunks(length, random.Random(seed)), page_size)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    assert greedy(model, ids, steps, page_size) == tiny.oracle_greedy(oracle, ids, steps)


@pytest.mark.parametrize(
    ("layers", "q_heads", "kv_heads", "dense"),
    [(1, 4, 2, 0), (1, 2, 1, 1), (2, 4, 1, 1), (2, 4, 4, 0), (3, 8, 2, 1), (4, 6, 3, 2), (4, 4, 2, 0)],
)
def test_m3_equals_transformers(tmp_path: Path, layers: int, q_heads: int, kv_heads: int, dense: int) -> None:
    oracle = tiny.build(tiny.m3_config(layers, q_heads, kv_heads, dense=dense), seed=layers)
    model = load(tiny.save(oracle, tmp_path))
    # Three blocks of four: from token 13 on, selection drops something.
    for seed, (length, page_size) in enumerate([(61, 4), (90, 1), (77, 2)]):
        check(oracle, model, length, page_size, seed)


def test_m3_one_token_at_a_time(tmp_path: Path) -> None:
    oracle = tiny.build(tiny.m3_config(3), seed=7)
    model = load(tiny.save(oracle, tmp_path))
    ids = random_ids(70, model.config, 1)
    got = chunked_logits(model, ids, [1] * 70, page_size=2)
    torch.testing.assert_close(got, tiny.oracle_logits(oracle, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("topk", "block", "local"), [(2, 8, 2), (4, 2, 1), (3, 16, 1)])
def test_m3_block_settings(tmp_path: Path, topk: int, block: int, local: int) -> None:
    oracle = tiny.build(tiny.m3_config(2, topk=topk, block=block, local=local), seed=topk)
    model = load(tiny.save(oracle, tmp_path))
    check(oracle, model, 120, 2, seed=3, steps=16)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_llama_family_equals_transformers(tmp_path: Path, kind: str) -> None:
    oracle = tiny.build(tiny.llama_config(kind), seed=2)
    model = load(tiny.save(oracle, tmp_path))
    check(oracle, model, 83, 16, seed=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 64}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "truncate": False,
                             "mscale": 1.0, "mscale_all_dim": 0.8, "original_max_position_embeddings": 64}},
    ],
    ids=["biases", "tied", "linear", "llama3", "yarn", "yarn-mscale"],
)  # fmt: skip
def test_llama_options_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    oracle = tiny.build(tiny.llama_config("llama", **changes), seed=5)
    model = load(tiny.save(oracle, tmp_path))
    check(oracle, model, 200, 32, seed=6, steps=8)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    oracle = tiny.build(tiny.m3_config(3), seed=9)
    model = load(tiny.save(oracle, tmp_path, max_shard_size="100KB"))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check(oracle, model, 50, 4, seed=8, steps=8)
