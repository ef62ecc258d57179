"""Reading config.json and generation_config.json."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tamis.config import GenerationDefaults, LayerKind, ModelConfig
from tamis.errors import ConfigError, UnsupportedArchitectureError
from tamis.models import m3_config
from tamis.models.json_fields import Fields, read_json_object
from tamis.models.rope_config import extended_context, read_rope

log = logging.getLogger(__name__)

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "MiniMaxM3SparseForCausalLM": "minimax_m3",
        "MiniMaxM3SparseForConditionalGeneration": "minimax_m3",
        "MiniMaxM3VLForCausalLM": "minimax_m3",
        "MiniMaxM3VLForConditionalGeneration": "minimax_m3",
        "MiniMaxM3VLModel": "minimax_m3",
        "MiniMaxM3VLTextModel": "minimax_m3",
    }
)
"""The dialect in which each architecture's config.json is read."""
MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "llama",
        "mistral": "mistral",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "minimax_m3_vl": "minimax_m3",
        "minimax_m3_vl_text": "minimax_m3",
    }
)
"""The same by model_type, for a config without architectures."""
_QWEN: Mapping[str, object] = MappingProxyType(
    {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
)
DEFAULTS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        "mistral": {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "qwen2": _QWEN,
        "qwen3": {**_QWEN, "head_dim": 128},
        "minimax_m3": m3_config.DEFAULTS,
    }
)
"""By dialect: what transformers assumes where a key is absent (a null is a value of its own)."""
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
_MAX_LAYERS = 10_000


def read_hf_config(path: Path) -> ModelConfig:
    """The model that the config.json at `path` describes.

    Raises UnsupportedArchitectureError, UnsupportedRopeError or ConfigError, naming the file and the key, for what
    tamis cannot run or the file says wrongly; ModelNotFoundError where it cannot be read.
    """
    config = read_json_object(path)
    try:
        return _read(config)
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None


def _read(config: Fields) -> ModelConfig:
    dialect = _dialect(config)
    inner = config.section("text_config") if dialect == "minimax_m3" else None
    text = Fields({**DEFAULTS[dialect], **(inner or config).values}, "" if inner is None else inner.prefix)
    _refuse_quantised(config, text)
    layers = text.integer("num_hidden_layers", minimum=1)
    if layers > _MAX_LAYERS:
        raise ConfigError(f"{text.prefix}num_hidden_layers: {layers} is more than {_MAX_LAYERS}")
    q_heads = text.integer("num_attention_heads", minimum=1)
    head_dim = _head_dim(text, q_heads)
    context = text.integer("max_position_embeddings", minimum=1)
    if dialect == "minimax_m3":
        special = m3_config.read_m3(text, layers, head_dim, context)
    else:
        special = _read_llama(dialect, text, layers, head_dim, context)
    return ModelConfig(
        **{
            "family": "minimax_m3" if dialect == "minimax_m3" else "llama",
            "model_type": text.text("model_type", config.text("model_type", dialect)),
            "vocab_size": text.integer("vocab_size", minimum=1),
            "hidden_size": text.integer("hidden_size", minimum=1),
            "num_layers": layers,
            "q_heads": q_heads,
            "kv_heads": text.integer("num_key_value_heads", q_heads, minimum=1),
            "head_dim": head_dim,
            "context_length": context,
            "norm_eps": text.number("rms_norm_eps", 1e-6, positive=True),
            "tie_embeddings": text.flag("tie_word_embeddings", False) or config.flag("tie_word_embeddings", False),
            "bos_token_id": next(iter(text.token_ids("bos_token_id")), None),
            "eos_token_ids": text.token_ids("eos_token_id") or config.token_ids("eos_token_id"),
            "dtype": _dtype(text) or _dtype(config),
            **special,
        }
    )


def _dialect(config: Fields) -> str:
    listed = config.values.get("architectures") or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"architectures: {listed!r} is not a list of names")
    if listed:
        name, known = listed[0], ARCHITECTURES
    else:
        name, known = config.text("model_type"), MODEL_TYPES
    if name not in known:
        raise UnsupportedArchitectureError(
            f"the architecture {name!r} is not implemented; known: {', '.join(sorted(known))}"
        )
    return known[name]


def _refuse_quantised(*configs: Fields) -> None:
    for config in configs:
        for key in ("quantization_config", "compression_config"):
            section = config.section(key)
            if section is not None:
                method = section.text("quant_method", "unnamed")
                raise ConfigError(f"{section.prefix}quant_method={method!r}: quantised weights are read from GGUF only")


def _head_dim(text: Fields, q_heads: int) -> int:
    if "head_dim" in text:
        return text.integer("head_dim", minimum=1)
    hidden = text.integer("hidden_size", minimum=1)
    if hidden % q_heads:
        raise ConfigError(f"hidden_size={hidden} is not a multiple of num_attention_heads={q_heads}")
    return hidden // q_heads


def _dtype(config: Fields) -> torch.dtype | None:
    name = config.text("dtype", config.text("torch_dtype", "auto")).removeprefix("torch.")
    if name != "auto" and name not in _DTYPES:
        raise ConfigError(f"{config.prefix}dtype: {name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES.get(name)


def _read_llama(dialect: str, text: Fields, layers: int, head_dim: int, context: int) -> dict[str, Any]:
    """The fields of ModelConfig that the llama family reads its own way."""
    activation = text.text("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act={activation!r} is not implemented; known: silu")
    rope = read_rope(text, head_dim=head_dim, context=context, theta=10_000.0)
    bias = dialect in ("llama", "qwen3") and text.flag("attention_bias", False)
    return {
        "intermediate_size": text.integer("intermediate_size", minimum=1),
        "context_length": _windowed_context(dialect, text, layers, extended_context(text, rope, context)),
        "rope": rope,
        "layer_kinds": (LayerKind.DENSE,) * layers,
        "qk_norm": dialect == "qwen3",
        "qkv_bias": bias or dialect == "qwen2",
        "o_bias": bias,
        "mlp_bias": dialect == "llama" and text.flag("mlp_bias", False),
    }


def _windowed_context(dialect: str, text: Fields, layers: int, context: int) -> int:
    windowed = dialect == "mistral"
    if dialect in ("qwen2", "qwen3") and text.flag("use_sliding_window", False):
        windowed = text.integer("max_window_layers") < layers
        if "layer_types" in text:
            names = {"full_attention": False, "sliding_attention": True}
            windowed = any(text.layer_choices("layer_types", layers, names))
    if not windowed or "sliding_window" not in text:
        return context
    return inside_window(text.integer("sliding_window", minimum=1), context)


def inside_window(window: int, context: int) -> int:
    """The context in which full attention is the same as over a sliding window; logged where it is the shorter."""
    if window < context:
        log.warning(
            "sliding-window attention is not implemented: the context is limited to the window of %d tokens "
            "(the model's own limit is %d), within which full attention is the same", window, context
        )  # fmt: skip
    return min(window, context)


def read_generation_config(directory: Path) -> tuple[GenerationDefaults, tuple[int, ...]]:
    """Sampling defaults and end ids of generation_config.json; nothing said where there is no such file.

    `do_sample: false` is temperature 0. Raises ConfigError for a file or value that makes no sense.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return GenerationDefaults(), ()
    config = read_json_object(path)
    try:
        return _sampling_defaults(config), config.token_ids("eos_token_id")
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None


def _sampling_defaults(config: Fields) -> GenerationDefaults:
    penalty = config.number("repetition_penalty", positive=True) if "repetition_penalty" in config else None
    if not config.flag("do_sample", True):
        return GenerationDefaults(temperature=0.0, repetition_penalty=penalty)
    temperature, top_p, min_p = (_share(config, key) for key in ("temperature", "top_p", "min_p"))
    top_k = config.integer("top_k") if "top_k" in config else None
    return GenerationDefaults(temperature, top_p, top_k, min_p, penalty)


def _share(config: Fields, key: str) -> float | None:
    """A number of at least 0; at most 1 where it is a probability."""
    if key not in config:
        return None
    value = config.number(key)
    if value < 0 or (value > 1 and key != "temperature"):
        raise ConfigError(f"{key}: {value} is out of range")
    return value
