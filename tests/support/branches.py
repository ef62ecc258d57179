"""Random index branches for dense models: untrained, but every tensor matters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tamis.config import LayerKind
from tamis.models import load_config
from tamis.models.fingerprint import base_fingerprint
from tamis.models.hub import ModelSource, resolve
from tamis.models.index_branch import BaseArchitecture, IndexBranch, branch_shapes, write_index_branch

KINDS = (LayerKind.SPARSE_K, LayerKind.DENSE, LayerKind.SPARSE_KV)


def random_branch(source: ModelSource, **changes: Any) -> IndexBranch:
    """A branch for a base; by default its layers are K-only, dense and K+V in turn."""
    config = load_config(source)
    branch = IndexBranch(
        base=str(source.path), base_fingerprint=base_fingerprint(source), base_architecture=BaseArchitecture.of(config),
        layer_kinds=tuple(KINDS[i % len(KINDS)] for i in range(config.num_layers)), index_heads=config.kv_heads,
        index_head_dim=config.head_dim, index_rotary_dim=config.rope.rotary_dim, norm_eps=config.norm_eps,
        block_size=16, topk=3, init_blocks=1,
    )  # fmt: skip
    return replace(branch, **changes)


def write_branch(directory: Path, branch: IndexBranch, seed: int = 0) -> Path:
    """Both files of a branch, with random weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.1)
        + (0 if len(shape) == 2 else 1)
        for name, shape in branch_shapes(branch).items()
    }
    write_index_branch(directory, branch, tensors)
    return directory


def retrofitted(base: Path, directory: Path, *, seed: int = 0, **changes: Any) -> ModelSource:
    """The model at `base` with a random branch in `directory`."""
    source = resolve(str(base))
    return resolve(str(write_branch(directory, random_branch(source, **changes), seed)))
