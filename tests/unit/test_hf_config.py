"""config.json and generation_config.json of the Llama family: read as transformers does, or refused by name."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tamis.config import GenerationDefaults, LayerKind, ModelConfig
from tamis.errors import ConfigError, ModelNotFoundError, UnsupportedArchitectureError, UnsupportedRopeError
from tamis.models import ModelSource, load_config, load_generation_defaults
from tamis.models.hf_config import read_generation_config, read_hf_config
from tamis.models.layers import rope_frequencies

CLASSES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
ARCHITECTURES = {kind: f"{kind.capitalize()}ForCausalLM" for kind in CLASSES}
REQUIRED: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
SMALL = REQUIRED | {"num_key_value_heads": 2}


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def read(folder: Path, kind: str = "llama", **changes: Any) -> ModelConfig:
    config = {"architectures": [ARCHITECTURES[kind]], "model_type": kind} | SMALL | changes
    return read_hf_config(write(folder, config))


def as_tuple(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("source", ["saved", "minimal"])
def test_fields_and_absent_keys_are_read_as_transformers_does(tmp_path: Path, kind: str, source: str) -> None:
    """`minimal` has the required keys only, so every other field is a default of transformers' class."""
    required = REQUIRED | {"hidden_size": 128, "num_attention_heads": 32}
    theirs: Any = CLASSES[kind](**required)
    if source == "saved":
        theirs.architectures = [ARCHITECTURES[kind]]
        theirs.save_pretrained(tmp_path)
        ours = read_hf_config(tmp_path / "config.json")
    else:
        ours = read_hf_config(write(tmp_path, {"model_type": kind} | required))
    assert (ours.family, ours.model_type) == ("llama", kind)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.q_heads == theirs.num_attention_heads
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == as_tuple(theirs.eos_token_id)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert (ours.rope.scaling, ours.rope.rotary_dim) == ("default", ours.head_dim)
    window = theirs.sliding_window if kind == "mistral" else None
    assert ours.context_length == min(theirs.max_position_embeddings, window or theirs.max_position_embeddings)
    assert ours.layer_kinds == (LayerKind.DENSE,) * 3
    assert ours.qk_norm is (kind == "qwen3")
    assert ours.qkv_bias is (kind == "qwen2")
    assert not ours.o_bias
    assert not ours.mlp_bias
    assert ours.sparse is None
    assert ours.moe is None
    assert not ours.unit_offset_norm


def test_biases_follow_the_class(tmp_path: Path) -> None:
    both = {"attention_bias": True, "mlp_bias": True}
    read_as = {kind: read(tmp_path, kind, **both) for kind in CLASSES}
    flags = {kind: (config.qkv_bias, config.o_bias, config.mlp_bias) for kind, config in read_as.items()}
    assert flags == {
        "llama": (True, True, True),
        "mistral": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (True, True, False),
    }


def test_a_null_counts_as_absent(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads=None, head_dim=None, rope_scaling=None, eos_token_id=None)
    assert (config.kv_heads, config.head_dim, config.eos_token_ids) == (4, 16, ())


@pytest.mark.parametrize(("eos", "ids"), [(7, (7,)), ([7, 9], (7, 9)), ([], ())])
def test_end_ids_are_one_or_many(tmp_path: Path, eos: object, ids: tuple[int, ...]) -> None:
    assert read(tmp_path, eos_token_id=eos).eos_token_ids == ids


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_stored_dtype_is_read(tmp_path: Path, key: str) -> None:
    assert read(tmp_path, **{key: "bfloat16"}).dtype is torch.bfloat16
    assert read(tmp_path, **{key: "torch.float16"}).dtype is torch.float16
    assert read(tmp_path, **{key: "auto"}).dtype is None
    assert read(tmp_path).dtype is None
    with pytest.raises(ConfigError, match="dtype: 'int4' is not one of"):
        read(tmp_path, **{key: "int4"})


WINDOWS = [
    ("mistral", {"sliding_window": 512}, 512),
    ("mistral", {"sliding_window": None}, 131072),
    ("mistral", {"sliding_window": 1 << 20}, 131072),
    ("mistral", {}, 4096),
    ("qwen2", {"sliding_window": 512}, 32768),
    ("qwen2", {"sliding_window": 512, "use_sliding_window": False}, 32768),
    ("qwen2", {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 3}, 32768),
    ("qwen2", {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2}, 512),
    ("qwen3", {"sliding_window": 512, "use_sliding_window": True, "layer_types": ["full_attention"] * 3}, 32768),
    ("qwen3", {"sliding_window": 9, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3}, 9),
    ("llama", {"sliding_window": 512}, 2048),
]


@pytest.mark.parametrize(("kind", "changes", "context"), WINDOWS)
def test_a_real_window_limits_the_context_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, changes: dict[str, Any], context: int
) -> None:
    with caplog.at_level(logging.WARNING, "tamis"):
        assert read(tmp_path, kind, **changes).context_length == context
    assert ("limited to the window" in caplog.text) is (context in (9, 512, 4096))


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
    },
    "llama3 by default": {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn, all": {
        "factor": 4, "original_max_position_embeddings": 512, "attention_factor": 1.3, "beta_fast": 16.0,
        "beta_slow": 2.0, "truncate": False,
    },
    "yarn, mscale": {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1, "original_max_position_embeddings": 64},
    "yarn, half of mscale": {"factor": 40.0, "mscale": 0.7, "original_max_position_embeddings": 64},
    "yarn, shrinking": {"factor": 0.5, "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "rope_scaling with type"])
def test_rope_scaling_gives_transformers_frequencies(tmp_path: Path, name: str, spelling: str) -> None:
    kind = name.partition(",")[0].partition(" ")[0]
    settings = {"rope_type": kind, "rope_theta": 5e5} | SCALINGS[name]
    theirs = LlamaConfig(**SMALL, rope_parameters=dict(settings))
    if spelling == "rope_parameters":
        ours = read(tmp_path, rope_parameters=settings)
    else:
        theta = settings.pop("rope_theta")
        if spelling == "rope_scaling with type":
            settings["type"] = settings.pop("rope_type")
        ours = read(tmp_path, rope_theta=theta, rope_scaling=settings)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](theirs)
    assert ours.rope.scaling == kind
    assert ours.rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    torch.testing.assert_close(rope_frequencies(ours.rope), frequencies, rtol=1e-6, atol=0)


def test_a_length_beside_rope_scaling_has_the_last_word(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read(tmp_path, rope_scaling=yarn, original_max_position_embeddings=256).rope.original_context == 256


def test_yarn_with_a_stated_length_extends_the_context(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert read(tmp_path, rope_scaling=yarn).context_length == 2048
    stated = yarn | {"original_max_position_embeddings": 2048}
    assert read(tmp_path, rope_scaling=stated).context_length == 8192
    assert read(tmp_path, rope_scaling=stated, max_position_embeddings=9000).context_length == 9000
    assert read(tmp_path, "qwen2", rope_scaling=stated).context_length == 32768


def test_partial_rotation_is_honoured(tmp_path: Path) -> None:
    assert read(tmp_path, partial_rotary_factor=0.5).rope.rotary_dim == 8
    inside = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert read(tmp_path, rope_parameters=inside).rope.rotary_dim == 4


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "proportional", "Linear"])
def test_an_unknown_rope_scaling_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    for settings in ({"rope_scaling": {"type": kind, "factor": 2.0}}, {"rope_parameters": {"rope_type": kind}}):
        with pytest.raises(UnsupportedRopeError, match=rf"config\.json: RoPE scaling '{kind}' is not implemented"):
            read(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "linear"}, "RoPE setting factor is missing"),
        ({"type": "yarn", "factor": None}, "RoPE setting factor is missing"),
        ({"type": "linear", "factor": 0}, "RoPE setting factor: 0 is not a finite number above 0"),
        ({"type": "linear", "factor": "2"}, "RoPE setting factor: '2' is not a number"),
        ({"type": "llama3", "factor": 2.0, "high_freq_factor": 4.0}, "RoPE setting low_freq_factor is missing"),
        ({"type": "llama3", "factor": 2.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0}, "high_freq_factor: 1.0"),
        ({"type": "yarn", "factor": 2.0, "truncate": 1}, "RoPE setting truncate: 1 is not true or false"),
        ({"type": 7}, "RoPE setting rope_type: 7 is not text"),
        ({"mrope_section": [1, 2, 3]}, "RoPE scaling 'mrope' is not implemented"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention: RoPE settings a layer type"),
        ({"rope_theta": 1.0}, "RoPE setting rope_theta: 1.0 is not above 1"),
        ({"type": "linear", "factor": 10**400}, "RoPE setting factor: 10+... is not a finite number"),
        ({"type": "yarn", "factor": 1e308}, "RoPE: factor=1e.308 is not between 0.001 and 1e.06"),
        (
            {"type": "yarn", "factor": 1e308, "original_max_position_embeddings": 4096},
            "RoPE: factor=1e.308 is not between 0.001 and 1e.06",
        ),
        ({"type": "yarn", "factor": 4.0, "beta_slow": 1e308}, "RoPE: beta_slow=1e.308 is not between"),
        ({"type": "yarn", "factor": 4.0, "beta_fast": 1e-320}, "RoPE: beta_fast=1e-320 is not between"),
        (
            {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": -10 / math.log(4.0)},
            "RoPE setting mscale_all_dim: -7.2134.* with factor 4.0 is a division by 0",
        ),
        ({"type": "yarn", "factor": 4.0, "mscale": 1e308, "mscale_all_dim": 1.0}, "RoPE: attention_factor="),
        (
            {"type": "llama3", "factor": 2.0, "high_freq_factor": 1e300, "low_freq_factor": 1.0},
            "RoPE: high_freq_factor=1e.300 is not between",
        ),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor: 2.0 is above 1"),
        ({"partial_rotary_factor": 0.8}, r"rotary_dim=\d+ must be even"),
        ([], r"rope_scaling: \[\] is not an object"),
    ],
)
def test_bad_rope_settings_are_named(tmp_path: Path, settings: object, message: str) -> None:
    if message.startswith("rotary"):
        settings = {"partial_rotary_factor": 0.7}
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, rope_scaling=settings)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForSequenceClassification", "MiniMaxM2ForCausalLM"])
def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=rf"config\.json: .*'{name}'.*LlamaForCausalLM.*Qwen3"):
        read(tmp_path, architectures=[name])


def test_without_architectures_the_model_type_decides(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=None, model_type="qwen3").qk_norm
    with pytest.raises(UnsupportedArchitectureError, match=r"'gpt2'.*known: llama, mini"):
        read(tmp_path, architectures=[], model_type="gpt2")
    with pytest.raises(ConfigError, match="the key model_type is missing"):
        read_hf_config(write(tmp_path, SMALL))


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named_with_the_file(tmp_path: Path, key: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"]} | SMALL
    del config[key]
    with pytest.raises(ConfigError, match=rf"config\.json: the key {key} is missing$"):
        read_hf_config(write(tmp_path, config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size: '64' is not a whole number"),
        ({"hidden_size": 64.0}, "hidden_size: 64.0 is not a whole number"),
        ({"hidden_size": True}, "hidden_size: True is not a whole number"),
        ({"hidden_size": [64]}, r"hidden_size: \[64\] is not a whole number"),
        ({"hidden_size": -64}, "hidden_size: -64 is not a whole number from 1"),
        ({"hidden_size": 66}, "hidden_size=66 is not a multiple of num_attention_heads=4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: 1000000 is more than 10000"),
        ({"vocab_size": 10**12}, "vocab_size: 1000000000000 is not"),
        ({"num_key_value_heads": 3}, "q_heads=4 is not a multiple of kv_heads=3"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: '1e-5' is not a number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: 0 is not a finite number above 0"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: 10+... is not a finite number above 0"),
        ({"rope_theta": 10**400}, "rope_theta: 10+... is not a finite number"),
        ({"rope_theta": 1e300}, "RoPE: theta=1e.300 is not between 1 and 1e.30"),
        ({"head_dim": 2**31 - 2}, "head_dim=2147483646 must be at most 65536"),
        (
            {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 4, "head_dim": 64},
            "a matrix of vocab_size=2147483647 by hidden_size=",
        ),
        ({"num_attention_heads": 2**20, "head_dim": 2**16, "hidden_size": 2**20}, r"a matrix of q_heads \* head_dim="),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes' is not true or false"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented"),
        ({"eos_token_id": "</s>"}, "eos_token_id: '</s>' is not a token id"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id: \[2, -1\] is not a token id"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: 'LlamaForCausalLM' is not a list of names"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method='gptq'"),
        ({"quantization_config": {}}, "quant_method='unnamed'"),
    ],
)
def test_a_wrong_value_is_named_with_the_file(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}") as caught:
        read(tmp_path, **change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("types", [["full_attention"] * 2, ["full_attention"] * 2 + ["chunked_attention"], "all"])
def test_a_bad_list_of_layer_types_is_named(tmp_path: Path, types: object) -> None:
    with pytest.raises(ConfigError, match=r"layer_types(: entry 'chunked|: 'all' is not a list| has 2 entries for 3)"):
        read(tmp_path, "qwen3", use_sliding_window=True, layer_types=types)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b" 2}', "malformed JSON at line 2, column 6"),
        ("", "malformed JSON at line 1"),
        ("[1]", "it holds a list, not an object"),
        ("[" * 100_000, "malformed JSON: it is nested too deeply"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "malformed JSON"),
        ('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": NaN}', "num_hidden_layers: nan is not a whole"),
    ],
)
def test_what_is_no_json_object_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        read_hf_config(write(tmp_path, text))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(tmp_path: Path, value: float) -> None:
    with pytest.raises(ConfigError, match=r"rope_theta: (nan|inf) is not a finite number"):
        read(tmp_path, rope_theta=value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json: no such file"):
        read_hf_config(tmp_path / "config.json")
    with pytest.raises(ModelNotFoundError, match="cannot be read: Is a directory"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match=r"config\.json: not UTF-8 text \(byte 7\)"):
        read_hf_config(tmp_path / "config.json")


def defaults_of(folder: Path, generation: object) -> tuple[GenerationDefaults, tuple[int, ...]]:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_generation_config(folder)


def test_generation_defaults_are_read(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == (GenerationDefaults(), ())
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    assert defaults_of(tmp_path, sampling | {"eos_token_id": [2, 5], "do_sample": True}) == (
        GenerationDefaults(0.6, 0.95, 20, 0.1, 1.1), (2, 5),
    )  # fmt: skip
    assert defaults_of(tmp_path, {"eos_token_id": 2})[1] == (2,)
    greedy = GenerationDefaults(temperature=0.0, repetition_penalty=1.1)
    assert defaults_of(tmp_path, sampling | {"do_sample": False}) == (greedy, ())


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": -1}, "temperature: -1.0 is out of range"),
        ({"temperature": 10**400}, "temperature: 10+... is not a finite number"),
        ({"top_p": 1.5}, "top_p: 1.5 is out of range"),
        ({"top_k": 0.5}, "top_k: 0.5 is not a whole number"),
        ({"repetition_penalty": 0}, "repetition_penalty: 0 is not"),
        ({"eos_token_id": "x"}, "eos_token_id: 'x' is not a token id"),
        ([], "it holds a list, not an object"),
    ],
)
def test_bad_generation_defaults_are_named(tmp_path: Path, generation: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {message}"):
        defaults_of(tmp_path, generation)


def test_end_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    read(tmp_path, eos_token_id=7)
    source = ModelSource("m", tmp_path, "directory")
    assert load_config(source).eos_token_ids == (7,)
    assert load_generation_defaults(source)[1] == (7,)
    defaults_of(tmp_path, {"eos_token_id": [8, 9], "temperature": 0.5})
    assert load_generation_defaults(source) == (GenerationDefaults(temperature=0.5), (8, 9))
    alone = ModelSource("m", tmp_path / "config.json", "config")
    assert load_generation_defaults(alone)[1] == (8, 9)
