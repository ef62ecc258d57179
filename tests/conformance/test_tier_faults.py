"""Faults in each kind of store, as a client sees them: the cold run's output, in bounded time, and a count."""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from support.engines import expected_greedy, greedy, make_engine, run
from support.offload import IMPATIENT
from support.tiers import Store
from tamis.engine.engine import Engine
from tamis.kv.tiers.base import Key
from tamis.kv.tiers.stack import TierStack
from tamis.kv.tiers.stored import StoredTier
from tamis.request import Request

PROMPT = [3 + place % 40 for place in range(41)]
STEPS = 6
SECONDS = 10.0
"""No request may take longer, whatever a store does; on a machine that does much else, too."""


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hangs goes on when it is set, at the latest at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def engine_over(tier: StoredTier) -> Engine:
    engine = make_engine(tiers=TierStack([tier]), offload=IMPATIENT)
    assert engine.offload is not None
    engine.offload.loader.rate.seconds = lambda nbytes: 0.0  # type: ignore[method-assign]
    return engine


def ask(engine: Engine) -> int:
    """Run the prompt in bounded time; how many of its tokens were cached."""
    began = time.monotonic()
    engine.add_request(Request(tuple(PROMPT), greedy(STEPS)))
    (done,) = [event.completion for event in run(engine, max_steps=10_000) if event.completion is not None]
    assert list(done.token_ids) == expected_greedy(PROMPT, STEPS)
    assert time.monotonic() - began < SECONDS
    return done.usage.cached_tokens


def faults(engine: Engine) -> int:
    """All that was counted."""
    assert engine.stats.offload is not None
    assert engine.offload is not None
    found = sum(engine.stats.offload.failures.values()) + engine.stats.offload.worker_deaths
    return found + sum(stat.errors + stat.corrupt for stat in engine.offload.tier_stats())


@contextmanager
def filled(store: Store) -> Iterator[StoredTier]:
    """A tier with the pages of PROMPT, as an engine left it; the store has no other."""
    tier = store.open()
    engine = engine_over(tier)
    assert ask(engine) == 0
    if store.lasting:
        engine.close()
        tier = store.open()
    yield tier


def spoil(store: Store, keys: Sequence[Key], change: Callable[[bytes], bytes]) -> None:
    for key in keys:
        raw = store.get_raw(key)
        assert raw is not None
        store.put_raw(key, change(raw))


def flip(raw: bytes) -> bytes:
    return raw[:-10] + bytes([raw[-10] ^ 1]) + raw[-9:]


def raising(*names: str, error: Callable[[StoredTier], BaseException]) -> Callable[[Store, StoredTier], None]:
    def install(_: Store, tier: StoredTier) -> None:
        def fail(*_: Any) -> Any:
            raise error(tier)

        for name in names:
            setattr(tier, name, fail)

    return install


def foreign(tier: StoredTier) -> BaseException:
    return tier.foreign_errors[0]("the connection is lost")


BAD_BYTES: dict[str, Callable[[bytes], bytes]] = {
    "flipped bit": flip,
    "cut short": lambda raw: raw[:-80],
    "cut to a byte": lambda raw: raw[:1],
    "something else": lambda raw: b"\xff" * len(raw),
}
FAILING = {
    "no answer to a look-up": raising("_has", error=foreign),
    "no answer to a read": raising("_open", error=foreign),
    "a thread that dies in a look-up": raising("_has", error=lambda _: SystemExit()),
    "a thread that dies in a read": raising("_open", error=lambda _: SystemExit()),
    "out of memory": raising("_open", error=lambda _: MemoryError()),
}


@pytest.mark.parametrize("fault", BAD_BYTES)
def test_a_page_that_is_wrong_is_computed_again_and_written_again(store: Store, fault: str) -> None:
    """What comes before it is loaded all the same."""
    with filled(store) as tier:
        engine = engine_over(tier)
        assert engine.offload is not None
        keys = engine.offload._keys(PROMPT, "")()
        spoil(store, keys[4:5], BAD_BYTES[fault])
        assert ask(engine) == 16
        assert faults(engine) > 0
        assert ask(engine_over(tier)) == 40


@pytest.mark.parametrize("fault", BAD_BYTES)
def test_pages_that_are_all_wrong_are_computed(store: Store, fault: str) -> None:
    with filled(store) as tier:
        spoil(store, [entry.key for entry in tier.scan()], BAD_BYTES[fault])
        engine = engine_over(tier)
        assert ask(engine) == 0
        assert faults(engine) > 0


@pytest.mark.parametrize("fault", FAILING)
def test_a_store_that_fails_is_done_without(store: Store, fault: str) -> None:
    with filled(store) as tier:
        FAILING[fault](store, tier)
        engine = engine_over(tier)
        assert ask(engine) == 0
        assert faults(engine) > 0


@pytest.mark.parametrize("verb", ["_has", "_open"])
def test_a_store_that_takes_for_ever_is_not_waited_for(store: Store, verb: str, released: threading.Event) -> None:
    with filled(store) as tier:
        real = getattr(tier, verb)

        def slow(*arguments: Any) -> Any:
            assert released.wait(60)
            return real(*arguments)

        setattr(tier, verb, slow)
        engine = engine_over(tier)
        assert ask(engine) == 0
        assert faults(engine) > 0


@pytest.mark.parametrize("error", ["full", "lost", "hangs"])
def test_what_cannot_be_written_is_only_not_kept(store: Store, error: str, released: threading.Event) -> None:
    tier = store.open()

    def put(*_: Any) -> None:
        if error == "hangs":
            assert released.wait(60)
        raise OSError(errno.ENOSPC, "No space left on device") if error == "full" else foreign(tier)

    tier._put = put  # type: ignore[method-assign, assignment]
    engine = engine_over(tier)
    assert ask(engine) == 0
    assert ask(engine) == 40, "the prefix cache has it"
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < SECONDS
    assert faults(engine) > 0
