"""Pages as files, one a page, in a directory that several processes may share.

    pages/KEY.kv      whole pages only: a file gets this name when every byte of it is on the disk
    tmp/OWNER-N       being written; OWNER.lock is held for as long as the writing process lives
    bad/KEY.kv        set aside: not what a page looks like
    pins/*.json       what owners have pinned
    lock              held while pins change, while room is made, and while a process starts

The time of a file's last change is that of its page's last use, for all processes.
"""

import itertools
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from tamis.errors import TierError, TierReadError
from tamis.kv.tiers.base import Blob, Key
from tamis.kv.tiers.files import NewFile, OpenFiles, read_begin, read_some, sync_folder, write_synced
from tamis.kv.tiers.format import has_other_version, header_bytes, parse_header
from tamis.kv.tiers.pins import MAX_BYTES, pin_name, read_pins, write_pins
from tamis.kv.tiers.reader import Fetch
from tamis.kv.tiers.stored import Listed, StoredTier, describe

logger = logging.getLogger(__name__)

PAGE_NAME = re.compile(r"([0-9a-f]{64})\.kv")
_FOLDERS = ("pages", "tmp", "bad", "pins")
_LOCK_SECONDS = 10.0
_USUAL_HEADER = 8192
"""Bytes that most headers do not exceed."""
_KEPT_ASIDE = 16
"""Files set aside that are kept for whoever wants to look at them."""


class DiskTier(StoredTier):
    """Files in a directory. Survives kill -9 at any moment; its index is rebuilt from the files at start."""

    least_fetch = 64 << 10

    def __init__(self, path: str | Path, capacity: int | None = None, *, create: bool = True) -> None:
        """Pages in `path`, up to `capacity` bytes of them. Raises TierError where it cannot be written to.

        Without `create` for what must be a directory of pages already.
        """
        self.path = Path(path).expanduser().absolute()
        super().__init__(f"disk:{self.path}", capacity)
        self._pages, self._tmp, self._bad, self._pin_files = (self.path / name for name in _FOLDERS)
        self._owner = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        with self._verb("open its directory"):
            if not create and not self._pages.is_dir():
                raise TierError(f"{self.path} is not a directory of KV pages")
            for folder in (self._pages, self._tmp, self._bad, self._pin_files):
                folder.mkdir(parents=True, exist_ok=True)
            with self._exclusive():
                self._alive = self._start()

    def _start(self) -> BaseFileLock:
        """Remove what dead processes left, read the index; the lock that says this one lives."""
        self._remove_leftovers()
        alive = FileLock(self._tmp / f"{self._owner}.lock", thread_local=False)
        alive.acquire(timeout=0)
        self._set_aside_unreadable()
        self._rescan()
        return alive

    def _set_aside_unreadable(self) -> None:
        for key, size, _ in self._list():
            try:
                self._check_header(key, size)
            except TierReadError as error:
                self._count(corrupt=1)
                logger.warning("kv tier %s: %s; it is set aside", self.name, error)
                self._discard(key)
            except FileNotFoundError:  # evicted by another process in this moment
                continue
            except OSError as error:  # another user's, or the disk is at fault: a miss, should it be asked for
                self._count(errors=1)
                logger.warning("kv tier %s: page %s cannot be looked at: %s", self.name, key.hex(), describe(error))

    def _check_header(self, key: Key, size: int) -> None:
        begin = read_begin(self._file(key), _USUAL_HEADER)
        # Another version of tamis may share the directory; in its own time it goes as the others do.
        if not has_other_version(begin):
            length = header_bytes(key, begin)
            parse_header(key, begin if length <= len(begin) else read_begin(self._file(key), length), size)

    def _remove_leftovers(self) -> int:
        """Files of processes that are no more; how many. Nobody may start at the same time."""
        living = {lock.stem for lock in self._tmp.glob("*.lock") if not _is_free(lock)}
        return _unlink_all([path for path in self._tmp.iterdir() if _owner_of(path) not in living])

    # What StoredTier asks for

    def _file(self, key: Key) -> Path:
        return self._pages / f"{key.hex()}.kv"

    def _list(self) -> Iterator[Listed]:
        with os.scandir(self._pages) as entries:
            for entry in entries:
                match = PAGE_NAME.fullmatch(entry.name)
                with suppress(FileNotFoundError):  # evicted by another process in this moment
                    # A link could lead anywhere.
                    if match and entry.is_file(follow_symlinks=False):
                        found = entry.stat(follow_symlinks=False)
                        yield bytes.fromhex(match[1]), found.st_size, found.st_mtime

    def _has(self, keys: Sequence[Key]) -> list[bool]:
        return [os.path.lexists(self._file(key)) for key in keys]

    @contextmanager
    def _open(self, keys: Sequence[Key]) -> Iterator[Fetch]:
        with OpenFiles(keys, [self._file(key) for key in keys]) as files:
            yield files.fetch

    def _put(self, blobs: dict[Key, tuple[Blob, float]]) -> None:
        self._write([(self._file(key), blob, used) for key, (blob, used) in blobs.items()], self._pages)

    def _write(self, files: list[tuple[Path, Blob, float | None]], folder: Path) -> None:
        """Write files in `folder`: each has its name only once it is whole."""
        new = [NewFile(self._tmp / f"{self._owner}-{next(self._numbers)}", data, used) for _, data, used in files]
        write_synced(new)
        try:
            for file, (path, _, _) in zip(new, files, strict=True):
                file.path.replace(path)
        except BaseException:
            _unlink_all([file.path for file in new])
            raise
        sync_folder(folder)

    def _drop(self, keys: Sequence[Key]) -> int:
        removed = 0
        for key in keys:
            with suppress(FileNotFoundError):
                self._file(key).unlink()
                removed += 1
        return removed

    def _discard(self, key: Key) -> None:
        with suppress(FileNotFoundError):
            self._file(key).replace(self._bad / self._file(key).name)
        _unlink_all(sorted(self._bad.iterdir(), key=_last_change)[:-_KEPT_ASIDE])

    def _touch(self, uses: dict[Key, float]) -> None:
        for key, used in uses.items():
            with suppress(FileNotFoundError):
                os.utime(self._file(key), (used, used), follow_symlinks=False)

    def _exclusive(self) -> AbstractContextManager[object]:
        return FileLock(self.path / "lock", timeout=_LOCK_SECONDS)

    def _load_pins(self) -> dict[str, list[Key]]:
        pins: dict[str, list[Key]] = {}
        for path in self._pin_files.glob("*.json"):
            try:
                owner, keys = read_pins(path.name, read_some(path, MAX_BYTES))
                pins[owner] = keys
            except FileNotFoundError:  # let go of by another process in this moment
                continue
            except (OSError, ValueError) as error:
                logger.warning("kv tier %s: %s", self.name, describe(error))
        return pins

    def _save_pins(self, owner: str, keys: list[Key]) -> None:
        path = self._pin_files / pin_name(owner)
        if not keys:
            path.unlink(missing_ok=True)
            return
        self._write([(path, write_pins(owner, keys), None)], self._pin_files)

    def _shut(self) -> None:
        self._alive.release(force=True)
        _unlink_all([self._tmp / f"{self._owner}.lock"])

    def clean(self) -> int:
        """See StoredTier: blobs set aside, and what dead processes left over."""
        with self._verb("remove leftovers"), self._exclusive():
            return _unlink_all(list(self._bad.iterdir())) + self._remove_leftovers()

    def set_aside(self) -> int:
        """See StoredTier."""
        with self._verb("count what is set aside"):
            return sum(1 for _ in self._bad.iterdir())


def _unlink_all(paths: Iterable[Path]) -> int:
    count = 0
    for path in paths:
        if path.is_dir() and not path.is_symlink():  # put there under a page's name
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        count += 1
    return count


def _last_change(path: Path) -> float:
    """0 for what another process has removed in this moment."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_free(lock: Path) -> bool:
    """Whether the process that made this lock is no more."""
    try:
        with FileLock(lock, timeout=0):
            return True
    except Timeout:
        return False


def _owner_of(path: Path) -> str:
    """`OWNER.lock` and `OWNER-N` -> OWNER, which is a process id, a dash and a random number."""
    return path.stem if path.suffix == ".lock" else path.name.rpartition("-")[0]
