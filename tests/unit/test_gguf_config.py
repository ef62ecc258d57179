"""The configuration in GGUF metadata: Llama family and minimax-m3."""

import logging
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tamis.config import GenerationDefaults, LayerKind, ModelConfig, SparseAttentionConfig
from tamis.errors import (
    ConfigError,
    CorruptFileError,
    MissingTensorError,
    UnsupportedArchitectureError,
    UnsupportedRopeError,
)
from tamis.models import ModelSource, load_config, load_generation_defaults
from tamis.models.layers import rope_frequencies

Type = gguf.GGMLQuantizationType

LLAMA: dict[str, Any] = {
    "block_count": 3, "context_length": 2048, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5e5, "vocab_size": 160,
}  # fmt: skip
M3: dict[str, Any] = LLAMA | {
    "attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 16,
    "leading_dense_block_count": 1, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32,
    "expert_shared_count": 1, "expert_weights_scale": 2.0, "expert_weights_norm": True, "expert_gating_func": 2,
    "attention.indexer.head_count": 2, "attention.indexer.key_length": 16, "attention.indexer.top_k": 5,
    "attention.indexer.block_size": 8, "attention.indexer.local_blocks": 2,
}  # fmt: skip
SHARED = "blk.1.ffn_gate_shexp.weight"


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write(
    folder: Path,
    architecture: str,
    keys: dict[str, Any],
    tensors: dict[str, tuple[int, ...]],
    embedding: Type = Type.F32,
) -> ModelSource:
    """Keys with a None are left out; a key with "tokenizer." or "split." in front stands for itself."""
    path = folder / "m.gguf"
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in keys.items():
        if value is not None:
            add(writer, key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}", value)
    rows = gguf.quants.quantize(np.zeros((160, 64), dtype=np.float32), embedding)
    writer.add_tensor("token_embd.weight", rows, raw_dtype=embedding)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.full(shape, 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource("m", path, "gguf")


def read(
    folder: Path, architecture: str = "llama", tensors: dict[str, tuple[int, ...]] | None = None, **changes: Any
) -> ModelConfig:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(write(folder, architecture, LLAMA | named, tensors or {}))


def read_m3(folder: Path, **changes: Any) -> ModelConfig:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(write(folder, "minimax-m3", M3 | named, {SHARED: (48, 64), "output.weight": (160, 64)}))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_llama_family_is_read(tmp_path: Path, architecture: str) -> None:
    ids: dict[str, Any] = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    config = read(tmp_path, architecture, **ids)
    assert (config.family, config.model_type) == ("llama", architecture)
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.intermediate_size) == (160, 64, 3, 96)
    assert (config.q_heads, config.kv_heads, config.head_dim, config.context_length) == (4, 2, 16, 2048)
    assert config.norm_eps == pytest.approx(1e-5, rel=1e-6)
    assert (config.rope.theta, config.rope.rotary_dim, config.rope.scaling) == (5e5, 16, "default")
    assert config.layer_kinds == (LayerKind.DENSE,) * 3
    assert (config.qkv_bias, config.qk_norm) == (architecture == "qwen2", architecture == "qwen3")
    assert (config.o_bias, config.mlp_bias, config.unit_offset_norm) == (False, False, False)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.tie_embeddings
    assert config.dtype is torch.float32


def test_what_the_tensors_say(tmp_path: Path) -> None:
    biased = ("blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias", "output.weight")
    config = read(tmp_path, tensors=dict.fromkeys(biased, (64,)))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.tie_embeddings) == (True, True, True, False)
    assert read(tmp_path, vocab_size=None).vocab_size == 160
    with pytest.raises(ConfigError, match=r"m\.gguf: llama\.vocab_size=161, but token_embd\.weight has 160 rows"):
        read(tmp_path, vocab_size=161)


@pytest.mark.parametrize(("kind", "dtype"), [(Type.F16, torch.float16), (Type.BF16, torch.bfloat16), (Type.Q8_0, None)])
def test_the_dtype_is_the_embeddings(tmp_path: Path, kind: Type, dtype: torch.dtype | None) -> None:
    assert load_config(write(tmp_path, "llama", LLAMA, {}, kind)).dtype is dtype


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    config = read(tmp_path, attention__head_count_kv=None, rope__freq_base=None)
    assert (config.kv_heads, config.rope.theta, config.bos_token_id, config.eos_token_ids) == (4, 10000.0, None, ())
    assert read(tmp_path, attention__key_length=32, attention__value_length=32).head_dim == 32
    assert read(tmp_path, attention__head_count_kv=[2, 2, 2]).kv_heads == 2


def test_every_kind_of_end_counts_once(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    source = write(tmp_path, "llama", LLAMA | ends, {})
    assert load_config(source).eos_token_ids == (2, 7)
    assert load_generation_defaults(source) == (GenerationDefaults(), (2, 7))


def test_minimax_m3_is_read(tmp_path: Path) -> None:
    config = read_m3(tmp_path)
    assert (config.family, config.model_type) == ("minimax_m3", "minimax-m3")
    assert config.layer_kinds == (LayerKind.DENSE, LayerKind.SPARSE_K, LayerKind.SPARSE_K)
    assert config.sparse == SparseAttentionConfig(2, 16, 8, 5, local_blocks=2)
    assert config.moe is not None
    assert config.moe.layers == (False, True, True)
    assert (config.moe.num_experts, config.moe.experts_per_token, config.moe.intermediate_size) == (8, 2, 32)
    assert (config.moe.shared_intermediate_size, config.moe.routed_scaling_factor) == (48, 2.0)
    assert (config.head_dim, config.rope.rotary_dim, config.intermediate_size) == (32, 16, 96)
    assert config.qk_norm
    assert config.activation == "swiglu_oai"
    assert not config.unit_offset_norm  # GGUF has added the 1 already
    assert not config.tie_embeddings


def test_minimax_m3_without_sparse_layers_or_shared_expert(tmp_path: Path) -> None:
    config = read_m3(tmp_path, leading_dense_block_count=3)
    assert config.layer_kinds == (LayerKind.DENSE,) * 3
    assert (config.sparse, config.moe) == (None, None)
    moe = read_m3(tmp_path, expert_shared_count=0).moe
    assert moe is not None
    assert moe.shared_intermediate_size == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_used_count": 9}, "experts_per_token=9 is not between 1 and num_experts=8"),
        ({"leading_dense_block_count": 4}, "leading_dense_block_count=4 is not between 0 and 3 layers"),
        ({"expert_gating_func": 1}, "expert_gating_func=1 is not implemented"),
        ({"expert_weights_norm": False}, "expert_weights_norm=false is not implemented"),
        ({"attention__indexer__top_k": None}, "the metadata key minimax-m3.attention.indexer.top_k is missing"),
        ({"attention__indexer__top_k": 1}, "topk=1 is less than init_blocks=0 [+] local_blocks=2"),
        ({"attention__indexer__block_size": 0}, "indexer.block_size=0 is not a whole number from 1"),
        ({"attention__indexer__head_count": 3}, "index_heads=3 is not a multiple of kv_heads=2"),
        ({"expert_weights_scale": math.nan}, "expert_weights_scale=nan is not a finite number"),
    ],
)
def test_a_minimax_m3_that_cannot_be_run_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"m\.gguf: .*{message}"):
        read_m3(tmp_path, **changes)


def test_a_missing_tensor_that_a_size_comes_from_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingTensorError, match=rf"'{SHARED}' is missing in .*m\.gguf"):
        load_config(write(tmp_path, "minimax-m3", M3, {}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "the metadata key llama.block_count is missing"),
        ({"block_count": 0}, "llama.block_count=0 is not a whole number from 1"),
        ({"block_count": 20000}, "llama.block_count=20000 is more than 10000"),
        ({"block_count": "3"}, "the metadata key llama.block_count is not a whole number"),
        ({"context_length": 1 << 31}, "llama.context_length=2147483648 is not a whole number"),
        ({"attention__head_count": 5}, "llama.embedding_length=64 is not a multiple of 5 heads"),
        ({"attention__head_count_kv": [2, 1, 2]}, "head_count_kv: layers with different numbers of heads"),
        ({"attention__head_count_kv": 3}, "q_heads=4 is not a multiple of kv_heads=3"),
        ({"attention__value_length": 8}, "llama.attention.value_length=8 differs from llama.attention.key_length=16"),
        ({"attention__layer_norm_rms_epsilon": math.nan}, "rms_epsilon=nan is not a finite number above 0"),
        ({"attention__layer_norm_rms_epsilon": None}, "rms_epsilon is missing"),
        ({"rope__dimension_count": 18}, "rotary_dim=18 must be even and at most head_dim=16"),
        ({"expert_count": 8}, "llama.expert_count: mixtures of experts"),
        ({"split.count": 3}, "split.count=3"),
    ],
)
def test_a_bad_key_is_named_once_with_the_file(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"m\.gguf: .*{message}") as caught:
        read(tmp_path, **changes)
    assert str(caught.value).count("m.gguf") == 1


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=r"'gemma'.*known: llama, minimax-m3, qwen2, qwen3"):
        read(tmp_path, "gemma")


def test_a_sliding_window_limits_the_context_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tamis"):
        assert read(tmp_path, attention__sliding_window=128).context_length == 128
    assert "limited to the window of 128 tokens" in caplog.text


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        {
            "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 512,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "yarn, all": (
        {
            "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 512,
            "rope__scaling__yarn_beta_fast": 16.0, "rope__scaling__yarn_beta_slow": 2.0,
            "rope__scaling__yarn_ext_factor": 1.0,
        },
        {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling_gives_transformers_frequencies(tmp_path: Path, name: str) -> None:
    keys, settings = ROPES[name]
    rope = read(tmp_path, **keys).rope
    theirs = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=2048,
        rope_parameters=settings | {"rope_theta": 5e5},
    )  # fmt: skip
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](theirs)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    torch.testing.assert_close(rope_frequencies(rope), frequencies, rtol=1e-6, atol=0)


def test_yarn_attention_factors_multiply(tmp_path: Path) -> None:
    keys = ROPES["yarn"][0]
    plain = read(tmp_path, **keys).rope.attention_factor
    assert read(tmp_path, **keys, rope__scaling__attn_factor=0.5).rope.attention_factor == plain / 2


def test_llama3_frequency_factors_are_read_from_their_tensor(tmp_path: Path) -> None:
    plain = read(tmp_path).rope
    assert plain.frequency_factors is None
    rope = read(tmp_path, tensors={"rope_freqs.weight": (8,)}).rope
    assert rope.frequency_factors == (2.0,) * 8
    torch.testing.assert_close(rope_frequencies(rope), rope_frequencies(plain) / 2)
    with pytest.raises(CorruptFileError, match=r"rope_freqs\.weight is not 8 numbers above 0"):
        read(tmp_path, tensors={"rope_freqs.weight": (4,)})


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}, (), "RoPE scaling 'longrope'"),
        ({}, ("rope_factors_long.weight",), "RoPE scaling 'longrope'"),
        (ROPES["linear"][0], ("rope_freqs.weight",), "RoPE scaling 'linear' together with rope_freqs.weight"),
        (ROPES["yarn"][0] | {"rope__scaling__yarn_ext_factor": 0.0}, (), "yarn_ext_factor=0.0 is not implemented"),
        (ROPES["yarn"][0] | {"rope__scaling__yarn_log_multiplier": 0.1}, (), "yarn_log_multiplier=0.1"),
    ],
)
def test_rope_scaling_that_is_not_implemented_is_named(
    tmp_path: Path, changes: dict[str, Any], tensors: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UnsupportedRopeError, match=rf"m\.gguf: .*{message}"):
        read(tmp_path, tensors=dict.fromkeys(tensors, (8,)), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope__scaling__type": "linear"}, r"the metadata key llama\.rope\.scaling\.factor is missing"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 0.0}, r"scaling\.factor=0\.0 is not a finite number"),
        ({"rope__freq_base": math.inf}, r"llama\.rope\.freq_base=inf is not a finite number above 0"),
        ({"rope__freq_base": 3e38}, r"m\.gguf: RoPE: theta=.* is not between 1 and 1e\+30"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__yarn_beta_slow": 3e38},
            r"m\.gguf: RoPE: beta_slow=.* is not between",
        ),
        ({"rope__freq_base": 1.0}, r"llama\.rope\.freq_base=1\.0 is not above 1"),
    ],
)
def test_incomplete_rope_settings_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)
