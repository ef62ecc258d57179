"""How much memory a model takes on one rank of a deployment, and what fits beside its weights."""

from dataclasses import dataclass

import torch

from tamis.config import KV_DTYPES, ModelConfig, ParallelContext
from tamis.errors import ConfigError
from tamis.kv import KVLayout
from tamis.models import ModelSource
from tamis.models.sizes import rank_config, weight_bytes

FIXED_SCRATCH = 64 << 20
"""Bytes that libraries take beside the rows of a step: thread pools, compiled code, what allocators keep (measured)."""


@dataclass(frozen=True)
class Load:
    """What the engine is asked to do at once; it decides how much memory a step works in."""

    max_batch_tokens: int = 512
    """Tokens one step computes at most."""
    max_num_seqs: int = 64
    """Replies that run at once at most."""


@dataclass(frozen=True)
class StagePlan:
    """The memory of one rank of one pipeline stage, in bytes."""

    layout: KVLayout
    place: ParallelContext
    weights: dict[str, int]
    """By part of the model, and "total"."""
    scratch: int
    """An estimate of what a step works in."""
    pool_budget: int | None = None
    """For usable pages; None: there is no budget. 0: nothing is left for them."""

    @property
    def pages(self) -> int | None:
        """Usable pages that fit."""
        return None if self.pool_budget is None else self.layout.pages_for(self.pool_budget)

    @property
    def tokens(self) -> int | None:
        """Tokens that fit."""
        return None if self.pages is None else self.pages * self.layout.page_size

    @property
    def total(self) -> int | None:
        """Weights, scratch and the pool with its padding page."""
        if self.pages is None:
            return None
        return self.weights["total"] + self.scratch + (self.pages + 1) * self.layout.bytes_per_page

    def requests(self, length: int) -> int | None:
        """Requests of `length` tokens, prompt and reply, that hold their pages at the same time."""
        return None if self.pages is None else self.pages // -(-length // self.layout.page_size)


def plan_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """The type of weights to plan for: "fp32", "bf16", or "auto", fp32 where the checkpoint is, else bf16.

    Raises ConfigError for any other name.
    """
    if name == "auto":
        return torch.float32 if config.dtype is torch.float32 else torch.bfloat16
    if name not in ("fp32", "bf16"):
        raise ConfigError(f"weight dtype {name!r} is not one of auto, fp32, bf16")
    return KV_DTYPES[name]


def scratch_bytes(config: ModelConfig, dtype: torch.dtype, load: Load) -> int:
    """About what a step of `load` works in, on a rank whose part of the model is `config`."""
    logits = 2 * load.max_num_seqs * config.vocab_size * 4
    return FIXED_SCRATCH + load.max_batch_tokens * row_bytes(config, dtype) + logits


def row_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """About what one token of a step takes between layers and inside one, at most."""
    size, hidden, heads = dtype.itemsize, config.hidden_size, config.q_heads * config.head_dim
    projected = heads + 2 * config.kv_heads * config.head_dim
    scores = 0
    if config.sparse is not None:
        sparse = config.sparse
        projected += (sparse.index_heads + 2) * sparse.index_head_dim
        scores = 4 * sparse.index_heads * (-(-config.context_length // sparse.block_size) + sparse.topk)
    inner, parts = config.intermediate_size, 1
    if config.moe is not None:
        parts = config.moe.experts_per_token + 1
        routed = config.moe.experts_per_token * config.moe.intermediate_size + config.moe.shared_intermediate_size
        inner = max(inner if not all(config.moe.layers) else 0, routed)
    stream = hidden * (4 + size)
    attention = 2 * projected * size + heads * (4 + size)
    mlp = 3 * inner * size + parts * hidden * (4 + size)
    return stream + attention + mlp + scores


def plan_stage(
    config: ModelConfig, layout: KVLayout, place: ParallelContext, *, dtype: torch.dtype, quant: str = "auto",
    load: Load | None = None, source: ModelSource | None = None, memory: int | None = None,
    device_memory: int | None = None,
) -> StagePlan:  # fmt: skip
    """The plan of the rank at `place`, whose pool has `layout`.

    `memory`: bytes for usable pages alone. `device_memory`: bytes for everything, of which weights, scratch and the
    padding page are taken first. `dtype`, `quant`, `source`: see `sizes.weight_bytes`. Raises ConfigError where both
    budgets are given, and as `rank_config`.
    """
    if memory is not None and device_memory is not None:
        raise ConfigError("memory and device_memory are two ways to give a budget: only one of them can be used")
    weights = weight_bytes(config, place, dtype=dtype, quant=quant, source=source)
    scratch = scratch_bytes(rank_config(config, place), dtype, load or Load())
    if device_memory is not None:
        memory = max(0, device_memory - weights["total"] - scratch - layout.bytes_per_page)
    return StagePlan(layout, place, weights, scratch, memory)
