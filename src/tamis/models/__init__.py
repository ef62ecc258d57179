"""Models: finding and reading them (config, weights), and running them over the sparse KV pool."""

from typing import TYPE_CHECKING

from tamis.cache import cache_dir
from tamis.config import GenerationDefaults, ModelConfig
from tamis.errors import ConfigError
from tamis.models.builtin import SMOLLM2_135M
from tamis.models.hub import ModelSource, pull, resolve

if TYPE_CHECKING:
    from tamis.models.checkpoint import Checkpoint

__all__ = [
    "ModelSource",
    "load_config",
    "load_generation_defaults",
    "open_checkpoint",
    "pull",
    "resolve",
]


def load_config(source: ModelSource) -> ModelConfig:
    """The model that `source` describes.

    Raises ConfigError (or one of its kinds) for what tamis cannot run or an index branch that does not suit its base,
    CorruptFileError for a broken GGUF.
    """
    config = _load_base_config(source)
    if source.branch is None:
        return config
    from tamis.models.index_branch import BRANCH_FILE, read_index_branch

    branch = read_index_branch(source.branch)
    try:
        return branch.apply(config)
    except ConfigError as error:
        raise type(error)(f"{source.branch / BRANCH_FILE}: {error}") from None


def _load_base_config(source: ModelSource) -> ModelConfig:
    if source.kind == "gguf":
        from tamis.models.gguf_config import read_gguf_config
        from tamis.models.gguf_file import GGUFFile

        with GGUFFile(source.path) as file:
            return read_gguf_config(file)
    from tamis.models.hf_config import read_hf_config

    return read_hf_config(source.path / "config.json" if source.kind == "directory" else source.path)


def load_generation_defaults(source: ModelSource) -> tuple[GenerationDefaults, tuple[int, ...]]:
    """Sampling defaults and end ids: of generation_config.json where there is one, else the end ids of the config.

    The built-in model, which is a GGUF, has defaults of its own.
    """
    from tamis.models.hf_config import read_generation_config

    if source.kind == "gguf":
        builtin = source.path == SMOLLM2_135M.path_in(cache_dir())  # with an index branch or without
        defaults = SMOLLM2_135M.defaults if builtin else GenerationDefaults()
        return defaults, load_config(source).eos_token_ids
    directory = source.path if source.kind == "directory" else source.path.parent
    defaults, end_ids = read_generation_config(directory)
    return defaults, end_ids or load_config(source).eos_token_ids


def open_checkpoint(source: ModelSource) -> "Checkpoint":
    """The weights of `source`, mapped; raises WeightError (or one of its kinds) where they cannot be read."""
    from tamis.models.checkpoint import open_checkpoint

    return open_checkpoint(source)
