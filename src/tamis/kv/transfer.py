"""Layers that are still on their way into the pool while the forward pass is already running.

A producer thread loads pages layer by layer and reports each part; the reader, before it looks at a layer, waits for
the loads its step depends on. A load that fails, is given up or does not arrive in time raises in the reader: it never
hangs and never yields bytes.
"""

import enum
import threading
import time
from collections.abc import Callable, Iterable

from tamis.errors import ConfigError, LayerNotLocalError, NotALayerIdError, TransferError
from tamis.kv.layout import MAIN_PLANES, check_int
from tamis.kv.slots import as_tuple


class LayerPart(enum.Flag):
    """What can arrive of a layer on its own."""

    MAIN = enum.auto()
    """Main K and V."""
    INDEX = enum.auto()
    """The index planes, whichever the layer has."""


MAIN = LayerPart.MAIN
INDEX = LayerPart.INDEX
NOTHING = LayerPart(0)


MAX_TIMEOUT = threading.TIMEOUT_MAX
"""Seconds that a thread can wait at most."""
_ASK_SECONDS = 0.05
"""How often a waiting reader asks whether it is still worth its while."""


def part_of(plane: str) -> LayerPart:
    """The part of its layer that a plane, "k", "v", "index_k" or "index_v", arrives with."""
    return MAIN if plane in MAIN_PLANES else INDEX


class TransferTicket:
    """One load, from `LayerTransferCounter.begin` to `release`. Opaque: only its counter reads or changes it."""

    def __init__(self, counter: "LayerTransferCounter", number: int, timeout: float, pause: float) -> None:
        self._counter = counter
        self._number = number
        self._timeout, self._pause = timeout, pause
        self._begun = self._last = time.monotonic()
        self._arrived = [NOTHING] * counter.num_layers
        self._error: BaseException | None = None
        self._released = False

    def __repr__(self) -> str:
        return f"TransferTicket({self._number})"

    def _has(self, local_layer: int, planes: LayerPart) -> bool:
        return planes in self._arrived[local_layer]

    @property
    def _seconds_left(self) -> float:
        return min(self._begun + self._timeout, self._last + self._pause) - time.monotonic()

    @property
    def _abandoned(self) -> bool:
        return self._released and any(parts != MAIN | INDEX for parts in self._arrived)


class LayerTransferCounter:
    """Which parts of which local layers have arrived, for up to `slots` loads at once.

    One producer thread a ticket, one reader at a time: the tickets given to `consume` are the reader's until the next
    `consume`. All methods may be called from any thread.
    """

    def __init__(self, num_layers: int, slots: int = 3, timeout: float = 30.0) -> None:
        """`num_layers` of this pipeline stage; `timeout` in seconds, from `begin` to the last part of a load."""
        check_int("num_layers", num_layers, 1)
        check_int("slots", slots, 1)
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= MAX_TIMEOUT:
            raise ConfigError(f"timeout={timeout!r} must be above 0 and at most {MAX_TIMEOUT:g} seconds")
        self.num_layers = num_layers
        self.slots = slots
        self.timeout = timeout
        self._changed = threading.Condition()
        self._in_use = 0
        self._begun = 0
        self._consumed: tuple[TransferTicket, ...] = ()
        self._give_up: Callable[[], None] = _keep_waiting
        self.waited = 0.0
        """Seconds that readers have waited so far."""

    def begin(self, timeout: float | None = None, pause: float = MAX_TIMEOUT) -> TransferTicket:
        """Take a slot for one load; where all are taken, wait for a `release`. Raises TransferError after `timeout`.

        The load may take `timeout` seconds (None: the counter's), and `pause` seconds from one part to the next.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._in_use < self.slots, self.timeout):
                raise TransferError(f"no transfer slot came free within {self.timeout:g} s: all {self.slots} are taken")
            self._in_use += 1
            self._begun += 1
            return TransferTicket(self, self._begun, self.timeout if timeout is None else timeout, pause)

    def complete(self, ticket: TransferTicket, local_layer: int, planes: LayerPart = MAIN | INDEX) -> None:
        """Report that these parts of a layer are in the pool. Raises TransferError on a released ticket."""
        self._check_layer(local_layer)
        _check_parts(planes)
        with self._changed:
            self._check_open(ticket)
            ticket._arrived[local_layer] |= planes
            ticket._last = time.monotonic()
            self._changed.notify_all()

    def fail(self, ticket: TransferTicket, error: BaseException) -> None:
        """Report that the load failed: whoever waits for it raises TransferError caused by `error` (the first one).

        Raises TransferError unless `error` is an exception.
        """
        if not isinstance(error, BaseException):
            raise TransferError(f"error={error!r} is not an exception")
        with self._changed:
            self._check_open(ticket)
            if ticket._error is None:
                ticket._error = error
            self._changed.notify_all()

    def release(self, ticket: TransferTicket) -> None:
        """Give the slot back. A load released before all parts were in counts as abandoned: its readers raise."""
        with self._changed:
            self._check_open(ticket)
            ticket._released = True
            self._in_use -= 1
            self._changed.notify_all()

    def is_late(self, ticket: TransferTicket) -> bool:
        """Whether a load has taken longer than it may, in all or since its last part."""
        self._check_mine(ticket)
        with self._changed:
            return ticket._seconds_left <= 0

    def consume(self, tickets: Iterable[TransferTicket], give_up: Callable[[], None] | None = None) -> None:
        """Name the loads that the coming reads depend on: none, one or several; replaces those named before.

        `give_up` is called now and then while a reader waits; what it raises ends the wait and comes out there.
        """
        tickets = as_tuple("tickets", tickets, TransferError)
        for ticket in tickets:
            self._check_mine(ticket)
        with self._changed:
            self._consumed, self._give_up = tickets, give_up or _keep_waiting

    @property
    def is_consuming(self) -> bool:
        """Whether the coming reads depend on a load."""
        return bool(self._consumed)

    def wait_until(self, local_layer: int, planes: LayerPart = MAIN | INDEX) -> None:
        """Block until these parts of a layer have arrived from every consumed load; at once where nothing is loading.

        Raises TransferError where a load failed or was abandoned, or where a part is not in `timeout` seconds after
        its load began.
        """
        self._check_layer(local_layer)
        _check_parts(planes)
        if not planes:
            raise TransferError(f"there is nothing to wait for in planes={planes!r}")
        if not self._consumed:
            return
        started = time.monotonic()
        with self._changed:
            try:
                for ticket in self._consumed:
                    self._wait_for(ticket, local_layer, planes)
            finally:
                self.waited += time.monotonic() - started

    def wait_for_all(self) -> None:
        """Block until every part of every consumed load has arrived. Raises as `wait_until`."""
        for layer in range(self.num_layers):
            self.wait_until(layer)

    def _wait_for(self, ticket: TransferTicket, local_layer: int, planes: LayerPart) -> None:
        def settled() -> bool:
            return ticket._error is not None or ticket._abandoned or ticket._has(local_layer, planes)

        while not settled() and ticket._seconds_left > 0:
            self._give_up()
            self._changed.wait_for(settled, min(_ASK_SECONDS, max(0.0, ticket._seconds_left)))
        if ticket._error is not None:
            raise TransferError(f"the load of local layer {local_layer} failed: {ticket._error!r}") from ticket._error
        # Once abandoned, the pages may already belong to somebody else, those that had arrived included.
        if ticket._abandoned:
            raise TransferError(f"the load of local layer {local_layer} was released before it was complete")
        if not ticket._has(local_layer, planes):
            missing = _names(planes & ~ticket._arrived[local_layer])
            if time.monotonic() < ticket._begun + ticket._timeout:
                raise TransferError(f"local layer {local_layer} ({missing}): nothing came for {ticket._pause:g} s")
            raise TransferError(f"local layer {local_layer} ({missing}) did not arrive within {ticket._timeout:g} s")

    def _check_layer(self, local_layer: int) -> None:
        if isinstance(local_layer, bool) or not isinstance(local_layer, int):
            raise NotALayerIdError(f"local_layer={local_layer!r} is not a layer id: an int is needed")
        if not 0 <= local_layer < self.num_layers:
            raise LayerNotLocalError(f"local_layer={local_layer} is not in 0 <= id < {self.num_layers}")

    def _check_mine(self, ticket: TransferTicket) -> None:
        if not isinstance(ticket, TransferTicket):
            raise TransferError(f"{ticket!r} is not a transfer ticket")
        if ticket._counter is not self:
            raise TransferError(f"{ticket!r} belongs to another transfer counter")

    def _check_open(self, ticket: TransferTicket) -> None:
        self._check_mine(ticket)
        if ticket._released:
            raise TransferError(f"{ticket!r} has been released already")


def _keep_waiting() -> None:
    """Nobody minds how long it takes."""


def _check_parts(planes: LayerPart) -> None:
    if not isinstance(planes, LayerPart):
        raise TransferError(f"planes={planes!r} is not MAIN, INDEX or both")


def _names(parts: LayerPart) -> str:
    return " and ".join(part.name.lower() for part in LayerPart if part in parts and part.name)
