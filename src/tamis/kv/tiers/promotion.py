"""Copying what was read from a slow tier into the faster ones, behind the back of whoever reads."""

import atexit
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tamis.errors import TierError
from tamis.kv.blob import PageBlob
from tamis.kv.layout import KVLayout
from tamis.kv.tiers.base import Key, ReadPart, Tier
from tamis.kv.tiers.format import encode_pages

logger = logging.getLogger(__name__)
_CLOSE_SECONDS = 5.0
_GROUP = 16
"""Pages that are encoded and written at once."""


@dataclass
class Promotion:
    """The first pages of a read, as they go by, and the tiers that are to have them."""

    tiers: Sequence[Tier]
    layout: KVLayout
    keys: Sequence[Key]
    """As many as there is room for."""
    tensors: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    cancelled: bool = False
    """Nobody needs it any more."""

    def take(self, part: ReadPart) -> None:
        """Keep a copy of what there is room for: the reader may do with its own what it likes."""
        for plane, values in part.tensors.items():
            self.tensors[plane] = values[: len(self.keys)].clone()

    def run(self) -> None:
        """Write the pages."""
        for start in range(0, len(self.keys), _GROUP):
            if self.cancelled:
                return
            some = range(start, min(start + _GROUP, len(self.keys)))
            keys = [self.keys[at] for at in some]
            tensors = {name: tensor[some.start : some.stop] for name, tensor in self.tensors.items()}
            blobs = encode_pages(self.layout, keys, PageBlob(self.layout, len(keys), tensors))
            items = list(zip(keys, blobs, strict=True))
            for tier in self.tiers:
                try:
                    tier.write(items)
                except TierError as error:
                    logger.warning("pages were not copied to a faster tier: %s", error)


class Promoter:
    """A thread that runs one promotion at a time. One more may wait, others are dropped: they are only copies."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: Promotion | None = None
        self._running: Promotion | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def offer(self, promotion: Promotion) -> None:
        """Have it run, unless another one waits already."""
        with self._changed:
            if self._closed or self._waiting is not None:
                return
            self._waiting = promotion
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tamis-kv-promote", daemon=True)
                self._thread.start()
                atexit.register(self.close)  # a thread that is inside of torch then takes the process down
            self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Wait until nothing runs or waits; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._running is None, seconds)

    def close(self) -> None:
        """End the thread once it is done with what it does now; a tier that takes long is not waited for."""
        with self._changed:
            self._closed, self._waiting = True, None
            if self._running is not None:
                self._running.cancelled = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
            atexit.unregister(self.close)

    def _run(self) -> None:
        while (promotion := self._next()) is not None:
            try:
                promotion.run()
            except Exception:  # the pages are where they were
                logger.exception("pages could not be copied to a faster tier")
            finally:
                with self._changed:
                    self._running = None
                    self._changed.notify_all()

    def _next(self) -> Promotion | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closed)
            self._running, self._waiting = self._waiting, None
            return self._running
