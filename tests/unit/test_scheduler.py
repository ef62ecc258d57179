from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.engines import VOCAB, greedy, make_engine
from tamis.engine.limits import Limits
from tamis.engine.sampler import Sampled
from tamis.engine.scheduler import Chunk, Scheduler
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


def make_scheduler(tokens: int = 16, pages: int = 100, seqs: int = 8) -> Scheduler:
    return Scheduler(limits(pages, seqs), max_batch_tokens=tokens)


class Requests:
    """Makes requests of an engine that never runs them: real samples with real page tables."""

    def __init__(self) -> None:
        self.engine = make_engine(pages=1000, context=64)

    def __call__(self, prompt: int, max_tokens: int = 8, n: int = 1) -> RequestState:
        self.engine.add_request(Request(tuple(3 + i % 40 for i in range(prompt)), greedy(max_tokens, n=n)))
        return self.engine.scheduler.waiting[-1]


def advance(chunks: list[Chunk]) -> None:
    """What the engine does with a step, as far as the scheduler sees it; token 5 always comes next."""
    for chunk in chunks:
        if chunk.is_prefill:
            chunk.request.computed += len(chunk.token_ids)
        for sample in chunk.receivers:
            sample.accept(Sampled(5, None))


def shape(chunks: list[Chunk]) -> list[tuple[int, int, int]]:
    return [(chunk.request.request_id, chunk.start, len(chunk.token_ids)) for chunk in chunks]


def test_a_long_prompt_is_cut_to_the_budget_and_only_its_last_chunk_gives_a_token() -> None:
    scheduler = make_scheduler(tokens=16)
    scheduler.add(Requests()(40))
    steps = []
    for _ in range(4):
        chunks = scheduler.schedule()
        steps.append((*shape(chunks)[0][1:], chunks[0].num_logits, len(chunks[0].receivers)))
        advance(chunks)
    assert steps == [(0, 16, 0, 0), (16, 16, 0, 0), (32, 8, 1, 1), (40, 1, 1, 1)]


def test_replies_come_before_prompts_in_a_step() -> None:
    """A long prompt never starves a running reply."""
    make, scheduler = Requests(), make_scheduler(tokens=16)
    scheduler.add(make(4))
    advance(scheduler.schedule())
    scheduler.add(make(40))
    for step in range(3):
        chunks = scheduler.schedule()
        assert shape(chunks)[0] == (0, 4 + step, 1)
        assert shape(chunks)[1] == (1, 15 * step, min(15, 40 - 15 * step))
        advance(chunks)


def test_no_step_exceeds_the_token_budget() -> None:
    make, scheduler = Requests(), make_scheduler(tokens=5)
    for prompt in (3, 1, 9, 2, 7, 4):
        scheduler.add(make(prompt, max_tokens=6))
    sizes = []
    while scheduler.has_work:
        chunks = scheduler.schedule()
        assert chunks, "there is work, but no step"
        sizes.append(sum(len(chunk.token_ids) for chunk in chunks))
        advance(chunks)
        for chunk in chunks:
            if not chunk.request.live:
                scheduler.remove(chunk.request)
    assert max(sizes) == 5
    assert sum(sizes) == 26 + 6 * 5  # every prompt token and every generated token but the last


def test_with_more_replies_than_tokens_a_step_all_take_turns() -> None:
    make, scheduler = Requests(), make_scheduler(tokens=4)
    for _ in range(3):
        scheduler.add(make(1, max_tokens=8))
    advance(scheduler.schedule())
    scheduler.max_batch_tokens = 2
    turns = []
    for _ in range(3):
        chunks = scheduler.schedule()
        turns.append([chunk.request.request_id for chunk in chunks])
        advance(chunks)
    assert turns == [[0, 1], [2, 0], [1, 2]]


def test_requests_are_admitted_in_order_and_the_first_is_never_overtaken() -> None:
    make, scheduler = Requests(), make_scheduler(tokens=64, pages=10)
    for prompt, output in ((16, 8), (20, 8), (4, 4)):  # 6, 7 and 2 pages
        scheduler.add(make(prompt, output))
    assert shape(scheduler.schedule()) == [(0, 0, 16)]
    assert [request.request_id for request in scheduler.waiting] == [1, 2]
    scheduler.remove(scheduler.running[0])
    assert shape(scheduler.schedule()) == [(1, 0, 20), (2, 0, 4)]


def test_admission_promises_the_pages_a_request_can_need_at_most() -> None:
    make, scheduler = Requests(), make_scheduler(tokens=64, pages=6)
    scheduler.add(make(4, 9))  # 3 pages
    scheduler.add(make(4, 10))  # 4 pages, of which 1 is missing
    scheduler.schedule()
    assert (len(scheduler.running), len(scheduler.waiting), scheduler.promised_pages) == (1, 1, 3)


def test_samples_of_a_request_count_as_sequences_and_share_full_prompt_pages() -> None:
    make, scheduler = Requests(), make_scheduler(tokens=64, pages=100, seqs=4)
    scheduler.add(make(10, 6, n=3))  # 2 shared pages, then 2 for each
    scheduler.add(make(4, 4, n=2))
    chunks = scheduler.schedule()
    assert scheduler.promised_pages == 2 + 3 * 2
    assert [len(chunk.receivers) for chunk in chunks] == [3]
    assert len(scheduler.waiting) == 1, "3 + 2 sequences are more than 4"
    advance(chunks)
    chunks[0].receivers[0].finish(FinishReason.STOP)
    assert scheduler.promised_pages == 2 + 2 * 2
    assert [len(chunk.receivers) for chunk in scheduler.schedule()] == [1, 1, 2]


def test_prompt_logprobs_want_logits_of_every_prompt_token() -> None:
    make, scheduler = Requests(), make_scheduler(tokens=6)
    request = make(10)
    request.sampling = greedy(prompt_logprobs=0)
    scheduler.add(request)
    first = scheduler.schedule()
    advance(first)
    second = scheduler.schedule()
    assert [chunk.num_logits for chunk in (*first, *second)] == [6, 4]


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
