"""From the tiers into the pool: asking what they have, and loading it layer by layer."""

import threading
import time
from collections.abc import Sequence

from tamis.errors import TransferError
from tamis.kv.blob import PageBlob
from tamis.kv.manager import KVSequence, PageHold
from tamis.kv.offload.saving import MakeKeys, count_leading
from tamis.kv.pool import SparseKVPool
from tamis.kv.prefix import Tokens
from tamis.kv.tiers.base import Key, ReadPart, Tier
from tamis.kv.transfer import INDEX, MAIN, LayerPart, LayerTransferCounter, TransferTicket


class Lookup:
    """What the tiers have of the first pages of one sequence. `hits` is written by the thread that asks."""

    def __init__(self, tier: Tier, make_keys: MakeKeys, tokens: Tokens) -> None:
        """`make_keys` gives the content keys of the pages."""
        self.tokens = tokens
        self.keys: list[Key] = []
        self.hits: int | None = None
        """Pages from the first on that can be loaded; None: not known yet."""
        self.error: BaseException | None = None
        self.loads = 0
        """Loads that were tried."""
        self.noted = False
        """Whether the answer was counted."""
        self.asked = time.monotonic()
        self._tier, self._make_keys = tier, make_keys

    def run(self) -> None:
        """Ask. Raises TierError."""
        self.keys = self._make_keys()
        self.hits = count_leading(self._tier.contains(self.keys))

    def fail(self, error: BaseException) -> None:
        """Nothing that could be loaded is known of."""
        self.error, self.hits = error, 0


class PageLoad:
    """Pages on their way into a sequence.

    A loader thread writes to them under a lock and only as long as nobody has stopped it; so they can be given back as
    soon as it is stopped, however long the tier takes.
    """

    def __init__(
        self,
        tier: Tier,
        lookup: Lookup,
        keys: Sequence[Key],
        pool: SparseKVPool,
        counter: LayerTransferCounter,
        ticket: TransferTicket,
        sequence: KVSequence,
        hold: PageHold,
    ) -> None:
        """`hold` keeps the pages, one for each key, until the load has ended."""
        self.ticket, self.sequence, self.hold, self.lookup = ticket, sequence, hold, lookup
        self.keys = keys
        self.nbytes = len(keys) * pool.layout.bytes_per_page
        self.begun = time.monotonic()
        self.parts: set[tuple[int, LayerPart]] = set()
        """Layers and their parts that are in."""
        self.error: BaseException | None = None
        self.seconds: float | None = None
        """What it took, once all is in."""
        self.cancelled = False
        """Nobody waits for it."""
        self._tier, self._pool, self._counter = tier, pool, counter
        self._lock = threading.Lock()
        self._stopped = False

    # In the loader's thread

    def run(self) -> None:
        """Load everything. Raises TierError, or TransferError where the tier gave less than all parts."""
        layout = self._pool.layout
        self.begun = time.monotonic()
        if self._stopped or self.cancelled:
            return
        for layer in layout.dense_layers:
            self._complete(layer, INDEX)  # it has no such part, and nobody waits for it
        for part in self._tier.read(self.keys, layout):
            if not self._take(part):
                return
        missing = len(layout.local_layers) * 2 - len(self.parts)
        if missing:
            raise TransferError(f"{self._tier.name} left {missing} parts of {len(self.keys)} pages out")
        self.seconds = time.monotonic() - self.begun

    def _take(self, part: ReadPart) -> bool:
        """Put one part into the pool; False where nobody wants it any more."""
        kind = INDEX if part.part == "index" else MAIN
        blob = PageBlob(self._pool.layout, len(self.keys), part.tensors)
        with self._lock:
            if self._stopped or self.cancelled:
                return False
            self._pool.import_pages(self.hold.pages, blob, [part.layer], kind)
        self._complete(part.layer, kind)
        return True

    def _complete(self, layer: int, kind: LayerPart) -> None:
        with self._lock:
            if not self._stopped:
                self.parts.add((layer, kind))
                self._counter.complete(self.ticket, self._pool.layout.local_index(layer), kind)

    def fail(self, error: BaseException) -> None:
        """Have whoever waits for it know."""
        with self._lock:
            if not self._stopped:
                self.error = error
                self._counter.fail(self.ticket, error)

    # In the engine's thread

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.cancelled = True

    @property
    def has_begun(self) -> bool:
        """Whether the tier has given anything yet."""
        return self.share > 0

    @property
    def share(self) -> float:
        """How much of it has come in, 0 to 1, by parts of layers."""
        layout = self._pool.layout
        parts = len(layout.local_layers) * 2 - len(layout.dense_layers)
        return max(0, len(self.parts) - len(layout.dense_layers)) / parts

    @property
    def elapsed(self) -> float:
        """Seconds since a thread began with it, or it was queued."""
        return time.monotonic() - self.begun

    @property
    def is_late(self) -> bool:
        """Whether it has taken longer than it may."""
        return self._counter.is_late(self.ticket)

    def stop(self, *, wait: bool = False) -> bool:
        """Have nothing written to the pages from now on; False where just now something is, unless told to wait."""
        if not self._lock.acquire(blocking=wait):
            return False
        self._stopped = True
        self._lock.release()
        return True
