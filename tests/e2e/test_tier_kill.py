"""A disk tier outlives the sudden death of whoever writes to it."""

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from support.kv import DENSE, SPARSE_KV
from support.tier_writer import write_for_ever
from support.tiers import make_items
from tamis.kv import KVLayout
from tamis.kv.tiers.base import Key
from tamis.kv.tiers.disk import DiskTier

KILLS = 100
LAYOUT = KVLayout((SPARSE_KV, DENSE), 2, 32, 16, 128, torch.float32)


def kill_a_writer(path: Path, items: list[list[tuple[Key, bytes]]], dice: random.Random) -> set[Key]:
    """Let a process write until some moment, and kill it; what it said is written."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tamis.kv.tiers.disk"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=write_for_ever, args=(str(path), items, theirs))
    process.start()
    theirs.close()
    written = follow(ours, items, dice.randrange(1, 5))
    time.sleep(dice.uniform(0, 0.01))
    process.kill()
    process.join()
    written = follow(ours, items, None, written)
    ours.close()
    return written


def follow(
    reports: Connection, items: list[list[tuple[Key, bytes]]], count: int | None, written: set[Key] | None = None
) -> set[Key]:
    """What so many reports (None: all there are until the writer's end) say is written."""
    written = set() if written is None else written
    try:
        while count is None or count > 0:
            number = reports.recv()
            if number is None:
                written.clear()
            else:
                written |= {key for key, _ in items[number]}
            count = None if count is None else count - 1
    except EOFError:
        assert count is None, "the writer ended before it was killed"
    return written


@pytest.mark.slow
def test_kill_9_at_any_moment_costs_nothing_that_was_written(tmp_path: Path) -> None:
    items = [make_items(LAYOUT, 3, salt=bytes([number])) for number in range(6)]
    expected = {key: blob for batch in items for key, blob in batch}
    dice = random.Random(0)
    in_the_middle = 0
    for _ in range(KILLS):
        written = kill_a_writer(tmp_path, items, dice)
        in_the_middle += any("-" in path.name and path.suffix != ".lock" for path in (tmp_path / "tmp").iterdir())
        tier = DiskTier(tmp_path, 1 << 30)
        assert [path.suffix for path in (tmp_path / "tmp").iterdir()] == [".lock"], "a temporary file is left"
        assert tier.set_aside() == 0, "a file has a page's name and is none"
        found = {entry.key: entry.bytes for entry in tier.scan()}
        assert written <= found.keys(), "a page that was written is gone"
        for key in found:
            assert (tmp_path / "pages" / f"{key.hex()}.kv").read_bytes() == expected[key]
        parts = list(tier.read(list(found), LAYOUT))
        assert len(parts) == (3 if found else 0)
        assert not any(bool(torch.isnan(tensor).any()) for part in parts for tensor in part.tensors.values())
        tier.close()
        assert list((tmp_path / "tmp").iterdir()) == []
    assert in_the_middle >= KILLS // 20, "hardly any writer was killed while it wrote"
