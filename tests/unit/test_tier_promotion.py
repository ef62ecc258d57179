"""Copies from slow tiers to faster ones end with the engine."""

import threading

from support.kv import small_layout
from support.offload import FaultyTier, Gate, nothing
from support.serving import eventually
from support.tiers import make_items
from tamis.kv.tiers.host import HostTier
from tamis.kv.tiers.promotion import _GROUP
from tamis.kv.tiers.stack import TierStack

LAYOUT = small_layout()


def test_a_copy_is_given_up_when_the_tiers_are_closed() -> None:
    """Of many pages: a thread that goes on may meet the end of the process inside a library."""
    fast, slow, gate = FaultyTier(), HostTier(1 << 30), Gate()
    items = make_items(LAYOUT, 3 * _GROUP)
    slow.write(items)
    stack = TierStack([fast, slow])
    fast.on_write = gate
    for _ in stack.read([key for key, _ in items], LAYOUT):
        pass
    assert gate.reached.wait(20)
    fast.on_write = nothing
    ending = threading.Thread(target=stack.close)
    ending.start()
    eventually(lambda: stack._promoter._closed)
    gate.open.set()
    ending.join(20)
    assert fast.pages_written == _GROUP
