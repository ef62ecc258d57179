"""What a model's weights take on one rank, without reading or allocating any."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from tamis.config import ModelConfig, ParallelContext
from tamis.errors import ConfigError
from tamis.kernels.linear import Linear
from tamis.kernels.quant import Format, empty_matrix
from tamis.kv.layout import split_layers
from tamis.models.checkpoint import open_checkpoint
from tamis.models.decoder import CausalLM
from tamis.models.hub import ModelSource
from tamis.models.loader import choose_format, plan_weights

Stored = Callable[[str], set[Format | None]]
"""The formats in which a checkpoint has the pieces of a parameter, by the parameter's name."""


def rank_config(config: ModelConfig, place: ParallelContext) -> ModelConfig:
    """`config` as one rank sees it: the layers of its stage, its share of heads, MLP rows and vocabulary.

    Where there are more ranks than KV or index heads, each has one. The key of the index branch is on every rank.
    Raises ConfigError where heads or layers cannot be split so.
    """
    ranks = place.tp_size
    for what, heads in (("query", config.q_heads), ("KV", config.kv_heads)):
        if heads % ranks and (what == "query" or ranks % heads):
            raise ConfigError(f"{heads} {what} heads cannot be split over {ranks} ranks")
    start, end = split_layers(config.num_layers, place.pp_size)[place.pp_rank]
    sparse, moe = config.sparse, config.moe
    if sparse is not None:
        sparse = replace(sparse, index_heads=max(1, sparse.index_heads // ranks))
    if moe is not None:
        moe = replace(
            moe,
            layers=moe.layers[start:end],
            intermediate_size=-(-moe.intermediate_size // ranks),
            shared_intermediate_size=-(-moe.shared_intermediate_size // ranks),
        )
    return replace(
        config,
        vocab_size=-(-config.vocab_size // ranks),
        num_layers=end - start,
        layer_kinds=config.layer_kinds[start:end],
        q_heads=config.q_heads // ranks,
        kv_heads=max(1, config.kv_heads // ranks),
        intermediate_size=-(-config.intermediate_size // ranks),
        sparse=sparse,
        moe=moe,
    )


def weight_bytes(
    config: ModelConfig, place: ParallelContext, *, dtype: torch.dtype, quant: str = "auto",
    source: ModelSource | None = None,
) -> dict[str, int]:  # fmt: skip
    """Bytes of the weights of one rank: "embeddings", "attention", "mlp", "norms", "total".

    `dtype` and `quant` as in `loader.load_model`. quant="auto" keeps what the checkpoint of `source` has in blocks;
    where there are no weights to look at, all matrices are dense. Raises ConfigError as `rank_config`.
    """
    sizes = dict.fromkeys(("embeddings", "attention", "mlp", "norms"), 0)
    first_layer = split_layers(config.num_layers, place.pp_size)[place.pp_rank][0]
    with _stored_formats(config, source) as stored, torch.device("meta"):
        for name, module in _modules(rank_config(config, place), place, dtype):
            size = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
            if isinstance(module, Linear):
                whole = _whole_name(name, first_layer)
                form = choose_format(quant, dtype, whole, module.shape[-1], stored(whole))
                size += empty_matrix(form, module.shape).nbytes
            sizes[_part(name)] += size
    return sizes | {"total": sum(sizes.values())}


def _modules(config: ModelConfig, place: ParallelContext, dtype: torch.dtype) -> Iterator[tuple[str, nn.Module]]:
    """The modules of one stage by name: the embedding on the first, the norm and the head on the last.

    A tied table is on both.
    """
    first, last = place.pp_rank == 0, place.pp_rank == place.pp_size - 1
    ends = {
        "embed_tokens": first or (last and config.tie_embeddings),
        "norm": last,
        "lm_head": last,
    }
    for name, module in CausalLM(config, dtype).named_modules():
        if ends.get(name, True):
            yield name, module


def _whole_name(name: str, first_layer: int) -> str:
    """The name of a module's weight in the whole model: layers are counted from the first of all."""
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        name = f"layers.{first_layer + int(layer)}.{rest}"
    return f"{name}.weight"


def _part(name: str) -> str:
    if name in ("embed_tokens", "lm_head"):
        return "embeddings"
    parts = name.split(".")
    if parts[-1].endswith("norm"):
        return "norms"
    return "attention" if "attention" in parts else "mlp"


@contextlib.contextmanager
def _stored_formats(config: ModelConfig, source: ModelSource | None) -> Iterator[Stored]:
    if source is None or source.kind != "gguf":  # only GGUF keeps matrices in blocks
        yield lambda _name: set()
        return
    with contextlib.closing(open_checkpoint(source)) as checkpoint:
        plan = plan_weights(config, checkpoint.names(), gguf=True)
        yield lambda name: {checkpoint.block_format(piece.name) for piece in plan.parameters.get(name, ())}
