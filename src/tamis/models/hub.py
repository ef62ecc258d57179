"""Where a model comes from: the built-in one, a local path, or the Hugging Face hub."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tamis.cache import cache_dir
from tamis.errors import ConfigError, DownloadError, ModelNotFoundError
from tamis.models.builtin import SMOLLM2_135M, fetch_builtin
from tamis.progress import NoProgress, Progress

SHIPPED_CONFIG = "minimax-m3"
"""A configuration that is part of the package, for planning without any download."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_CONFIG_FILES = ("*.json",)
_ALL_FILES = (*_CONFIG_FILES, "*.safetensors", "tokenizer*", "*.jinja")
_OTHER_FORMS = ("consolidated*", "original/*")
"""The same weights once more, in their author's own format."""


@dataclass(frozen=True)
class ModelSource:
    """A model that is on this machine."""

    name: str
    """As the user wrote it; "smollm2-135m" for the built-in."""
    path: Path
    """A directory, a .gguf file, or a config.json, by `kind`."""
    kind: Literal["directory", "gguf", "config"]


def resolve(model: str | None, *, weights: bool = True, progress: Progress | None = None) -> ModelSource:
    """Find `model`, fetching it where needed.

    None or "smollm2-135m" is the built-in model; else a directory with a config.json, a .gguf file, a name on the
    Hugging Face hub ("organisation/name"), or, with `weights=False`, a config.json or "minimax-m3". Without `weights`
    only what describes the model needs to be there. Raises ModelNotFoundError or DownloadError, ConfigError for what
    is no name at all.
    """
    if not isinstance(model, str | None):
        raise ConfigError(f"model={model!r} is not a name or a path")
    if model is None or model == SMOLLM2_135M.name:
        return ModelSource(
            SMOLLM2_135M.name, fetch_builtin(SMOLLM2_135M, cache_dir(), progress or NoProgress()), "gguf"
        )
    if model == SHIPPED_CONFIG:
        return _config_only(model, Path(__file__).parent / "configs" / f"{SHIPPED_CONFIG}.json", weights)
    local = _resolve_local(model, weights)
    if local is not None:
        return local
    if not _HUB_NAME.fullmatch(model) or model.endswith((".gguf", ".json")):
        raise ModelNotFoundError(
            f"{model!r} is no directory, .gguf file, hub name or built-in model; built-in are: "
            f"{SMOLLM2_135M.name}, {SHIPPED_CONFIG} (a configuration, without weights)"
        )
    return _directory(model, _fetch_from_hub(model, weights), weights)


def pull(model: str | None = None, progress: Progress | None = None) -> Path:
    """Fetch `model` now, where it is not here yet, and return its path. The built-in one's sha256 is checked again.

    Raises as `resolve` does.
    """
    if model is None or model == SMOLLM2_135M.name:
        return fetch_builtin(SMOLLM2_135M, cache_dir(), progress or NoProgress(), verify=True)
    return resolve(model, progress=progress).path


def _resolve_local(model: str, weights: bool) -> ModelSource | None:
    """The file or directory `model`; None where there is no such path."""
    try:
        path = Path(model).expanduser()
        if not model or not path.exists():
            return None
        if path.is_dir():
            return _directory(model, path, weights)
        if path.suffix.lower() == ".gguf":
            return ModelSource(model, path, "gguf")
        if path.suffix.lower() == ".json":
            return _config_only(model, path, weights)
    except (ValueError, RuntimeError) as error:
        raise ModelNotFoundError(f"{model!r} cannot be a path: {error}") from None
    except OSError as error:
        if isinstance(error, ModelNotFoundError):
            raise
        raise ModelNotFoundError(f"{model!r} cannot be read: {error.strerror}") from None
    raise ModelNotFoundError(f"{path} is not a directory, a .gguf file or a config.json")


def _config_only(name: str, path: Path, weights: bool) -> ModelSource:
    if weights:
        raise ModelNotFoundError(f"{name} is a configuration only: there are no weights to run")
    return ModelSource(name, path, "config")


def _directory(name: str, path: Path, weights: bool) -> ModelSource:
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
