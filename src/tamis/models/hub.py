"""Where a model comes from: the built-in one, a local path, or the Hugging Face hub."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tamis.cache import cache_dir
from tamis.errors import ConfigError, DownloadError, ModelNotFoundError, TamisError
from tamis.models.builtin import SMOLLM2_135M, fetch_builtin
from tamis.models.index_branch import BRANCH_FILE, BRANCH_TENSORS, has_branch, read_index_branch
from tamis.names import DEFAULT_MODEL, DENSE_MODEL, SHIPPED_CONFIG, SPARSE_MODEL
from tamis.progress import NoProgress, Progress

BRANCHES = Path(__file__).parent.parent / "branches"
"""Index branches that are part of the package, by the name of the model they make."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_CONFIG_FILES = ("*.json",)
_ALL_FILES = (*_CONFIG_FILES, "*.safetensors", "tokenizer*", "*.jinja")
_OTHER_FORMS = ("consolidated*", "original/*")
"""The same weights once more, in their author's own format."""


@dataclass(frozen=True)
class ModelSource:
    """A model that is on this machine."""

    name: str
    """As the user wrote it; the built-in one's where there was no name."""
    path: Path
    """A directory, a .gguf file, or a config.json, by `kind`."""
    kind: Literal["directory", "gguf", "config"]
    branch: Path | None = None
    """The directory of an index branch, which makes a dense model at `path` a sparse one."""


def resolve(model: str | None, *, weights: bool = True, progress: Progress | None = None) -> ModelSource:
    """Find `model`, fetching it where needed.

    None is the built-in model `names.DEFAULT_MODEL`; else the name of a built-in one, a directory with a config.json, a
    .gguf file, a name on the Hugging Face hub ("organisation/name"), or, with `weights=False`, a config.json or
    "minimax-m3". A directory with an index branch is the base model that the branch names, or that lies beside it, with
    the branch. Without `weights` only what describes the model needs to be there. Raises ModelNotFoundError or
    DownloadError, ConfigError for what is no name at all or a branch that makes no sense.
    """
    if not isinstance(model, str | None):
        raise ConfigError(f"model={model!r} is not a name or a path")
    return _resolve(DEFAULT_MODEL if model is None else model, weights, progress or NoProgress())


def _resolve(model: str, weights: bool, progress: Progress) -> ModelSource:
    if model in (DENSE_MODEL, SPARSE_MODEL):
        path = fetch_builtin(SMOLLM2_135M, cache_dir(), progress)
        return ModelSource(model, path, "gguf", BRANCHES / model if model == SPARSE_MODEL else None)
    if model == SHIPPED_CONFIG:
        return _config_only(model, Path(__file__).parent / "configs" / f"{SHIPPED_CONFIG}.json", weights)
    local = _resolve_local(model, weights, progress)
    if local is not None:
        return local
    if not _HUB_NAME.fullmatch(model) or model.endswith((".gguf", ".json")):
        raise ModelNotFoundError(
            f"{model!r} is no directory, .gguf file, hub name or built-in model; built-in are: "
            f"{SPARSE_MODEL}, {DENSE_MODEL}, {SHIPPED_CONFIG} (a configuration, without weights)"
        )
    return _directory(model, _fetch_from_hub(model, weights), weights, progress)


def pull(model: str | None = None, progress: Progress | None = None) -> Path:
    """Fetch `model` now, where it is not here yet, and return its path. The built-in one's sha256 is checked again.

    Raises as `resolve` does.
    """
    if (model or DEFAULT_MODEL) in (DENSE_MODEL, SPARSE_MODEL):
        return fetch_builtin(SMOLLM2_135M, cache_dir(), progress or NoProgress(), verify=True)
    return resolve(model, progress=progress).path


def _resolve_local(model: str, weights: bool, progress: Progress) -> ModelSource | None:
    """The file or directory `model`; None where there is no such path."""
    try:
        path = Path(model).expanduser()
        return _at_path(model, path, weights, progress) if model and path.exists() else None
    except TamisError:  # some of them are kinds of what follows
        raise
    except (ValueError, RuntimeError) as error:
        raise ModelNotFoundError(f"{model!r} cannot be a path: {error}") from None
    except OSError as error:
        raise ModelNotFoundError(f"{model!r} cannot be read: {error.strerror}") from None


def _at_path(name: str, path: Path, weights: bool, progress: Progress) -> ModelSource:
    if path.is_dir():
        return _directory(name, path, weights, progress)
    if path.suffix.lower() == ".gguf":
        return ModelSource(name, path, "gguf")
    if path.suffix.lower() == ".json":
        return _config_only(name, path, weights)
    raise ModelNotFoundError(f"{path} is not a directory, a .gguf file or a config.json")


def _config_only(name: str, path: Path, weights: bool) -> ModelSource:
    if weights:
        raise ModelNotFoundError(f"{name} is a configuration only: there are no weights to run")
    return ModelSource(name, path, "config", path.parent if has_branch(path.parent) else None)


def _directory(name: str, path: Path, weights: bool, progress: Progress) -> ModelSource:
    """A model in a directory, or what an index branch there makes of its base."""
    if not has_branch(path):
        return _plain_directory(name, path, weights)
    if weights and not (path / BRANCH_TENSORS).is_file():
        raise ModelNotFoundError(f"{path}: the directory has no {BRANCH_TENSORS}")
    base = read_index_branch(path).base
    if (path / "config.json").is_file():
        return replace(_plain_directory(name, path, weights), branch=path)
    try:
        return replace(_resolve_base(base, path, weights, progress), name=name, branch=path)
    except (ModelNotFoundError, ConfigError) as error:
        raise type(error)(f"{path / BRANCH_FILE}: base={base!r}: {error}") from None


def _resolve_base(base: str, beside: Path, weights: bool, progress: Progress) -> ModelSource:
    """The dense model that a branch in the directory `beside` is for."""
    near = beside / base
    place = str(near) if "\0" not in base and near.exists() else base
    # Looked at before it is resolved: two branches that name each other would be resolved for ever.
    if base == SPARSE_MODEL or ("\0" not in place and Path(place).is_dir() and has_branch(Path(place))):
        raise ConfigError("the base has an index branch itself")
    return _resolve(place, weights, progress)


def _plain_directory(name: str, path: Path, weights: bool) -> ModelSource:
    if not (path / "config.json").is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; for {ggufs[0]} name the file itself" if ggufs else ""
        raise ModelNotFoundError(f"{path}: the directory has no config.json{hint}")
    if weights:
        from tamis.models.checkpoint import check_has_weights

        check_has_weights(path)
    return ModelSource(name, path, "directory")


def _fetch_from_hub(name: str, weights: bool) -> Path:
    """The snapshot of a hub repository, in the hub client's own cache and with its own progress bars."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=list(_ALL_FILES if weights else _CONFIG_FILES), ignore_patterns=list(_OTHER_FORMS)
            )
        )
    except GatedRepoError:
        raise DownloadError(
            f"{name}: access to this repository is restricted; accept its terms there and log in with `hf auth login`"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelNotFoundError(
            f"{name}: there is no such directory here and no such repository on the Hugging Face hub"
        ) from None
    except Exception as error:  # the client lets through whatever its HTTP library and the file system raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DownloadError(f"cannot fetch {name} from the Hugging Face hub: {reason}") from error
