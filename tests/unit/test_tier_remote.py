"""What only a server or a bucket can meet: it is slow, it is full, it is gone, and comes back."""

import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest
import redis

from support.kv import small_layout
from support.redis_server import RedisServer, redis_server
from support.tiers import make_items
from tamis.errors import TierError, TierReadError
from tamis.kv.tiers.format import page_format
from tamis.kv.tiers.remote_fsspec import FsspecTier
from tamis.kv.tiers.remote_redis import RedisTier
from tamis.kv.tiers.stored import StoredTier

LAYOUT = small_layout()
SIZE = page_format(LAYOUT).blob_bytes
ITEMS = make_items(LAYOUT, 4)
KEYS = [key for key, _ in ITEMS]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


def read(tier: StoredTier, *numbers: int) -> None:
    for _ in tier.read([KEYS[number] for number in numbers], LAYOUT):
        pass


def test_a_lost_server_is_a_counted_error_and_found_again(server: RedisServer) -> None:
    tier = RedisTier(server.url, timeout=1.0)
    tier.write(ITEMS)
    server.stop()
    for use in (
        lambda: read(tier, 0),
        lambda: tier.contains(KEYS),
        lambda: tier.write(ITEMS),
        lambda: list(tier.scan()),
    ):
        with pytest.raises(TierError, match=rf"^kv tier redis://127.0.0.1:{server.port}/0 could not "):
            use()
    assert tier.stat().errors == 4
    server.start()
    assert tier.contains(KEYS) == [False] * 4
    tier.write(ITEMS)
    read(tier, 0, 1, 2, 3)


def test_connections_that_were_cut_are_made_anew(server: RedisServer) -> None:
    tier = RedisTier(server.url)
    tier.write(ITEMS)
    with redis.Redis(port=server.port) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    read(tier, 0, 1, 2, 3)
    assert tier.stat().errors == 0


def test_a_server_that_hangs_is_given_up_in_time(server: RedisServer) -> None:
    tier = RedisTier(server.url, timeout=0.2)
    tier.write(ITEMS)
    with server.frozen():
        for use in (lambda: read(tier, 0), lambda: tier.contains(KEYS), lambda: tier.write(ITEMS)):
            started = time.monotonic()
            with pytest.raises(TierError):
                use()
            assert time.monotonic() - started < 5.0
    assert tier.stat().errors == 3
    read(tier, 0, 1, 2, 3)


def test_a_full_server_keeps_what_it_has(server: RedisServer) -> None:
    tier = RedisTier(server.url)
    tier.write(ITEMS[:1])
    with redis.Redis(port=server.port) as client:
        client.config_set("maxmemory", "1")
        with pytest.raises(TierError, match=r"could not write: .*maxmemory"):
            tier.write(ITEMS)
        client.config_set("maxmemory", "0")
    assert tier.contains(KEYS) == [True, False, False, False]
    read(tier, 0)


def test_what_the_server_evicted_is_a_miss_and_is_not_counted_as_room(server: RedisServer) -> None:
    tier = RedisTier(server.url, 4 * SIZE)
    tier.write(ITEMS)
    with redis.Redis(port=server.port) as client:
        client.delete(*client.keys("tamis:kv:page:*")[:2])
    assert sum(tier.contains(KEYS)) == 2
    with pytest.raises(TierReadError, match="it is not there"):
        read(tier, 0, 1, 2, 3)
    assert RedisTier(server.url).stat().bytes == 2 * SIZE
    tier.write(ITEMS)
    read(tier, 0, 1, 2, 3)
    assert tier.stat().evictions == 0


def test_something_else_under_a_pages_name_is_taken_out(server: RedisServer) -> None:
    tier = RedisTier(server.url)
    with redis.Redis(port=server.port) as client:
        client.lpush(f"tamis:kv:page:{KEYS[0].hex()}", "hello")
        assert tier.contains(KEYS) == [True, False, False, False]
        with pytest.raises(TierReadError, match="WRONGTYPE") as caught:
            read(tier, 0)
        assert caught.value.corrupt
        assert not client.exists(f"tamis:kv:page:{KEYS[0].hex()}")


def test_something_else_in_the_list_of_pages_is_passed_over(server: RedisServer) -> None:
    tier = RedisTier(server.url, 3 * SIZE)
    tier.write(ITEMS[:2])
    with redis.Redis(port=server.port) as client:
        client.zadd("tamis:kv:used", {"zz": 1, "ab": 2, b"\xff": 3, "0" * 63: 4, "A" * 64: 5})
        client.hset("tamis:kv:pins", b"\xff", b"short")
    again = RedisTier(server.url, 3 * SIZE)
    assert {entry.key for entry in again.scan()} == set(KEYS[:2])
    again.write(ITEMS[2:])
    assert sum(again.contains(KEYS)) == 3


def test_a_page_that_went_while_it_was_read_is_not_listed_again(server: RedisServer) -> None:
    tier = RedisTier(server.url)
    tier.write(ITEMS)
    parts = tier.read(KEYS, LAYOUT)
    next(parts)
    with redis.Redis(port=server.port) as client:
        RedisTier(server.url).delete(KEYS[:1])
        assert len(list(parts)) == 9, "all of it had been fetched"
        assert client.zcard("tamis:kv:used") == 3


def test_prefixes_are_stores_of_their_own_and_nothing_else_is_touched(server: RedisServer) -> None:
    first, second = RedisTier(server.url, 2 * SIZE, prefix="a"), RedisTier(server.url, prefix="b")
    with redis.Redis(port=server.port) as client:
        client.set("mine", "1")
        first.write(ITEMS[:2])
        second.write(ITEMS[2:])
        assert second.contains(KEYS) == [False, False, True, True]
        first.write(ITEMS[2:3])
        assert second.contains(KEYS) == [False, False, True, True]
        assert client.get("mine") == b"1"


def test_a_server_that_is_down_cannot_be_opened(server: RedisServer) -> None:
    server.stop()
    with pytest.raises(TierError, match=r"^kv tier redis://127.0.0.1:\d+/0 could not connect: "):
        RedisTier(server.url.replace("//", "//user:secret@"))


class Failing:
    """A call of a file system that fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self.error


@pytest.fixture
def bucket() -> Iterator[str]:
    yield "memory://bucket"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_whatever_a_store_raises_is_a_counted_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FsspecTier(bucket, refresh=0.0)
    tier.write(ITEMS)
    filesystem = type(fsspec.filesystem("memory"))
    fresh = make_items(LAYOUT, 1, salt=b"x")
    calls: dict[str, Callable[[], object]] = {
        "cat_file": lambda: read(tier, 0),
        "ls": lambda: tier.contains([fresh[0][0]]),
        "pipe_file": lambda: tier.write(fresh),
        "rm_file": lambda: tier.delete(KEYS),
    }
    for count, (name, use) in enumerate(calls.items()):
        with monkeypatch.context() as patch:
            patch.setattr(filesystem, name, Failing(RuntimeError("the cloud is\n down")))
            with pytest.raises(TierError, match=r"^kv tier fsspec:memory://bucket could not .*: the cloud is down$"):
                use()
        assert tier.stat().errors == count + 1
    read(tier, 0, 1, 2, 3)
    assert tier.stat().corrupt == 0


def test_a_listing_is_not_read_again_for_every_look_up(bucket: str) -> None:
    first, second = FsspecTier(bucket, refresh=3600.0), FsspecTier(bucket, refresh=0.0)
    first.write(ITEMS[:1])
    second.write(ITEMS[1:])
    assert first.contains(KEYS) == [True, False, False, False]
    assert second.contains(KEYS) == [True] * 4
    assert FsspecTier(bucket).contains(KEYS) == [True] * 4


def test_a_local_store_gives_names_to_whole_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FsspecTier(f"file://{tmp_path}/kv")
    filesystem = type(fsspec.filesystem("file"))
    for name in ("mv", "pipe_file"):
        with monkeypatch.context() as patch:
            patch.setattr(filesystem, name, Failing(OSError(28, "No space left on device")))
            with pytest.raises(TierError, match="No space left on device"):
                tier.write(ITEMS)
        assert [*(tmp_path / "kv" / "pages").iterdir(), *(tmp_path / "kv" / "tmp").iterdir()] == []
    (tmp_path / "kv" / "tmp" / "new").write_text("being written")
    (tmp_path / "kv" / "tmp" / "old").write_text("left over")
    os.utime(tmp_path / "kv" / "tmp" / "old", (1, 1))
    FsspecTier(f"file://{tmp_path}/kv")
    assert [path.name for path in (tmp_path / "kv" / "tmp").iterdir()] == ["new"]


def test_a_store_that_is_full_can_still_be_opened_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FsspecTier(f"file://{tmp_path}/kv").write(ITEMS)
    filesystem = type(fsspec.filesystem("file"))
    monkeypatch.setattr(filesystem, "pipe_file", Failing(OSError(28, "No space left on device")))
    tier = FsspecTier(f"file://{tmp_path}/kv")
    read(tier, 0, 1, 2, 3)
    assert tier.stat().errors == 1
    monkeypatch.setattr(filesystem, "pipe_file", Failing(OSError(30, "Read-only file system")))
    with pytest.raises(TierError, match=r"could not open its store: .*Read-only file system"):
        FsspecTier(f"file://{tmp_path}/kv")


def test_a_store_that_does_not_say_when_a_page_was_written_is_no_trouble(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = type(fsspec.filesystem("memory"))
    ls = filesystem.ls
    times: dict[str, Any] = {}

    def timeless(self: Any, path: str, detail: bool = True, **more: Any) -> Any:
        return [{name: value for name, value in info.items() if name != "created"} | times for info in ls(self, path)]

    FsspecTier(bucket).write(ITEMS)
    monkeypatch.setattr(filesystem, "ls", timeless)
    assert {entry.last_used for entry in FsspecTier(bucket).scan()} == {None}
    for more, expected in (({"LastModified": datetime(2026, 1, 1, tzinfo=UTC)}, 1767225600.0), ({"mtime": 5}, 5.0)):
        times.update(more)
        assert {entry.last_used for entry in FsspecTier(bucket).scan()} == {expected}


def test_credentials_are_not_shown() -> None:
    with pytest.raises(TierError) as caught:
        FsspecTier("sftp://user:secret@127.0.0.1:1/kv?token=secret")
    assert "secret" not in str(caught.value)


def test_stores_of_one_server_have_names_of_their_own(server: RedisServer) -> None:
    """They are told apart in metrics."""
    names = [RedisTier(server.url, prefix=prefix).name for prefix in ("tamis:kv", "a", "b")]
    assert names == [server.url, f"{server.url}?prefix=a", f"{server.url}?prefix=b"]
