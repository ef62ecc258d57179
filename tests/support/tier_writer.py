"""A process that writes to a disk tier until it is killed. It starts often: no more is imported than it needs."""

import itertools
from multiprocessing.connection import Connection

from tamis.kv.tiers.base import Key
from tamis.kv.tiers.disk import DiskTier


def write_for_ever(path: str, items: list[list[tuple[Key, bytes]]], reports: Connection) -> None:
    """Write one batch after the other, take them all out, and begin again; reports what was done.

    A number: this batch is written. None: from now on nothing may be there.
    """
    tier = DiskTier(path, 1 << 30)
    for number in itertools.cycle(range(len(items))):
        if number == 0:
            reports.send(None)
            tier.delete([key for batch in items for key, _ in batch])
        tier.write(items[number])
        reports.send(number)
