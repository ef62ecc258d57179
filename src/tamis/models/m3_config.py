"""config.json of MiniMax-M3 shaped models, as the checkpoint spells it and as transformers does (facts.md 3)."""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tamis.config import LayerKind, MoEConfig, RopeConfig, SparseAttentionConfig
from tamis.errors import ConfigError
from tamis.models.json_fields import Fields
from tamis.models.rope_config import extended_context, partial_rotary_dim, read_rope, rope_fields

log = logging.getLogger(__name__)

DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
    }
)
"""What transformers assumes where a key is absent."""
_THETA = 5e6


def read_m3(text: Fields, layers: int, head_dim: int, context: int) -> dict[str, Any]:
    """The fields of ModelConfig that only this family has, from the (text part of the) config.

    The checkpoint's own spelling has a `sparse_attention_config`; without one it is transformers' spelling.
    """
    own = text.section("sparse_attention_config")
    kinds, sparse = _own_sparse(own, layers) if own is not None else _flat_sparse(text, layers)
    _check_fixed(text)
    rope = _read_rope(text, head_dim, context, own is not None)
    reached = extended_context(text, rope, context)
    return {
        "intermediate_size": text.integer("dense_intermediate_size", 12288, minimum=1),
        "context_length": reached,
        "rope": rope,
        "layer_kinds": kinds,
        "sparse": None if sparse is None else sparse.within(reached),
        "moe": _read_moe(text, layers),
        "qk_norm": True,
        "activation": "swiglu_oai",
        "swiglu_alpha": text.number("swiglu_alpha", 1.702),
        "swiglu_limit": text.number("swiglu_limit", 7.0, positive=True),
        "unit_offset_norm": text.flag("use_gemma_norm", True),
    }


def _check_fixed(text: Fields) -> None:
    """Refuse, by name, what the released model does not do and tamis does not implement."""
    for key, known in (
        ("qk_norm_type", ("per_head",)),
        ("scoring_func", ("sigmoid",)),
        ("hidden_act", ("swigluoai", "silu")),  # transformers writes silu and computes swiglu-oai all the same
    ):
        value = text.text(key, known[0])
        if value not in known:
            raise ConfigError(f"{text.prefix}{key}={value!r} is not implemented; known: {', '.join(known)}")
    for key in ("use_routing_bias", "use_qk_norm"):
        if not text.flag(key, True):
            raise ConfigError(f"{text.prefix}{key}=false is not implemented")


def _own_sparse(sparse: Fields, layers: int) -> tuple[tuple[LayerKind, ...], SparseAttentionConfig | None]:
    dense = (LayerKind.DENSE,) * layers
    if not sparse.flag("use_sparse_attention", True):
        return dense, None
    on = sparse.layer_flags("sparse_attention_freq", layers)
    key_only = (False,) * layers  # as SGLang reads a config that does not say
    if "sparse_disable_index_value" in sparse:
        key_only = sparse.layer_flags("sparse_disable_index_value", layers)
    if not any(on):
        return dense, None
    block = sparse.integer("sparse_block_size", minimum=1)
    settings = SparseAttentionConfig(
        index_heads=sparse.integer("sparse_num_index_heads"),
        index_head_dim=sparse.integer("sparse_index_dim"),
        block_size=block,
        topk=sparse.integer("sparse_topk_blocks"),
        init_blocks=_blocks(sparse, "init", block, 0),
        local_blocks=_blocks(sparse, "local", block, 1),
        score_type=sparse.text("sparse_score_type", "max"),
    )
    sparse_kinds = (LayerKind.SPARSE_K if only else LayerKind.SPARSE_KV for only in key_only)
    return tuple(kind if used else LayerKind.DENSE for used, kind in zip(on, sparse_kinds, strict=True)), settings


def _blocks(sparse: Fields, which: str, block: int, default: int) -> int:
    """Forced blocks, given as sparse_{which}_block or as sparse_{which}_tokens (rounded up to whole blocks)."""
    in_blocks, in_tokens = f"sparse_{which}_block", f"sparse_{which}_tokens"
    if in_blocks not in sparse and in_tokens in sparse:
        return -(-sparse.integer(in_tokens) // block)
    return sparse.integer(in_blocks, default)


def _flat_sparse(text: Fields, layers: int) -> tuple[tuple[LayerKind, ...], SparseAttentionConfig | None]:
    if "layer_types" not in text:
        return (LayerKind.DENSE,) * layers, None
    on = text.layer_choices("layer_types", layers, {"full_attention": False, "minimax_m3_sparse": True})
    if not any(on):
        return (LayerKind.DENSE,) * layers, None
    settings = SparseAttentionConfig(
        index_heads=text.integer("index_n_heads", 4),
        index_head_dim=text.integer("index_head_dim", 128),
        block_size=text.integer("index_block_size", 128),
        topk=text.integer("index_topk_blocks", 16),
        local_blocks=text.integer("index_local_blocks", 1),
    )
    return tuple(LayerKind.SPARSE_K if used else LayerKind.DENSE for used in on), settings


def _read_moe(text: Fields, layers: int) -> MoEConfig | None:
    on = (True,) * layers
    if "mlp_layer_types" in text:
        on = text.layer_choices("mlp_layer_types", layers, {"dense": False, "sparse": True})
    elif "moe_layer_freq" in text:
        on = text.layer_flags("moe_layer_freq", layers)
    if not any(on):
        return None
    experts = text.integer("num_local_experts", text.integer("num_experts", 128), minimum=1)
    return MoEConfig(
        layers=on,
        num_experts=experts,
        experts_per_token=text.integer("num_experts_per_tok", 4, minimum=1),
        intermediate_size=text.integer("intermediate_size", minimum=1),
        shared_intermediate_size=text.integer("shared_intermediate_size", 3072),
        routed_scaling_factor=text.number("routed_scaling_factor", 2.0),
    )


def _read_rope(text: Fields, head_dim: int, context: int, own_spelling: bool) -> RopeConfig:
    """RoPE; the spellings differ in what says how many channels rotate.

    In the checkpoint's own it is rotary_dim. transformers writes rotary_dim and does not read it: what it runs is
    partial_rotary_factor, all channels where that is absent.
    """
    rope = rope_fields(text)
    rotary = partial_rotary_dim(rope, head_dim)
    if "rotary_dim" in text:
        stated = text.integer("rotary_dim", minimum=2)
        if own_spelling and "partial_rotary_factor" in rope and stated != rotary:
            share = rope.number("partial_rotary_factor")
            raise ConfigError(
                f"{text.prefix}rotary_dim={stated} contradicts partial_rotary_factor={share} of head_dim={head_dim}"
            )
        if own_spelling:
            rotary = stated
        elif stated != rotary:
            log.warning(
                "%srotary_dim=%d is not read in transformers' spelling: %d of %d channels rotate, as "
                "partial_rotary_factor says", text.prefix, stated, rotary, head_dim
            )  # fmt: skip
    return read_rope(text, head_dim=head_dim, context=context, theta=_THETA, rotary_dim=rotary)
