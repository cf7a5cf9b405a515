"""Turns: threads take them one after the other, a session ends once, and it is released after its last user."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from minialpa.errors import WorkerError
from minialpa.runtime.cluster.turns import Turns
from tests.runtime.threads import Threads, run_threads


class Session:
    """Turns of a session that records its end."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.n_inside, self.n_released = 0, 0
        self.inside_at_release: int | None = None
        self.turns = Turns(self.stopped.set, self._release)

    def _release(self) -> None:
        self.n_released += 1
        self.inside_at_release = self.n_inside


def test_turns_do_not_overlap() -> None:
    session, log = Session(), list[int]()

    def work(thread: int) -> None:
        for _ in range(50):
            with session.turns.turn(), session.turns.turn():
                for _ in range(3):
                    log.append(thread)
                    time.sleep(1e-5)

    run_threads(8, work)
    assert all(len(list(run)) % 3 == 0 for _, run in itertools.groupby(log))


def test_all_threads_get_the_first_cause() -> None:
    session = Session()

    def work(thread: int) -> None:
        with session.turns.in_use():
            session.n_inside += 1
            try:
                time.sleep(0.01)
                session.turns.end(WorkerError("first"), lambda: WorkerError(f"cause of thread {thread}"))
            finally:
                session.n_inside -= 1

    threads = run_threads(8, work, 5)
    assert len(threads.errors) == 8 and session.n_released == 1 and session.inside_at_release == 0
    causes = {str(error).removeprefix("The session has ended. ") for error in threads.errors.values()}
    assert len(causes) == 1 and causes.pop().startswith("cause of thread")
    with pytest.raises(WorkerError, match=r"The session has ended\. cause of thread"), session.turns.turn():
        pass


def test_shutdown_waits_until_threads_have_left_and_then_releases_once() -> None:
    session = Session()

    def work(_: int) -> None:
        with session.turns.in_use():
            session.n_inside += 1
            try:
                assert session.stopped.wait(5)  # as a call of a worker that has been ended
                time.sleep(0.05)
                session.turns.check()
            finally:
                session.n_inside -= 1

    threads = Threads().start(4, work)
    while session.n_inside < 4:
        time.sleep(1e-3)
    for _ in range(2):
        session.turns.shutdown(WorkerError("enough"))
    threads.join(5)
    assert session.n_released == 1 and session.inside_at_release == 0
    assert [str(error) for error in threads.errors.values()] == ["The session has ended. enough"] * 4


def test_shutdown_while_another_thread_finds_out_why_the_session_ends() -> None:
    session, asked = Session(), threading.Event()

    def cause() -> WorkerError:
        asked.set()
        time.sleep(0.1)
        return WorkerError("the cause")

    def work(_: int) -> None:
        with session.turns.turn():
            session.turns.end(WorkerError("first"), cause)

    threads = Threads().start(1, work)
    assert asked.wait(5)
    session.turns.shutdown(WorkerError("enough"))
    threads.join(5)
    assert session.n_released == 1
    assert str(session.turns.failure) == str(threads.errors[0]) == "the cause"


def test_an_interrupt_while_the_cause_is_sought_ends_the_session_all_the_same() -> None:
    session = Session()

    def interrupted() -> WorkerError:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), session.turns.in_use():
        session.turns.end(WorkerError("first"), interrupted)
    assert session.n_released == 1 and str(session.turns.failure) == "first"


def test_arrays_are_freed_after_the_end() -> None:
    session = Session()
    session.turns.shutdown(WorkerError("enough"))
    with session.turns.turn_even_if_ended():
        assert session.n_released == 1
