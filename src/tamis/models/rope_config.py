"""RoPE settings of config.json, in the old spelling (rope_theta, rope_scaling) and the new one (rope_parameters)."""

import math

from tamis.config import RopeConfig
from tamis.errors import ConfigError, UnsupportedRopeError
from tamis.models.json_fields import Fields

SCALINGS = ("default", "linear", "llama3", "yarn")


def read_rope(
    config: Fields, *, head_dim: int, context: int, theta: float, rotary_dim: int | None = None
) -> RopeConfig:
    """RoPE of a model with heads of `head_dim` channels.

    `rotary_dim`: where the caller knows it; else partial_rotary_factor decides. `theta`: where the config has none.
    Raises UnsupportedRopeError for a scaling that tamis lacks, ConfigError for one whose settings are incomplete.
    """
    rope = rope_fields(config)
    kind = rope.text("rope_type", "default")
    kind = "mrope" if "mrope_section" in rope else kind
    if kind not in SCALINGS:
        raise UnsupportedRopeError(f"RoPE scaling {kind!r} is not implemented; known: {', '.join(SCALINGS)}")
    base = rope.number("rope_theta", theta)
    if base <= 1:
        raise ConfigError(f"{rope.prefix}rope_theta: {base} is not above 1")
    rotary = partial_rotary_dim(rope, head_dim) if rotary_dim is None else rotary_dim
    if kind == "default":
        return RopeConfig(base, rotary)
    factor = rope.number("factor", positive=True)
    if kind == "linear":
        return RopeConfig(base, rotary, kind, factor)
    # transformers gives a setting beside rope_scaling the last word over one inside it.
    outer = config.integer("original_max_position_embeddings", 0)
    original = outer or rope.integer("original_max_position_embeddings", context, minimum=1)
    scaled = _llama3 if kind == "llama3" else _yarn
    return scaled(rope, base, rotary, factor, original)


def extended_context(config: Fields, rope: RopeConfig, context: int) -> int:
    """The context that yarn reaches: factor times the original length, where the config states that length.

    Users are told to add yarn to a config and to leave max_position_embeddings as it is.
    """
    stated = any("original_max_position_embeddings" in fields for fields in (config, rope_fields(config)))
    return max(context, int(rope.original_context * rope.factor)) if stated and rope.scaling == "yarn" else context


def rope_fields(config: Fields) -> Fields:
    """All that `config` says about RoPE, in one object: rope_scaling before rope_parameters before the keys beside."""
    merged = {key: config.values.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for section in filter(None, (config.section("rope_parameters"), config.section("rope_scaling"))):
        for key, value in section.values.items():
            if isinstance(value, dict):
                raise UnsupportedRopeError(f"{section.prefix}{key}: RoPE settings a layer type are not implemented")
            if value is not None:
                merged["rope_type" if key == "type" and "rope_type" not in section else key] = value
    return Fields(merged, "RoPE setting ")


def partial_rotary_dim(rope: Fields, head_dim: int) -> int:
    """Channels that rotate, by partial_rotary_factor (1 where it is absent)."""
    share = rope.number("partial_rotary_factor", 1.0, positive=True)
    if share > 1:
        raise ConfigError(f"{rope.prefix}partial_rotary_factor: {share} is above 1")
    return int(head_dim * share)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies cos and sin by: 0.1 * mscale * ln(factor) + 1 (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(rope: Fields, base: float, rotary: int, factor: float, original: int) -> RopeConfig:
    low = rope.number("low_freq_factor", positive=True)
    high = rope.number("high_freq_factor", positive=True)
    if high <= low:
        raise ConfigError(f"{rope.prefix}high_freq_factor: {high} is not above low_freq_factor {low}")
    return RopeConfig(base, rotary, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: Fields, base: float, rotary: int, factor: float, original: int) -> RopeConfig:
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if "attention_factor" in rope:
        attention = rope.number("attention_factor", positive=True)
    elif mscale and mscale_all:
        divisor = yarn_attention_factor(factor, mscale_all)
        if divisor == 0:
            raise ConfigError(f"{rope.prefix}mscale_all_dim: {mscale_all} with factor {factor} is a division by 0")
        attention = yarn_attention_factor(factor, mscale) / divisor
    else:
        attention = yarn_attention_factor(factor)
    return RopeConfig(
        base, rotary, "yarn", factor, original,
        beta_fast=rope.number("beta_fast", 32.0, positive=True), beta_slow=rope.number("beta_slow", 1.0, positive=True),
        truncate=rope.flag("truncate", True), attention_factor=attention,
    )  # fmt: skip
