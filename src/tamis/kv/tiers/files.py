"""Files as the disk tier reads and writes them: regular ones, whole, and never more of them than was asked for."""

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tamis.errors import TierReadError
from tamis.kv.tiers.base import Blob, Key
from tamis.kv.tiers.format import Rows

_MAX_OPEN = 128
"""Files that one load keeps open. The others are opened for each read: descriptors are needed elsewhere too."""
# Whoever put a link or a pipe there wants another file read, or the reader to wait.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OWN = 0o600
"""What is in a page tells of a prompt: nobody else may read it."""


class OpenFiles:
    """The files of several pages while they are read. What is open can be read to the end though it is unlinked."""

    def __init__(self, keys: Sequence[Key], paths: Sequence[Path]) -> None:
        self._keys, self._paths = keys, paths
        self._open: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def fetch(self, offset: int, rows: Rows) -> None:
        """See reader.Fetch."""
        for number, row in enumerate(rows):
            descriptor = self._open.get(number)
            if descriptor is not None:
                self._fill(number, descriptor, offset, row)
                continue
            descriptor = self._begin(number)
            try:
                self._fill(number, descriptor, offset, row)
            finally:
                if len(self._open) < _MAX_OPEN:
                    self._open[number] = descriptor
                else:
                    os.close(descriptor)

    def _begin(self, number: int) -> int:
        try:
            descriptor = os.open(self._paths[number], _READ)
        except FileNotFoundError:
            raise TierReadError(self._keys[number], "it is not there") from None
        except PermissionError:
            raise TierReadError(self._keys[number], "it is another user's") from None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            raise TierReadError(self._keys[number], "it is no regular file", corrupt=True) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise TierReadError(self._keys[number], "it is no regular file", corrupt=True)
        return descriptor

    def _fill(self, number: int, descriptor: int, offset: int, row: Rows) -> None:
        room = row.data
        done = 0
        while done < len(room):
            count = os.preadv(descriptor, [room[done:]], offset + done)
            if not count:
                raise TierReadError(self._keys[number], f"it ends after {offset + done} bytes", corrupt=True)
            done += count


@dataclass(frozen=True)
class NewFile:
    """A file to be written."""

    path: Path
    """Nothing may be there yet."""
    data: Blob
    used: float | None = None
    """Seconds since 1970 that count as its last change; None: now."""


def write_synced(files: Sequence[NewFile]) -> None:
    """Write these, all of which are on the disk when this returns. Whatever fails, none is left half written.

    All are written before the first is waited for: the disk has more to do at a time.
    """
    with ExitStack() as opened:
        try:
            descriptors = [_write(file, opened) for file in files]
            for descriptor in descriptors:
                os.fsync(descriptor)
        except BaseException:
            for file in files:
                file.path.unlink(missing_ok=True)
            raise


def _write(file: NewFile, opened: ExitStack) -> int:
    descriptor = os.open(file.path, _WRITE, _OWN)
    opened.callback(os.close, descriptor)
    rest = memoryview(file.data).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    if file.used is not None:
        os.utime(descriptor, (file.used, file.used))
    return descriptor


def sync_folder(path: Path) -> None:
    """Have the names in a directory be on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_begin(path: Path, length: int) -> bytes:
    """The first `length` bytes of a file, or all of it."""
    descriptor = os.open(path, _READ)
    try:
        return os.read(descriptor, length)
    finally:
        os.close(descriptor)


def read_some(path: Path, most: int) -> bytes:
    """A file of at most `most` bytes. Raises ValueError for a longer one."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} has more than {most} bytes")
    return data
