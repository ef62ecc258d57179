"""Pages in any store that fsspec knows: a bucket (s3, gs, az...), sftp, another process's memory, a local directory.

    pages/KEY.kv    pins/*.json    tmp/NAME (being written, where the store does not put a file whole)

Such a store tells when a page was written, not when it was used: uses are known to this process only. What others wrote
is seen when the listing is read again, at most every `refresh` seconds.
"""

import errno
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, ClassVar
from urllib.parse import urlsplit

import fsspec
import numpy as np

from tamis.errors import TierReadError
from tamis.kv.tiers.base import Blob, Key
from tamis.kv.tiers.format import Rows
from tamis.kv.tiers.pins import MAX_BYTES, pin_name, read_pins, write_pins
from tamis.kv.tiers.reader import Fetch
from tamis.kv.tiers.stored import Listed, StoredTier, describe, logger

_PAGE_NAME = re.compile(r"([0-9a-f]{64})\.kv")
_WHOLE = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "r2"}
"""Protocols whose stores put a file whole or not at all. In others it is moved to its name once it is written."""
_STALE_SECONDS = 3600.0
"""A file that is being written for so long is not any more."""
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""What stores call the time at which a file was written."""


class FsspecTier(StoredTier):
    """Files or objects in a store that fsspec knows."""

    least_fetch: ClassVar[int] = 4 << 20
    foreign_errors = (Exception,)  # each store has its own

    def __init__(
        self, url: str, capacity: int | None = None, *, refresh: float = 5.0, options: Mapping[str, Any] | None = None
    ) -> None:
        """`url` and `options` as fsspec takes them. Raises TierError where the store cannot be written to."""
        parts = urlsplit(url)
        super().__init__(f"fsspec:{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}", capacity)
        self._refresh, self._listed = refresh, 0.0
        with self._verb("open its store"):
            self._fs, root = fsspec.core.url_to_fs(url, **(options or {}))
            root = root.rstrip("/")
            self._pages, self._tmp, self._pin_files = (f"{root}/{name}" for name in ("pages", "tmp", "pins"))
            protocols = (self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol
            self._puts_whole = not _WHOLE.isdisjoint(protocols)
            for folder in (self._pages, self._tmp, self._pin_files):
                self._fs.makedirs(folder, exist_ok=True)
            self._mark(f"{root}/tamis-kv")
            self._remove_stale()
            self._rescan()

    def _mark(self, path: str) -> None:
        """See whether the store can be written to. One that is only full can still be read."""
        try:
            self._write_file(path, b"KV pages of tamis, format 1\n")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._count(errors=1)
            logger.warning("kv tier %s: %s", self.name, describe(error))

    def _remove_stale(self) -> None:
        for name, info in self._files(self._tmp):
            if 0 < _written(info) < time.time() - _STALE_SECONDS:
                self._fs.rm_file(f"{self._tmp}/{name}")

    def _files(self, folder: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Names and facts of a folder's files, as they are now."""
        self._fs.invalidate_cache(folder)
        with suppress(FileNotFoundError):  # a store of objects knows no empty folders
            for info in self._fs.ls(folder, detail=True):
                if info["type"] == "file":
                    yield info["name"].rpartition("/")[2], info

    def _write_file(self, path: str, data: bytes) -> None:
        if self._puts_whole:
            self._fs.pipe_file(path, data)
            return
        temporary = f"{self._tmp}/{secrets.token_hex(16)}"
        try:
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, path)
        except BaseException:
            with suppress(*self.foreign_errors):  # it is stale in an hour; why it came to this matters more
                self._fs.rm_file(temporary)
            raise

    def _file(self, key: Key) -> str:
        return f"{self._pages}/{key.hex()}.kv"

    def _list(self) -> Iterator[Listed]:
        self._listed = time.monotonic()
        for name, info in self._files(self._pages):
            if match := _PAGE_NAME.fullmatch(name):
                key = bytes.fromhex(match[1])
                known = self._ledger.notes.get(key)
                yield key, int(info["size"]), _written(info) if known is None else known.used

    def _has(self, keys: Sequence[Key]) -> list[bool]:
        if not all(self._known(keys)) and time.monotonic() - self._listed >= self._refresh:
            self._rescan()
        return self._known(keys)

    def _known(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            return [key in self._ledger for key in keys]

    @contextmanager
    def _open(self, keys: Sequence[Key]) -> Iterator[Fetch]:
        paths = [self._file(key) for key in keys]

        def fetch(offset: int, rows: Rows) -> None:
            end = offset + rows.shape[1]
            found = self._fs.cat_ranges(paths, offset, end, on_error="return")
            for key, row, data in zip(keys, rows, found, strict=True):
                if isinstance(data, FileNotFoundError):
                    raise TierReadError(key, "it is not there")
                if isinstance(data, Exception):
                    raise data
                if len(data) != len(row):
                    raise TierReadError(key, f"it ends after {offset + len(data)} bytes", corrupt=True)
                row[:] = np.frombuffer(data, np.uint8)

        yield fetch

    def _put(self, blobs: dict[Key, tuple[Blob, float]]) -> None:
        if self._puts_whole:
            self._fs.pipe({self._file(key): bytes(blob) for key, (blob, _) in blobs.items()})
            return
        for key, (blob, _) in blobs.items():
            self._write_file(self._file(key), bytes(blob))

    def _drop(self, keys: Sequence[Key]) -> int:
        removed = 0
        for key in keys:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._file(key))
                removed += 1
        return removed

    def _load_pins(self) -> dict[str, list[Key]]:
        pins: dict[str, list[Key]] = {}
        for name, _ in self._files(self._pin_files):
            try:
                owner, keys = read_pins(name, self._fs.cat_file(f"{self._pin_files}/{name}", 0, MAX_BYTES))
                pins[owner] = keys
            except FileNotFoundError:  # let go of by another process in this moment
                continue
            except ValueError as error:
                logger.warning("kv tier %s: %s", self.name, describe(error))
        return pins

    def _save_pins(self, owner: str, keys: list[Key]) -> None:
        path = f"{self._pin_files}/{pin_name(owner)}"
        if keys:
            self._write_file(path, write_pins(owner, keys))
        else:
            with suppress(FileNotFoundError):
                self._fs.rm_file(path)


def _written(info: Mapping[str, Any]) -> float:
    """When a file was written, in seconds since 1970; 0 where the store does not say."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
