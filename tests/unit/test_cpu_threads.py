"""How kernel threads share work: all of it done once, whoever sleeps, fails or ends meanwhile."""

import gc
import queue
import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from numba import njit

from tamis.errors import EngineClosedError, KernelFailedError
from tamis.kernels.cpu.threads import ThreadTeam, share, take_ticket


@njit(nogil=True)
def count_up(tickets, cells, step):  # type: ignore[no-untyped-def]
    while True:
        ticket = take_ticket(tickets, 0)
        if ticket >= cells.shape[0]:
            return
        cells[ticket] += step


@njit(nogil=True)
def divide(tickets, cells, by):  # type: ignore[no-untyped-def]
    while True:
        ticket = take_ticket(tickets, 0)
        if ticket >= cells.shape[0]:
            return
        cells[ticket] //= by


@njit(nogil=True)
def launch_count_up(box, *args):  # type: ignore[no-untyped-def]
    return share(box, count_up, args)


@njit(nogil=True)
def launch_twice(box, cells, step):  # type: ignore[no-untyped-def]
    return share(box, count_up, (cells, step)) | share(box, count_up, (cells, 10 * step))


@njit(nogil=True)
def launch_divide(box, *args):  # type: ignore[no-untyped-def]
    return share(box, divide, args)


@njit(nogil=True)
def meet(tickets, arrived, spins):  # type: ignore[no-untyped-def]
    """Every thread says that it is there, then waits for the others, for so many looks."""
    arrived[take_ticket(tickets, 0)] = 1
    for _ in range(spins):
        if arrived.min() == 1:
            return


@njit(nogil=True)
def launch_meet(box, *args):  # type: ignore[no-untyped-def]
    return share(box, meet, args)


@pytest.fixture(params=[1, 2, 5])
def team(request: pytest.FixtureRequest) -> Iterator[ThreadTeam]:
    team = ThreadTeam(request.param)
    yield team
    team.close()


def asleep(team: ThreadTeam) -> None:
    """Wait until all threads but the caller's are."""
    while any(team._box[-8 * team.size :: 8][1:] != 1):
        threading.Event().wait(0.001)


def test_every_work_item_is_done_once(team: ThreadTeam) -> None:
    cells = np.zeros(1000, np.int64)
    for _ in range(2000):
        team.run(launch_count_up, cells, 1)
    assert (cells == 2000).all()


def test_phases_follow_each_other(team: ThreadTeam) -> None:
    cells = np.zeros(50, np.int64)
    for _ in range(500):
        team.run(launch_twice, cells, 1)
    assert (cells == 500 * 11).all()


def test_threads_that_sleep_are_woken(team: ThreadTeam) -> None:
    """They lie down at once where nothing comes, and each of them takes part in the next kernel."""
    for _ in range(3):
        asleep(team)
        arrived = np.zeros(team.size, np.int64)
        team.run(launch_meet, arrived, 1 << 34)
        assert arrived.all()


def test_one_thread_is_enough_where_one_is_asked_for(team: ThreadTeam) -> None:
    arrived = np.zeros(team.size + 1, np.int64)
    team.run(launch_meet, arrived, 10_000, threads=1)
    assert arrived.sum() == 1


def test_a_kernel_that_raises_raises_in_the_caller_and_the_team_goes_on(team: ThreadTeam) -> None:
    cells = np.full(1000, 6, np.int64)
    with pytest.raises(KernelFailedError, match="launch_divide failed"):
        team.run(launch_divide, cells, 0)
    team.run(launch_divide, cells, 2)
    assert (cells == 3).all()


def test_several_callers_take_turns(team: ThreadTeam) -> None:
    cells = [np.zeros(100, np.int64) for _ in range(4)]

    def work(mine: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
        for _ in range(500):
            team.run(launch_count_up, mine, 1)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in cells]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((mine == 500).all() for mine in cells)


def test_a_closed_team_refuses_and_its_threads_are_gone() -> None:
    before = threading.active_count()
    team = ThreadTeam(3)
    assert threading.active_count() == before + 2
    team.close()
    team.close()
    assert threading.active_count() == before
    with pytest.raises(EngineClosedError, match="closed"):
        team.run(launch_count_up, np.zeros(3, np.int64), 1)


def test_an_interrupt_while_threads_are_woken_leaves_none_asleep() -> None:
    class Interrupted:
        """Ctrl-C at the worst moment, once."""

        def __init__(self, alarm: "queue.SimpleQueue[None]") -> None:
            self._alarm, self._calls = alarm, 0

        def put(self, item: None) -> None:
            self._calls += 1
            if self._calls == 1:
                raise KeyboardInterrupt
            self._alarm.put(item)

    with closing(ThreadTeam(3)) as team:
        team._alarms[:] = [Interrupted(alarm) for alarm in team._alarms]  # type: ignore[misc]
        for _ in range(len(team._alarms)):
            asleep(team)
            with pytest.raises(KeyboardInterrupt):
                team.run(launch_meet, np.zeros(team.size, np.int64), 0)
        arrived = np.zeros(team.size, np.int64)
        team.run(launch_meet, arrived, 1 << 34)
        assert arrived.all()


def test_a_team_that_is_dropped_ends_its_threads() -> None:
    before = threading.active_count()
    team = ThreadTeam(3)
    team.run(launch_count_up, np.zeros(3, np.int64), 1)
    threads = team._threads
    assert threading.active_count() == before + 2
    del team
    gc.collect()
    for thread in threads:
        thread.join(timeout=20)
    assert threading.active_count() == before


def test_threads_that_were_started_end_where_another_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start"):
        ThreadTeam(5)
    gc.collect()
    for thread in started:
        thread.join(timeout=20)
        assert not thread.is_alive()
