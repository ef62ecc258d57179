import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.engines import VOCAB, expected_greedy, greedy, make_engine, model_of
from support.model_dirs import write_tokenizer
from support.progress import Recorder
from tamis import LLM, Completion, FinishReason, SamplingParams, TokenEvent
from tamis.config import GenerationDefaults
from tamis.engine.batch import Batch
from tamis.engine.engine import Engine
from tamis.engine.tokenizer import Tokenizer
from tamis.errors import (
    ConfigError,
    EmptyPromptError,
    EngineClosedError,
    NeverFitsError,
    PromptTooLongError,
    RequestError,
    SamplingError,
    TokenizerError,
    TokenRangeError,
)
from tamis.models.hub import ModelSource


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_source(ModelSource("tiny", directory, "directory"))


@pytest.fixture
def make_llm(tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[LLM, Engine]]]:
    """LLMs over the hash model; whatever a test does, all pages are back at its end."""
    made: list[tuple[LLM, Engine]] = []

    def make(defaults: GenerationDefaults | None = None, progress: Any = None, **options: Any) -> tuple[LLM, Engine]:
        engine = make_engine(tokenizer=tokenizer, **options)
        made.append((LLM.from_engine(engine, defaults=defaults, progress=progress), engine))
        return made[-1]

    yield make
    for llm, engine in made:
        llm.close()
        engine.check()
        assert engine.pages_used == 0
        assert not engine.scheduler.has_work


def check_idle(llm: LLM, engine: Engine) -> None:
    """Nothing runs and no page is held, as soon as the engine has seen what was asked of it."""
    llm.check()
    assert (engine.pages_used, engine.has_work) == (0, False)


@pytest.fixture
def llm(make_llm: Callable[..., tuple[LLM, Engine]]) -> LLM:
    return make_llm()[0]


# generate


def test_one_text_gives_a_list_of_one(llm: LLM) -> None:
    (done,) = llm.generate("hello", greedy(6))
    ids = llm.encode("hello")
    assert done.prompt_token_ids == tuple(ids)
    assert list(done.token_ids) == expected_greedy(ids, 6)
    assert done.text == llm.decode(done.token_ids)
    assert done.usage.prompt_tokens == len(ids)


def test_texts_and_token_ids_come_back_in_order(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["hello there", "a", [5, 6, 7], "what is it?"]
    results = llm.generate(prompts, greedy(9))
    for prompt, done in zip(prompts, results, strict=True):
        ids = llm.encode(prompt) if isinstance(prompt, str) else prompt
        assert list(done.token_ids) == expected_greedy(ids, 9)


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    results = llm.generate(["one", "two"], [greedy(2, ignore_eos=True), greedy(5, ignore_eos=True)])
    assert [len(done.token_ids) for done in results] == [2, 5]


def test_samples_stand_beside_each_other(llm: LLM) -> None:
    params = [SamplingParams(n=2, seed=1, max_tokens=4), SamplingParams(n=3, seed=2, max_tokens=4)]
    results = llm.generate(["one", "two"], params)
    assert [done.index for done in results] == [0, 1, 0, 1, 2]
    assert [llm.decode(done.prompt_token_ids) for done in results] == ["one"] * 2 + ["two"] * 3


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([], greedy()) == []


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(llm: LLM) -> None:
    (free,) = llm.generate("hello", greedy(20, ignore_eos=True))
    place = 3
    stop = free.text[place : place + 2]
    cut = free.text.index(stop)
    (done,) = llm.generate("hello", greedy(20, ignore_eos=True, stop=stop))
    assert (done.text, done.finish_reason, done.stop_reason) == (free.text[:cut], FinishReason.STOP, stop)
    assert done.token_ids == free.token_ids[: len(done.token_ids)]
    assert llm.decode(done.token_ids) == free.text[: cut + 2], "the tokens end where the stop string does"


def test_text_held_back_for_a_stop_string_is_not_lost_at_the_end(llm: LLM) -> None:
    """E3: a started stop string that never ends is text."""
    (free,) = llm.generate("hello", greedy(8, ignore_eos=True))
    stop = free.text[-1] + "never"
    (done,) = llm.generate("hello", greedy(8, ignore_eos=True, stop=[stop]))
    assert (done.text, done.finish_reason) == (free.text, FinishReason.LENGTH)
    events = list(llm.stream("hello", greedy(8, ignore_eos=True, stop=[stop])))
    assert "".join(event.text for event in events) == free.text
    assert events[-1].text.endswith(free.text[-1])


def test_the_end_id_is_a_token_but_no_text(llm: LLM) -> None:
    prompt = next(
        [3, a, b] for a, b in itertools.product(range(3, VOCAB), repeat=2) if 2 in expected_greedy([3, a, b], 9)
    )
    (done,) = llm.generate([prompt], greedy(9))
    assert done.token_ids[-1] == 2
    assert "</s>" not in done.text
    assert done.text == llm.decode(done.token_ids[:-1])


def test_nothing_runs_where_one_prompt_is_refused(make_llm: Callable[..., tuple[LLM, Engine]]) -> None:
    llm, engine = make_llm()
    with pytest.raises(TokenRangeError) as caught:
        llm.generate([[5, 6], [7, 99]], greedy())
    assert str(caught.value) == "prompt 1: the prompt's token 1 is 99, outside the vocabulary of 50 tokens"
    assert engine.stats.steps == 0
    assert not engine.has_work


@pytest.mark.parametrize(
    ("prompts", "sampling", "error", "message"),
    [
        ("", greedy(), EmptyPromptError, "the prompt is empty: it has no tokens"),
        ([[]], greedy(), EmptyPromptError, "the prompt is empty: it has no tokens"),
        ("x" * 70, greedy(), PromptTooLongError, "the prompt has 70 tokens, more than the model's context of 64"),
        ([3, 4], greedy(), RequestError, "prompt 0: the prompt is 3, not a list of token ids"),
        (None, greedy(), RequestError, "prompts=None is not text, a list of texts or a list of lists of token ids"),
        (5, greedy(), RequestError, "prompts=5 is not text, a list of texts or a list of lists of token ids"),
        (b"ab", greedy(), RequestError, "prompts=b'ab' is not text, a list of texts or a list of lists of token ids"),
        (["a", "b"], [greedy()], RequestError, "there are 2 prompts and 1 sampling parameters"),
        ("a", {"n": 1}, RequestError, "sampling is of type dict, not SamplingParams or a list of them"),
        ("a", greedy(n=65), SamplingError, "n=65 is more than max_num_seqs=64, which run at once"),
        ("a" * 40, greedy(20, n=40), NeverFitsError,
         "the request needs 210 pages (40 samples of 40 prompt + 20 output tokens), more than the KV pool's 64 pages "
         "(256 tokens)"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_by_name(
    llm: LLM, prompts: Any, sampling: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        llm.generate(prompts, sampling)
    assert str(caught.value) == message
    assert llm.stats.steps == 0


def test_a_model_that_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model=5 is not a name or a path$"):
        LLM(5)  # type: ignore[arg-type]


def test_a_failing_step_is_raised_and_the_llm_goes_on(make_llm: Callable[..., tuple[LLM, Engine]]) -> None:
    llm, engine = make_llm()
    model_of(engine).fail_at_token = 13
    with pytest.raises(RuntimeError, match="the kernel failed"):
        llm.generate([[5, 6], [13]], greedy())
    with pytest.raises(RuntimeError, match="the kernel failed"):
        list(llm.stream([13], greedy()))
    check_idle(llm, engine)
    assert list(llm.generate([[5, 6]], greedy())[0].token_ids) == expected_greedy([5, 6], 8)


# stream and chat


def test_a_stream_is_the_completion_piece_by_piece(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=4, max_tokens=8, ignore_eos=True)
    whole = llm.generate("hello", params)
    pieces: dict[int, list[TokenEvent]] = {0: [], 1: []}
    for event in llm.stream("hello", params):
        pieces[event.index].append(event)
    for done in whole:
        events = pieces[done.index]
        assert "".join(event.text for event in events) == done.text
        assert tuple(event.token_id for event in events) == done.token_ids
        assert events[-1].finish_reason is done.finish_reason
        assert events[-1].usage == replace(done.usage, cached_tokens=4), "the second time a page of it is cached"


def test_closing_a_stream_early_frees_its_pages(make_llm: Callable[..., tuple[LLM, Engine]]) -> None:
    """E5, in the library: the request ends with its reader."""
    llm, engine = make_llm()
    stream = llm.stream("hello", greedy(40, ignore_eos=True))
    for _ in range(3):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    check_idle(llm, engine)


def test_a_dropped_stream_frees_its_pages(make_llm: Callable[..., tuple[LLM, Engine]]) -> None:
    llm, engine = make_llm()
    for event in llm.stream("hello", greedy(40, ignore_eos=True)):
        assert event.token_id is not None
        break
    gc.collect()
    check_idle(llm, engine)


def test_a_stream_that_was_never_read_costs_nothing(make_llm: Callable[..., tuple[LLM, Engine]]) -> None:
    llm, engine = make_llm()
    stream = llm.stream("hello", greedy())
    assert not engine.has_work
    del stream
    with pytest.raises(EmptyPromptError):
        llm.stream("", greedy())


def test_two_streams_may_be_read_in_turns(llm: LLM) -> None:
    one, two = llm.stream("one", greedy(6)), llm.stream("two", greedy(6))
    pairs = list(itertools.zip_longest(one, two))
    assert [e.token_id for e, _ in pairs if e] == expected_greedy(llm.encode("one"), 6)
    assert [e.token_id for _, e in pairs if e] == expected_greedy(llm.encode("two"), 6)


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    done = llm.chat(messages, greedy(5))
    assert isinstance(done, Completion)
    assert llm.decode(done.prompt_token_ids) == "user: hi\nbot:"
    assert "".join(event.text for event in llm.stream_chat(messages, greedy(5))) == done.text
    with pytest.raises(SamplingError, match="n=2: chat gives one reply; use generate for several"):
        llm.chat(messages, greedy(n=2))


def test_chat_without_messages_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.chat([], greedy())


# Threads


def test_threads_share_the_engine_and_each_gets_its_own(make_llm: Callable[..., tuple[LLM, Engine]]) -> None:
    llm, engine = make_llm(pages=24, max_batch_tokens=8)
    results: dict[str, Any] = {}

    def work(name: str) -> None:
        prompts = [[5 + len(name), 6, i + 7] for i in range(5)]
        try:
            generated = llm.generate(prompts, greedy(12))
            streamed = [event.token_id for event in llm.stream(prompts[0], greedy(12))]
            results[name] = ([list(done.token_ids) for done in generated], streamed)
        except Exception as error:
            results[name] = error

    threads = [threading.Thread(target=work, args=("x" * size,)) for size in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for size in range(1, 5):
        expected = [expected_greedy([5 + size, 6, i + 7], 12) for i in range(5)]
        assert results["x" * size] == (expected, expected[0])
    engine.check()


def test_closing_ends_what_other_threads_wait_for(make_llm: Callable[..., tuple[LLM, Engine]]) -> None:
    llm, engine = make_llm(context=200, pages=50)
    started, results = threading.Event(), list[FinishReason | None]()

    def work() -> None:
        for event in llm.stream([5, 6], greedy(190, ignore_eos=True)):
            started.set()
            results.append(event.finish_reason)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(timeout=60)
    llm.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert results[-1] in (FinishReason.ABORT, FinishReason.LENGTH)
    assert results.count(None) == len(results) - 1
    assert engine.pages_used == 0


# The rest of the surface


def test_a_closed_llm_refuses_everything(make_llm: Callable[..., tuple[LLM, Engine]]) -> None:
    llm, _ = make_llm()
    stream = llm.stream("hello", greedy())
    with llm:
        pass
    llm.close()
    calls: list[Callable[[], object]] = [
        lambda: llm.generate("a", greedy()), lambda: llm.stream("a", greedy()), lambda: llm.encode("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]), lambda: llm.stats, lambda: llm.pool, llm.__enter__,
        lambda: next(stream),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(EngineClosedError, match=r"the (LLM|engine) is closed"):
            call()


def test_sampling_defaults_are_the_checkpoints(make_llm: Callable[..., tuple[LLM, Engine]]) -> None:
    llm, _ = make_llm(GenerationDefaults(temperature=0.5, top_k=7))
    assert llm.default_sampling() == SamplingParams(temperature=0.5, top_k=7)
    assert llm.default_sampling(top_k=3, max_tokens=9) == SamplingParams(temperature=0.5, top_k=3, max_tokens=9)
    plain, _ = make_llm()
    assert plain.default_sampling() == SamplingParams()


def test_prompts_are_reported_until_they_are_read(make_llm: Callable[..., tuple[LLM, Engine]]) -> None:
    recorder = Recorder()
    llm, engine = make_llm(progress=recorder, max_batch_tokens=4)
    llm.generate([[5] * 6, [6] * 3], greedy(3, ignore_eos=True))
    assert recorder.calls == [("reading the prompt", 9, "tokens"), 3, 1, 3, 1, 1, "done"]
    recorder.calls.clear()
    model_of(engine).fail_at_token = 13
    with pytest.raises(RuntimeError):
        llm.generate([[7] * 4 + [13]], greedy())
    assert recorder.calls == [("reading the prompt", 5, "tokens"), 4, "done"]


def test_one_of_several_calls_at_a_time_is_reported(make_llm: Callable[..., tuple[LLM, Engine]]) -> None:
    recorder = Recorder()
    llm, _ = make_llm(progress=recorder, max_batch_tokens=2)
    one, two = llm.stream([5] * 6, greedy(3)), llm.stream([6] * 3, greedy(3))
    threads = [threading.Thread(target=list, args=(stream,)) for stream in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    llm.generate([[7]], greedy(1))
    tasks = [(i, call) for i, call in enumerate(recorder.calls) if isinstance(call, tuple) or call == "done"]
    assert [isinstance(call, tuple) for _, call in tasks] == [True, False] * (len(tasks) // 2)
    assert recorder.calls[-3:] == [("reading the prompt", 1, "tokens"), 1, "done"]


def test_an_abort_inside_a_step_is_applied_after_it(
    make_llm: Callable[..., tuple[LLM, Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a garbage collection in the middle of a step does, in the engine's own thread."""
    llm, engine = make_llm()
    dropped = llm.stream([5, 6], greedy(30, ignore_eos=True))
    next(dropped)
    run = engine.runner.run

    def run_and_drop(batch: Batch, before_layer: Callable[[], None]) -> torch.Tensor:
        dropped.close()  # type: ignore[attr-defined]
        return run(batch, before_layer)

    monkeypatch.setattr(engine.runner, "run", run_and_drop)
    (done,) = llm.generate([[7, 8]], greedy(5))
    assert list(done.token_ids) == expected_greedy([7, 8], 5)
    check_idle(llm, engine)


def test_an_llm_that_is_dropped_ends_its_thread() -> None:
    llm = LLM.from_engine(make_engine())
    thread = llm._thread._thread
    llm.generate([[5]], greedy(1))
    del llm
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_model_without_tokenizer_runs_on_token_ids() -> None:
    llm = LLM.from_engine(make_engine())
    (done,) = llm.generate([[5, 6]], greedy(4))
    assert (list(done.token_ids), done.text) == (expected_greedy([5, 6], 4), "")
    with pytest.raises(TokenizerError, match="the model has no tokenizer: give it token ids instead of text"):
        llm.generate("hello", greedy())
    with pytest.raises(TokenizerError, match="no tokenizer: stop strings"):
        llm.generate([[5, 6]], greedy(stop="x"))
    with pytest.raises(TokenizerError):
        llm.chat([{"role": "user", "content": "a"}], greedy())
