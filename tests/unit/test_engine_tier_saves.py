"""An engine whose KV tiers take long over what it gives them, or over nothing at all: it goes on, and so do they."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from support.engines import VOCAB, expected_greedy, greedy, make_engine, model_of, run
from support.offload import IMPATIENT, FaultyTier, Gate
from support.serving import eventually
from tamis.engine.engine import Engine
from tamis.engine.llm import LLM
from tamis.errors import TamisError
from tamis.kv.offload import OffloadConfig, saver
from tamis.request import FinishReason, Request

PROMPT = [3 + place % 40 for place in range(41)]
STEPS = 6


def random_prompt(seed: int, length: int = 41) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, VOCAB), k=length))


def step_until(engine: Engine, happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        engine.step()
        engine.check()


@pytest.mark.parametrize("verb", ["pin", "delete"])
def test_pages_are_not_held_behind_a_pin_or_a_delete_that_hangs(verb: str) -> None:
    """There is one thread for all writing, and the pool has room for one prompt at a time."""
    tier, gate = FaultyTier(), Gate()
    through = OffloadConfig(write_through=verb == "delete")
    engine = make_engine(tiers=tier, offload=through, pages=16, max_batch_tokens=8)
    assert engine.offload is not None
    if verb == "pin":
        tier.on_pin = gate
        engine.add_request(Request(tuple(PROMPT), greedy(STEPS)))
        run(engine)
        engine.offload.saver.save(lambda start, end: tuple(PROMPT[start:end]), 10, "", "somebody")
    else:
        tier.on_delete = gate
        model_of(engine).nan_after = PROMPT[-1]
        engine.add_request(Request(tuple(PROMPT), greedy(STEPS)))
    step_until(engine, gate.reached.is_set)
    model_of(engine).nan_after = None
    for seed in range(3):
        prompt = random_prompt(seed)
        request = engine.add_request(Request(prompt, greedy(STEPS)))
        done: list[list[int]] = []
        deadline = time.monotonic() + 20
        while not done:
            assert time.monotonic() < deadline, "the request never ended"
            done = [
                list(event.completion.token_ids)
                for event in engine.step()
                if event.request_id == request and event.completion is not None
            ]
        assert done == [expected_greedy(prompt, STEPS)]
        engine.check()
    gate.open.set()
    run(engine)


def test_a_write_that_takes_longer_than_anybody_waits_is_followed_by_the_next() -> None:
    """Though nobody asks the engine for anything meanwhile."""
    tier, gate = FaultyTier(), Gate()
    engine = make_engine(tiers=tier, offload=IMPATIENT)
    assert engine.offload is not None
    engine.offload.saver._batch = 2
    tier.on_write = gate
    with LLM.from_engine(engine) as llm:
        llm.generate([PROMPT], greedy(STEPS))
        assert gate.reached.wait(20)
        eventually(lambda: not engine.has_work)
        gate.open.set()
        eventually(lambda: len(tier.keys) == 11)


def test_of_too_many_that_wait_to_be_written_those_of_sessions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "_MAX_PATHS", 2)
    tier, gate = FaultyTier(), Gate()
    engine = make_engine(tiers=tier)
    assert engine.offload is not None
    tier.on_write = gate
    engine.add_request(Request(random_prompt(9), greedy(STEPS)))
    step_until(engine, gate.reached.is_set)
    ticket = engine.offload.saver.save(lambda start, end: tuple(PROMPT[start:end]), 10, "", "somebody")
    for seed in range(4):
        engine.add_request(Request(random_prompt(seed), greedy(STEPS)))
    step_until(engine, lambda: not engine.scheduler.has_work)
    assert not ticket.done.is_set()
    assert engine.stats.offload is not None
    assert engine.stats.offload.dropped_pages > 0
    gate.open.set()
    run(engine)
    assert ticket.done.is_set()
    assert ticket.error is None


@pytest.mark.parametrize("fault", ["nothing may follow", "not a number"])
def test_pages_are_taken_back_for_what_the_model_says_and_not_for_what_a_client_wants(fault: str) -> None:
    tier = FaultyTier()
    engine = make_engine(tiers=tier)
    engine.add_request(Request(tuple(PROMPT), greedy(1)))
    run(engine)
    kept = tier.keys
    assert len(kept) == 10
    if fault == "not a number":
        model_of(engine).nan_after = PROMPT[-1]
        sampling = greedy(STEPS)
    else:
        sampling = greedy(STEPS, logit_bias=dict.fromkeys(range(VOCAB), -float("inf")))
    engine.add_request(Request(tuple(PROMPT), sampling))
    assert run(engine)[-1].token.finish_reason is FinishReason.ERROR
    engine.close()
    assert (tier.keys == kept) == (fault == "nothing may follow")


@pytest.mark.parametrize("verb", ["on_contains", "on_part", "on_write", "on_pin"])
def test_closing_does_not_wait_for_a_tier_that_hangs(verb: str) -> None:
    """Whoever waits for a reply, or for a session, is told."""
    tier, gate = FaultyTier(), Gate()
    with LLM.from_engine(make_engine(tiers=tier)) as llm:
        llm.generate([PROMPT], greedy(STEPS))
    setattr(tier, verb, gate.part if verb == "on_part" else gate)
    engine = make_engine(tiers=tier, offload=replace(IMPATIENT, lookup_seconds=60.0, stall_seconds=60.0))
    assert engine.offload is not None
    engine.offload.loader.rate.seconds = lambda nbytes: 0.0  # type: ignore[method-assign]
    llm, told = LLM.from_engine(engine), list[object]()

    def use() -> None:
        try:
            if verb == "on_pin":
                llm.sessions.save("doc", PROMPT)
            told.append(llm.generate([[*PROMPT, 5]], greedy(STEPS))[0].finish_reason)
        except TamisError as error:
            told.append(error)

    client = threading.Thread(target=use, daemon=True)
    client.start()
    assert gate.reached.wait(20)
    if verb == "on_write":
        client.join(20)
    began = time.monotonic()
    llm.close()
    assert time.monotonic() - began < 10
    gate.open.set()
    client.join(20)
    assert len(told) == 1
