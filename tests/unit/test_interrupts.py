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
from tamis.engine.signals import SignalGate
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


def check_idle(engine: Engine) -> None:
    engine.check()
    assert (engine.pages_used, engine.has_work, engine.scheduler.has_work) == (0, False, False)


def check_usable(llm: LLM, engine: Engine) -> None:
    check_idle(engine)
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
    """A trace function that sends SIGINT at the `count`-th line that runs in the package.

    Python looks for signals at calls, so not where there is none: at a line that says `try:` and no more, or between
    the lines of the gate, which counts on that.
    """

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> "InterruptAt | None":
        file = frame.f_code.co_filename
        if "/tamis/" not in file or file.endswith("signals.py"):
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
    for count in range(1, 100_000, 37):
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
        check_idle(engine)
        before = count
        if interrupt.left > 0:
            break
    assert before > 500, "the package ran, line by line"


def test_interrupts_at_random_moments_leave_nothing(llm: LLM, engine: Engine) -> None:
    moments, calls = random.Random(0), itertools.cycle((generate, stream, stream_partly))
    for _ in range(200):
        late = threading.Thread(target=interrupt_main_thread, args=(moments.uniform(0.0001, 0.004),))
        with contextlib.suppress(KeyboardInterrupt):
            late.start()
            for call in calls:  # until it is interrupted
                call(llm)
        late.join()
        check_idle(engine)


def interrupt_main_thread(after_s: float) -> None:
    time.sleep(after_s)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def during_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Let `action` happen once, as if between two layers of the model."""
    run, left = engine.runner.run, [action]

    def act_and_run(batch: Batch) -> torch.Tensor:
        logits = run(batch)
        if left:
            left.pop()()
        engine.signals.deliver()
        return logits

    monkeypatch.setattr(engine.runner, "run", act_and_run)


def test_an_interrupted_step_is_taken_again_for_everybody_else(
    llm: LLM, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = llm.stream([9, 8, 7], greedy(8, ignore_eos=True))
    tokens = [next(other).token_id]
    during_a_step(engine, monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3, 4, 5, 6, 7]], greedy(3))
    engine.check()
    tokens += [event.token_id for event in other]
    assert tokens == expected_greedy([9, 8, 7], 8, ends=())


def test_an_interrupt_in_a_layer_waits_for_its_end_and_for_no_other(tmp_path: Path) -> None:
    """Kernels may have threads of their own at work."""
    heard: list[str] = []
    with LLM(write_model(tmp_path), dtype="fp32", kv_budget="64KiB", kernels="reference") as llm:
        (wanted,) = llm.generate([[5, 6]], greedy(4))
        first, second = llm._engine.runner.model.layers
        hooks = [
            first.register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT)),
            first.register_forward_hook(lambda *_: heard.append("the first layer ended")),
            second.register_forward_pre_hook(lambda *_: heard.append("the second layer began")),
        ]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6]], greedy(4))
        assert heard == ["the first layer ended"]
        for hook in hooks:
            hook.remove()
        check_idle(llm._engine)
        assert llm.generate([[5, 6]], greedy(4)) == [wanted]


def test_a_signals_handler_may_close_the_llm_in_the_middle_of_a_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server does on SIGTERM: what runs ends as aborted, and nothing waits for itself."""
    llm = LLM.from_engine(engine)
    before = signal.signal(signal.SIGTERM, lambda *_: llm.close())
    try:
        during_a_step(engine, monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
        (done,) = llm.generate([[5, 6]], greedy(9, ignore_eos=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.finish_reason is FinishReason.ABORT
    check_idle(engine)


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
    assert [str(error).partition(",")[0] for error in refused] == [
        "a request cannot be run from inside a step of the same engine"
    ]


def test_an_interrupt_reaches_who_waits_for_another_threads_step(
    llm: LLM, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    during_a_step(engine, monkeypatch, lambda: (begun.set(), go_on.wait(PATIENCE))[0])  # type: ignore[func-returns-value]
    results: list[list[int]] = []

    def work() -> None:
        (done,) = llm.generate([[9, 8, 7]], greedy(8, ignore_eos=True))
        results.append(list(done.token_ids))

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(PATIENCE)
    interrupt = threading.Thread(target=interrupt_main_thread, args=(0.05,))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3, 4, 5]], greedy(3))
    go_on.set()
    thread.join(PATIENCE)
    interrupt.join()
    assert results == [expected_greedy([9, 8, 7], 8, ends=())]


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
    assert llm.generate([[5] * 6], greedy(3))[0].finish_reason is FinishReason.ABORT
    check_idle(engine)


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
    check_idle(engine)


# The gate


def test_a_handler_waits_for_the_end_of_the_outermost_block() -> None:
    heard: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("handled"))
    gate = SignalGate()
    try:
        with gate:
            with gate:
                signal.raise_signal(signal.SIGUSR1)
                signal.raise_signal(signal.SIGUSR1)
            heard.append("inside")
            gate.open_for(lambda: heard.append("open"))
            signal.raise_signal(signal.SIGUSR1)
            heard.append("shut again")
        assert heard == ["inside", "handled", "open", "shut again", "handled"]
    finally:
        assert signal.signal(signal.SIGUSR1, before) != gate._on_signal


def test_a_handler_set_meanwhile_is_left_alone() -> None:
    def mine(_number: int, _frame: FrameType | None) -> None:
        pass

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    with SignalGate():
        signal.signal(signal.SIGUSR1, mine)
    assert signal.signal(signal.SIGUSR1, before) is mine


def test_every_handler_is_put_back_where_one_raises() -> None:
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise InterruptedError

    before = [signal.signal(name, stop) for name in names]
    try:
        with pytest.raises(InterruptedError), SignalGate():
            for name in names:
                signal.raise_signal(name)
        assert [signal.getsignal(name) for name in names] == [stop] * 3
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)
