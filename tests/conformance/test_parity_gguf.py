"""Llama-family models in GGUF against transformers on the same weights: row order, biases, tying, RoPE factors."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support import tiny
from support.llama_gguf import write_llama_gguf
from support.running import chunked_logits, greedy, random_ids
from tamis.models import load_config
from tamis.models.hub import ModelSource
from tamis.models.loader import load_model

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, llama3 RoPE": ("llama", {"rope_parameters": LLAMA3}),
    "llama, biases, tied": ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen2, biases, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 24}),
    "qwen3, fp16": ("qwen3", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_gguf_equals_transformers(tmp_path: Path, case: str) -> None:
    kind, changes = CASES[case]
    oracle = tiny.build(tiny.llama_config(kind, hidden_size=96, num_attention_heads=6, **changes), seed=21)
    oracle.tie_weights()
    half = "fp16" in case
    if half:
        with torch.no_grad():
            for tensor in oracle.parameters():
                tensor.copy_(tensor.half().float())
    path = write_llama_gguf(oracle, tmp_path / "tiny.gguf", half=half)
    source = ModelSource(path.name, path, "gguf")
    model = load_model(source, load_config(source), dtype=torch.float32)
    ids = random_ids(200, model.config, 3)
    got = chunked_logits(model, ids, [1, 100, 7, 92], page_size=16)
    torch.testing.assert_close(got, tiny.oracle_logits(oracle, ids), atol=1e-4, rtol=0)
    assert greedy(model, ids[:50], 16, page_size=16) == tiny.oracle_greedy(oracle, ids[:50], 16)
