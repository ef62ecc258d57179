import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.engines import VOCAB, HeldStep, expected_greedy, greedy, make_engine, model_of
from tamis import AsyncEngine, FinishReason, SamplingParams, TokenEvent
from tamis.config import GenerationDefaults
from tamis.engine.engine import Engine
from tamis.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    NeverFitsError,
    PromptTooLongError,
    QueueFullError,
    TokenizerError,
    TokenRangeError,
)
from tamis.request import PrefillProgress

PATIENCE = 60


@asynccontextmanager
async def opened(engine: Engine | None = None, **options: Any) -> AsyncIterator[AsyncEngine]:
    """An AsyncEngine over a HashModel; whatever a test does, all pages are back at its end."""
    engine = engine or make_engine(**options)
    async with AsyncEngine.from_engine(engine) as front:
        yield front
    engine.check()
    assert (engine.pages_used, engine.has_work) == (0, False)


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE))


def test_many_requests_at_once_each_get_their_own() -> None:
    async def test() -> None:
        async with opened(pages=48, max_batch_tokens=16) as engine:
            prompts = [[3 + i % 40, 5, 6 + i % 7] for i in range(40)]
            handles = [engine.submit(prompt, greedy(9)) for prompt in prompts]
            results = await asyncio.gather(*(handle.completions() for handle in handles))
            for prompt, (done,) in zip(prompts, results, strict=True):
                assert list(done.token_ids) == expected_greedy(prompt, 9)
            assert len({handle.request_id for handle in handles}) == 40
            assert handles[0].prompt_token_ids == prompts[0]

    run(test)


def test_events_of_all_samples_come_in_order_and_end() -> None:
    async def test() -> None:
        async with opened() as engine:
            handle = engine.submit([5, 6], SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True))
            events: list[TokenEvent] = [event async for event in handle]
            assert await anext(handle, None) is None
            for done in await handle.completions():
                own = [event for event in events if event.index == done.index]
                assert tuple(event.token_id for event in own) == done.token_ids
                assert [event.finish_reason for event in own] == [None] * 4 + [FinishReason.LENGTH]

    run(test)


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ([3, VOCAB], greedy(), TokenRangeError),
        ([3] * 70, greedy(), PromptTooLongError),
        ([3] * 40, greedy(20, n=40), NeverFitsError),
        ("text", greedy(), TokenizerError),
    ],
)
def test_what_cannot_run_is_refused_at_once(prompt: Any, sampling: SamplingParams, error: type[Exception]) -> None:
    async def test() -> None:
        async with opened() as engine:
            with pytest.raises(error):
                engine.submit(prompt, sampling)
            assert engine.stats.steps == 0

    run(test)


def test_a_full_queue_is_said_at_once_and_later_there_is_room() -> None:
    async def test() -> None:
        inner = make_engine()
        step = HeldStep(inner)
        async with AsyncEngine.from_engine(inner, max_queue=2) as engine:
            first = engine.submit([5], greedy(2))
            await asyncio.to_thread(step.begun.wait, PATIENCE)
            waiting = [engine.submit([6], greedy(2)) for _ in range(2)]
            with pytest.raises(QueueFullError, match="2 requests wait already, of at most max_queue=2"):
                engine.submit([7], greedy(2))
            step.go_on.set()
            for handle in (first, *waiting):
                await handle.completions()
            await engine.submit([7], greedy(2)).completions()
        inner.check()

    run(test)


@pytest.mark.parametrize("max_queue", [0, -1, True, 1.5, None])
def test_a_queue_without_room_is_refused(max_queue: Any) -> None:
    with pytest.raises(ConfigError, match=r"^max_queue=.* must be a whole number of at least 1$"):
        AsyncEngine.from_engine(make_engine(), max_queue=max_queue)


def test_an_abort_ends_the_request_and_tells_its_reader() -> None:
    async def test() -> None:
        async with opened(context=2000, pages=600) as engine:
            handle = engine.submit([5, 6], greedy(1500, ignore_eos=True))
            assert (await anext(handle)).finish_reason is None
            for _ in range(2):
                await asyncio.to_thread(handle.abort)
            (done,) = await handle.completions()
            assert done.finish_reason is FinishReason.ABORT
            assert done.usage.completion_tokens == len(done.token_ids) < 1500
            handle.abort()

    run(test)


def test_a_reader_that_is_cancelled_ends_its_request() -> None:
    """E5."""

    async def test() -> None:
        inner = make_engine(context=2000, pages=600)
        async with opened(inner) as engine:
            handle = engine.submit([5, 6], greedy(1500, ignore_eos=True))
            began = asyncio.Event()

            async def read() -> None:
                async for _ in handle:
                    began.set()

            reader = asyncio.create_task(read())
            await began.wait()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            engine.check()
            assert (inner.pages_used, inner.has_work) == (0, False)

    run(test)


@pytest.mark.parametrize("read", [0, 2])
def test_a_handle_that_is_dropped_ends_its_request(read: int) -> None:
    async def test() -> None:
        inner = make_engine(context=2000, pages=600)
        async with opened(inner) as engine:
            handle = engine.submit([5, 6], greedy(1500, ignore_eos=True))
            for _ in range(read):
                await anext(handle)
            del handle
            gc.collect()
            engine.check()
            assert (inner.pages_used, inner.has_work) == (0, False)

    run(test)


def test_a_failing_step_is_raised_in_its_own_requests_only() -> None:
    async def test() -> None:
        inner = make_engine(max_num_seqs=1)
        model_of(inner).fail_at_token = 13
        async with opened(inner) as engine:
            bad, good = engine.submit([13], greedy(3)), engine.submit([14], greedy(3))
            with pytest.raises(RuntimeError, match="the kernel failed"):
                await bad.completions()
            assert await anext(bad, None) is None
            (done,) = await good.completions()
            assert list(done.token_ids) == expected_greedy([14], 3)
            engine.check_health()

    run(test)


def test_a_dead_engine_tells_everybody_why() -> None:
    async def test() -> None:
        inner = make_engine()
        engine = AsyncEngine.from_engine(inner)
        step = HeldStep(inner)
        running = engine.submit([5], greedy(20, ignore_eos=True))
        await asyncio.to_thread(step.begun.wait, PATIENCE)
        waiting = engine.submit([6], greedy(3))
        inner.scheduler.schedule = lambda: 1 / 0  # type: ignore[assignment,return-value,method-assign]
        step.go_on.set()
        for call in (running.completions(), waiting.completions()):
            with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                await call
        for refused in (engine.check_health, lambda: engine.submit([7], greedy())):
            with pytest.raises(EngineDeadError, match=r"the engine has stopped after an error: ZeroDivisionError"):
                refused()
        await engine.aclose()

    run(test)


def test_closing_drains_refuses_more_and_ends_what_takes_too_long() -> None:
    async def test() -> None:
        inner = make_engine(context=100_000, pages=30_000, page_size=4)
        step = HeldStep(inner)
        engine = AsyncEngine.from_engine(inner)
        short, endless = engine.submit([5], greedy(3)), engine.submit([6], greedy(90_000, ignore_eos=True))
        await asyncio.to_thread(step.begun.wait, PATIENCE)
        closing = asyncio.create_task(engine.aclose(drain=0.3))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            engine.submit([7], greedy())
        step.go_on.set()
        await closing
        assert list((await short.completions())[0].token_ids) == expected_greedy([5], 3)
        assert (await endless.completions())[0].finish_reason is FinishReason.ABORT
        await engine.aclose()
        inner.check()
        assert engine.kv_usage()["pages"]["held"] == 0

    run(test)


def test_prefill_is_reported_before_the_first_event_and_in_the_readers_loop() -> None:
    async def test() -> None:
        loop_thread, threads = threading.get_ident(), set[int]()
        seen: list[PrefillProgress | TokenEvent] = []

        def report(progress: PrefillProgress) -> None:
            threads.add(threading.get_ident())
            seen.append(progress)

        async with opened(max_batch_tokens=4) as engine:
            for _ in range(2):
                seen += [
                    event async for event in engine.submit([5] * 10, greedy(2, ignore_eos=True), on_prefill=report)
                ]
        assert threads == {loop_thread}
        figures = [(p.total, p.cached, p.processed) if isinstance(p, PrefillProgress) else p.token_id for p in seen]
        tokens = expected_greedy([5] * 10, 2, ends=())
        assert figures == [(10, 0, 4), (10, 0, 8), (10, 0, 10), *tokens, (10, 8, 10), *tokens]

    run(test)


def test_a_callback_that_fails_ends_its_own_request() -> None:
    async def test() -> None:
        def fail(_: PrefillProgress) -> None:
            raise ValueError("the callback failed")

        async with opened() as engine:
            with pytest.raises(ValueError, match="the callback failed"):
                await engine.submit([5, 6], greedy(30, ignore_eos=True), on_prefill=fail).completions()
            await engine.submit([5, 6], greedy(3)).completions()

    run(test)


def test_the_second_of_two_equal_prompts_comes_from_the_cache_and_a_tenants_does_not() -> None:
    async def test() -> None:
        async with opened() as engine:
            prompt = list(range(3, 3 + 20))
            cached = []
            for salt in ("", "", "other"):
                (done,) = await engine.submit(prompt, greedy(3), salt=salt).completions()
                assert list(done.token_ids) == expected_greedy(prompt, 3)
                cached.append(done.usage.cached_tokens)
            assert cached == [0, 16, 0]
            assert (engine.stats.hit_tokens, engine.stats.prompt_tokens) == (16, 60)

    run(test)


def test_kv_usage_adds_up() -> None:
    async def test() -> None:
        async with opened() as engine:
            await engine.submit([5] * 9, greedy(2)).completions()
            usage = engine.kv_usage()
            pages = usage["pages"]
            assert pages["free"] + pages["held"] + pages["cached"] + pages["in_transfer"] == pages["total"] == 64
            assert (pages["cached"], usage["tokens"]["total"], usage["page_size"]) == (2, 256, 4)
            assert usage["bytes"]["main"] == 64 * 4 * 2 * 2 * 4

    run(test)


def test_a_request_may_be_submitted_where_no_loop_runs() -> None:
    async def test() -> None:
        async with opened() as engine:
            handle = await asyncio.to_thread(engine.submit, [5, 6], greedy(3))
            assert list((await handle.completions())[0].token_ids) == expected_greedy([5, 6], 3)

    run(test)


def test_the_surface_is_that_of_the_model() -> None:
    async def test() -> None:
        engine = AsyncEngine.from_engine(make_engine(), defaults=GenerationDefaults(temperature=0.5), model_name="hash")
        assert (engine.model_name, engine.tokenizer, engine.config.vocab_size) == ("hash", None, VOCAB)
        assert engine.default_sampling(top_k=2) == SamplingParams(temperature=0.5, top_k=2)
        assert (engine.limits.num_pages, engine.pool.num_pages, engine.layout.page_size) == (64, 64, 4)
        await engine.aclose()
        assert engine.stats.pages_total == 64, "figures can still be read"

    run(test)
