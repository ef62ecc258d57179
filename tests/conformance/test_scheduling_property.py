"""Whatever arrives, in whatever pool: every reply is the model's own, the books are right after every step, all ends.

The model's logits are a hash of the whole context as it stands in the pool: a page that is lost, swapped or stale
changes every token after it.
"""

import random
from dataclasses import dataclass, field

import pytest

from support.engines import VOCAB, expected_greedy, hash_logits, make_engine
from tamis.engine.engine import Engine
from tamis.engine.sequence import EngineEvent
from tamis.errors import NeverFitsError
from tamis.request import Completion, FinishReason, Request, SamplingParams

REQUESTS = 20
MOST_STEPS = 3000


@dataclass
class Traffic:
    """Requests that share beginnings, arrive at any time, and are cancelled now and then."""

    engine: Engine
    rng: random.Random
    asked: dict[int, tuple[list[int], SamplingParams]] = field(default_factory=dict)
    done: dict[tuple[int, int], Completion] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.beginnings = [self.tokens(20) for _ in range(3)]

    def tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB) for _ in range(self.rng.randint(0, most))]

    def arrive(self) -> None:
        prompt = [*self.rng.choice(self.beginnings), *self.tokens(6), 3]
        sampling = SamplingParams(
            n=self.rng.choice([1, 1, 1, 2, 3]),
            temperature=self.rng.choice([0, 0, 1.0]),
            seed=self.rng.randrange(10),
            max_tokens=self.rng.choice([1, 2, 5, 12, 30, None]),
            presence_penalty=self.rng.choice([0, 0, 1.0]),
            logprobs=0,
            prompt_logprobs=self.rng.choice([None, None, None, 1]),
            ignore_eos=True,
        )
        salt = self.rng.choice(["", "", "other"])
        try:
            request_id = self.engine.add_request(Request(prompt, sampling, salt=salt))
        except NeverFitsError:
            return
        self.asked[request_id] = prompt, sampling

    def cancel(self) -> None:
        running = [request_id for request_id in self.asked if self.engine.has_request(request_id)]
        if running:
            self.engine.abort(self.rng.choice(running))

    def hear(self, event: EngineEvent) -> None:
        assert event.error is None
        if event.completion is not None:
            key = event.request_id, event.token.index
            assert key not in self.done, "a second end"
            self.done[key] = event.completion

    def check(self) -> None:
        """Every sample has ended, and every token is what the model gives to its context."""
        assert {request_id for request_id, _ in self.done} == self.asked.keys()
        for request_id, (prompt, sampling) in self.asked.items():
            for index in range(sampling.n):
                _check_reply(prompt, sampling, self.done[request_id, index])


def _check_reply(prompt: list[int], sampling: SamplingParams, done: Completion) -> None:
    assert done.logprobs is not None
    context = [*prompt, *done.token_ids]
    for place, logprob in enumerate(done.logprobs, start=len(prompt)):
        assert logprob == pytest.approx(float(hash_logits(context[:place]).log_softmax(-1)[context[place]]), abs=1e-4)
    if sampling.greedy and not sampling.presence_penalty:
        assert list(done.token_ids) == expected_greedy(prompt, len(done.token_ids), ends=())
    if sampling.prompt_logprobs and done.finish_reason is not FinishReason.ABORT:
        assert done.prompt_logprobs is not None
        assert len(done.prompt_logprobs) == len(prompt)
        for place, entry in enumerate(done.prompt_logprobs[1:], start=1):
            assert entry is not None
            wanted = float(hash_logits(prompt[:place]).log_softmax(-1)[prompt[place]])
            assert entry.logprob == pytest.approx(wanted, abs=1e-4)


def run(seed: int) -> Engine:
    rng = random.Random(seed)
    engine = make_engine(
        pages=rng.randint(4, 24),
        page_size=rng.choice([1, 2, 4, 8]),
        max_batch_tokens=rng.choice([1, 2, 3, 5, 16, 64]),
        max_num_seqs=rng.randint(4, 10),
        prefix_cache=rng.random() < 0.8,
        step_seconds=rng.choice([None, 0.1]),
    )
    traffic = Traffic(engine, rng)
    for _ in range(MOST_STEPS):
        if len(traffic.asked) < REQUESTS and rng.random() < 0.3:
            traffic.arrive()
        if rng.random() < 0.03:
            traffic.cancel()
        for event in engine.step():
            traffic.hear(event)
        engine.check()
        if len(traffic.asked) == REQUESTS and not engine.has_work:
            break
    assert not engine.has_work, f"still busy after {MOST_STEPS} steps"
    traffic.check()
    assert engine.pages_used == 0
    return engine


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_any_traffic_in_any_pool(first: int) -> None:
    engines = [run(seed) for seed in range(first, first + 10)]
    assert sum(engine.stats.hit_tokens for engine in engines) > 0
    assert sum(engine.stats.retractions for engine in engines) > 0


def test_without_a_cache_nothing_is_kept() -> None:
    for seed in range(60):
        engine = run(seed)
        if not engine._shares_prefixes:
            assert engine.kv.usage.cached == 0
            break
    else:
        pytest.fail("no seed ran without a cache")
