"""The parts that transfers are made of."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from support.serving import eventually
from tamis.kv.offload.figures import Failures
from tamis.kv.offload.rates import Rate
from tamis.kv.offload.workers import Workers


class Task:
    def __init__(self, work: Callable[[], object]) -> None:
        self.work, self.ended = work, threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        self.work()
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.ended.set()


def revived(workers: Workers) -> Workers:
    workers.revive()
    return workers


def leave() -> None:
    raise SystemExit


def test_jobs_that_fail_and_threads_that_die_do_not_stop_those_that_follow() -> None:
    done = threading.Semaphore(0)
    workers = Workers("test", 1, done.release)
    tasks = [Task(lambda: 1 / 0), Task(leave), Task(lambda: None), Task(leave), Task(lambda: None)]
    for task in tasks:
        workers.submit(task)
    eventually(lambda: revived(workers).is_idle)
    assert [type(task.error).__name__ for task in tasks] == [
        "ZeroDivisionError", "SystemExit", "NoneType", "SystemExit", "NoneType"]  # fmt: skip
    assert workers.deaths == 2
    assert all(done.acquire(blocking=False) for _ in tasks)
    workers.stop(20)


def test_several_jobs_run_at_once_and_no_more_than_that() -> None:
    workers, running, gate = Workers("test", 2, lambda: None), threading.Semaphore(0), threading.Event()

    def work() -> None:
        running.release()
        assert gate.wait(60)

    tasks = [Task(work) for _ in range(3)]
    for task in tasks:
        workers.submit(task)
    eventually(lambda: bool(revived(workers)) and running.acquire(blocking=False))
    eventually(lambda: bool(revived(workers)) and running.acquire(blocking=False))
    assert not running.acquire(timeout=0.05)
    gate.set()
    eventually(lambda: workers.is_idle)
    workers.stop(20)


def test_what_is_stopped_or_dropped_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    stopped, dropped = Workers("test", 2, lambda: None), Workers("test", 2, lambda: None)
    for workers in (stopped, dropped):
        workers.submit(Task(lambda: None))
        workers.submit(Task(lambda: None))
    assert set(threading.enumerate()) > before
    stopped.stop(20)
    never = Task(lambda: None)
    stopped.submit(never)
    del dropped, workers
    gc.collect()
    eventually(lambda: set(threading.enumerate()) <= before)
    assert not never.ended.is_set()


def test_a_rate_follows_what_is_measured() -> None:
    rate = Rate()
    assert (rate.known, rate.bytes_per_second, rate.seconds(100)) == (False, 0.0, 0.0)
    rate.observe(1000, 1.0)
    assert rate.seconds(500) == pytest.approx(0.5)
    assert rate.age < 20
    for _ in range(30):
        rate.observe(4000, 1.0)
    assert rate.bytes_per_second == pytest.approx(4000, rel=0.02)
    for _ in range(40):
        rate.observe(0, 10.0)
    assert rate.seconds(1000) > 100, "what gives nothing is slow"


def test_failures_of_one_kind_are_counted_always_and_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    for kind in ("load", "load", "save", "load"):
        failures.add(kind, ValueError("the store is down"))
    assert failures.counts == {"load": 3, "save": 1}
    assert [record.message for record in caplog.records] == [
        "KV tiers: a load failed, and counts as a miss: the store is down",
        "KV tiers: a save failed, and counts as a miss: the store is down",
    ]


JOB = """
import time, torch
from tamis.kv.offload.workers import Workers
from tamis.kv.tiers.promotion import Promoter
source, rows, begun = torch.zeros(1000, 20_000), torch.arange(1000), []
class Job:
    cancelled = False
    def run(self):
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            begun.append(source.index_select(0, rows).shape)
    def fail(self, error):
        raise error
"""


@pytest.mark.parametrize("start", ["owner = Workers('test', 1, lambda: None); owner.submit(Job())",
                                   "Promoter().offer(Job())"])  # fmt: skip
def test_a_program_that_ends_in_the_middle_of_a_job_ends_well(start: str) -> None:
    """A daemon thread that comes out of torch while the interpreter is taken down takes the whole process with it."""
    script = f"{JOB}\n{start}\nwhile not begun: time.sleep(0.001)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
