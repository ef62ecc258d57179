"""The engine's own thread: what goes wrong in it is told to everybody, and nobody waits for ever."""

import os
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from support.engines import HeldStep, greedy, make_engine, model_of
from tamis import LLM
from tamis.engine.engine import Engine
from tamis.engine.sequence import EngineEvent
from tamis.engine.thread import MAX_CRASHES, Delivery, EngineThread, take
from tamis.errors import EngineClosedError, EngineDeadError, QueueFullError
from tamis.request import FinishReason, Request

PATIENCE = 60


@pytest.fixture
def engine() -> Engine:
    return make_engine()


@pytest.fixture
def thread(engine: Engine) -> Iterator[EngineThread]:
    thread = EngineThread(engine)
    yield thread
    thread.close()
    thread.join()


def ask(thread: EngineThread, prompt: tuple[int, ...], max_tokens: int = 4) -> SimpleQueue[Delivery]:
    """Submit a request; what it is told."""
    mail: SimpleQueue[Delivery] = SimpleQueue()
    state = thread.engine.prepare(Request(prompt, greedy(max_tokens, ignore_eos=True)))
    thread.submit([state], [mail.put])
    return mail


def last(mail: SimpleQueue[Delivery]) -> Delivery:
    while True:
        item = mail.get(timeout=PATIENCE)
        if isinstance(item, Exception) or (isinstance(item, EngineEvent) and item.completion is not None):
            return item


def finish_reason(item: Delivery) -> FinishReason | None:
    assert isinstance(item, EngineEvent)
    return item.token.finish_reason


def test_a_step_that_fails_ends_its_requests_and_the_thread_goes_on(thread: EngineThread, engine: Engine) -> None:
    model_of(engine).fail_at_token = 13
    for _ in range(MAX_CRASHES - 1):
        item = last(ask(thread, (13,)))
        assert isinstance(item, EngineEvent)
        assert str(item.error) == "the kernel failed"
    assert finish_reason(last(ask(thread, (5,)))) is FinishReason.LENGTH
    for _ in range(MAX_CRASHES - 1):
        last(ask(thread, (13,)))
    thread.check_health()


def test_after_three_crashes_in_a_row_the_thread_ends_and_says_why(thread: EngineThread, engine: Engine) -> None:
    model_of(engine).fail_at_token = 13
    for _ in range(MAX_CRASHES):
        last(ask(thread, (13,)))
    thread.join()
    reason = r"^the engine has stopped after an error: RuntimeError\('the kernel failed'\)$"
    for call in (thread.check_health, thread.check_open, lambda: ask(thread, (5,)), lambda: thread.call(Engine.check)):
        with pytest.raises(EngineDeadError, match=reason) as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), AssertionError("lost a page")], ids=repr)
def test_what_breaks_the_books_ends_the_thread_and_everybody_is_told(
    thread: EngineThread, engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    held = HeldStep(engine)
    running = ask(thread, (5,), max_tokens=40)
    assert held.begun.wait(PATIENCE)

    def fail() -> None:
        raise error

    monkeypatch.setattr(engine.scheduler, "schedule", fail)
    waiting = ask(thread, (6,))
    calls: SimpleQueue[BaseException | None] = SimpleQueue()
    caller = threading.Thread(target=lambda: calls.put(outcome(lambda: thread.call(Engine.check))))
    held.go_on.set()
    for mail in (running, waiting):
        item = last(mail)
        assert isinstance(item, EngineDeadError)
        assert repr(error) in str(item)
    caller.start()
    caller.join(PATIENCE)
    assert isinstance(calls.get(timeout=PATIENCE), EngineDeadError)
    with pytest.raises(EngineDeadError):
        thread.check_health()


def outcome(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def test_an_llm_whose_engine_has_died_says_so(engine: Engine) -> None:
    model_of(engine).fail_at_token = 13
    with LLM.from_engine(engine) as llm:
        for _ in range(MAX_CRASHES):
            with pytest.raises(RuntimeError, match="the kernel failed"):
                llm.generate([[13]], greedy(1))
        with pytest.raises(EngineDeadError, match="the kernel failed"):
            llm.generate([[5]], greedy(1))


def test_no_more_than_max_queue_requests_wait(engine: Engine) -> None:
    thread, held = EngineThread(engine, max_queue=3), HeldStep(engine)
    first = ask(thread, (5,))
    assert held.begun.wait(PATIENCE)
    mails = [ask(thread, (6,)) for _ in range(3)]
    with pytest.raises(QueueFullError, match=r"^3 requests wait already, of at most max_queue=3$"):
        ask(thread, (7,))
    held.go_on.set()
    assert [finish_reason(last(mail)) for mail in (first, *mails)] == [FinishReason.LENGTH] * 4
    assert finish_reason(last(ask(thread, (7,)))) is FinishReason.LENGTH
    thread.close()
    thread.join()


def test_closing_with_patience_lets_what_was_asked_for_end(engine: Engine) -> None:
    thread, held = EngineThread(engine), HeldStep(engine)
    running = ask(thread, (5,))
    assert held.begun.wait(PATIENCE)
    waiting = ask(thread, (6,))
    thread.close(drain=PATIENCE)
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        ask(thread, (7,))
    held.go_on.set()
    assert [finish_reason(last(mail)) for mail in (running, waiting)] == [FinishReason.LENGTH] * 2
    thread.join()


def test_closing_without_patience_ends_a_step_and_all_requests(engine: Engine) -> None:
    thread, held = EngineThread(engine), HeldStep(engine)
    running = ask(thread, (5,))
    assert held.begun.wait(PATIENCE)
    waiting = ask(thread, (6,))
    thread.close(drain=PATIENCE)
    thread.close()
    held.go_on.set()
    assert [finish_reason(last(mail)) for mail in (running, waiting)] == [FinishReason.ABORT] * 2
    thread.join()
    engine.check()
    assert (engine.pages_used, engine.has_work, model_of(engine).batch_sizes) == (0, False, [])


def test_a_request_that_comes_too_late_is_told(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the state and the queue, the thread may have ended."""
    thread.close()
    thread.join()
    monkeypatch.setattr(thread, "check_open", lambda: None)
    assert isinstance(last(ask(thread, (5,))), EngineClosedError)


def test_a_request_may_be_cancelled_before_the_thread_has_seen_it(thread: EngineThread, engine: Engine) -> None:
    held = HeldStep(engine)
    ask(thread, (5,), max_tokens=1)
    assert held.begun.wait(PATIENCE)
    mail: SimpleQueue[Delivery] = SimpleQueue()
    state = engine.prepare(Request((6,), greedy(4)))
    thread.submit([state], [mail.put])
    thread.abort([state])
    thread.abort([state])
    held.go_on.set()
    assert finish_reason(last(mail)) is FinishReason.ABORT
    thread.call(Engine.check)
    assert engine.pages_used == 0


def test_a_call_sees_the_engine_between_steps_and_may_fail(thread: EngineThread) -> None:
    assert thread.call(lambda engine: engine.limits.page_size) == 4
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda _: 1 // 0)
    thread.check_health()


def test_stats_are_those_of_the_last_step_when_its_events_come(thread: EngineThread) -> None:
    last(ask(thread, (5, 6, 7), max_tokens=2))
    stats = thread.stats
    assert (stats.steps, stats.prefill_tokens, stats.running, stats.pages_used) == (2, 3, 0, 0)


def test_take_waits_for_an_item() -> None:
    queue: SimpleQueue[int] = SimpleQueue()
    timer = threading.Timer(0.12, queue.put, (7,))
    timer.start()
    assert take(queue) == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_the_child_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """The engine's thread does not exist there: waiting for it would never end."""
    thread = EngineThread(make_engine())
    child = os.fork()
    if child == 0:
        try:
            thread.call(lambda engine: engine.stats)
        except EngineClosedError as error:
            os._exit(7 if "after a fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    thread.close()
    thread.join()
