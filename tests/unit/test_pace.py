import random

import pytest

from tamis.engine.pace import FIRST_CHUNK, LEAST_CHUNK, StepPace


def feed(
    pace: StepPace, *, flat: float, slope: float = 0.0, contexts: tuple[int, ...] = (0,), noise: float = 0.0
) -> None:
    """Steps beside one reply that cost 20 ms and so much a prompt token."""
    rng = random.Random(0)
    for _ in range(8):
        pace.observe(replies=1, prompt_tokens=0, context=0, seconds=0.02)
        for context in contexts:
            tokens = rng.randint(20, 60)
            seconds = tokens * (flat + slope * context) * (1 + rng.uniform(-noise, noise))
            pace.observe(replies=1, prompt_tokens=tokens, context=context, seconds=0.02 + seconds)


def most(pace: StepPace, context: float) -> int:
    tokens = pace.prompt_tokens(context)
    assert tokens is not None
    return tokens


def test_without_a_measurement_the_first_chunk_is_small() -> None:
    assert StepPace(0.1).prompt_tokens(context=0) == FIRST_CHUNK


def test_a_step_is_filled_up_to_its_time() -> None:
    pace = StepPace(0.1)
    feed(pace, flat=0.001)
    assert pace.prompt_tokens(0) == pytest.approx(80, abs=1), "20 of the 100 ms are the replies'"


def test_a_token_costs_more_with_more_context() -> None:
    """Also at a context that was not seen yet, such as behind a long prefix from the cache."""
    pace = StepPace(0.1)
    feed(pace, flat=0.001, slope=1e-6, contexts=(0, 500, 1000, 1500))
    assert pace.token_seconds(0) == pytest.approx(0.001, rel=0.01)
    assert pace.token_seconds(8000) == pytest.approx(0.009, rel=0.01)
    assert most(pace, 3000) == pytest.approx(most(pace, 0) / 4, abs=1)


def test_noise_does_not_carry_it_away() -> None:
    pace = StepPace(0.1)
    feed(pace, flat=0.001, slope=1e-6, contexts=(0, 1000, 2000), noise=0.3)
    assert 20 < most(pace, 1000) < 80


def test_it_follows_a_machine_that_slows_down() -> None:
    pace = StepPace(0.1)
    feed(pace, flat=0.001)
    feed(pace, flat=0.004)
    assert pace.prompt_tokens(0) == pytest.approx(20, abs=2)


def test_prompts_go_on_where_replies_alone_take_more_than_the_time() -> None:
    """Half as long again as the replies, so that they stay below twice what they take alone."""
    pace = StepPace(0.1)
    for _ in range(30):
        pace.observe(replies=8, prompt_tokens=0, context=0, seconds=0.4)
        pace.observe(replies=8, prompt_tokens=100, context=0, seconds=0.4 + 0.5)
    assert pace.prompt_tokens(0) == pytest.approx(0.2 / 0.005, abs=1)


def test_prompts_go_on_however_dear_their_tokens_are() -> None:
    pace = StepPace(0.1)
    pace.observe(replies=0, prompt_tokens=10, context=0, seconds=100)
    assert pace.prompt_tokens(0) == LEAST_CHUNK


def test_a_step_that_was_held_up_once_counts_little() -> None:
    """Another process had the machine: that is no cost of a token."""
    pace = StepPace(0.1)
    feed(pace, flat=0.001)
    pace.observe(replies=1, prompt_tokens=40, context=0, seconds=60)
    pace.observe(replies=1, prompt_tokens=0, context=0, seconds=60)
    feed(pace, flat=0.001)
    assert pace.prompt_tokens(0) == pytest.approx(80, abs=10)


def test_without_a_time_there_is_no_limit() -> None:
    pace = StepPace(None)
    feed(pace, flat=0.001)
    assert pace.prompt_tokens(0) is None
