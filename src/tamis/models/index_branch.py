"""Index branches beside dense models: `index_branch.json` and `index_branch.safetensors`, as `tamis retrofit` writes.

The JSON names the base model, which layers are sparse, and how they select blocks; the tensors are the index
projections and norms of the sparse layers (`branch_shapes`). An index head is RMSNorm(projection of the layer's normed
input), then half-split RoPE on its first `index_rotary_dim` channels (facts.md section 1).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tamis.config import IndexBranchConfig, LayerKind, ModelConfig, SparseAttentionConfig
from tamis.errors import ConfigError
from tamis.models.json_fields import Fields, read_json_object

BRANCH_FILE = "index_branch.json"
BRANCH_TENSORS = "index_branch.safetensors"
FORMAT = 1
_MAX_LAYERS = 10_000


@dataclass(frozen=True)
class BaseArchitecture:
    """What a base model must look like for a branch to fit it."""

    model_type: str
    num_layers: int
    hidden_size: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig) -> "BaseArchitecture":
        """That of a model."""
        return cls(**{each.name: getattr(config, each.name) for each in fields(cls)})


@dataclass(frozen=True)
class IndexBranch:
    """What `index_branch.json` holds."""

    base: str
    """Name or path of the dense model; a relative path counts from the branch's directory, else from the working one.
    """
    base_fingerprint: str
    """`fingerprint.base_fingerprint` of the base: sha256, in hex."""
    base_architecture: BaseArchitecture
    layer_kinds: tuple[LayerKind, ...]
    index_heads: int
    index_head_dim: int
    index_rotary_dim: int
    norm_eps: float
    """Of the norms over index heads."""
    block_size: int
    topk: int
    init_blocks: int = 0
    local_blocks: int = 1
    score_type: str = "max"
    rope_theta: float | None = None
    """None: the base's."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """How it was made: for people, and for making it again."""

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Ids of the layers that have an index branch."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind is not LayerKind.DENSE)

    def apply(self, config: ModelConfig) -> ModelConfig:
        """The base of `config` with this branch.

        Raises ConfigError where the base is not a dense model of the Llama family, is of another shape than the branch
        was made for, or where the branch's numbers make no sense.
        """
        self._check_base(config)
        rope = replace(config.rope, rotary_dim=self.index_rotary_dim, theta=self.rope_theta or config.rope.theta)
        if rope.frequency_factors is not None and len(rope.frequency_factors) * 2 != rope.rotary_dim:
            raise ConfigError(
                f"index_rotary_dim={self.index_rotary_dim} is not the {2 * len(rope.frequency_factors)} channels that "
                f"the base has RoPE frequency factors for"
            )
        sparse = SparseAttentionConfig(
            self.index_heads, self.index_head_dim, self.block_size, self.topk, self.init_blocks, self.local_blocks,
            self.score_type,
        )  # fmt: skip
        return replace(
            config,
            layer_kinds=self.layer_kinds,
            sparse=sparse.within(config.context_length),
            index_branch=IndexBranchConfig(rope, self.norm_eps),
        )

    def _check_base(self, config: ModelConfig) -> None:
        if config.family != "llama":
            raise ConfigError(f"base={self.base!r} is a {config.model_type} model, not one of the Llama family")
        found = BaseArchitecture.of(config)
        for each in fields(BaseArchitecture):
            wanted, has = getattr(self.base_architecture, each.name), getattr(found, each.name)
            if wanted != has:
                raise ConfigError(f"base_architecture.{each.name}={wanted!r}, but base={self.base!r} has {has!r}")


def branch_shapes(branch: IndexBranch) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in `index_branch.safetensors`."""
    hidden, dim = branch.base_architecture.hidden_size, branch.index_head_dim
    width = branch.index_heads * dim
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in branch.sparse_layers:
        parts = {"q_proj": (width, hidden), "k_proj": (dim, hidden), "q_norm": (dim,), "k_norm": (dim,)}
        if branch.layer_kinds[layer] is LayerKind.SPARSE_KV:
            parts |= {"v_proj": (dim, hidden), "o_proj": (hidden, width)}
        shapes |= {f"layers.{layer}.self_attn.index_{name}.weight": shape for name, shape in parts.items()}
    return shapes


def has_branch(directory: Path) -> bool:
    """Whether there is an index branch in `directory`, or half of one."""
    return (directory / BRANCH_FILE).exists() or (directory / BRANCH_TENSORS).exists()


def read_index_branch(directory: Path) -> IndexBranch:
    """The branch in `directory`, its JSON only.

    Raises ModelNotFoundError where there is no such file; ConfigError, naming the file and the key, for a value that
    makes no sense or a key that is not known.
    """
    path = directory / BRANCH_FILE
    values = read_json_object(path)
    try:
        return _read(values)
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None


def _read(values: Fields) -> IndexBranch:
    version = values.integer("format")
    if version != FORMAT:
        raise ConfigError(f"format={version} is not implemented; known: {FORMAT}")
    known = {"format", *(each.name for each in fields(IndexBranch))}
    unknown = sorted(set(values.values) - known)
    if unknown:
        raise ConfigError(f"the key {unknown[0]!r} is not known; known: {', '.join(sorted(known))}")
    architecture = _read_architecture(values)
    training = values.section("training")
    branch = IndexBranch(
        base=values.text("base"),
        base_fingerprint=values.text("base_fingerprint"),
        base_architecture=architecture,
        layer_kinds=_read_kinds(values, architecture.num_layers),
        index_heads=values.integer("index_heads", minimum=1),
        index_head_dim=values.integer("index_head_dim", minimum=1),
        index_rotary_dim=values.integer("index_rotary_dim", minimum=2),
        norm_eps=values.number("norm_eps", positive=True),
        block_size=values.integer("block_size", minimum=1),
        topk=values.integer("topk", minimum=1),
        init_blocks=values.integer("init_blocks", 0),
        local_blocks=values.integer("local_blocks", 1),
        score_type=values.text("score_type", "max"),
        rope_theta=values.number("rope_theta", positive=True) if "rope_theta" in values else None,
        training={} if training is None else training.values,
    )
    if not branch.base:
        raise ConfigError("base is empty")
    return branch


def _read_architecture(values: Fields) -> BaseArchitecture:
    section = values.section("base_architecture")
    if section is None:
        raise ConfigError("the key base_architecture is missing")
    numbers = {
        each.name: section.integer(each.name, minimum=1) for each in fields(BaseArchitecture) if each.type is int
    }
    if numbers["num_layers"] > _MAX_LAYERS:
        raise ConfigError(f"base_architecture.num_layers={numbers['num_layers']} is more than {_MAX_LAYERS}")
    return BaseArchitecture(section.text("model_type"), **numbers)


def _read_kinds(values: Fields, layers: int) -> tuple[LayerKind, ...]:
    listed = values.values.get("layer_kinds")
    known = {kind.value: kind for kind in LayerKind}
    if not isinstance(listed, list) or not all(isinstance(name, str) and name in known for name in listed):
        raise ConfigError(f"layer_kinds: {listed!r} is not a list of {', '.join(known)}")
    if len(listed) != layers:
        raise ConfigError(f"layer_kinds has {len(listed)} entries for {layers} layers")
    if set(listed) == {LayerKind.DENSE.value}:
        raise ConfigError("layer_kinds: there is no sparse layer")
    return tuple(known[name] for name in listed)


def write_index_branch(directory: Path, branch: IndexBranch, tensors: Mapping[str, Tensor]) -> None:
    """Write both files, whole or not at all; tensors by the names of `branch_shapes`, kept as bf16.

    Raises ConfigError where a tensor is missing, superfluous, misshapen or not finite, OSError where the disk is full.
    """
    import torch
    from safetensors.torch import save

    shapes = branch_shapes(branch)
    odd = sorted(shapes.keys() ^ tensors.keys())
    if odd:
        raise ConfigError(f"index branch: tensor {odd[0]!r} is {'missing' if odd[0] in shapes else 'superfluous'}")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(f"index branch: tensor {name!r} has shape {list(tensors[name].shape)}, not {list(shape)}")
        if not bool(torch.isfinite(tensors[name]).all()):
            raise ConfigError(f"index branch: tensor {name!r} holds a number that is not finite")
    kept = {name: tensors[name].detach().to(torch.bfloat16).contiguous() for name in shapes}
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{BRANCH_TENSORS}.new"
    try:
        temporary.write_bytes(save(kept))  # its save_file makes a file that only its owner may read
        temporary.replace(directory / BRANCH_TENSORS)
        temporary.write_text(branch_json(branch), "utf-8")
        temporary.replace(directory / BRANCH_FILE)
    finally:
        temporary.unlink(missing_ok=True)


def branch_json(branch: IndexBranch) -> str:
    """The text of `index_branch.json`."""
    values = {"format": FORMAT, **asdict(branch), "layer_kinds": [kind.value for kind in branch.layer_kinds]}
    if any(isinstance(value, float) and not math.isfinite(value) for value in values.values()):
        raise ConfigError("index branch: a number is not finite")
    return json.dumps({key: value for key, value in values.items() if value is not None}, indent=1) + "\n"
