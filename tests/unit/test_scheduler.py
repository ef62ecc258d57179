import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.engines import VOCAB, greedy, make_engine
from tamis.engine.limits import Limits
from tamis.engine.pace import FIRST_CHUNK
from tamis.engine.sampler import Sampled
from tamis.engine.scheduler import Chunk, fair_shares
from tamis.engine.sequence import RequestState
from tamis.errors import (
    EmptyPromptError,
    NeverFitsError,
    PromptTooLongError,
    RequestError,
    SamplingError,
    TokenizerError,
    TokenRangeError,
)
from tamis.request import FinishReason, Request


def limits(pages: int = 100, seqs: int = 8, context: int = 64) -> Limits:
    return Limits(VOCAB, context, page_size=4, num_pages=pages, max_num_seqs=seqs, has_tokenizer=True)


class Driver:
    """Schedules requests and does with a step what the engine does, as far as the scheduler sees it."""

    def __init__(self, tokens: int = 16, pages: int = 100, seqs: int = 8, **options: Any) -> None:
        self.engine = make_engine(
            pages=pages, context=64, max_batch_tokens=tokens, max_num_seqs=seqs, end_ids=(), **options
        )
        self.scheduler = self.engine.scheduler
        self.random = random.Random(0)

    def add(self, prompt: int | Sequence[int], max_tokens: int = 8, n: int = 1, **sampling: Any) -> RequestState:
        """A request with a prompt of its own, where `prompt` is a length."""
        ids = [self.random.randrange(3, VOCAB) for _ in range(prompt)] if isinstance(prompt, int) else list(prompt)
        state = self.engine.prepare(Request(ids, greedy(max_tokens, n=n, **sampling)))
        self.engine.enqueue(state)
        return state

    def plan(self) -> list[tuple[int, int, int]]:
        """Take a step: (request, position, tokens) of each chunk."""
        return shape(self.step())

    def step(self) -> list[Chunk]:
        chunks = self.scheduler.schedule()
        for chunk in chunks:
            chunk.sample.kv.append(len(chunk.token_ids))
            chunk.sample.kv.commit(chunk.request.tokens(chunk.sample))
            if chunk.end == len(chunk.request.prompt) and not chunk.request.prefilled:
                chunk.request.prefilled = True
                for sample in chunk.request.samples[1:]:
                    sample.kv = chunk.sample.kv.fork()
        self.engine.check()
        for chunk in chunks:
            for sample in chunk.receivers:
                sample.accept(Sampled(self.random.randrange(3, VOCAB), None))
                if sample.finish_reason is not None:
                    sample.kv.release()
            if not chunk.request.live:
                self.scheduler.remove(chunk.request)
        return chunks


def shape(chunks: list[Chunk]) -> list[tuple[int, int, int]]:
    return [(chunk.request.request_id, chunk.start, len(chunk.token_ids)) for chunk in chunks]


def test_a_long_prompt_is_cut_to_the_budget_and_only_its_last_chunk_gives_a_token() -> None:
    driver = Driver(tokens=16)
    driver.add(40)
    chunks = [driver.step()[0] for _ in range(4)]
    assert [(c.start, len(c.token_ids), c.num_logits, len(c.receivers)) for c in chunks] == [
        (0, 16, 0, 0), (16, 16, 0, 0), (32, 8, 1, 1), (40, 1, 1, 1)]  # fmt: skip
    assert [chunk.is_prefill for chunk in chunks] == [True, True, True, False]


def test_replies_come_before_prompts_in_a_step() -> None:
    """A long prompt never starves a running reply."""
    driver = Driver(tokens=16)
    driver.add(4)
    driver.step()
    driver.add(40)
    for step in range(3):
        assert driver.plan() == [(0, 4 + step, 1), (1, 15 * step, min(15, 40 - 15 * step))]


def test_beside_replies_prompts_get_as_much_as_fits_the_time() -> None:
    driver = Driver(tokens=64, step_seconds=0.1)
    driver.add(4, max_tokens=40)
    driver.step()
    driver.add(60, max_tokens=1)
    assert [chunk[2] for chunk in driver.plan()] == [1, FIRST_CHUNK], "nothing was measured yet"
    for _ in range(20):
        driver.engine.pace.observe(replies=1, prompt_tokens=20, context=0, seconds=0.1)
    assert [chunk[2] for chunk in driver.plan()] == [1, 20]


def test_prompts_share_a_step_evenly_and_short_ones_leave_the_rest() -> None:
    driver = Driver(tokens=32)
    for prompt in (40, 6, 50):
        driver.add(prompt)
    assert driver.plan() == [(0, 0, 13), (1, 0, 6), (2, 0, 13)]
    assert driver.plan() == [(1, 6, 1), (0, 13, 16), (2, 13, 15)]


@pytest.mark.parametrize(
    ("wanted", "budget", "shares"),
    [
        ([], 8, []),
        ([5], 0, [0]),
        ([5, 5], 20, [5, 5]),
        ([100, 100, 100], 30, [10, 10, 10]),
        ([100, 4, 100], 30, [13, 4, 13]),
        ([100, 100], 1, [1, 0]),
        ([2, 100, 100], 32, [2, 15, 15]),
    ],
)
def test_shares_are_fair(wanted: list[int], budget: int, shares: list[int]) -> None:
    assert fair_shares(wanted, budget) == shares


def test_no_step_exceeds_the_token_budget() -> None:
    driver = Driver(tokens=5)
    for prompt in (3, 1, 9, 2, 7, 4):
        driver.add(prompt, max_tokens=6)
    sizes = []
    while driver.scheduler.has_work:
        chunks = driver.step()
        assert chunks, "there is work, but no step"
        sizes.append(sum(len(chunk.token_ids) for chunk in chunks))
    assert max(sizes) == 5
    assert sum(sizes) == 26 + 6 * 5  # every prompt token and every generated token but the last


def test_with_more_replies_than_tokens_a_step_all_take_turns() -> None:
    driver = Driver(tokens=4)
    for _ in range(3):
        driver.add(1, max_tokens=8)
    driver.step()
    driver.scheduler.max_batch_tokens = 2
    turns = [[request_id for request_id, _, _ in driver.plan()] for _ in range(3)]
    assert turns == [[0, 1], [2, 0], [1, 2]]


def test_requests_are_admitted_in_order_and_the_first_is_never_overtaken() -> None:
    driver = Driver(tokens=64, pages=12)
    first = driver.add(30, 8)  # 8 pages, 2 to grow by
    driver.add(9, 8)  # 3 pages, of which 2 are left
    driver.add(3, 1)
    assert driver.plan() == [(0, 0, 30)]
    assert [request.request_id for request in driver.scheduler.waiting] == [1, 2]
    driver.engine.abort(first.request_id)
    assert driver.plan() == [(1, 0, 9), (2, 0, 3)]


def test_admission_asks_for_the_prompt_and_a_little_more_not_for_all_of_the_reply() -> None:
    driver = Driver(tokens=64, pages=16)
    driver.add(4, 57)  # 15 pages in the end
    driver.add(4, 57)
    assert len(driver.plan()) == 2


def test_samples_of_a_request_count_as_sequences_and_share_its_prompt() -> None:
    driver = Driver(tokens=64, seqs=4)
    request = driver.add(10, 6, n=3)
    driver.add(4, 4, n=2)
    (chunk,) = driver.step()
    assert len(chunk.receivers) == 3
    assert len(driver.scheduler.waiting) == 1, "3 + 2 sequences are more than 4"
    request.samples[0].finish(FinishReason.STOP)
    request.samples[0].kv.release()
    assert [len(chunk.receivers) for chunk in driver.step()] == [1, 1, 2]


def test_prompt_logprobs_want_logits_of_every_prompt_token() -> None:
    driver = Driver(tokens=6)
    driver.add(10, prompt_logprobs=0)
    assert [driver.step()[0].num_logits for _ in range(2)] == [6, 4]


# The cache


def test_a_prompt_starts_behind_what_the_cache_has_of_it() -> None:
    """C8, in steps: never the last token, which has to be computed."""
    driver = Driver(tokens=64)
    ids = list(range(3, 3 + 32))
    driver.add(ids, 1)
    assert driver.plan() == [(0, 0, 32)]
    for length, start in ((32, 28), (33, 32), (3, 0), (8, 4)):
        driver.add([*ids, 40][:length], 1)
        assert [chunk[1:] for chunk in driver.plan()] == [(start, length - start)]


def test_equal_prompts_in_flight_are_computed_once() -> None:
    driver = Driver(tokens=16)
    ids = list(range(3, 3 + 40))
    for last in (44, 45, 46):
        driver.add([*ids, last], 1)
    steps = [driver.plan() for _ in range(3)]
    assert steps[:2] == [[(0, 0, 16)], [(0, 16, 16)]], "the others wait for what the first computes"
    assert steps[2] == [(0, 32, 9)]
    assert driver.plan() == [(1, 40, 1), (2, 40, 1)]


def test_a_prompt_takes_over_a_page_that_it_had_begun_itself() -> None:
    driver = Driver(tokens=64)
    ids = list(range(3, 3 + 20))
    slow, quick = driver.engine.prepare(Request(ids, greedy(1))), driver.engine.prepare(Request(ids, greedy(1)))
    slow.samples[0].kv.append(6)
    slow.samples[0].kv.commit(slow.tokens(slow.samples[0]))
    quick.samples[0].kv.adopt(quick.tokens(quick.samples[0]), 4)
    quick.samples[0].kv.append(12)
    quick.samples[0].kv.commit(quick.tokens(quick.samples[0]))
    assert slow.samples[0].kv.adopt(slow.tokens(slow.samples[0]), slow.readable(slow.samples[0])) == 10
    assert slow.samples[0].kv.table.pages == quick.samples[0].kv.table.pages
    driver.engine.kv.check([slow.samples[0].kv, quick.samples[0].kv])
    for state in (slow, quick):
        state.samples[0].kv.release()


def test_prompt_logprobs_read_nothing_from_the_cache() -> None:
    driver = Driver(tokens=64)
    ids = list(range(3, 3 + 20))
    driver.add(ids, 1)
    driver.step()
    request = driver.add(ids, 1, prompt_logprobs=0)
    assert driver.plan() == [(1, 0, 20)]
    assert request.cached_tokens == 0


def test_tenants_do_not_see_each_others_prefixes() -> None:
    driver = Driver(tokens=64)
    for salt in ("a", "b", "a"):
        state = driver.engine.prepare(Request(list(range(3, 3 + 20)), greedy(1), salt=salt))
        driver.engine.enqueue(state)
        driver.step()
        assert state.cached_tokens == (16 if state.request_id == 2 else 0)


# Retraction


def test_when_pages_run_out_the_youngest_makes_room_and_goes_on_later() -> None:
    driver = Driver(tokens=64, pages=8)
    old, young = driver.add(8, 17), driver.add(8, 17)  # 6 pages each in the end
    while not driver.scheduler.retractions:
        driver.step()
    assert driver.scheduler.running == [old]
    assert driver.scheduler.waiting[0] is young
    assert young.samples[0].kv.length == 0
    while old.live:
        assert driver.step(), "the oldest always gets on"
    while young.live:
        driver.step()
    assert [len(r.samples[0].token_ids) for r in (old, young)] == [17, 17]


def test_the_one_that_was_retracted_is_before_all_others_in_the_queue() -> None:
    driver = Driver(tokens=64, pages=8, seqs=2)
    driver.add(8, 17)
    young = driver.add(8, 17)
    driver.add(4, 2)
    while not driver.scheduler.retractions:
        driver.step()
    assert [request.request_id for request in driver.scheduler.waiting] == [young.request_id, 2]


def test_a_request_that_makes_room_reads_its_own_pages_again_where_they_are_left() -> None:
    driver = Driver(tokens=64, pages=10)
    old, young = driver.add(8, 20), driver.add(8, 20)
    while not driver.scheduler.retractions:
        driver.step()
    driver.engine.abort(old.request_id)
    total = young.total(young.samples[0])
    (chunk,) = driver.step()
    assert chunk.end == total
    assert chunk.start >= 8, "what was not evicted is not computed again"
    assert young.cached_tokens == 0, "its own work is no hit"


def test_output_is_cut_to_the_context_and_without_a_wish_to_the_pool() -> None:
    assert limits(context=64).max_length(10, greedy(8)) == 18
    assert limits(context=64).max_length(60, greedy(8)) == 64
    assert limits(context=64).max_length(10, greedy(None)) == 64
    assert limits(context=64, pages=10).max_length(10, greedy(None)) == 40 + 1
    assert limits(context=64, pages=10).max_length(10, greedy(None, n=3)) == (2 + 2) * 4 + 1
    assert limits(context=64, pages=10).max_length(50, greedy(None)) == 51


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "message"),
    [
        ([], greedy(), EmptyPromptError, "the prompt is empty: it has no tokens"),
        ([3, VOCAB], greedy(), TokenRangeError, "the prompt's token 1 is 50, outside the vocabulary of 50 tokens"),
        ([-1], greedy(), TokenRangeError, "the prompt's token 0 is -1, outside the vocabulary of 50 tokens"),
        ([3, 4.5], greedy(), TokenRangeError, "the prompt's token 1 is 4.5, which is not a token id"),
        ([True], greedy(), TokenRangeError, "the prompt's token 0 is True, which is not a token id"),
        (b"ab", greedy(), RequestError, "the prompt is b'ab', not a list of token ids"),
        (7, greedy(), RequestError, "the prompt is 7, not a list of token ids"),
        ([3] * 70, greedy(), PromptTooLongError, "the prompt has 70 tokens, more than the model's context of 64"),
        ([3] * 64, greedy(), PromptTooLongError,
         "the prompt has 64 tokens, which leaves no room for output in the model's context of 64"),
        ([3] * 20, greedy(30), NeverFitsError,
         "the request needs 13 pages (20 prompt + 30 output tokens), more than the KV pool's 10 pages (40 tokens)"),
        ([3] * 20, greedy(10, n=3), NeverFitsError,
         "the request needs 14 pages (3 samples of 20 prompt + 10 output tokens), more than the KV pool's 10 pages "
         "(40 tokens)"),
        ([3], greedy(n=9), SamplingError, "n=9 is more than max_num_seqs=8, which run at once"),
        ([3], greedy(stop_token_ids=(50,)), TokenRangeError,
         "stop_token_ids holds token 50, outside the vocabulary of 50 tokens"),
        ([3], greedy(logit_bias={-2: 1.0}), TokenRangeError,
         "logit_bias holds token -2, outside the vocabulary of 50 tokens"),
        ([3], None, RequestError, "sampling is NoneType, not SamplingParams"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_run_is_refused_with_the_numbers(
    prompt: Any, sampling: Any, error: type[RequestError], message: str
) -> None:
    """E7: context overflow names both numbers."""
    with pytest.raises(error) as caught:
        limits(pages=10).check(prompt, sampling)
    assert str(caught.value) == message
    assert type(caught.value) is error


def test_what_just_fits_is_accepted() -> None:
    assert limits(pages=10).check([3] * 20, greedy(21)) == (3,) * 20
    assert limits(pages=2).check([3] * 8, greedy(1)) == (3,) * 8
    assert limits(pages=2).check([3] * 7, greedy(1, n=3)) == (3,) * 7
    with pytest.raises(NeverFitsError):
        limits(pages=10).check([3] * 20, greedy(22))
    with pytest.raises(NeverFitsError):
        limits(pages=3).check([3] * 7, greedy(2, n=3))
    assert limits(pages=16).check([VOCAB - 1] * 63, greedy(1000)) == (VOCAB - 1,) * 63


def test_whole_numbers_of_other_libraries_are_token_ids() -> None:
    ids = limits().check(list(np.array([3, 4])), greedy())
    assert ids == (3, 4)
    assert {type(token) for token in ids} == {int}


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(TokenizerError, match="no tokenizer: stop strings cannot be looked for"):
        replace(limits(), has_tokenizer=False).check([3], greedy(stop=("x",)))
