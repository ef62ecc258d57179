"""Layers that are still on their way into the pool while the forward pass is already running.

A producer thread loads pages layer by layer and reports each part; the reader, before it looks at a layer, waits for
the loads its step depends on. A load that fails, is given up or does not arrive in time raises in the reader: it never
hangs and never yields bytes.
"""

import enum
import threading
import time
from collections.abc import Iterable

from tamis.errors import ConfigError, LayerNotLocalError, NotALayerIdError, TransferError
from tamis.kv.layout import check_int
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


def part_of(plane: str) -> LayerPart:
    """The part of a layer that a plane belongs to."""
    return INDEX if plane.startswith("index") else MAIN


MAX_TIMEOUT = threading.TIMEOUT_MAX
"""Seconds that a thread can wait at most."""


class TransferTicket:
    """One load, from `LayerTransferCounter.begin` to `release`. Opaque: only its counter reads or changes it."""

    def __init__(self, counter: "LayerTransferCounter", number: int, num_layers: int, deadline: float) -> None:
        self._counter = counter
        self._number = number
        self._deadline = deadline
        self._arrived = [NOTHING] * num_layers
        self._error: BaseException | None = None
        self._released = False

    def __repr__(self) -> str:
        return f"TransferTicket({self._number})"

    def _has(self, local_layer: int, planes: LayerPart) -> bool:
        return planes in self._arrived[local_layer]

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

    def begin(self) -> TransferTicket:
        """Take a slot for one load; where all are taken, wait for a `release`. Raises TransferError after `timeout`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._in_use < self.slots, self.timeout):
                raise TransferError(f"no transfer slot came free within {self.timeout:g} s: all {self.slots} are taken")
            self._in_use += 1
            self._begun += 1
            return TransferTicket(self, self._begun, self.num_layers, time.monotonic() + self.timeout)

    def complete(self, ticket: TransferTicket, local_layer: int, planes: LayerPart = MAIN | INDEX) -> None:
        """Report that these parts of a layer are in the pool. Raises TransferError on a released ticket."""
        self._check_layer(local_layer)
        _check_parts(planes)
        with self._changed:
            self._check_open(ticket)
            ticket._arrived[local_layer] |= planes
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

    def consume(self, tickets: Iterable[TransferTicket]) -> None:
        """Name the loads that the coming reads depend on: none, one or several; replaces those named before."""
        tickets = as_tuple("tickets", tickets, TransferError)
        for ticket in tickets:
            self._check_mine(ticket)
        with self._changed:
            self._consumed = tickets

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
        with self._changed:
            for ticket in self._consumed:
                self._wait_for(ticket, local_layer, planes)

    def _wait_for(self, ticket: TransferTicket, local_layer: int, planes: LayerPart) -> None:
        def settled() -> bool:
            return ticket._error is not None or ticket._abandoned or ticket._has(local_layer, planes)

        self._changed.wait_for(settled, max(0.0, ticket._deadline - time.monotonic()))
        if ticket._error is not None:
            raise TransferError(f"the load of local layer {local_layer} failed: {ticket._error!r}") from ticket._error
        # Once abandoned, the pages may already belong to somebody else, those that had arrived included.
        if ticket._abandoned:
            raise TransferError(f"the load of local layer {local_layer} was released before it was complete")
        if not ticket._has(local_layer, planes):
            missing = planes & ~ticket._arrived[local_layer]
            raise TransferError(
                f"local layer {local_layer} ({_names(missing)}) did not arrive within {self.timeout:g} s"
            )

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


def _check_parts(planes: LayerPart) -> None:
    if not isinstance(planes, LayerPart):
        raise TransferError(f"planes={planes!r} is not MAIN, INDEX or both")


def _names(parts: LayerPart) -> str:
    return " and ".join(part.name.lower() for part in LayerPart if part in parts and part.name)
