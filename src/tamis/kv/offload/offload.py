"""Pages on their way between one pool and the tiers: what an engine has to do with its tiers."""

import hashlib
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

from tamis.kv.manager import KVManager
from tamis.kv.offload.between import Between
from tamis.kv.offload.figures import Failures, OffloadStats
from tamis.kv.offload.loader import PageLoader
from tamis.kv.offload.saver import PageSaver
from tamis.kv.offload.saving import MakeKeys
from tamis.kv.offload.settings import OffloadConfig
from tamis.kv.tiers.base import Tier, TierStat
from tamis.kv.tiers.keys import page_keys
from tamis.kv.tiers.stack import TierStack

_CLOSE_SECONDS = 1.0
"""That a thread may take to end, once nothing is left to write."""


class KVOffload:
    """Loads and saves the pages of one KVManager. For the manager's own thread alone.

    Nothing here waits for a tier: threads do, and `poll` looks between two steps at what has become of their work.
    """

    def __init__(self, manager: KVManager, tier: Tier, fingerprint: str, config: OffloadConfig | None = None) -> None:
        """`fingerprint`: of the model that computes the pages. The tiers are this object's from now on."""
        self.config, self.tier = config or OffloadConfig(), tier
        self._layout, self._fingerprint = manager.pool.layout, fingerprint
        told = f"{fingerprint} {self._layout.fingerprint()}".encode()
        self.identity = hashlib.sha256(told).hexdigest()[:16]
        """Of model and layout: what is kept under another one is of no use here."""
        self._news = threading.Event()
        self._stats, self._failures = OffloadStats(), Failures()
        between = Between(manager, tier, self._keys, self.config, self._stats, self._failures, self._news.set)
        self.loader, self.saver = PageLoader(between), PageSaver(between)

    def poll(self) -> None:
        """See what has become of everything, and hand out the next work."""
        self.loader.poll()
        self.saver.poll()

    def wait(self, seconds: float) -> None:
        """Until there is something for `poll` to see, at most so long."""
        self._news.wait(seconds)
        self._news.clear()

    @property
    def is_busy(self) -> bool:
        """Whether pages are being moved, and still get on."""
        return self.loader.is_busy or self.saver.is_busy

    @property
    def is_writing(self) -> bool:
        """Whether a thread still writes, however long it takes: there may be more to do once it has."""
        return not self.saver.writers.is_idle

    @property
    def stats(self) -> OffloadStats:
        """Counters as they stand."""
        workers = (self.loader.lookers, self.loader.loaders, self.saver.writers)
        return replace(
            self._stats,
            load_bytes_per_second=self.loader.rate.bytes_per_second,
            save_bytes_per_second=self.saver.rate.bytes_per_second,
            waiting_pages=self.saver.waiting_pages,
            failures=self._failures.counts,
            worker_deaths=sum(each.deaths for each in workers),
            resting=self.loader.is_resting,
        )

    def tier_stats(self) -> list[TierStat]:
        """Of each tier, the fastest first. Any thread may ask."""
        return self.tier.stats() if isinstance(self.tier, TierStack) else [self.tier.stat()]

    def close(self) -> None:
        """Write what waits, for `flush_seconds` at most, and close the tiers."""
        deadline = time.monotonic() + self.config.flush_seconds
        while self.is_busy and time.monotonic() < deadline:
            self.poll()
            self.wait(0.05)
        self.saver.give_up()
        for workers in (self.loader.lookers, self.loader.loaders, self.saver.writers):
            workers.stop(_CLOSE_SECONDS)
        self.tier.close()

    def _keys(self, token_ids: Sequence[int], salt: Hashable) -> MakeKeys:
        """The content keys of the pages of these tokens, for a thread that has the time to work them out."""
        told = str(salt).encode("utf-8", "surrogatepass")
        return partial(page_keys, self._fingerprint, self._layout, told, token_ids, self._layout.page_size)
