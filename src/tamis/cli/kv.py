"""`tamis kv`: what lies in a KV tier, whether it is whole, and what can go."""

import time
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.commands import Command, Group
from tamis.cli.options import AsJson, Debug

if TYPE_CHECKING:
    from tamis.kv.tiers.base import TierEntry
    from tamis.kv.tiers.stored import StoredTier

kv = typer.Typer(cls=Group, help="Look after the pages that KV tiers keep.", no_args_is_help=True)

Place = Annotated[
    str,
    typer.Argument(metavar="PATH", help="A directory, or a tier as redis://host:6379/0 or fsspec:s3://bucket/path."),
]
_CORRUPT = 1
"""Exit code where pages are not as they were written."""


@kv.command(cls=Command)
def ls(place: Place, as_json: AsJson = False, _debug: Debug = False) -> None:
    """List the pages, the last used first."""
    from rich.markup import escape

    from tamis.cli.output import new_table, print_json, print_table

    with closing(open_place(place)) as tier:
        entries = sorted(tier.scan(), key=lambda entry: entry.last_used or 0.0, reverse=True)
    if as_json:
        print_json({"tier": tier.name, "pages": [_facts(entry) for entry in entries]})
        return
    table = new_table(
        f"Pages in {escape(tier.name)}", (("page", False), ("bytes", True), ("last used", False), ("", False))
    )
    for entry in entries:
        table.add_row(entry.key.hex(), f"{entry.bytes:,}", _when(entry.last_used), "pinned" if entry.pinned else "")
    print_table(table)


@kv.command(cls=Command)
def stat(place: Place, as_json: AsJson = False, _debug: Debug = False) -> None:
    """Count the pages, their bytes and who has pinned them."""
    from rich.markup import escape

    from tamis.cli.output import key_values, print_json, print_table
    from tamis.units import show

    with closing(open_place(place)) as tier:
        facts = _stat_facts(tier)
    if as_json:
        print_json(facts)
        return
    rows = [
        ("pages", f"{facts['pages']:,}"),
        ("bytes", f"{facts['bytes']:,}"),
        ("pinned pages", f"{facts['pinned_pages']:,}"),
        *((f"pinned by {escape(show(owner))}", f"{count:,}") for owner, count in facts["owners"].items()),
        ("last used", f"{_when(facts['oldest_use'])} to {_when(facts['newest_use'])}"),
        ("set aside", f"{facts['set_aside']:,}"),
    ]
    print_table(key_values(f"KV tier {escape(tier.name)}", rows))


@kv.command(cls=Command)
def verify(
    place: Place,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the pages that are not whole.")] = False,
    as_json: AsJson = False,
    _debug: Debug = False,
) -> None:
    """Read every page and check it. Exit code 1 where one is not as it was written."""
    from tamis.cli.output import print_json

    with closing(open_place(place)) as tier:
        whole, broken = _verify(tier)
        deleted = tier.delete([bytes.fromhex(key) for key in broken]) if delete and broken else 0
    if as_json:
        print_json({"tier": tier.name, "whole": sum(whole.values()), "layouts": dict(whole), "broken": broken,
                    "deleted": deleted})  # fmt: skip
    else:
        for why in broken.values():
            print(why)
        print(f"{sum(whole.values()):,} pages of {len(whole)} layouts are whole, {len(broken):,} are not")
        if deleted:
            print(f"{deleted:,} pages deleted")
    if broken:
        raise typer.Exit(_CORRUPT)


@kv.command(cls=Command)
def gc(
    place: Place,
    size: Annotated[str | None, typer.Option(metavar="SIZE", help="Evict until so much is left: 50GiB.")] = None,
    as_json: AsJson = False,
    _debug: Debug = False,
) -> None:
    """Remove what is of no use, and with --size the pages that were used longest ago; pinned ones stay."""
    from tamis.cli.output import print_json
    from tamis.units import format_size, parse_size

    capacity = None if size is None else parse_size(size)
    with closing(open_place(place)) as tier:
        removed = tier.clean()
        evicted = 0 if capacity is None else tier.shrink(capacity)
        left = tier.stat()
    if as_json:
        print_json({"tier": tier.name, "removed": removed, "evicted": evicted, "pages": left.entries,
                    "bytes": left.bytes})  # fmt: skip
    else:
        print(f"{removed:,} leftovers removed, {evicted:,} pages evicted; {left.entries:,} pages are left, "
              f"{format_size(left.bytes)}")  # fmt: skip


def open_place(place: str) -> "StoredTier":
    """A store that is there. Raises ConfigError, TierError."""
    from tamis.errors import ConfigError
    from tamis.kv.tiers.disk import DiskTier
    from tamis.kv.tiers.spec import parse_tier

    kind = place.partition(":")[0]
    if kind == "host":
        raise ConfigError("kv tier host is the memory of a running process: nobody else can look at it")
    if kind in ("redis", "rediss", "valkey", "valkeys", "fsspec"):
        return parse_tier(place).open()
    return DiskTier(place.removeprefix("disk:").partition("?")[0], create=False)


def _verify(tier: "StoredTier") -> tuple[Counter[str], dict[str, str]]:
    """Whole pages by layout, and what is wrong with the others, by key."""
    from tamis.errors import TierReadError

    whole: Counter[str] = Counter()
    broken: dict[str, str] = {}
    for entry in tier.scan():
        try:
            whole[tier.verify(entry)] += 1
        except TierReadError as error:
            if error.corrupt:  # else it was evicted in this moment
                broken[entry.key.hex()] = str(error)
    return whole, broken


def _stat_facts(tier: "StoredTier") -> dict[str, Any]:
    entries = list(tier.scan())
    uses = [entry.last_used for entry in entries if entry.last_used is not None]
    return {
        "tier": tier.name,
        "pages": len(entries),
        "bytes": sum(entry.bytes for entry in entries),
        "pinned_pages": sum(entry.pinned for entry in entries),
        "owners": {owner: len(keys) for owner, keys in tier.owners().items()},
        "oldest_use": min(uses, default=None),
        "newest_use": max(uses, default=None),
        "set_aside": tier.set_aside(),
    }


def _facts(entry: "TierEntry") -> dict[str, Any]:
    return {"key": entry.key.hex(), "bytes": entry.bytes, "last_used": entry.last_used, "pinned": entry.pinned}


def _when(seconds: float | None) -> str:
    """Local time, for people."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
