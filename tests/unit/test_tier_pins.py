"""Pins that change in several threads at once, and pins that take the place of others."""

import threading

import pytest

from support.kv import small_layout
from support.tiers import Store, make_items
from tamis.kv.tiers.base import Key

ITEMS = make_items(small_layout(), 4)
KEYS = [key for key, _ in ITEMS]


@pytest.mark.parametrize("verb", ["pin", "unpin"])
def test_pins_that_change_at_once_are_all_kept(store: Store, verb: str) -> None:
    """The one has read all pins, and has not written them yet, when the other comes."""
    tier = store.open()
    tier.pin(KEYS[:1], "first")
    real, others = tier._load_pins, list[threading.Thread]()

    def load() -> dict[str, list[Key]]:
        pins = real()
        if not others:
            others.append(threading.Thread(target=tier.pin, args=(KEYS[1:2], "other")))
            others[0].start()
            others[0].join(0.1)
        return pins

    tier._load_pins = load  # type: ignore[method-assign]
    if verb == "pin":
        tier.pin(KEYS[2:3], "second")
    else:
        tier.unpin("first")
    others[0].join()
    tier._load_pins = real  # type: ignore[method-assign]
    expected = {"first": KEYS[:1], "second": KEYS[2:3]} if verb == "pin" else {}
    assert tier.owners() == {**expected, "other": KEYS[1:2]}
    assert tier.stat().pinned == len(expected) + 1


def test_pins_may_take_the_place_of_those_before_them(store: Store) -> None:
    tier = store.open()
    tier.pin(KEYS[:2], "a")
    tier.pin(KEYS[1:2], "b")
    tier.pin(KEYS[2:], "a", replace=True)
    assert tier.owners() == {"a": KEYS[2:], "b": KEYS[1:2]}
    assert tier.stat().pinned == 3
    tier.pin([], "a", replace=True)
    assert tier.owners().get("a", []) == []
