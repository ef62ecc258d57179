"""Signals, callbacks and threads that come at the worst moment: no request, page or lock is lost."""

import contextlib
import itertools
import linecache
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from support.engines import expected_greedy, greedy, make_engine, run
from support.model_dirs import write_model
from tamis import LLM, FinishReason
from tamis.engine.batch import Batch
from tamis.engine.engine import Engine
from tamis.errors import RequestError
from tamis.request import Request

PATIENCE = 30


@pytest.fixture
def engine() -> Engine:
    return make_engine(pages=16, page_size=2, max_batch_tokens=4)


@pytest.fixture
def llm(engine: Engine) -> Iterator[LLM]:
    """An LLM that a test may interrupt anywhere, and that is as good as new afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    llm = LLM.from_engine(engine)
    yield llm
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)
    check_usable(llm, engine)


def check_idle(llm: LLM, engine: Engine) -> None:
    """As soon as the engine has seen what was asked of it."""
    llm.check()
    assert (engine.pages_used, engine.has_work, engine.scheduler.has_work) == (0, False, False)


def check_usable(llm: LLM, engine: Engine) -> None:
    check_idle(llm, engine)
    (done,) = llm.generate([[5, 6]], greedy(3, ignore_eos=True))
    assert list(done.token_ids) == expected_greedy([5, 6], 3, ends=())


def generate(llm: LLM) -> None:
    llm.generate([[3, 4, 5], [6]], greedy(3, n=2, ignore_eos=True))


def stream(llm: LLM) -> None:
    assert len(list(llm.stream([3, 4, 5], greedy(3, ignore_eos=True)))) == 3


def stream_partly(llm: LLM) -> None:
    events = llm.stream([3, 4, 5], greedy(9, ignore_eos=True))
    next(events)
    events.close()  # type: ignore[attr-defined]


class InterruptAt:
    """A trace function that sends SIGINT at the `count`-th line that this thread runs in the package.

    Python looks for signals at calls, so not where there is none: at a line that says `try:` and no more.
    """

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> "InterruptAt | None":
        file = frame.f_code.co_filename
        if "/tamis/" not in file:
            return None
        self.left -= event == "line" and linecache.getline(file, frame.f_lineno).strip() not in ("try:", "finally:")
        if not self.left:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return self


@pytest.mark.parametrize("call", [generate, stream, stream_partly])
def test_an_interrupt_at_any_line_is_raised_and_leaves_nothing(
    llm: LLM, engine: Engine, call: Callable[[LLM], None]
) -> None:
    trace, before = sys.gettrace(), 0
    for count in range(1, 100_000, 3):
        interrupt = InterruptAt(count)
        try:
            sys.settrace(interrupt)
            call(llm)
        except KeyboardInterrupt:
            pass
        else:
            assert interrupt.left > 0, f"the interrupt at line {count} was swallowed"
        finally:
            sys.settrace(trace)
        check_idle(llm, engine)
        before = count
        if interrupt.left > 0:
            break
    assert before > 100, "the package ran, line by line"


def test_interrupts_at_random_moments_leave_nothing(llm: LLM, engine: Engine) -> None:
    moments, calls = random.Random(0), itertools.cycle((generate, stream, stream_partly))
    for _ in range(200):
        late = threading.Thread(target=interrupt_main_thread, args=(moments.uniform(0.0001, 0.004),))
        with contextlib.suppress(KeyboardInterrupt):
            late.start()
            for call in calls:  # until it is interrupted
                call(llm)
        late.join()
        check_idle(llm, engine)


def interrupt_main_thread(after_s: float) -> None:
    time.sleep(after_s)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def during_a_step(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    action: Callable[[], object],
    requests: int = 1,
    asked: threading.Event | None = None,
) -> None:
    """Let `action` happen once, in the engine's thread, in a step while so many requests are there.

    Until `asked` a reply that has begun does not go on, lest it ends before the other requests come.
    """
    run, left = engine.runner.run, [action]

    def act_and_run(batch: Batch, before_layer: Callable[[], None]) -> torch.Tensor:
        begun = any(sample.token_ids for request in engine._requests.values() for sample in request.samples)
        assert asked is None or not begun or asked.wait(PATIENCE)
        # Not in a step that began before the call which is to be interrupted.
        if left and len(engine._requests) >= requests:
            left.pop()()
        return run(batch, before_layer)

    monkeypatch.setattr(engine.runner, "run", act_and_run)


def interrupt_and_wait(engine: Engine) -> Callable[[], None]:
    """Interrupt the main thread, and let it give up what it asked for before the step goes on."""

    def action() -> None:
        interrupt_main_thread(0)
        ends = time.monotonic() + PATIENCE
        while not any(state.cancelled for state in engine._requests.values()) and time.monotonic() < ends:
            time.sleep(0.001)

    return action


def test_an_interrupted_call_leaves_everybody_elses_step_alone(
    llm: LLM, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, submit = threading.Event(), llm._thread.submit

    def submit_and_tell(*arguments: Any) -> None:
        submit(*arguments)
        asked.set()

    during_a_step(engine, monkeypatch, interrupt_and_wait(engine), requests=2, asked=asked)
    other = llm.stream([9, 8, 7], greedy(20, ignore_eos=True))
    tokens = [next(other).token_id]
    monkeypatch.setattr(llm._thread, "submit", submit_and_tell)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3, 4, 5, 6, 7]], greedy(3))
    llm.check()
    tokens += [event.token_id for event in other]
    assert tokens == expected_greedy([9, 8, 7], 20, ends=())


def test_an_interrupt_ends_a_step_before_its_next_layer(tmp_path: Path) -> None:
    """Kernels may have threads of their own at work: they are not interrupted."""
    heard: list[str] = []
    with LLM(write_model(tmp_path), dtype="fp32", kv_budget="64KiB", kernels="reference") as llm:
        (wanted,) = llm.generate([[5, 6]], greedy(4))
        first, second = llm._engine.runner.model.layers
        interrupt = interrupt_and_wait(llm._engine)
        hooks = [
            first.register_forward_pre_hook(lambda *_: interrupt()),
            first.register_forward_hook(lambda *_: heard.append("the first layer ended")),
            second.register_forward_pre_hook(lambda *_: heard.append("the second layer began")),
        ]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6]], greedy(4))
        check_idle(llm, llm._engine)
        assert heard == ["the first layer ended"]
        for hook in hooks:
            hook.remove()
        assert llm.generate([[5, 6]], greedy(4)) == [wanted]


def test_a_signals_handler_may_close_the_llm_in_the_middle_of_a_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program does on SIGTERM: what runs ends as aborted, and nothing waits for itself."""
    llm, heard = LLM.from_engine(engine), threading.Event()

    def close(_number: int, _frame: FrameType | None) -> None:
        heard.set()
        llm.close()

    def terminate() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        assert heard.wait(PATIENCE)

    before = signal.signal(signal.SIGTERM, close)
    try:
        during_a_step(engine, monkeypatch, terminate)
        (done,) = llm.generate([[5, 6]], greedy(9, ignore_eos=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.finish_reason is FinishReason.ABORT
    engine.check()
    assert (engine.pages_used, engine.has_work) == (0, False)


def test_a_request_from_inside_a_step_is_refused(llm: LLM, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Exception] = []

    def ask() -> None:
        try:
            llm.generate([[6]], greedy(1))
        except RequestError as error:
            refused.append(error)

    during_a_step(engine, monkeypatch, ask)
    (done,) = llm.generate([[5, 6]], greedy(4, ignore_eos=True))
    assert list(done.token_ids) == expected_greedy([5, 6], 4, ends=())
    assert [str(error) for error in refused] == ["a request cannot be run from inside a step of the same engine"]


class Callback:
    """A Progress that does something when it hears of prompt tokens, once."""

    def __init__(self, action: Callable[[], object] | None = None) -> None:
        self.action = action
        self.starts = 0
        self.fail_start = False

    def start(self, task: str, total: int | None, unit: str) -> None:
        self.starts += 1
        if self.fail_start:
            raise ValueError("no bar")

    def advance(self, amount: int) -> None:
        if self.action is not None:
            action, self.action = self.action, None
            action()

    def finish(self) -> None:
        pass


def fail() -> None:
    raise ValueError("the callback failed")


def test_a_progress_callback_may_close_the_llm(engine: Engine) -> None:
    progress = Callback()
    llm = LLM.from_engine(engine, progress=progress)
    progress.action = llm.close
    (done,) = llm.generate([[5] * 6], greedy(20, ignore_eos=True))
    assert done.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH), "the engine does not wait for callbacks"
    engine.check()
    assert (engine.pages_used, engine.has_work) == (0, False)


def test_a_progress_callback_may_generate(engine: Engine) -> None:
    inner: list[int] = []
    progress = Callback()
    llm = LLM.from_engine(engine, progress=progress)
    progress.action = lambda: inner.extend(llm.generate([[6]], greedy(2))[0].token_ids)
    (done,) = llm.generate([[5] * 6], greedy(3))
    assert (list(done.token_ids), inner) == (expected_greedy([5] * 6, 3), expected_greedy([6], 2))


def test_a_failing_progress_callback_ends_its_own_call_only(engine: Engine) -> None:
    progress = Callback()
    llm = LLM.from_engine(engine, progress=progress)
    other = llm.stream([5] * 3, greedy(20, ignore_eos=True))
    tokens = [next(other).token_id]
    progress.action = fail
    with pytest.raises(ValueError, match="the callback failed"):
        llm.generate([[7] * 5], greedy(2))
    tokens += [event.token_id for event in other]
    assert tokens == expected_greedy([5] * 3, 20, ends=())


def test_a_failing_on_prefill_ends_its_own_request_only(engine: Engine) -> None:
    first = engine.add_request(Request((5, 6), greedy(2)), lambda _: fail())
    second = engine.add_request(Request((7,), greedy(2, ignore_eos=True)))
    ends = {event.request_id: event for event in run(engine) if event.completion is not None}
    assert (ends[first].token.finish_reason, str(ends[first].error)) == (FinishReason.ERROR, "the callback failed")
    assert ends[second].token.finish_reason is FinishReason.LENGTH


def test_progress_is_shown_again_after_a_start_that_failed(engine: Engine) -> None:
    progress = Callback()
    llm = LLM.from_engine(engine, progress=progress)
    progress.fail_start = True
    with pytest.raises(ValueError, match="no bar"):
        llm.generate([[5]], greedy(1))
    progress.fail_start = False
    llm.generate([[5]], greedy(1))
    assert progress.starts == 2
    check_idle(llm, engine)
