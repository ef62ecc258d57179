"""An engine with KV tiers: what is read from them, and that nothing they do wrong changes a token."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.engines import VOCAB, complete, expected_greedy, greedy, make_engine, model_of, run
from support.offload import IMPATIENT, FaultyTier, Gate
from tamis.engine.engine import Engine
from tamis.engine.sequence import EngineEvent
from tamis.errors import TierError, TierReadError
from tamis.kv.offload import OffloadConfig, OffloadStats
from tamis.kv.tiers.base import ReadPart
from tamis.kv.tiers.host import HostTier
from tamis.request import FinishReason, Request

PROMPT = [3 + place % 40 for place in range(41)]
STEPS = 6
WANTED = expected_greedy(PROMPT, STEPS)


def moved(engine: Engine) -> OffloadStats:
    stats = engine.stats.offload
    assert stats is not None
    return stats


def ask(engine: Engine, prompt: list[int] = PROMPT, salt: str = "") -> int:
    """Run the prompt; its tokens must be right. Returns how many of the prompt's were cached."""
    request = engine.add_request(Request(tuple(prompt), greedy(STEPS), salt=salt))
    (done,) = [e.completion for e in run(engine) if e.request_id == request and e.completion is not None]
    assert list(done.token_ids) == expected_greedy(prompt, STEPS)
    assert engine.pages_used == 0
    return done.usage.cached_tokens


@pytest.fixture
def tier() -> FaultyTier:
    """With the pages of PROMPT in it."""
    tier = FaultyTier()
    engine = make_engine(tiers=tier)
    assert ask(engine) == 0
    engine.close()
    assert len(tier.keys) == (len(PROMPT) + STEPS - 1) // 4
    return tier


def fresh(tier: FaultyTier, config: OffloadConfig | None = None, **options: Any) -> Engine:
    """An engine whose prefix cache is empty, and which always loads what there is: its model computes in no time."""
    engine = make_engine(tiers=tier, offload=config, **options)
    assert engine.offload is not None
    engine.offload.loader.rate.seconds = lambda nbytes: 0.0  # type: ignore[method-assign]
    return engine


# Hits and misses


def test_a_prompt_is_read_from_the_tiers_and_not_computed(tier: FaultyTier) -> None:
    engine = fresh(tier)
    assert ask(engine) == 40
    assert sum(model_of(engine).batch_sizes) == 1 + STEPS - 1
    assert (moved(engine).loads, moved(engine).loaded_tokens) == (1, 40)
    assert moved(engine).load_bytes_per_second > 0
    assert ask(engine, [*PROMPT[:30], 49, 48]) == 28  # the prefix cache has it now
    assert moved(engine).loads == 1


def test_another_prompt_another_salt_and_another_model_miss(tier: FaultyTier) -> None:
    assert ask(fresh(tier), [4, *PROMPT[1:]]) == 0
    assert ask(fresh(tier), salt="other") == 0
    engine = fresh(tier)
    engine.offload._fingerprint = "other"  # type: ignore[union-attr]
    assert ask(engine) == 0
    assert moved(engine).lookup_hits == 0


@pytest.mark.parametrize("length", range(1, 13))
def test_only_full_pages_of_what_agrees_are_read(tier: FaultyTier, length: int) -> None:
    """C8, C10: as far as the tokens agree, never the last token of the prompt, never half a page."""
    assert ask(fresh(tier), PROMPT[:length]) == (length - 1) // 4 * 4
    assert ask(fresh(tier), [*PROMPT[:length], 49, 48, 47]) == length // 4 * 4


def test_pages_computed_behind_loaded_ones_are_saved_too(tier: FaultyTier) -> None:
    longer = [*PROMPT, *range(3, 20)]
    assert ask(fresh(tier), longer) == 40
    assert ask(fresh(tier), longer) == 56
    before = tier.pages_written
    assert ask(fresh(tier), longer) == 56
    assert tier.pages_written == before + 1, "what came from the tiers is not written again, but the reply's page is"


def test_write_through_saves_while_the_request_runs() -> None:
    tier = FaultyTier()
    engine = fresh(tier, OffloadConfig(write_through=True))
    engine.add_request(Request(tuple(PROMPT), greedy(20, ignore_eos=True)))
    deadline = time.monotonic() + 20
    while len(tier.keys) < 10:
        assert engine.scheduler.running or not moved(engine).saved_pages
        assert time.monotonic() < deadline
        engine.step()
    assert engine.scheduler.running, "it was over before anything was written"
    run(engine)
    assert len(tier.keys) == 15


def test_a_lookup_is_spared_where_the_prefix_cache_has_all(tier: FaultyTier) -> None:
    engine = fresh(tier)
    ask(engine)
    ask(engine)
    assert moved(engine).lookups == 1


def test_loading_is_left_where_computing_is_faster(tier: FaultyTier) -> None:
    engine = make_engine(tiers=tier)
    ask(engine, [9] * 30)  # how long a token takes is known from here on
    assert engine.offload is not None
    engine.offload.loader.rate.observe(1, 1000.0)
    assert ask(engine) == 0
    assert moved(engine).recomputed_tokens == 40
    assert tier.reads == 0


# Faults


def corrupt(_: int, part: ReadPart) -> ReadPart | None:
    raise TierReadError(b"k" * 32, "its checksum is wrong")


def broken(*_: object) -> Any:
    raise TierError("the connection is lost")


def bug(*_: object) -> Any:
    raise ZeroDivisionError


def dying(*_: object) -> Any:
    raise SystemExit


def too_small(_: int, part: ReadPart) -> ReadPart:
    return ReadPart(part.layer, part.part, {name: tensor[:-1] for name, tensor in part.tensors.items()})


FAULTS: dict[str, Callable[[int, ReadPart], ReadPart | None]] = {
    "corrupt": corrupt, "broken": broken, "bug": bug, "dying": dying, "cut short": lambda *_: None,
    "too small": too_small,
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_load_that_fails_is_computed_instead(tier: FaultyTier, fault: str) -> None:
    tier.on_part = FAULTS[fault]
    engine = fresh(tier)
    assert ask(engine) == 0
    assert moved(engine).failures["load"] >= 1
    assert moved(engine).worker_deaths == (fault == "dying")
    tier.on_part = lambda _, part: part
    assert ask(fresh(tier)) == 40, "the tier is as good as before"
    assert ask(engine, [5, *PROMPT]) == 0  # and this engine's threads still work
    assert engine.offload is not None
    assert moved(engine).failures["load"] >= 1


@pytest.mark.parametrize("fault", ["raise", "die"])
def test_a_lookup_that_fails_is_a_miss(tier: FaultyTier, fault: str) -> None:
    tier.on_contains = broken if fault == "raise" else dying
    engine = fresh(tier)
    assert ask(engine) == 0
    assert moved(engine).failures == {"lookup": 1}
    assert moved(engine).worker_deaths == (fault == "die")
    tier.on_contains = lambda: None
    assert ask(engine, PROMPT[:-1], salt="x") == 0
    assert moved(engine).failures == {"lookup": 1}


@pytest.mark.parametrize("verb", ["on_contains", "on_part"])
def test_a_tier_that_hangs_is_given_up(tier: FaultyTier, verb: str) -> None:
    """D7: a promised load that never comes; and from then on nobody waits for a while."""
    gate = Gate()
    setattr(tier, verb, gate if verb == "on_contains" else gate.part)
    engine = fresh(tier, IMPATIENT)
    started = time.monotonic()
    assert ask(engine) == 0
    assert gate.reached.is_set()
    assert moved(engine).resting
    assert ask(engine, PROMPT[1:]) == 0
    assert time.monotonic() - started < 5
    assert sum(moved(engine).failures.values()) == 1
    gate.open.set()


def test_a_tier_that_hangs_does_not_hold_up_others(tier: FaultyTier) -> None:
    """While one request waits for its load, others run, and it has their company once it has given up."""
    gate = Gate()
    tier.on_part = gate.part
    engine = fresh(tier, OffloadConfig(stall_seconds=30))
    engine.add_request(Request((7, 8, 9), greedy(20, ignore_eos=True)))
    engine.step()
    slow = engine.add_request(Request(tuple(PROMPT), greedy(STEPS)))
    done: list[EngineEvent] = []
    while not done:
        done = [event for event in engine.step() if event.completion is not None]
        engine.check()
    assert gate.reached.wait(20)
    assert done[0].request_id != slow
    gate.open.set()
    (event,) = [event for event in run(engine) if event.completion is not None]
    assert event.completion is not None
    assert (list(event.completion.token_ids), event.completion.usage.cached_tokens) == (WANTED, 40)


@pytest.mark.parametrize("fault", ["raise", "die"])
def test_what_cannot_be_written_is_not_kept_and_nothing_else_happens(fault: str) -> None:
    """D3: a backup that failed is a miss at the next look-up."""
    tier = FaultyTier()
    tier.on_write = broken if fault == "raise" else dying
    engine = fresh(tier)
    assert ask(engine) == 0
    assert moved(engine).failures == {"save": 1}
    assert (moved(engine).saved_pages, tier.keys) == (0, set())
    assert ask(fresh(tier), PROMPT) == 0
    tier.on_write = lambda: None
    assert ask(engine) == 40, "the prefix cache still has it"
    assert len(tier.keys) == 11, "and it is written the next time"


def test_a_tier_that_is_full_of_pinned_pages_is_a_miss() -> None:
    inner = HostTier(3000)
    tier = FaultyTier(inner)
    ask(fresh(tier), [9] * 30)
    assert tier.keys
    inner.pin(list(tier.keys), "somebody")
    kept = tier.keys
    ask(fresh(tier))
    assert kept <= tier.keys
    ask(fresh(tier))


def test_a_write_that_hangs_holds_no_pages_and_closing_does_not_wait_for_ever() -> None:
    tier, gate = FaultyTier(), Gate()
    tier.on_write = gate
    engine = fresh(tier, IMPATIENT, pages=16)
    for seed in range(5):
        prompt = random.Random(seed).choices(range(3, VOCAB), k=41)
        engine.add_request(Request(tuple(prompt), greedy(STEPS)))
        deadline = time.monotonic() + 20
        while engine.scheduler.has_work:
            assert time.monotonic() < deadline
            engine.step()
            engine.check()
    assert gate.reached.wait(20)
    assert engine.stats.pages.in_transfer == 0
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5
    assert moved(engine).failures["save"] >= 1
    gate.open.set()


def test_what_may_be_wrong_is_taken_back_from_the_tiers() -> None:
    """Pages of a prompt that ends in NaN were written while it was read; nobody may find them."""
    tier = FaultyTier()
    engine = fresh(tier, OffloadConfig(write_through=True), max_batch_tokens=8)
    model_of(engine).nan_after = PROMPT[-1]
    engine.add_request(Request(tuple(PROMPT), greedy(STEPS)))
    events = run(engine)
    assert events[-1].token.finish_reason is FinishReason.ERROR
    assert tier.pages_written > 0
    engine.close()
    assert tier.keys == set()


def test_what_was_loaded_stays_in_the_tiers_where_a_step_fails(tier: FaultyTier) -> None:
    engine = fresh(tier)
    model_of(engine).fail_at_token = 49
    engine.add_request(Request((*PROMPT, 49), greedy(STEPS)))
    assert run(engine)[-1].token.finish_reason is FinishReason.ERROR
    engine.close()
    assert ask(fresh(tier)) == 40


# Pages in transfer


def step_until(engine: Engine, happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        engine.step()
        engine.check()


def test_pages_of_an_aborted_load_go_to_nobody_while_they_are_written(tier: FaultyTier) -> None:
    """D11."""
    engine = fresh(tier, OffloadConfig(stall_seconds=30), pages=24)
    gate, pool = Gate(), engine.pool
    write = pool.import_pages
    pages: list[int] = []

    def slow_import(targets: list[int], *rest: object) -> None:
        pages[:] = targets
        gate()
        write(targets, *rest)  # type: ignore[arg-type]

    pool.import_pages = slow_import  # type: ignore[method-assign, assignment]
    request = engine.add_request(Request(tuple(PROMPT), greedy(STEPS)))
    step_until(engine, gate.reached.is_set)
    engine.abort(request)
    engine.step()
    engine.check()
    assert engine.stats.pages.in_transfer == len(pages) == 10
    pool.import_pages = write  # type: ignore[method-assign]
    other = Request(tuple(random.Random(1).choices(range(3, VOCAB), k=50)), greedy(6))
    engine.add_request(other)
    used: set[int] = set()
    while engine.scheduler.has_work:
        used |= {p for r in engine.scheduler.running for s in r.samples for p in s.kv.table.pages}
        engine.step()
        engine.check()
    assert used.isdisjoint(pages)
    gate.open.set()
    step_until(engine, lambda: engine.stats.pages.in_transfer == 0)
    assert ask(engine) in (0, 40)


def test_an_abort_before_the_tier_gives_anything_frees_the_pages_at_once(tier: FaultyTier) -> None:
    gate = Gate()
    tier.on_part = gate.part
    engine = fresh(tier, OffloadConfig(stall_seconds=30))
    request = engine.add_request(Request(tuple(PROMPT), greedy(STEPS)))
    step_until(engine, gate.reached.is_set)
    assert engine.stats.pages.held == 10
    engine.abort(request)
    engine.step()
    engine.check()
    assert engine.stats.pages.free == engine.stats.pages.total
    gate.open.set()
    assert ask(engine) == 40


def test_a_load_evicts_what_nobody_uses_and_not_its_own_prefix(tier: FaultyTier) -> None:
    engine = fresh(tier, pages=16)
    ask(engine, PROMPT[:17])  # the first pages of the prompt
    ask(engine, [45, 44] * 20)
    assert engine.stats.pages.free < 6
    assert ask(engine) == 40
    assert 0 < moved(engine).loads <= 2


def test_what_waits_in_the_queue_is_loaded_meanwhile(tier: FaultyTier) -> None:
    engine = fresh(tier, max_num_seqs=1)
    engine.add_request(Request((7, 8, 9), greedy(30, ignore_eos=True)))
    engine.step()
    engine.add_request(Request(tuple(PROMPT), greedy(STEPS)))
    step_until(engine, lambda: moved(engine).loads)
    assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (1, 1)
    events = run(engine)
    assert events[-1].completion is not None
    assert list(events[-1].completion.token_ids) == WANTED
    assert events[-1].completion.usage.cached_tokens == 40


def test_what_is_loaded_for_the_queue_makes_room_for_those_who_run(tier: FaultyTier) -> None:
    engine = fresh(tier, pages=17, max_num_seqs=1)
    long = Request((7, 8, 9), greedy(60, ignore_eos=True))
    engine.add_request(long)
    engine.step()
    engine.add_request(Request(tuple(PROMPT), greedy(STEPS)))
    done = [e.completion for e in run(engine) if e.completion is not None]
    assert [list(c.token_ids) for c in done] == [expected_greedy([7, 8, 9], 60, ends=()), WANTED]
    assert engine.scheduler.retractions == 0


def test_requests_that_begin_alike_load_it_once(tier: FaultyTier) -> None:
    engine = fresh(tier)
    results = complete(engine, [PROMPT, [*PROMPT, 5], PROMPT], greedy(STEPS))
    assert [list(done.token_ids) for (done,) in results] == [WANTED, expected_greedy([*PROMPT, 5], STEPS), WANTED]
    assert [done.usage.cached_tokens for (done,) in results] == [40, 40, 40]
    assert (moved(engine).loads, tier.reads) == (1, 1)


def test_samples_share_what_was_loaded(tier: FaultyTier) -> None:
    engine = fresh(tier)
    ((a, b, c),) = complete(engine, [PROMPT], greedy(STEPS, n=3))
    assert [list(s.token_ids) for s in (a, b, c)] == [WANTED] * 3
    assert a.usage.cached_tokens == 40


def test_prompt_logprobs_are_computed(tier: FaultyTier) -> None:
    ((done,),) = complete(fresh(tier), [PROMPT], greedy(STEPS, prompt_logprobs=0))
    assert done.prompt_logprobs is not None
    assert len(done.prompt_logprobs) == len(PROMPT)
    assert done.usage.cached_tokens == 0


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_the_tokens_are_right_and_every_page_is_accounted_for(seed: int) -> None:
    """Retractions, prefetches, aborts, evictions and faults at random, in a pool that is too small, over one tier."""
    rng = random.Random(seed)
    tier = FaultyTier(HostTier(rng.choice([4000, 1 << 20])))

    def part(_: int, part: ReadPart) -> ReadPart | None:
        time.sleep(rng.random() * 0.002)
        return FAULTS[rng.choice(list(FAULTS))](0, part) if rng.random() < 0.15 else part

    tier.on_part = part
    config = replace(IMPATIENT, write_through=rng.random() < 0.5, layerwise=rng.random() < 0.7, rest_seconds=0.01)
    shared = rng.choices(range(3, VOCAB), k=24)
    for _ in range(2):
        engine = fresh(tier, config, pages=rng.randint(16, 40), max_num_seqs=rng.randint(1, 6), max_batch_tokens=16)
        prompts = {}
        for _ in range(14):
            own = rng.choices(range(3, VOCAB), k=rng.randint(1, 16))
            prompt = shared[: rng.choice([0, 8, 24])] + own
            salt = rng.choice(["", "s"])
            prompts[engine.add_request(Request(tuple(prompt), greedy(12, ignore_eos=True), salt=salt))] = prompt
        done = {}
        deadline = time.monotonic() + 60
        while engine.has_work:
            assert time.monotonic() < deadline
            for event in engine.step():
                if event.completion is not None:
                    done[event.request_id] = event.completion
            engine.check()
            if rng.random() < 0.05:
                engine.abort(rng.choice(list(prompts)))
        assert done.keys() == prompts.keys()
        for request_id, completion in done.items():
            got = list(completion.token_ids)
            assert got == expected_greedy(prompts[request_id], 12, ends=())[: len(got)]
            assert completion.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
            assert len(got) == 12 or completion.finish_reason is FinishReason.ABORT
        engine.close()


def test_loads_write_every_byte_of_their_pages(tier: FaultyTier) -> None:
    """D6: pages full of NaN are the same afterwards as those that were saved."""
    source = fresh(tier)
    engine = fresh(tier, OffloadConfig(layerwise=False))
    for plane in engine.pool.get_kv_buffer(0):
        plane.fill_(torch.nan)
    assert ask(engine) == 40
    assert ask(source) == 40
    assert moved(engine).loads == 1
