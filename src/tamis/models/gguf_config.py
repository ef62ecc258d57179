"""Reading the configuration of a model from GGUF metadata."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import gguf
import torch

from tamis.config import LayerKind, ModelConfig, MoEConfig, RopeConfig, SparseAttentionConfig
from tamis.errors import (
    ConfigError,
    CorruptFileError,
    MissingTensorError,
    UnsupportedArchitectureError,
    UnsupportedRopeError,
)
from tamis.models.checkpoint import read_gguf_tensor
from tamis.models.gguf_file import GGUFFile
from tamis.models.hf_config import inside_window
from tamis.models.rope_config import yarn_attention_factor

ARCHITECTURES = ("llama", "minimax-m3", "qwen2", "qwen3")
_FLOAT_TYPES: Mapping[gguf.GGMLQuantizationType, torch.dtype] = MappingProxyType(
    {
        gguf.GGMLQuantizationType.F32: torch.float32,
        gguf.GGMLQuantizationType.F16: torch.float16,
        gguf.GGMLQuantizationType.BF16: torch.bfloat16,
    }
)
FREQUENCY_FACTORS = "rope_freqs.weight"
_MAX_LAYERS = 10_000


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """The model that the metadata of `file` describes.

    `dtype` is the type of the token embedding where that is fp32, bf16 or fp16, None where it is quantised.
    Raises UnsupportedArchitectureError, UnsupportedRopeError or ConfigError, naming the file and the key or value.
    """
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"{file.path}: the architecture {architecture!r} is not implemented; known: {', '.join(ARCHITECTURES)}"
        )
    if (parts := file.find("split.count", int) or 0) > 1:
        raise ConfigError(f"{file.path}: split.count={parts}: a GGUF split into several files is not supported")
    try:
        return _Reader(file, architecture).read()
    except ConfigError as error:
        text = str(error)
        raise type(error)(text if text.startswith(str(file.path)) else f"{file.path}: {text}") from None


class _Reader:
    """Reads `{architecture}.*` keys."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def read(self) -> ModelConfig:
        layers = self.size("block_count")
        if layers > _MAX_LAYERS:
            raise ConfigError(f"{self.key('block_count')}={layers} is more than {_MAX_LAYERS}")
        q_heads = self.heads("attention.head_count")
        head_dim = self.head_dim(q_heads)
        special = self.m3(layers) if self.architecture == "minimax-m3" else self.llama(layers)
        return ModelConfig(
            **{
                "family": "llama",
                "model_type": self.architecture,
                "vocab_size": self.vocab_size(),
                "hidden_size": self.size("embedding_length"),
                "num_layers": layers,
                "q_heads": q_heads,
                "kv_heads": self.heads("attention.head_count_kv", q_heads),
                "head_dim": head_dim,
                "intermediate_size": self.size("feed_forward_length"),
                "context_length": self.size("context_length"),
                "norm_eps": self.number("attention.layer_norm_rms_epsilon"),
                "rope": self.rope(head_dim),
                "tie_embeddings": "output.weight" not in self.file.tensors,
                "bos_token_id": self.file.find("tokenizer.ggml.bos_token_id", int),
                "eos_token_ids": self.end_ids(),
                "dtype": self.dtype(),
                **special,
            }
        )

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.file.find(self.key(name), int)
        value = default if value is None else value
        value = self.file.get(self.key(name), int) if value is None else value
        if not 1 <= value < 2**31:
            raise ConfigError(f"{self.key(name)}={value} is not a whole number from 1 to {2**31 - 1}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.file.find(self.key(name), float)
        value = default if value is None else value
        value = self.file.get(self.key(name), float) if value is None else value
        if not 0 < value < math.inf:
            raise ConfigError(f"{self.key(name)}={value} is not a finite number above 0")
        return value

    def heads(self, name: str, default: int | None = None) -> int:
        """A number of heads; a list with one a layer is taken where all are the same."""
        if not self.file.is_list(self.key(name)):
            return self.size(name, default)
        counts = self.file.get_list(self.key(name), int)
        if len(set(counts)) != 1 or counts[0] < 1:
            raise ConfigError(f"{self.key(name)}: layers with different numbers of heads are not implemented")
        return counts[0]

    def head_dim(self, q_heads: int) -> int:
        hidden = self.size("embedding_length")
        key_length = self.file.find(self.key("attention.key_length"), int)
        if key_length is None and hidden % q_heads:
            raise ConfigError(f"{self.key('embedding_length')}={hidden} is not a multiple of {q_heads} heads")
        head_dim = self.size("attention.key_length", max(1, hidden // q_heads))
        value_length = self.size("attention.value_length", head_dim)
        if value_length != head_dim:
            raise ConfigError(
                f"{self.key('attention.value_length')}={value_length} differs from "
                f"{self.key('attention.key_length')}={head_dim}, which is not implemented"
            )
        return head_dim

    def vocab_size(self) -> int:
        """Rows of the embedding; the metadata must not say otherwise."""
        rows = self.rows("token_embd.weight")
        stated = self.size("vocab_size", rows)
        if stated != rows:
            raise ConfigError(f"{self.key('vocab_size')}={stated}, but token_embd.weight has {rows} rows")
        return rows

    def rows(self, name: str) -> int:
        if name not in self.file.tensors:
            raise MissingTensorError(f"tensor {name!r} is missing in {self.file.path}")
        return self.file.tensors[name].shape[0]

    def dtype(self) -> torch.dtype | None:
        return _FLOAT_TYPES.get(self.file.tensors["token_embd.weight"].type)

    def end_ids(self) -> tuple[int, ...]:
        """End of sequence, of turn and of message, those that are given."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = (self.file.find(f"tokenizer.ggml.{key}", int) for key in keys)
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def llama(self, layers: int) -> dict[str, Any]:
        if self.file.find(self.key("expert_count"), int):
            raise ConfigError(f"{self.key('expert_count')}: mixtures of experts are implemented for minimax-m3 only")
        context = self.size("context_length")
        if window := self.file.find(self.key("attention.sliding_window"), int):
            context = inside_window(window, context)
        tensors = self.file.tensors
        return {
            "layer_kinds": (LayerKind.DENSE,) * layers,
            "context_length": context,
            "qk_norm": self.architecture == "qwen3",
            "qkv_bias": self.architecture == "qwen2" or "blk.0.attn_q.bias" in tensors,
            "o_bias": "blk.0.attn_output.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        }

    def m3(self, layers: int) -> dict[str, Any]:
        dense = self.file.find(self.key("leading_dense_block_count"), int) or 0
        if not 0 <= dense <= layers:
            raise ConfigError(f"{self.key('leading_dense_block_count')}={dense} is not between 0 and {layers} layers")
        sparse = layers - dense
        return {
            "family": "minimax_m3",
            "layer_kinds": (LayerKind.DENSE,) * dense + (LayerKind.SPARSE_K,) * sparse,
            "sparse": self.sparse() if sparse else None,
            "moe": self.moe(dense, layers) if sparse else None,
            "qk_norm": True,
            "activation": "swiglu_oai",
        }

    def sparse(self) -> SparseAttentionConfig:
        return SparseAttentionConfig(
            index_heads=self.size("attention.indexer.head_count"),
            index_head_dim=self.size("attention.indexer.key_length"),
            block_size=self.size("attention.indexer.block_size"),
            topk=self.size("attention.indexer.top_k"),
            local_blocks=self.file.get(self.key("attention.indexer.local_blocks"), int),
        ).within(self.size("context_length"))

    def moe(self, dense: int, layers: int) -> MoEConfig:
        gating = self.file.find(self.key("expert_gating_func"), int)
        if gating not in (None, int(gguf.ExpertGatingFuncType.SIGMOID)):
            raise ConfigError(f"{self.key('expert_gating_func')}={gating} is not implemented; known: 2 (sigmoid)")
        if self.file.find(self.key("expert_weights_norm"), bool) is False:
            raise ConfigError(f"{self.key('expert_weights_norm')}=false is not implemented")
        shared = f"blk.{dense}.ffn_gate_shexp.weight"
        return MoEConfig(
            layers=(False,) * dense + (True,) * (layers - dense),
            num_experts=self.size("expert_count"),
            experts_per_token=self.size("expert_used_count"),
            intermediate_size=self.size("expert_feed_forward_length"),
            shared_intermediate_size=self.rows(shared) if self.file.find(self.key("expert_shared_count"), int) else 0,
            routed_scaling_factor=self.number("expert_weights_scale", 1.0),
        )

    def rope(self, head_dim: int) -> RopeConfig:
        theta = self.number("rope.freq_base", 10_000.0)
        if theta <= 1:
            raise ConfigError(f"{self.key('rope.freq_base')}={theta} is not above 1")
        rotary = self.size("rope.dimension_count", head_dim)
        kind = self.file.find(self.key("rope.scaling.type"), str) or "none"
        if kind not in ("none", "linear", "yarn"):
            raise UnsupportedRopeError(f"RoPE scaling {kind!r} is not implemented; known: none, linear, yarn")
        for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
            if name in self.file.tensors:
                raise UnsupportedRopeError(f"RoPE scaling 'longrope' (tensor {name}) is not implemented")
        factors = self.frequency_factors(rotary)
        if kind == "none":
            return RopeConfig(theta, rotary, frequency_factors=factors)
        if factors is not None:
            raise UnsupportedRopeError(f"RoPE scaling {kind!r} together with {FREQUENCY_FACTORS} is not implemented")
        factor = self.number("rope.scaling.factor")
        return RopeConfig(theta, rotary, kind, factor) if kind == "linear" else self.yarn(theta, rotary, factor)

    def yarn(self, theta: float, rotary: int, factor: float) -> RopeConfig:
        for name, known in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
            value = self.file.find(self.key(f"rope.scaling.{name}"), float)
            if value not in (None, known):
                raise UnsupportedRopeError(f"{self.key(f'rope.scaling.{name}')}={value} is not implemented")
        scale = self.number("rope.scaling.attn_factor", 1.0) * self.number("rope.scaling.yarn_attn_factor", 1.0)
        return RopeConfig(
            theta, rotary, "yarn", factor,
            self.size("rope.scaling.original_context_length", self.size("context_length")),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=scale * yarn_attention_factor(factor),
        )  # fmt: skip

    def frequency_factors(self, rotary: int) -> tuple[float, ...] | None:
        """What each frequency is divided by: how GGUF carries llama3 scaling (tensor rope_freqs.weight)."""
        name = FREQUENCY_FACTORS
        if name not in self.file.tensors:
            return None
        factors = tuple(read_gguf_tensor(self.file, name).flatten().tolist())
        if len(factors) != rotary // 2 or not all(0 < factor < math.inf for factor in factors):
            raise CorruptFileError(
                f"{self.file.path}: tensor {name} is not {rotary // 2} numbers above 0, one a rotary frequency"
            )
        return factors
