import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.cli import invoke
from support.kv import small_layout
from support.tiers import make_items
from tamis.kv.tiers.disk import DiskTier
from tamis.kv.tiers.format import page_format
from tamis.kv.tiers.remote_fsspec import FsspecTier

LAYOUT, STAGE = small_layout(), small_layout(start_layer=3)
SIZE = page_format(LAYOUT).blob_bytes
ITEMS = [*make_items(LAYOUT, 3), *make_items(STAGE, 1)]
KEYS = [key.hex() for key, _ in ITEMS]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Four pages of two layouts, the first the last used; the second is pinned."""
    tier = DiskTier(tmp_path / "kv")
    tier.write(ITEMS)
    tier.pin([ITEMS[1][0]], "notes")
    tier.close()
    for number in range(4):
        os.utime(page(tmp_path / "kv", number), (4000 - number, 4000 - number))
    return tmp_path / "kv"


def page(place: Path, number: int) -> Path:
    return place / "pages" / f"{KEYS[number]}.kv"


def spoil(place: Path, number: int) -> None:
    data = bytearray(page(place, number).read_bytes())
    data[-100] ^= 1
    page(place, number).write_bytes(data)


def kv(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = invoke("kv", *arguments, "--json")
    assert (result.code, result.err) == (code, "")
    facts = json.loads(result.out)
    assert isinstance(facts, dict)
    return facts


def test_ls_lists_the_pages_the_last_used_first(place: Path) -> None:
    pages = kv("ls", str(place))["pages"]
    assert [one["key"] for one in pages] == KEYS
    assert [one["bytes"] for one in pages] == [len(blob) for _, blob in ITEMS]
    assert [one["pinned"] for one in pages] == [False, True, False, False]
    assert [one["last_used"] for one in pages] == [4000.0, 3999.0, 3998.0, 3997.0]
    rows = [line.split() for line in invoke("kv", "ls", f"disk:{place}").out.splitlines()]
    assert [row[0] for row in rows if row and len(row[0]) == 64] == KEYS
    assert [row[0] for row in rows if row[-1:] == ["pinned"]] == KEYS[1:2]


def test_stat_counts_pages_bytes_and_owners(place: Path) -> None:
    (place / "bad" / "x").write_text("set aside")
    assert kv("stat", str(place)) == {
        "tier": f"disk:{place}", "pages": 4, "bytes": sum(len(blob) for _, blob in ITEMS), "pinned_pages": 1,
        "owners": {"notes": 1}, "oldest_use": 3997.0, "newest_use": 4000.0, "set_aside": 1,
    }  # fmt: skip
    out = invoke("kv", "stat", str(place)).out
    assert "pinned by 'notes'" in out
    assert f"{sum(len(blob) for _, blob in ITEMS):,}" in out


def test_an_owners_name_is_shown_as_it_is_and_does_nothing(tmp_path: Path) -> None:
    DiskTier(tmp_path / "[red]").pin([ITEMS[0][0]], "[bold]a\x1b[2J")
    out = invoke("kv", "stat", str(tmp_path / "[red]")).out
    assert "pinned by '[bold]a\\x1b[2J'" in out
    assert "[red]" in out


def test_verify_reads_every_byte(place: Path) -> None:
    whole = kv("verify", str(place))
    assert (whole["whole"], whole["broken"], whole["deleted"]) == (4, {}, 0)
    assert whole["layouts"] == {LAYOUT.fingerprint(): 3, STAGE.fingerprint(): 1}
    spoil(place, 2)
    broken = kv("verify", str(place), code=1)
    assert (broken["whole"], list(broken["broken"]), broken["deleted"]) == (3, [KEYS[2]], 0)
    result = invoke("kv", "verify", str(place))
    assert result.code == 1
    assert f"page {KEYS[2]} cannot be read: layer 5's main part does not match its checksum\n" in result.out
    assert result.out.endswith("3 pages of 2 layouts are whole, 1 are not\n")
    assert page(place, 2).exists(), "who only looks changes nothing"
    assert kv("verify", str(place), "--delete", code=1)["deleted"] == 1
    assert kv("verify", str(place))["whole"] == 3


def test_gc_removes_leftovers_and_evicts_but_what_is_pinned(place: Path) -> None:
    (place / "bad" / "x").write_text("set aside")
    assert kv("gc", str(place)) == {
        "tier": f"disk:{place}", "removed": 1, "evicted": 0, "pages": 4, "bytes": sum(len(blob) for _, blob in ITEMS),
    }  # fmt: skip
    assert kv("gc", str(place), "--size", str(2 * SIZE))["evicted"] == 2
    assert [one["key"] for one in kv("ls", str(place))["pages"]] == KEYS[:2]
    out = invoke("kv", "gc", str(place), "--size", "0").out
    assert out == f"0 leftovers removed, 1 pages evicted; 1 pages are left, {SIZE / 1024:.1f} KiB\n"
    assert [one["key"] for one in kv("ls", str(place))["pages"]] == KEYS[1:2]


def test_other_stores_are_looked_after_alike() -> None:
    tier = FsspecTier("memory://cli")
    tier.write(ITEMS)
    assert kv("verify", "fsspec:memory://cli")["whole"] == 4
    assert kv("gc", "fsspec:memory://cli", "--size", "0")["evicted"] == 4
    assert kv("stat", "fsspec:memory://cli")["oldest_use"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "{}/none"), "{}/none is not a directory of KV pages"),
        (("stat", "host:1GiB"), "kv tier host is the memory of a running process: nobody else can look at it"),
        (("verify", "redis://127.0.0.1:1"), "kv tier redis://127.0.0.1:1 could not connect: "),
        (("gc", "{}", "--size", "much"), "size 'much' is not a number of bytes such as 8GiB or 500MB"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = invoke("kv", *(argument.format(tmp_path) for argument in arguments))
    assert result.code == 2
    assert result.err.startswith("error: " + message.format(tmp_path))
    assert result.told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_verbs() -> None:
    out = invoke("kv", "--help").out
    assert all(verb in out for verb in ("ls", "stat", "verify", "gc"))
