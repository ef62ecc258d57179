"""Stores that tiers lie in, for tests: opened again and again, looked into, and spoiled byte by byte."""

import itertools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import fsspec
import redis
import torch

from support.kv import write_random
from tamis.kv import KVLayout, PageBlob, SparseKVPool
from tamis.kv.tiers.base import Key
from tamis.kv.tiers.disk import DiskTier
from tamis.kv.tiers.format import encode_page
from tamis.kv.tiers.host import HostTier
from tamis.kv.tiers.keys import page_keys
from tamis.kv.tiers.remote_fsspec import FsspecTier
from tamis.kv.tiers.remote_redis import RedisTier
from tamis.kv.tiers.stored import StoredTier

KINDS = ("host", "disk", "redis", "memory", "file")
"""Of `make_store`; the last two are fsspec's."""
_names = itertools.count()


def make_pages(layout: KVLayout, count: int, seed: int = 0) -> PageBlob:
    """Pages with random contents in every plane: the first of many are those of few."""
    pool = SparseKVPool(layout, count)
    for page in range(1, count + 1):
        write_random(pool, torch.arange(layout.page_size) + page * layout.page_size, seed * 1000 + page)
    return pool.export_pages(range(1, count + 1))


def make_keys(layout: KVLayout, count: int, *, salt: bytes = b"", first: int = 0) -> list[Key]:
    """Keys of the first pages of a sequence whose tokens count up from `first`."""
    tokens = range(first, first + count * layout.page_size)
    return page_keys("model", layout, salt, tokens, layout.page_size)


def make_items(layout: KVLayout, count: int, seed: int = 0, *, salt: bytes = b"") -> list[tuple[Key, bytes]]:
    """Keys and blobs of `make_keys` and `make_pages`."""
    pages = make_pages(layout, count, seed)
    keys = make_keys(layout, count, salt=salt)
    return [(key, encode_page(layout, key, pages.page(place))) for place, key in enumerate(keys)]


class Store(ABC):
    """Where one tier's blobs lie, and how to reach them without it."""

    lasting = True
    """Whether what was written is there when the tier is opened again."""

    def __init__(self) -> None:
        self._opened: list[StoredTier] = []

    def open(self, capacity: int | None = None) -> StoredTier:
        """The tier over this store: another one each time, as another process would have it."""
        tier = self._make(capacity)
        self._opened.append(tier)
        return tier

    def close(self) -> None:
        """Close all tiers and remove the store."""
        for tier in self._opened:
            tier.close()

    @abstractmethod
    def _make(self, capacity: int | None) -> StoredTier: ...

    @abstractmethod
    def put_raw(self, key: Key, data: bytes) -> None:
        """Have these bytes lie where the blob of `key` lies."""

    @abstractmethod
    def get_raw(self, key: Key) -> bytes | None:
        """What lies where the blob of `key` lies; None: nothing."""


class HostStore(Store):
    lasting = False

    def _make(self, capacity: int | None) -> HostTier:
        return HostTier(1 << 30 if capacity is None else capacity)

    def _blobs(self) -> dict[Key, bytes]:
        tier = self._opened[-1]
        assert isinstance(tier, HostTier)
        return tier._blobs

    def put_raw(self, key: Key, data: bytes) -> None:
        self._blobs()[key] = data

    def get_raw(self, key: Key) -> bytes | None:
        return self._blobs().get(key)


class DiskStore(Store):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def _make(self, capacity: int | None) -> DiskTier:
        return DiskTier(self.path, capacity)

    def put_raw(self, key: Key, data: bytes) -> None:
        (self.path / "pages" / f"{key.hex()}.kv").write_bytes(data)

    def get_raw(self, key: Key) -> bytes | None:
        path = self.path / "pages" / f"{key.hex()}.kv"
        return path.read_bytes() if path.exists() else None


class RedisStore(Store):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.prefix = url, f"test{next(_names)}"
        self._client: Any = redis.Redis.from_url(url)

    def _make(self, capacity: int | None) -> RedisTier:
        return RedisTier(self.url, capacity, prefix=self.prefix)

    def put_raw(self, key: Key, data: bytes) -> None:
        self._client.set(f"{self.prefix}:page:{key.hex()}", data)
        self._client.zadd(f"{self.prefix}:used", {key.hex(): 1.0})

    def get_raw(self, key: Key) -> bytes | None:
        found: bytes | None = self._client.get(f"{self.prefix}:page:{key.hex()}")
        return found

    def close(self) -> None:
        super().close()
        self._client.close()


class FsspecStore(Store):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self._fs, self._root = fsspec.core.url_to_fs(url)

    def _make(self, capacity: int | None) -> FsspecTier:
        return FsspecTier(self.url, capacity, refresh=0.0)

    def _path(self, key: Key) -> str:
        return f"{self._root}/pages/{key.hex()}.kv"

    def put_raw(self, key: Key, data: bytes) -> None:
        self._fs.pipe_file(self._path(key), data)

    def get_raw(self, key: Key) -> bytes | None:
        found: bytes | None = self._fs.cat_file(self._path(key)) if self._fs.exists(self._path(key)) else None
        return found

    def close(self) -> None:
        super().close()
        self._fs.rm(self._root, recursive=True)


def make_store(kind: str, path: Path, redis_url: str) -> Store:
    """An empty store of one of KINDS."""
    if kind == "host":
        return HostStore()
    if kind == "disk":
        return DiskStore(path / "kv")
    if kind == "redis":
        return RedisStore(redis_url)
    if kind == "memory":
        return FsspecStore(f"memory://test{next(_names)}")
    return FsspecStore(f"file://{path}/bucket")
