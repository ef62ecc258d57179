"""From the pool into the tiers: what is to be written, and writing it."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tamis.kv.manager import PageHold
from tamis.kv.offload.figures import Failures
from tamis.kv.pool import SparseKVPool
from tamis.kv.prefix import PrefixNode, Stored
from tamis.kv.tiers.base import Key, Tier
from tamis.kv.tiers.format import encode_pages
from tamis.kv.tiers.stack import TierStack

MakeKeys = Callable[[], list[Key]]


def count_leading(found: Sequence[bool]) -> int:
    """How many are true before the first that is not."""
    return ([*found, False]).index(False)


class SaveTicket:
    """Who waits for pages to be written and pinned."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        """The pages are pinned under this name."""
        self.done = threading.Event()
        self.pages = 0
        """Pages from the first on that are in the tiers, once it is done."""
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """They are not."""
        self.error = error
        self.done.set()


@dataclass(eq=False)
class SavePath:
    """A path in the tree, some pages of which are to be written."""

    nodes: tuple[PrefixNode, ...]
    """From the root down."""
    make_keys: MakeKeys
    """The content keys of all of them."""
    ticket: SaveTicket | None = None
    keys: list[Key] = field(default_factory=list)
    """Once the first pages were written."""
    begun: int = 0
    """Pages from the first on that were looked at."""

    def next_batch(self, most: int) -> list[int]:
        """Places of the next pages to write, at most so many; empty where there is nothing left to do."""
        batch: list[int] = []
        while self.begun < len(self.nodes) and len(batch) < most:
            node = self.nodes[self.begun]
            if node.parent is None:  # evicted, and with it all below
                self.begun = len(self.nodes)
            else:
                # Whoever has a ticket cannot rely on what a tier may have evicted since.
                if node.stored in (Stored.NO, Stored.WAITS) or self.ticket is not None:
                    batch.append(self.begun)
                self.begun += 1
        return batch


class PageSave:
    """Some pages of a path being written. They are copied first, so that the pool does not wait for the tiers."""

    def __init__(self, tier: Tier, pool: SparseKVPool, path: SavePath, places: Sequence[int], hold: PageHold) -> None:
        self.path, self.places = path, places
        self.hold: PageHold | None = hold
        """Of the pages, until they are copied."""
        self.nodes = [path.nodes[place] for place in places]
        self.spoiled = False
        """What is written may be wrong."""
        self.copied = False
        self.has_ended = False
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.nbytes = 0
        self._tier, self._pool = tier, pool

    def run(self) -> None:
        """Copy and write. Raises TierError."""
        pages = [node.page for node in self.nodes]
        blob = self._pool.export_pages(pages, wait=False)
        self.copied = True
        started = time.monotonic()
        self.path.keys = self.path.keys or self.path.make_keys()
        keys = [self.path.keys[place] for place in self.places]
        items = list(zip(keys, encode_pages(self._pool.layout, keys, blob), strict=True))
        self._tier.write(items)
        self.nbytes = blob.nbytes
        self.seconds = time.monotonic() - started
        self.has_ended = True

    def fail(self, error: BaseException) -> None:
        """The pages stay unwritten."""
        self.error, self.copied, self.has_ended = error, True, True


class PagePin:
    """Pins what was written of a path, behind the writing of it, instead of what its owner had pinned before."""

    def __init__(self, tier: Tier, path: SavePath, ticket: SaveTicket, failures: Failures) -> None:
        self._tier, self._path, self._ticket, self._failures = tier, path, ticket, failures

    def run(self) -> None:
        """Pin. Raises TierError."""
        # What is in host memory alone would be gone with the process.
        tier = self._tier.lasting if isinstance(self._tier, TierStack) else self._tier
        keys = self._path.keys or self._path.make_keys()
        keys = keys[: count_leading(tier.contains(keys))]
        if keys:
            tier.pin(keys, self._ticket.owner, replace=True)
        # What was there may have been evicted before it was pinned.
        self._ticket.pages = count_leading(tier.contains(keys))
        self._ticket.done.set()

    def fail(self, error: BaseException) -> None:
        """Tell who waits."""
        self._failures.add("pin", error)
        self._ticket.fail(error)


class PageDelete:
    """Takes pages out of the tiers again, behind the writing of them."""

    def __init__(self, tier: Tier, make_keys: MakeKeys, places: Sequence[int], failures: Failures) -> None:
        self._tier, self._make_keys, self._places, self._failures = tier, make_keys, places, failures

    def run(self) -> None:
        """Delete. Raises TierError."""
        keys = self._make_keys()
        self._tier.delete([keys[place] for place in self._places])

    def fail(self, error: BaseException) -> None:
        """They stay."""
        self._failures.add("delete", error)
