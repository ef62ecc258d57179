"""Pages in a Redis or Valkey server, which many machines may share.

    PREFIX:page:KEY     a page
    PREFIX:used         sorted set: when each page was last used
    PREFIX:pins         hash: what each owner has pinned, their keys one after the other
    PREFIX:lock         held while pins change and while room is made

A capacity is kept by whoever writes. Without one the server's own limit holds: what it evicts is a miss, pinned or not.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar
from urllib.parse import urlsplit

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tamis.errors import ConfigError, TierReadError
from tamis.kv.tiers.base import KEY_BYTES, Blob, Key
from tamis.kv.tiers.format import Rows
from tamis.kv.tiers.reader import Fetch
from tamis.kv.tiers.stored import Listed, StoredTier, describe

PREFIX = "tamis:kv"
"""What keys begin with unless told otherwise."""
_MEMBER = re.compile(rb"[0-9a-f]{64}")
_BATCH = 512
"""Commands that are sent at once."""
_FETCHED = 16 << 20
"""Bytes that are asked for at once."""
_LOCK_SECONDS = 10.0
_HELD_SECONDS = 60.0
"""After so long a lock is taken from a process that died with it."""


class RedisTier(StoredTier):
    """Strings in a server. No request waits longer than `timeout` seconds for the server's next byte."""

    least_fetch: ClassVar[int] = 256 << 10
    foreign_errors = (redis.RedisError, OSError)

    def __init__(self, url: str, capacity: int | None = None, *, prefix: str = PREFIX, timeout: float = 2.0) -> None:
        """`url` as redis://[[user]:password@]host[:port][/db]; all keys begin with `prefix`.

        Raises TierError where the server does not answer, ConfigError for what is not such a URL.
        """
        super().__init__(without_password(url) + ("" if prefix == PREFIX else f"?prefix={prefix}"), capacity)
        self._prefix = prefix
        self._used, self._pin_hash = f"{prefix}:used", f"{prefix}:pins"
        # Once more where a connection turns out to be lost, never where the server is slow.
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        try:
            # Any: the library's own types leave open whether an answer is one or is still to come.
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=retry, socket_read_size=1 << 20
            )
            with self._verb("connect"):
                self._client.ping()
                self._rescan()
        except (TypeError, ValueError) as error:  # some options are looked at by the first connection only
            raise ConfigError(f"kv tier {self.name}: {describe(error)}") from None

    def _name(self, key: Key) -> str:
        return f"{self._prefix}:page:{key.hex()}"

    def _ask(self, command: str, keys: Sequence[Key], *rest: object) -> Iterator[tuple[Key, Any]]:
        """Each page's answer to a command; an answer may be an error of the server's."""
        for start in range(0, len(keys), _BATCH):
            some = keys[start : start + _BATCH]
            pipe = self._client.pipeline(transaction=False)
            for key in some:
                pipe.execute_command(command, self._name(key), *rest)
            yield from zip(some, pipe.execute(raise_on_error=False), strict=True)

    def _list(self) -> Iterator[Listed]:
        used = {
            bytes.fromhex(member.decode()): float(score)
            for member, score in self._client.zrange(self._used, 0, -1, withscores=True)
            if _MEMBER.fullmatch(member)
        }
        for key, size in self._ask("STRLEN", list(used)):
            if not isinstance(size, Exception) and size:
                yield key, size, used[key]

    def _has(self, keys: Sequence[Key]) -> list[bool]:
        # Nothing at all may be there as a string that is empty.
        return [_is_no_string(size) or _answer(size) > 0 for _, size in self._ask("STRLEN", keys)]

    @contextmanager
    def _open(self, keys: Sequence[Key]) -> Iterator[Fetch]:
        def fetch(offset: int, rows: Rows) -> None:
            length = rows.shape[1]
            step = max(1, _FETCHED // max(1, length))
            for start in range(0, len(keys), step):
                some = self._ask("GETRANGE", keys[start : start + step], offset, offset + length - 1)
                for row, (key, data) in zip(rows[start : start + step], some, strict=True):
                    self._fill(row, key, data, offset)

        yield fetch

    def _fill(self, row: Rows, key: Key, data: Any, offset: int) -> None:
        if _is_no_string(data):
            raise TierReadError(key, str(data), corrupt=True)
        if isinstance(data, Exception):
            raise data
        if len(data) == len(row):
            row[:] = np.frombuffer(data, np.uint8)
            return
        # The server says nothing is there both for what has gone and for what is too short.
        size = int(self._client.strlen(self._name(key)))
        if 0 < size < offset + len(row):
            raise TierReadError(key, f"it ends after {size} bytes", corrupt=True)
        raise TierReadError(key, "it is not there" if not offset else "it went while it was read")

    def _put(self, blobs: dict[Key, tuple[Blob, float]]) -> None:
        for key, (blob, used) in blobs.items():
            pipe = self._client.pipeline(transaction=True)
            pipe.set(self._name(key), bytes(blob))
            pipe.zadd(self._used, {key.hex(): used})
            pipe.execute()

    def _drop(self, keys: Sequence[Key]) -> int:
        removed = sum(_answer(found) for _, found in self._ask("UNLINK", keys))
        for start in range(0, len(keys), _BATCH):
            self._client.zrem(self._used, *(key.hex() for key in keys[start : start + _BATCH]))
        return removed

    def _touch(self, uses: dict[Key, float]) -> None:
        if uses:
            # XX: what is evicted in this moment shall not be listed again.
            self._client.zadd(self._used, {key.hex(): used for key, used in uses.items()}, xx=True)

    def _exclusive(self) -> AbstractContextManager[object]:
        lock: AbstractContextManager[object] = self._client.lock(
            f"{self._prefix}:lock", timeout=_HELD_SECONDS, blocking_timeout=_LOCK_SECONDS
        )
        return lock

    def _load_pins(self) -> dict[str, list[Key]]:
        pins: dict[str, list[Key]] = {}
        for owner, keys in self._client.hgetall(self._pin_hash).items():
            whole = len(keys) // KEY_BYTES * KEY_BYTES
            pins[_text(owner)] = [keys[at : at + KEY_BYTES] for at in range(0, whole, KEY_BYTES)]
        return pins

    def _save_pins(self, owner: str, keys: list[Key]) -> None:
        if keys:
            self._client.hset(self._pin_hash, _raw(owner), b"".join(keys))
        else:
            self._client.hdel(self._pin_hash, _raw(owner))

    def _shut(self) -> None:
        self._client.close()


def without_password(url: str) -> str:
    """What of a URL may be shown: scheme, host, port and path."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _answer(found: Any) -> int:
    if isinstance(found, Exception):
        raise found
    return int(found)


def _is_no_string(found: Any) -> bool:
    """Whether something else lies under the key, which the server refuses to read."""
    return isinstance(found, redis.ResponseError) and str(found).startswith("WRONGTYPE")


def _raw(owner: str) -> bytes:
    return owner.encode("utf-8", "surrogatepass")


def _text(owner: bytes) -> str:
    return owner.decode("utf-8", "replace")
