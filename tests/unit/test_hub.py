"""Finding models: names, paths, and the cache directory."""

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

import tamis
from tamis.cache import cache_dir
from tamis.errors import DownloadError, ModelNotFoundError
from tamis.models import hub, load_config, pull, resolve
from tamis.models.builtin import SMOLLM2_135M, BuiltinModel
from tamis.names import DEFAULT_MODEL


def test_finding_a_model_loads_no_reader() -> None:
    """Weight formats and the hub client are imported when one of their models is opened."""
    heavy = ("filelock", "gguf", "huggingface_hub", "safetensors")
    code = f"import sys, tamis.models; print(*[name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAMIS_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.setenv("TAMIS_CACHE", "~/there")
    assert cache_dir() == tmp_path / "there"
    monkeypatch.setenv("TAMIS_CACHE", "")
    assert cache_dir() == tmp_path / "xdg" / "tamis"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "tamis"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "tamis"


@pytest.mark.parametrize("name", [None, "smollm2-135m", "smollm2-135m-msa"])
def test_the_builtin_models_are_used_from_the_cache(
    name: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TAMIS_CACHE", str(tmp_path))
    kept = tmp_path / "models" / SMOLLM2_135M.file_name
    kept.parent.mkdir()
    with kept.open("wb") as file:
        file.truncate(SMOLLM2_135M.nbytes)
    called = name or DEFAULT_MODEL
    branch = Path(tamis.__file__).parent / "branches" / called if called.endswith("-msa") else None
    assert resolve(name) == hub.ModelSource(called, kept, "gguf", branch)


def test_pull_checks_the_builtin_models_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[bool] = []

    def fetch(model: BuiltinModel, cache: Path, progress: object, *, verify: bool = False) -> Path:
        asked.append(verify)
        return cache / model.file_name

    monkeypatch.setattr(hub, "fetch_builtin", fetch)
    monkeypatch.setenv("TAMIS_CACHE", str(tmp_path))
    assert pull() == tmp_path / SMOLLM2_135M.file_name
    assert pull("smollm2-135m-msa") == pull("smollm2-135m") == pull()
    assert resolve(None).path == tmp_path / SMOLLM2_135M.file_name
    assert asked == [True, True, True, True, False]


def test_the_shipped_configuration_needs_no_download() -> None:
    source = resolve("minimax-m3", weights=False)
    assert (source.name, source.kind) == ("minimax-m3", "config")
    assert load_config(source).num_layers == 60
    for call in (lambda: resolve("minimax-m3"), lambda: pull("minimax-m3")):
        with pytest.raises(ModelNotFoundError, match="minimax-m3 is a configuration only"):
            call()


def model_directory(folder: Path, *files: str) -> Path:
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json"])
def test_a_directory_with_config_and_weights_is_a_model(tmp_path: Path, weights: str) -> None:
    folder = model_directory(tmp_path / "m", "config.json", weights)
    assert resolve(str(folder)) == hub.ModelSource(str(folder), folder, "directory")
    assert pull(str(folder)) == folder


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ((), "the directory has no config.json$"),
        (("model.safetensors",), "the directory has no config.json$"),
        (("x.gguf",), "the directory has no config.json; for x.gguf name the file itself"),
        (("config.json",), "there is no model.safetensors and no model.safetensors.index.json"),
        (("config.json", "pytorch_model.bin"), "the weights are in pytorch_model.bin; tamis reads safetensors or GGUF"),
    ],
)
def test_an_incomplete_directory_is_told_what_is_missing(tmp_path: Path, files: tuple[str, ...], missing: str) -> None:
    folder = model_directory(tmp_path / "m", *files)
    with pytest.raises(ModelNotFoundError, match=missing) as caught:
        resolve(str(folder))
    assert str(folder) in str(caught.value)


def test_without_weights_a_configuration_is_enough(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "m", "config.json")
    assert resolve(str(folder), weights=False).kind == "directory"
    file = folder / "config.json"
    assert resolve(str(file), weights=False) == hub.ModelSource(str(file), file, "config")
    with pytest.raises(ModelNotFoundError, match=r"config\.json is a configuration only"):
        resolve(str(file))


def test_a_gguf_file_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "m.GGUF").write_bytes(b"GGUF")
    assert resolve(str(tmp_path / "m.GGUF")).kind == "gguf"
    (tmp_path / "m.txt").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"m\.txt is not a directory, a \.gguf file or a config\.json"):
        resolve(str(tmp_path / "m.txt"))


@pytest.mark.parametrize("name", ["", "gpt-9", "./nowhere", "/no/such/dir", "org/m.gguf", "a/b/c", "org/", "x" * 5000])
def test_an_unknown_name_lists_the_builtin_ones(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(name)
    if len(name) < 5000:
        assert repr(name) in str(caught.value)
        assert "smollm2-135m-msa, smollm2-135m, minimax-m3" in str(caught.value)


@pytest.mark.parametrize("name", ["a\0b", "~nobody-of-this-name/x"])
def test_a_name_that_no_path_can_have_is_refused(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve(name)


def test_a_hub_name_fetches_only_what_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "snapshot", "config.json", "model.safetensors")
    asked: list[tuple[str, list[str]]] = []

    def download(repo: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/name") == hub.ModelSource("org/name", folder, "directory")
    resolve("org/name", weights=False)
    assert asked == [("org/name", ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]), ("org/name", ["*.json"])]
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve("org/name")


def test_hub_errors_become_ours_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error: Exception = OSError("disk full\nmore")

    def download(repo: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(DownloadError, match=r"^cannot fetch org/name from the Hugging Face hub: disk full$"):
        resolve("org/name")
    error = LocalEntryNotFoundError("no network and no copy")
    with pytest.raises(DownloadError, match=r"no network and no copy$"):
        resolve("org/name")
    error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    with pytest.raises(ModelNotFoundError, match="org/name: there is no such directory here and no such repository"):
        resolve("org/name")
    error = GatedRepoError.__new__(GatedRepoError)
    with pytest.raises(DownloadError, match="org/name: access to this repository is restricted"):
        resolve("org/name")
