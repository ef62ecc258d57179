"""config.json of MiniMax-M3 shaped models in both spellings."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.minimax_m3_vl import MiniMaxM3VLConfig, MiniMaxM3VLTextConfig

from tamis.config import LayerKind, ModelConfig, SparseAttentionConfig
from tamis.errors import ConfigError, UnsupportedArchitectureError
from tamis.models import load_config, resolve
from tamis.models.hf_config import read_hf_config

DENSE, SPARSE_K, SPARSE_KV = LayerKind.DENSE, LayerKind.SPARSE_K, LayerKind.SPARSE_KV

OWN: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3_vl_text", "vocab_size": 160,
    "hidden_size": 64, "intermediate_size": 32, "dense_intermediate_size": 96, "shared_intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rotary_dim": 16,
    "rope_theta": 5e6, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": [0, 1, 1, 1],
    "hidden_act": "swigluoai", "scoring_func": "sigmoid", "use_gemma_norm": True, "qk_norm_type": "per_head",
    "sparse_attention_config": {
        "use_sparse_attention": True, "sparse_index_dim": 16, "sparse_num_index_heads": 2, "sparse_topk_blocks": 3,
        "sparse_block_size": 4, "sparse_attention_freq": [0, 1, 1, 1], "sparse_disable_index_value": [0, 1, 0, 1],
    },
}  # fmt: skip

FLAT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 32, "dense_intermediate_size": 96, "shared_intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 160,
    "max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5,
    "index_n_heads": 2, "index_head_dim": 32, "index_block_size": 8, "index_topk_blocks": 5, "index_local_blocks": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "dense", "sparse"], "bos_token_id": 1, "eos_token_id": [2, 3],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}, "rotary_dim": 16,
}  # fmt: skip


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def read_own(folder: Path, sparse: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    config = copy.deepcopy(OWN) | changes
    config["sparse_attention_config"] |= sparse or {}
    return read_hf_config(write(folder, config))


def test_the_released_configuration_is_shipped() -> None:
    """facts.md section 3: what `tamis plan minimax-m3` plans with."""
    config = load_config(resolve("minimax-m3", weights=False))
    assert (config.family, config.num_layers, config.hidden_size, config.vocab_size) == ("minimax_m3", 60, 6144, 200064)
    assert (config.q_heads, config.kv_heads, config.head_dim, config.intermediate_size) == (64, 4, 128, 12288)
    assert (config.rope.theta, config.rope.rotary_dim, config.rope.scaling) == (5e6, 64, "default")
    assert config.layer_kinds == (DENSE,) * 3 + (SPARSE_K,) * 57
    assert config.sparse == SparseAttentionConfig(4, 128, 128, 16, init_blocks=0, local_blocks=1, score_type="max")
    assert config.moe is not None
    assert config.moe.layers == (False,) * 3 + (True,) * 57
    assert (config.moe.num_experts, config.moe.experts_per_token, config.moe.intermediate_size) == (128, 4, 3072)
    assert (config.moe.shared_intermediate_size, config.moe.routed_scaling_factor) == (3072, 2.0)
    assert (config.context_length, config.norm_eps, config.unit_offset_norm) == (524288, 1e-6, True)
    assert (config.activation, config.swiglu_alpha, config.swiglu_limit) == ("swiglu_oai", 1.702, 7.0)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_embeddings) == (200034, (200020,), False)
    assert config.qk_norm
    assert not config.qkv_bias


def test_transformers_reads_the_shipped_configuration_the_same() -> None:
    source = resolve("minimax-m3", weights=False)
    theirs: Any = MiniMaxM3VLConfig(**json.loads(source.path.read_text())).text_config
    ours = load_config(source)
    sparse = [kind == "minimax_m3_sparse" for kind in theirs.layer_types]
    assert [kind is not DENSE for kind in ours.layer_kinds] == sparse
    assert int(theirs.head_dim * theirs.rope_parameters["partial_rotary_factor"]) == ours.rope.rotary_dim
    assert (theirs.index_topk_blocks, theirs.index_local_blocks) == (16, 1)


def test_the_checkpoints_own_spelling(tmp_path: Path) -> None:
    config = read_own(tmp_path)
    assert config.layer_kinds == (DENSE, SPARSE_K, SPARSE_KV, SPARSE_K)
    assert config.sparse == SparseAttentionConfig(2, 16, 4, 3, init_blocks=0, local_blocks=1, score_type="max")
    assert config.moe is not None
    assert config.moe.layers == (False, True, True, True)
    assert config.rope.rotary_dim == 16


@pytest.mark.parametrize("name", ["MiniMaxM3VLForCausalLM", "MiniMaxM3VLForConditionalGeneration", None])
@pytest.mark.parametrize("nested", [False, True])
def test_transformers_spelling(tmp_path: Path, name: str | None, nested: bool) -> None:
    theirs: Any = MiniMaxM3VLTextConfig(**FLAT)
    if nested:
        theirs = MiniMaxM3VLConfig(text_config=theirs.to_dict())
    theirs.architectures = [name] if name else None
    theirs.save_pretrained(tmp_path)
    config = read_hf_config(tmp_path / "config.json")
    assert (config.family, config.model_type) == ("minimax_m3", "minimax_m3_vl_text")
    assert config.layer_kinds == (DENSE, SPARSE_K, SPARSE_K)
    assert config.sparse == SparseAttentionConfig(2, 32, 8, 5, local_blocks=2)
    assert config.moe is not None
    assert config.moe.layers == (False, False, True)
    assert (config.moe.num_experts, config.moe.experts_per_token, config.moe.intermediate_size) == (8, 2, 32)
    assert (config.moe.shared_intermediate_size, config.moe.routed_scaling_factor) == (48, 1.5)
    assert (config.intermediate_size, config.context_length) == (96, 2048)
    assert (config.rope.theta, config.rope.rotary_dim) == (1e6, 16)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 3))
    assert config.unit_offset_norm


def test_absent_keys_are_what_transformers_assumes(tmp_path: Path) -> None:
    required: dict[str, Any] = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
                                "num_attention_heads": 8}  # fmt: skip
    theirs: Any = MiniMaxM3VLTextConfig(**required)
    ours = read_hf_config(write(tmp_path, {"model_type": "minimax_m3_vl_text"} | required))
    assert (ours.kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.intermediate_size, ours.context_length) == (theirs.dense_intermediate_size, 524288)
    assert (ours.norm_eps, ours.rope.theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
    assert ours.layer_kinds == (DENSE, DENSE)
    assert ours.moe is not None
    assert ours.moe.layers == tuple(kind == "sparse" for kind in theirs.mlp_layer_types)
    assert (ours.moe.num_experts, ours.moe.experts_per_token) == (theirs.num_local_experts, theirs.num_experts_per_tok)
    assert ours.moe.routed_scaling_factor == theirs.routed_scaling_factor
    assert (ours.swiglu_alpha, ours.swiglu_limit) == (theirs.swiglu_alpha, theirs.swiglu_limit)
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert ours.tie_embeddings == theirs.tie_word_embeddings


def test_the_outer_config_adds_to_the_text_config(tmp_path: Path) -> None:
    text = copy.deepcopy(OWN)
    del text["architectures"]
    text["eos_token_id"] = None
    outer = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": text,
        "eos_token_id": [5],
        "tie_word_embeddings": True,
    }
    config = read_hf_config(write(tmp_path, outer))
    assert (config.eos_token_ids, config.tie_embeddings, config.num_layers) == ((5,), True, 4)
    del text["num_hidden_layers"]
    with pytest.raises(ConfigError, match=r"config\.json: the key text_config\.num_hidden_layers is missing"):
        read_hf_config(write(tmp_path, outer))


def test_without_a_word_on_index_values_the_spelling_decides(tmp_path: Path) -> None:
    """K+V in the checkpoint's own spelling, as SGLang reads it; K-only in transformers' (above)."""
    own = copy.deepcopy(OWN)
    del own["sparse_attention_config"]["sparse_disable_index_value"]
    assert read_hf_config(write(tmp_path, own)).layer_kinds == (DENSE, SPARSE_KV, SPARSE_KV, SPARSE_KV)


def test_sparse_attention_can_be_off(tmp_path: Path) -> None:
    for off in ({"use_sparse_attention": False}, {"sparse_attention_freq": [0] * 4}):
        config = read_own(tmp_path, off)
        assert config.layer_kinds == (DENSE,) * 4
        assert config.sparse is None
    assert read_own(tmp_path, moe_layer_freq=[0] * 4).moe is None


@pytest.mark.parametrize(
    ("sparse", "init", "local"),
    [
        ({}, 0, 1),
        ({"sparse_init_block": 1, "sparse_local_block": 2}, 1, 2),
        ({"sparse_init_tokens": 4, "sparse_local_tokens": 5}, 1, 2),
        ({"sparse_init_tokens": 0, "sparse_local_tokens": 1}, 0, 1),
        ({"sparse_init_block": 0, "sparse_init_tokens": 4}, 0, 1),
    ],
)
def test_forced_blocks_are_given_in_blocks_or_tokens(
    tmp_path: Path, sparse: dict[str, int], init: int, local: int
) -> None:
    config = read_own(tmp_path, sparse).sparse
    assert config is not None
    assert (config.init_blocks, config.local_blocks) == (init, local)


def test_the_score_type_is_read(tmp_path: Path) -> None:
    config = read_own(tmp_path, {"sparse_score_type": "lse"}).sparse
    assert config is not None
    assert config.score_type == "lse"
    with pytest.raises(ConfigError, match=r"config\.json: .*score_type='mean'"):
        read_own(tmp_path, {"sparse_score_type": "mean"})


def test_topk_below_the_forced_blocks_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: .*topk=3 is less than init_blocks=2 \+ local_blocks=2"):
        read_own(tmp_path, {"sparse_init_block": 2, "sparse_local_block": 2})


@pytest.mark.parametrize("entries", [0, 3, 5])
@pytest.mark.parametrize("name", ["sparse_attention_freq", "sparse_disable_index_value", "moe_layer_freq"])
def test_a_list_of_the_wrong_length_is_named_with_both_numbers(tmp_path: Path, name: str, entries: int) -> None:
    bad = {name: [1] * entries}
    with pytest.raises(ConfigError, match=rf"config\.json: .*{name} has {entries} entries for 4 layers$"):
        read_own(tmp_path, **({"sparse": bad} if name.startswith("sparse") else bad))


@pytest.mark.parametrize("name", ["layer_types", "mlp_layer_types"])
def test_lists_of_transformers_spelling_are_checked_too(tmp_path: Path, name: str) -> None:
    config = {"architectures": ["MiniMaxM3VLForCausalLM"]} | FLAT
    with pytest.raises(ConfigError, match=rf"{name} has 2 entries for 3 layers"):
        read_hf_config(write(tmp_path, config | {name: FLAT[name][:2]}))
    with pytest.raises(ConfigError, match=rf"{name}: entry 'odd' is not a list of '"):
        read_hf_config(write(tmp_path, config | {name: ["odd"] * 3}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm_type": "per_layer"}, "qk_norm_type='per_layer' is not implemented"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented"),
        ({"use_routing_bias": False}, "use_routing_bias=false is not implemented"),
        ({"rotary_dim": 8, "partial_rotary_factor": 0.5}, "rotary_dim=8 contradicts partial_rotary_factor=0.5"),
        ({"rotary_dim": 64}, "rotary_dim=64 must be even and at most head_dim=32"),
        ({"num_experts_per_tok": 9}, "experts_per_token=9 is not between 1 and num_experts=8"),
        ({"moe_layer_freq": 1}, "moe_layer_freq: 1 is not a list"),
        ({"moe_layer_freq": [0, 1, 2, 1]}, "moe_layer_freq: entry 2 is not a list of 0 and 1"),
        ({"sparse": {"sparse_attention_freq": None}}, "sparse_attention_config.sparse_attention_freq is missing"),
        ({"sparse": {"sparse_attention_freq": ["a"] * 4}}, "sparse_attention_freq: entry 'a' is not"),
        ({"sparse": {"sparse_topk_blocks": None}}, "sparse_attention_config.sparse_topk_blocks is missing"),
        ({"sparse": {"sparse_block_size": 0}}, "sparse_block_size: 0 is not"),
        ({"sparse": {"sparse_num_index_heads": 3}}, "index_heads=3 is not a multiple of kv_heads=2"),
        ({"sparse": {"use_sparse_attention": 1}}, "use_sparse_attention: 1 is not true or false"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8'"),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        read_own(tmp_path, **changes)


def test_norms_without_an_offset(tmp_path: Path) -> None:
    assert not read_own(tmp_path, use_gemma_norm=False).unit_offset_norm


def test_transformers_spelling_rotates_what_transformers_rotates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers writes rotary_dim and computes with partial_rotary_factor alone."""
    config = {"architectures": ["MiniMaxM3VLForCausalLM"]} | FLAT
    assert read_hf_config(write(tmp_path, config)).rope.rotary_dim == 16
    assert not caplog.records
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    assert read_hf_config(write(tmp_path, config)).rope.rotary_dim == 32
    assert "rotary_dim=16 is not read in transformers' spelling: 32 of 32 channels rotate" in caplog.text


def test_another_minimax_is_not_taken_for_this_one(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="'MiniMaxM2ForCausalLM'"):
        read_own(tmp_path, architectures=["MiniMaxM2ForCausalLM"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"index_topk_blocks": 10**6}, SparseAttentionConfig(2, 32, 8, 256, local_blocks=2)),
        ({"index_topk_blocks": 10**6, "index_local_blocks": 10**6}, SparseAttentionConfig(2, 32, 8, 256, 0, 256)),
        ({"index_block_size": 10**7}, SparseAttentionConfig(2, 32, 10**7, 1, local_blocks=1)),
    ],
)
def test_no_more_blocks_are_selected_than_a_context_has(
    tmp_path: Path, changes: dict[str, Any], expected: SparseAttentionConfig
) -> None:
    config = {"architectures": ["MiniMaxM3VLForCausalLM"]} | FLAT | changes
    assert read_hf_config(write(tmp_path, config)).sparse == expected


def test_forced_blocks_keep_their_places_in_a_short_context() -> None:
    """Three blocks, of which the first two and the last two are forced."""
    settings = SparseAttentionConfig(2, 16, 4, topk=9, init_blocks=2, local_blocks=2)
    assert settings.within(12) == SparseAttentionConfig(2, 16, 4, topk=4, init_blocks=2, local_blocks=2)
    assert settings.within(3) == SparseAttentionConfig(2, 16, 4, topk=2, init_blocks=1, local_blocks=1)
    assert settings.within(36) == settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 10**5}, "num_experts=100000 in 3 layers are more than 262144 in all"),
        ({"sparse": {"sparse_index_dim": 2**31 - 1}}, "index_head_dim=2147483647 must be at most 65536"),
        ({"sparse": {"sparse_num_index_heads": 2**31 - 2, "sparse_index_dim": 2**16}}, "a matrix of index_heads"),
        (
            {"intermediate_size": 2**31 - 1, "hidden_size": 2**20},
            r"a matrix of num_experts \* their intermediate_size=",
        ),
    ],
)
def test_sizes_that_no_memory_holds_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        read_own(tmp_path, **changes)
