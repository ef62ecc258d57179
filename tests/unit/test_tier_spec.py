import logging
import socket
import sys
from pathlib import Path

import pytest

from support.kv import small_layout
from support.tiers import make_items
from tamis.errors import ConfigError
from tamis.kv.tiers.disk import DiskTier
from tamis.kv.tiers.host import HostTier
from tamis.kv.tiers.remote_fsspec import FsspecTier
from tamis.kv.tiers.spec import open_tiers, parse_tier

LAYOUT = small_layout()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("host:8GiB", ("host", "", 8 << 30, {}, "host:8GiB")),
        ("disk:/a b/c%20d?size=100GiB", ("disk", "/a b/c%20d", 100 << 30, {}, "disk:/a b/c%20d")),
        ("disk:kv?size=1", ("disk", "kv", 1, {}, "disk:kv")),
        ("redis://localhost", ("redis", "redis://localhost", None, {}, "redis://localhost")),
        (
            "rediss://me:pw@h:6380/2?size=1GB&prefix=p&timeout=0.5&ssl_cert_reqs=none",
            ("redis", "rediss://me:pw@h:6380/2", 10**9,
             {"prefix": "p", "timeout": "0.5", "ssl_cert_reqs": "none"}, "rediss://h:6380/2"),
        ),
        ("valkey://h/1", ("redis", "redis://h/1", None, {}, "valkey://h/1")),
        ("valkeys://:pw@h", ("redis", "rediss://:pw@h", None, {}, "valkeys://h")),
        (
            "fsspec:s3://bucket/kv?size=1TiB&endpoint_url=http://a:1",
            ("fsspec", "s3://bucket/kv", 1 << 40, {"endpoint_url": "http://a:1"}, "fsspec:s3://bucket/kv"),
        ),
        ("fsspec:sftp://me:pw@h/kv?key=x", ("fsspec", "sftp://me:pw@h/kv", None, {"key": "x"}, "fsspec:sftp://h/kv")),
    ],
)  # fmt: skip
def test_tiers_are_named_as_documented(spec: str, expected: tuple[object, ...]) -> None:
    found = parse_tier(spec)
    assert (found.kind, found.target, found.capacity, dict(found.options), found.shown) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "kv tier '' is not one of host:8GiB, disk:/path?size=100GiB, redis://host:6379/0 or fsspec:s3://bucket/path"),
        ("/path", "kv tier '/path' is not one of "),
        ("tape:/dev/st0", "kv tier 'tape:/dev/st0' is not one of "),
        ("disk:", "kv tier 'disk:' is not one of "),
        ("disk:?size=1GiB", "kv tier 'disk:' is not one of "),
        ("fsspec:", "kv tier 'fsspec:' is not one of "),
        ("disk:/a\0b?size=1GiB", "kv tier 'disk:/a\\x00b' names no directory: it holds a null character"),
        ("disk:~nobody.at.all/kv?size=1GiB", "kv tier 'disk:~nobody.at.all/kv' names no directory: "),
        ("host:", "size '' is not a number of bytes such as 8GiB or 500MB"),
        ("host:lots", "size 'lots' is not a number of bytes"),
        ("disk:/kv", "kv tier disk:/kv needs a size, such as disk:/kv?size=100GiB"),
        ("disk:/kv?size=", "size '' is not a number of bytes"),
        ("disk:/kv?size=1GiB&fast=1", "kv tier disk:/kv has no option 'fast'"),
        ("redis://h?maxmemory=1", "kv tier redis://h has no option 'maxmemory'"),
        ("redis:h", "kv tier 'redis:h' names no host and port"),
        ("redis://h:99999", "kv tier 'redis://h:99999' names no host and port"),
        ("redis://:pw@", "kv tier 'redis://' names no host and port"),
        ("disk:/\ud800?size=1GiB", "kv tier 'disk:/\\ud800' names no directory: "),
        ("redis://127.0.0.1:1?db=x", "kv tier redis://127.0.0.1:1: Invalid value for 'db'"),
        ("redis://127.0.0.1:1?ssl_cert_reqs=none", "kv tier redis://127.0.0.1:1: "),
        ("rediss://127.0.0.1:1?ssl_nonsense=1", "kv tier rediss://127.0.0.1:1: "),
        (f"redis://{'h' * 100}", f"kv tier redis://{'h' * 100}: "),
        ("redis://h?timeout=0", "kv tier redis://h: timeout='0' is not a number of seconds above 0"),
        ("redis://h?timeout=nan", "kv tier redis://h: timeout='nan' is not a number of seconds above 0"),
        ("redis://h?timeout=soon", "kv tier redis://h: timeout='soon' is not a number of seconds above 0"),
    ],
)  # fmt: skip
def test_what_names_no_tier_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_tiers([spec], LAYOUT, optional=True)
    assert str(caught.value).startswith(message)


def test_host_memory_comes_first_the_others_as_they_are_named(tmp_path: Path) -> None:
    specs = [f"disk:{tmp_path}/b?size=1MB", "fsspec:memory://order?size=3MB", "host:2MB", f"disk:{tmp_path}/a?size=1MB"]
    stack = open_tiers(specs, LAYOUT)
    assert [type(tier) for tier in stack.tiers] == [HostTier, DiskTier, FsspecTier, DiskTier]
    assert [one.capacity for one in stack.stats()] == [2_000_000, 1_000_000, 3_000_000, 1_000_000]
    assert [one.name for one in stack.stats()][1::2] == [f"disk:{tmp_path}/b", f"disk:{tmp_path}/a"]
    items = make_items(LAYOUT, 2)
    stack.write(items)
    assert all(tier.contains([key for key, _ in items]) == [True, True] for tier in stack.tiers)
    stack.close()
    assert open_tiers([], LAYOUT).contains([items[0][0]]) == [False]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["host:1MB", "host:2MB"], "kv tier host:2MB is named twice"),
        (["disk:/kv?size=1MB", "disk:/kv?size=2MB"], "kv tier disk:/kv is named twice"),
        (["disk:/kv?size=1MB", "disk:/kv/../kv/?size=2MB"], "kv tier disk:/kv/../kv/ is named twice"),
        (["redis://h?prefix=a", "redis://h?prefix=a"], "kv tier redis://h is named twice"),
        (["redis://me:pw@h/1", "redis://you@h/1"], "kv tier redis://h/1 is named twice"),
        (["host:1000"], "kv tier host:1000 has room for 1000 B, one page takes 4.1 KiB"),
        (["host:0"], "kv tier host:0 has room for 0 B, one page takes 4.1 KiB"),
    ],
)
def test_tiers_that_make_no_sense_are_refused(specs: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_tiers(specs, LAYOUT, optional=True)
    assert str(caught.value) == message


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_what_cannot_be_opened_is_an_error_or_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    broken = {
        f"disk:{tmp_path}/file/kv?size=1MB": f"kv tier disk:{tmp_path}/file/kv could not open its directory: ",
        f"redis://me:secret@127.0.0.1:{closed_port()}": "kv tier redis://127.0.0.1:",
        "fsspec:nosuch://x": "kv tier fsspec:nosuch://x could not open its store: ",
    }
    for spec, message in broken.items():
        caplog.clear()
        with pytest.raises(ConfigError) as caught:
            open_tiers(["host:1MB", spec], LAYOUT)
        assert str(caught.value).startswith(message)
        assert "secret" not in str(caught.value)
        stack = open_tiers([spec, "host:1MB"], LAYOUT, optional=True)
        assert [type(tier) for tier in stack.tiers] == [HostTier]
        warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert warnings[0].startswith(message)
        assert warnings[0].endswith("; the engine runs without this tier")


@pytest.mark.parametrize(("spec", "package"), [("redis://h", "redis"), ("fsspec:memory://x", "fsspec")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, spec: str, package: str) -> None:
    monkeypatch.delitem(sys.modules, f"tamis.kv.tiers.remote_{package}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"^kv tier {spec}: .*; try pip install 'tamis\[{package}\]'$"):
        open_tiers([spec], LAYOUT, optional=True)
