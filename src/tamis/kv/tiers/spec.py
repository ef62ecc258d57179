"""Tiers as people name them.

    host:8GiB
    disk:/path?size=100GiB
    redis://[[user]:password@]host[:port][/db][?size=50GiB&prefix=NAME&timeout=SECONDS]
    fsspec:s3://bucket/path[?size=1TiB&NAME=VALUE]

rediss:// is Redis with TLS; valkey:// and valkeys:// are the same. Other options than those shown go to the store: of
redis those of its URL (db, protocol, ssl_...), of fsspec any.
"""

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from tamis.errors import ConfigError, TierError
from tamis.kv.layout import KVLayout
from tamis.kv.tiers.disk import DiskTier
from tamis.kv.tiers.format import page_format
from tamis.kv.tiers.host import HostTier
from tamis.kv.tiers.stack import TierStack
from tamis.kv.tiers.stored import StoredTier
from tamis.units import format_size, parse_size, show

logger = logging.getLogger(__name__)

_REDIS = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
_FORMS = "host:8GiB, disk:/path?size=100GiB, redis://host:6379/0 or fsspec:s3://bucket/path"
_REDIS_OPTION = re.compile(r"db|protocol|ssl_\w+")
_CREDENTIALS = re.compile(r"//[^/@]*@")


@dataclass(frozen=True)
class TierSpec:
    """A tier that is not open yet."""

    kind: str
    """ "host", "disk", "redis" or "fsspec"."""
    target: str
    """Path or URL."""
    capacity: int | None
    """Bytes."""
    options: Mapping[str, str]
    shown: str
    """What was written, without credentials and options."""

    def open(self) -> StoredTier:
        """The tier. Raises TierError where it cannot be used now, ConfigError where a package is missing."""
        try:
            if self.kind == "redis":
                return self._open_redis()
            if self.kind == "fsspec":
                from tamis.kv.tiers.remote_fsspec import FsspecTier

                return FsspecTier(self.target, self.capacity, options=self.options)
        except ImportError as error:
            raise ConfigError(f"kv tier {self.shown}: {error}; try pip install 'tamis[{self.kind}]'") from error
        if self.kind == "disk":
            return DiskTier(self.target, self.capacity)
        assert self.capacity is not None
        return HostTier(self.capacity)

    def _open_redis(self) -> StoredTier:
        from tamis.kv.tiers.remote_redis import PREFIX, RedisTier

        own = {name: value for name, value in self.options.items() if name in ("prefix", "timeout")}
        rest = urlencode({name: value for name, value in self.options.items() if name not in own})
        url = self.target + (f"?{rest}" if rest else "")
        timeout = _seconds(self.shown, own.get("timeout", "2"))
        return RedisTier(url, self.capacity, prefix=own.get("prefix", PREFIX), timeout=timeout)


def parse_tier(spec: str) -> TierSpec:
    """What `spec` names. Raises ConfigError for what names no tier."""
    kind, _, rest = spec.partition(":")
    shown = _CREDENTIALS.sub("//", spec.partition("?")[0])
    if kind == "host":
        return TierSpec("host", "", parse_size(rest), {}, shown)
    target, _, query = (spec if kind in _REDIS else rest).partition("?")
    if kind not in ("disk", "fsspec", *_REDIS) or not target:
        raise ConfigError(f"kv tier {show(shown)} is not one of {_FORMS}")
    options = dict(parse_qsl(query, keep_blank_values=True))
    size = options.pop("size", None)
    capacity = None if size is None else parse_size(size)
    if kind in _REDIS:
        _check_redis(shown, target, options)
        return TierSpec("redis", _REDIS[kind] + target[len(kind) :], capacity, options, shown)
    if kind == "disk":
        target = _directory(shown, target)
        if capacity is None:
            raise ConfigError(f"kv tier {shown} needs a size, such as {shown}?size=100GiB")
        _refuse_options(shown, options)
    return TierSpec(kind, target, capacity, options, shown)


def _directory(shown: str, target: str) -> str:
    try:
        if b"\0" not in os.fsencode(target):
            return str(Path(target).expanduser())
        reason = "it holds a null character"
    except (RuntimeError, UnicodeError) as error:  # a user who has no home, half a character
        reason = str(error)
    raise ConfigError(f"kv tier {show(shown)} names no directory: {reason}")


def _check_redis(shown: str, target: str, options: Mapping[str, str]) -> None:
    try:
        parts = urlsplit(target)
        known = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known:
        raise ConfigError(f"kv tier {show(shown)} names no host and port")
    _seconds(shown, options.get("timeout", "2"))
    _refuse_options(
        shown,
        {name: "" for name in options if name not in ("prefix", "timeout") and not _REDIS_OPTION.fullmatch(name)},
    )


def _refuse_options(shown: str, options: Mapping[str, str]) -> None:
    if options:
        raise ConfigError(f"kv tier {shown} has no option {show(next(iter(options)))}")


def _seconds(shown: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"kv tier {shown}: timeout={show(text)} is not a number of seconds above 0")
    return seconds


def open_tiers(specs: Sequence[str], layout: KVLayout, *, optional: bool = False) -> TierStack:
    """The tiers named by `specs` as one: host memory first, the others in the order given.

    Raises ConfigError for what names no tier, cannot hold one page of `layout`, or cannot be used now: a directory that
    is not writable, a server that is down. With `optional` what cannot be used now is left out with a warning.
    """
    parsed = [parse_tier(spec) for spec in specs]
    _check(parsed, page_format(layout).blob_bytes)
    tiers: list[StoredTier] = []
    try:
        for spec in sorted(parsed, key=lambda one: one.kind != "host"):
            try:
                tiers.append(spec.open())
            except TierError as error:
                if not optional:
                    raise ConfigError(str(error)) from error
                logger.warning("%s; the engine runs without this tier", error)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return TierStack(tiers)


def _check(parsed: Sequence[TierSpec], page_bytes: int) -> None:
    seen: set[tuple[str, str, str | None]] = set()
    for spec in parsed:
        # Of one server, each prefix is a store of its own, whoever asks.
        target = os.path.realpath(spec.target) if spec.kind == "disk" else _CREDENTIALS.sub("//", spec.target)
        place = (spec.kind, target, spec.options.get("prefix"))
        if place in seen:
            raise ConfigError(f"kv tier {spec.shown} is named twice")
        seen.add(place)
        if spec.capacity is not None and spec.capacity < page_bytes:
            room, needed = format_size(spec.capacity), format_size(page_bytes)
            raise ConfigError(f"kv tier {spec.shown} has room for {room}, one page takes {needed}")
