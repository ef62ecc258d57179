"""Index branches before training: what a trained one is held against."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from support.branches import random_branch, write_branch
from tamis.config import LayerKind
from tamis.models import load_config
from tamis.models.decoder import DecoderLayer
from tamis.models.hub import ModelSource, resolve
from tamis.models.index_branch import write_index_branch
from tamis.models.loader import load_model
from tamis.retrofit.student import IndexStudent


def layer_kinds(layers: int, dense: Collection[int]) -> tuple[LayerKind, ...]:
    """K-only layers but for those that are named."""
    return tuple(LayerKind.DENSE if layer in dense else LayerKind.SPARSE_K for layer in range(layers))


def with_random_branch(base: str, directory: Path, dense: Collection[int] = (), **changes: Any) -> ModelSource:
    """`base` with K-only index branches of random weights in `directory`."""
    source = resolve(base)
    kinds = layer_kinds(load_config(source).num_layers, dense)
    write_branch(directory, random_branch(source, base=base, layer_kinds=kinds, **changes))
    return resolve(str(directory))


def with_untrained_branch(base: str, directory: Path, dense: Collection[int] = (), **changes: Any) -> ModelSource:
    """The same with the weights that training starts from: means of the model's own queries and keys."""
    source = resolve(base)
    config = load_config(source)
    branch = random_branch(source, base=base, layer_kinds=layer_kinds(config.num_layers, dense), **changes)
    model = load_model(source, config, dtype=torch.float32, quant="none")
    tensors: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        if number in branch.sparse_layers:
            student = IndexStudent(config.hidden_size, branch.index_heads, branch.index_head_dim, branch.norm_eps)
            student.start_from(layer.attention, torch.Generator().manual_seed(0))
            tensors |= {
                f"layers.{number}.self_attn.index_{name}.weight": value for name, value in student.named_parameters()
            }
    write_index_branch(directory, branch, tensors)
    return resolve(str(directory))
