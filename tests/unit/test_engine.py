import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from support.engines import END, VOCAB, complete, expected_greedy, greedy, hash_logits, make_engine, model_of, run
from tamis.engine.engine import Engine
from tamis.errors import EmptyPromptError, EngineClosedError, LogitsError, SamplingError
from tamis.request import FinishReason, PrefillProgress, Request, SamplingParams


def random_prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Whatever a test does, all pages are back at its end."""
    engine = make_engine()
    yield engine
    engine.check()
    assert not engine.has_work
    assert engine.pages_used == 0


# Tokens


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_tokens_do_not_depend_on_batch_chunk_or_page_size(chunk: int, page_size: int) -> None:
    prompts = random_prompts(7)
    engine = make_engine(pages=320 // page_size, page_size=page_size, max_batch_tokens=chunk)
    results = complete(engine, prompts, greedy(10))
    assert [list(r[0].token_ids) for r in results] == [expected_greedy(p, 10) for p in prompts]
    assert max(model_of(engine).batch_sizes) <= chunk


def test_requests_may_join_at_any_step(engine: Engine) -> None:
    prompts = random_prompts(6, seed=1)
    done = {}
    for prompt in prompts:
        engine.add_request(Request(tuple(prompt), greedy(12)))
        for event in engine.step():
            if event.completion is not None:
                done[event.request_id] = event.completion
    done |= {event.request_id: event.completion for event in run(engine) if event.completion is not None}
    assert [list(done[i].token_ids) for i in range(6)] == [expected_greedy(p, 12) for p in prompts]


def test_an_end_id_ends_the_text_and_is_among_its_tokens(engine: Engine) -> None:
    prompt = next(p for p in random_prompts(400) if END in expected_greedy(p, 20) and len(expected_greedy(p, 20)) > 2)
    expected = expected_greedy(prompt, 20)
    ((plain,),) = complete(engine, [prompt], greedy(20))
    assert (list(plain.token_ids), plain.finish_reason, plain.stop_reason) == (expected, FinishReason.STOP, END)
    ((ignoring,),) = complete(engine, [prompt], greedy(20, ignore_eos=True))
    assert list(ignoring.token_ids) == expected_greedy(prompt, 20, ends=())
    assert (ignoring.finish_reason, ignoring.stop_reason) == (FinishReason.LENGTH, None)


def test_a_stop_token_id_ends_the_text(engine: Engine) -> None:
    prompt = [5, 6, 7]
    tokens = expected_greedy(prompt, 10)
    stop = tokens[3]
    ((done,),) = complete(engine, [prompt], greedy(10, stop_token_ids=[stop], ignore_eos=True))
    assert list(done.token_ids) == tokens[: tokens.index(stop) + 1]
    assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("max_tokens", [7, 8, 9, None])
def test_output_ends_where_the_context_does(engine: Engine, max_tokens: int | None) -> None:
    prompt = [9] * 56
    ((done,),) = complete(engine, [prompt], greedy(max_tokens, ignore_eos=True))
    assert list(done.token_ids) == expected_greedy(prompt, min(max_tokens or 8, 8), ends=())
    assert done.finish_reason is FinishReason.LENGTH
    assert done.usage.completion_tokens == min(max_tokens or 8, 8)
    assert (done.usage.prompt_tokens, done.usage.total_tokens) == (56, 56 + done.usage.completion_tokens)


# Samples and seeds


def test_samples_of_one_prompt_share_its_prefill_and_differ(engine: Engine) -> None:
    prompt = random_prompts(1, seed=5)[0] * 2
    params = SamplingParams(n=4, seed=3, max_tokens=6, ignore_eos=True)
    (samples,) = complete(engine, [prompt], params)
    assert [s.index for s in samples] == [0, 1, 2, 3]
    assert len({s.token_ids for s in samples}) > 1
    assert sum(model_of(engine).batch_sizes) == len(prompt) + 4 * 5
    ((alone,),) = complete(engine, [prompt], replace(params, n=1))
    assert samples[0].token_ids == alone.token_ids
    (again,) = complete(engine, [prompt], params)
    assert [s.token_ids for s in again] == [s.token_ids for s in samples]


@pytest.mark.parametrize("length", range(1, 10))
def test_samples_write_to_pages_of_their_own(length: int) -> None:
    """Prompts that end anywhere in a page: a shared last page would mix the samples' contexts."""
    engine = make_engine(max_batch_tokens=5)
    prompt = list(range(3, 3 + length))
    (samples,) = complete(engine, [prompt], SamplingParams(n=3, seed=1, max_tokens=9, ignore_eos=True, logprobs=0))
    for sample in samples:
        context = [*prompt, *sample.token_ids]
        for place, logprob in enumerate(sample.logprobs or (), start=length):
            expected = hash_logits(context[:place]).log_softmax(-1)[context[place]]
            assert logprob == pytest.approx(float(expected), abs=1e-5)
    assert engine.pages_used == 0


def test_a_seed_gives_the_same_tokens_in_any_batch(engine: Engine) -> None:
    prompts = random_prompts(5, seed=2)
    params = [SamplingParams(seed=10 + i, max_tokens=8, temperature=1.3, top_p=0.9) for i in range(5)]
    together = complete(engine, prompts, *params)
    alone = [complete(engine, [prompt], param)[0] for prompt, param in zip(prompts, params, strict=True)]
    assert [done.token_ids for (done,) in together] == [done.token_ids for (done,) in alone]


def test_without_a_seed_samples_are_not_repeated(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    results = complete(engine, [[5, 6]] * 3, params)
    assert len({result[0].token_ids for result in results}) == 3


def test_greedy_samples_are_all_alike(engine: Engine) -> None:
    (samples,) = complete(engine, [[7, 8, 9]], greedy(5, n=3))
    assert [list(s.token_ids) for s in samples] == [expected_greedy([7, 8, 9], 5)] * 3


# Log-probabilities


def test_logprobs_are_those_of_the_model(engine: Engine) -> None:
    prompt = [4, 5, 6, 7]
    ((done,),) = complete(engine, [prompt], greedy(5, logprobs=3, ignore_eos=True))
    assert done.logprobs is not None
    assert done.top_logprobs is not None
    assert len(done.logprobs) == len(done.top_logprobs) == len(done.token_ids) == 5
    context = list(prompt)
    for token, logprob, top in zip(done.token_ids, done.logprobs, done.top_logprobs, strict=True):
        expected = hash_logits(context).log_softmax(-1)
        assert logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert list(top) == expected.topk(3).indices.tolist()
        context.append(token)


def test_logprobs_come_only_when_asked_for(engine: Engine) -> None:
    (none,), (own,) = complete(engine, [[4], [4]], greedy(2), greedy(2, logprobs=0))
    assert (none.logprobs, none.top_logprobs, none.prompt_logprobs) == (None, None, None)
    assert own.logprobs is not None
    assert own.top_logprobs is None


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
def test_prompt_logprobs_are_the_same_for_any_chunk_size(chunk: int) -> None:
    prompt = random_prompts(1, seed=8)[0][:11] + [4, 5]
    engine = make_engine(max_batch_tokens=chunk)
    (done,), (plain,) = complete(engine, [prompt, prompt[:5]], greedy(3, prompt_logprobs=2), greedy(3))
    assert list(done.token_ids) == expected_greedy(prompt, 3)
    assert list(plain.token_ids) == expected_greedy(prompt[:5], 3)
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    assert len(done.prompt_logprobs) == len(prompt)
    for place, entry in enumerate(done.prompt_logprobs[1:], start=1):
        expected = hash_logits(prompt[:place]).log_softmax(-1)
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[prompt[place]]), abs=1e-5)
        assert set(entry.top) == {*expected.topk(2).indices.tolist(), prompt[place]}


# Events


def test_each_sample_ends_in_exactly_one_event_its_last(engine: Engine) -> None:
    engine.add_request(Request((3, 4, 5), SamplingParams(n=3, seed=0, max_tokens=6)))
    engine.add_request(Request((6,), greedy(1)))
    events = run(engine)
    for (_, _), group in itertools.groupby(
        sorted(events, key=lambda e: (e.request_id, e.token.index)), key=lambda e: (e.request_id, e.token.index)
    ):
        of_sample = list(group)
        ended = [e.token.finish_reason is not None for e in of_sample]
        assert ended == [False] * (len(ended) - 1) + [True]
        last = of_sample[-1]
        assert last.completion is not None
        assert tuple(e.token.token_id for e in of_sample) == last.completion.token_ids
        assert last.token.usage == last.completion.usage
        assert all(e.token.usage is None and e.completion is None for e in of_sample[:-1])


def test_prompts_tell_how_far_they_are() -> None:
    engine, seen = make_engine(max_batch_tokens=4), list[PrefillProgress]()
    for prompt in ((5,) * 10, (5,) * 9 + (6,)):
        engine.add_request(Request(prompt, greedy(2)), seen.append)
        run(engine)
    assert [(step.total, step.cached, step.processed) for step in seen] == [
        (10, 0, 4), (10, 0, 8), (10, 0, 10), (10, 8, 10)]  # fmt: skip
    assert 0 < seen[0].elapsed < seen[1].elapsed < seen[2].elapsed


def test_stats_count_tokens_and_pages(engine: Engine) -> None:
    complete(engine, [[5] * 10, [6] * 3], greedy(4, ignore_eos=True))
    stats = engine.stats
    assert (stats.prefill_tokens, stats.decode_tokens, stats.steps) == (13, 6, 4)
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0
    assert (stats.pages_total, stats.pages_used, stats.pages_peak) == (64, 0, 4 + 2)
    assert (stats.waiting, stats.running, stats.page_size) == (0, 0, 4)


# Room


def test_requests_that_fill_the_pool_exactly_run_one_after_another() -> None:
    engine = make_engine(pages=8)
    prompts = random_prompts(4, seed=3, longest=20)
    params = [greedy(33 - len(prompt), ignore_eos=True) for prompt in prompts]
    results = complete(engine, prompts, *params)
    for prompt, (done,) in zip(prompts, results, strict=True):
        assert list(done.token_ids) == expected_greedy(prompt, 33 - len(prompt), ends=())
    assert engine.stats.pages_peak == 8
    assert engine.pages_used == 0


def test_samples_that_fill_the_pool_exactly_do_not_run_out() -> None:
    engine = make_engine(pages=1 + 3 * 4, page_size=4)
    prompt = [5, 6, 7, 8, 9, 10]  # a full page, which is shared, and a half one, which is not
    (samples,) = complete(engine, [prompt], SamplingParams(n=3, seed=0, max_tokens=15, ignore_eos=True))
    assert [len(s.token_ids) for s in samples] == [15] * 3
    assert engine.stats.pages_peak == 13


@pytest.mark.parametrize("length", [7, 8])
def test_one_token_each_needs_no_room_behind_the_prompt(length: int) -> None:
    engine = make_engine(pages=2, page_size=4)
    (samples,) = complete(engine, [[5] * length], greedy(1, n=3))
    assert [list(s.token_ids) for s in samples] == [expected_greedy([5] * length, 1)] * 3


# Ends


def test_abort_gives_pages_back_wherever_the_request_stands() -> None:
    engine = make_engine(pages=16, max_batch_tokens=4)
    replying = engine.add_request(Request((5,) * 4, greedy(20, ignore_eos=True)))
    engine.step()
    reading = engine.add_request(Request((6,) * 12, greedy(20)))
    waiting = engine.add_request(Request((7,) * 30, SamplingParams(n=2, max_tokens=3)))
    engine.step()
    engine.check()
    before = engine.pages_used
    for request_id in (reading, waiting, replying):
        engine.abort(request_id)
        engine.check()
    assert before > 0
    assert engine.pages_used == 0
    events = engine.take_events()
    assert [(e.request_id, e.token.index, e.token.finish_reason) for e in events] == [
        (reading, 0, FinishReason.ABORT), (waiting, 0, FinishReason.ABORT), (waiting, 1, FinishReason.ABORT),
        (replying, 0, FinishReason.ABORT)]  # fmt: skip
    assert events[-1].completion is not None
    assert list(events[-1].completion.token_ids) == expected_greedy([5] * 4, 2, ends=())
    assert not engine.has_work


def test_aborting_what_has_ended_or_never_was_does_nothing(engine: Engine) -> None:
    ((_,),) = complete(engine, [[5]], greedy(2))
    engine.abort(0)
    engine.abort(99)
    assert engine.take_events() == []


def test_aborting_one_request_leaves_the_others_as_they_are(engine: Engine) -> None:
    prompts = random_prompts(3, seed=4)
    ids = [engine.add_request(Request(tuple(p), greedy(10))) for p in prompts]
    engine.step()
    engine.abort(ids[1])
    done = {e.request_id: e.completion for e in run(engine) if e.completion is not None}
    for request_id in (ids[0], ids[2]):
        assert list(done[request_id].token_ids) == expected_greedy(prompts[request_id], 10)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(engine: Engine) -> None:
    model = model_of(engine)
    model.fail_at_token = 13
    hit = engine.add_request(Request((13, 5), SamplingParams(n=2, max_tokens=4)))
    events = run(engine)
    assert [(e.request_id, e.token.index, e.token.finish_reason) for e in events] == [
        (hit, 0, FinishReason.ERROR), (hit, 1, FinishReason.ERROR)]  # fmt: skip
    assert {str(e.error) for e in events} == {"the kernel failed"}
    assert engine.pages_used == 0
    model.fail_at_token = None
    ((done,),) = complete(engine, [[13, 5]], greedy(4))
    assert list(done.token_ids) == expected_greedy([13, 5], 4)


def test_a_failing_step_spares_requests_that_were_not_in_it() -> None:
    engine = make_engine(max_batch_tokens=8, max_num_seqs=1)
    model_of(engine).fail_at_token = 13
    engine.add_request(Request((13,), greedy(4)))
    engine.add_request(Request((14,), greedy(4)))
    events = run(engine)
    assert [e.token.finish_reason for e in events if e.request_id == 0] == [FinishReason.ERROR]
    assert [e.token.token_id for e in events if e.request_id == 1] == expected_greedy([14], 4)


def test_a_sample_that_cannot_be_sampled_ends_alone(engine: Engine) -> None:
    """A bias that forbids every token is the fault of one request."""
    never = dict.fromkeys(range(VOCAB), -math.inf)
    engine.add_request(Request((5, 6), greedy(4, logit_bias=never)))
    engine.add_request(Request((7,), greedy(4)))
    events = run(engine)
    (failed,) = [e for e in events if e.request_id == 0]
    assert failed.token.finish_reason is FinishReason.ERROR
    assert isinstance(failed.error, SamplingError)
    assert [e.token.token_id for e in events if e.request_id == 1] == expected_greedy([7], 4)


def test_broken_prompt_logits_end_their_own_request(engine: Engine) -> None:
    model_of(engine).nan_after = 13
    engine.add_request(Request((5, 13, 6), greedy(4, prompt_logprobs=0, n=2)))
    engine.add_request(Request((7,), greedy(4)))
    events = run(engine)
    assert [e.token.finish_reason for e in events if e.request_id == 0] == [FinishReason.ERROR] * 2
    assert {type(e.error) for e in events if e.request_id == 0} == {LogitsError}
    assert [e.token.token_id for e in events if e.request_id == 1] == expected_greedy([7], 4)


def test_penalties_see_what_was_generated(engine: Engine) -> None:
    """A repetition penalty that large forbids every token of prompt and output."""
    ((done,),) = complete(
        engine, [[3, 4, 5]], greedy(30, presence_penalty=2.0, repetition_penalty=1e9, ignore_eos=True)
    )
    assert len({3, 4, 5, *done.token_ids}) == 33


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_step_that_must_stop_is_taken_back_and_taken_again(engine: Engine, steps: int) -> None:
    engine.add_request(Request((5, 6), greedy(4, ignore_eos=True)))
    events = [event for _ in range(steps) for event in engine.step()]
    engine.must_stop = lambda: True
    assert engine.step() == []
    engine.check()
    assert engine.crashes == 0
    engine.must_stop = lambda: False
    events += run(engine)
    assert [event.token.token_id for event in events] == expected_greedy([5, 6], 4, ends=())


def test_a_step_goes_on_while_somebody_needs_it(engine: Engine) -> None:
    """A request that was cancelled shares the step: it is not taken from the others."""
    gone, other = (engine.prepare(Request((5, 6, last), greedy(4, ignore_eos=True))) for last in (7, 8))
    engine.enqueue(gone)
    engine.enqueue(other)
    gone.cancelled = True
    assert [event.request_id for event in engine.step()] == [gone.request_id, other.request_id]
    other.cancelled = True
    assert engine.step() == []
    for state in (gone, other):
        engine.abort(state.request_id)
    assert len(engine.take_events()) == 2


def test_crashes_are_counted_until_a_step_succeeds(engine: Engine) -> None:
    model_of(engine).fail_at_token = 13
    for count in (1, 2):
        engine.add_request(Request((13,), greedy(1)))
        run(engine)
        assert (engine.crashes, str(engine.last_crash)) == (count, "the kernel failed")
    complete(engine, [[5]], greedy(1))
    assert engine.crashes == 0


def test_a_refused_request_leaves_no_trace(engine: Engine) -> None:
    with pytest.raises(EmptyPromptError):
        engine.add_request(Request((), greedy()))
    assert not engine.has_work


def test_a_closed_engine_aborts_what_runs_and_refuses_more(engine: Engine) -> None:
    engine.add_request(Request((5, 6), greedy(4)))
    engine.step()
    engine.close()
    engine.close()
    assert [e.token.finish_reason for e in engine.step()] == [FinishReason.ABORT]
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        engine.add_request(Request((5,), greedy()))


def test_the_check_notices_a_lost_page(engine: Engine) -> None:
    lost = engine.kv.allocator.allocate(1)
    with pytest.raises(AssertionError, match="held=1, cached=0, in_transfer=0\\) is not 0 held \\+ 0 cached"):
        engine.check()
    engine.kv.allocator.free(lost)
