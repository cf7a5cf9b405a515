"""The error for a failure that shows in several places."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minialpa import WorkerError
from minialpa.runtime.workers.failures import (
    Failure,
    Fault,
    Status,
    ended,
    fault_of,
    hung_worker,
    lost_host,
    root_cause,
    session_error,
    stalled_step,
    worker_error,
)


def failure(fault: Fault, worker: int, text: str = "") -> Failure:
    return Failure(fault, Status(worker=worker, host=worker), fault.name, text)


SAYINGS = (Fault.RAISED, Fault.LOST_PEER)
FAILURES = st.builds(
    lambda fault, worker: failure(fault, worker, "Traceback" if fault in SAYINGS else ""),
    st.sampled_from(Fault),
    st.integers(0, 3),
)


@given(st.lists(FAILURES, max_size=4), st.integers(0, 3))
def test_a_death_is_the_cause_of_lost_peers_and_silence(others: list[Failure], victim: int) -> None:
    after = [f for f in others if f.fault in (Fault.LOST_PEER, Fault.SILENT, Fault.STUCK) and f.where.worker != victim]
    death = failure(Fault.DIED, victim)
    for found in ([death, *after], [*after, death]):
        assert root_cause(found) is death


@given(st.lists(FAILURES, min_size=1, max_size=6))
def test_an_error_of_its_own_is_never_passed_over_for_a_follower(found: list[Failure]) -> None:
    cause = root_cause(found)
    assert cause in found
    if any(f.fault is Fault.RAISED for f in found):
        assert cause.fault in (Fault.LOST_HOST, Fault.DIED, Fault.RAISED)


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        # The process of a mesh that has the coordinator dies, and jax ends the others.
        ([failure(Fault.LOST_PEER, 1, "Traceback"), failure(Fault.DIED, 0), failure(Fault.DIED, 1)], 1),
        # Deaths follow from a lost host.
        ([failure(Fault.DIED, 1), failure(Fault.LOST_PEER, 2, "Traceback"), failure(Fault.LOST_HOST, 0)], 2),
        # An error that a worker has reported counts more than its later death.
        ([failure(Fault.DIED, 2), failure(Fault.RAISED, 2, "Traceback")], 1),
    ],
)
def test_the_cause_is_the_first_death_the_lost_host_or_the_reported_error(found: list[Failure], cause: int) -> None:
    assert root_cause(found) is found[cause]


def test_errors_of_collectives_and_transports_follow_from_others() -> None:
    assert fault_of(ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.")) is Fault.RAISED
    lost = ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"), WorkerError("Worker 1 is lost.")
    assert {fault_of(error) for error in lost} == {Fault.LOST_PEER}


def test_a_worker_hangs_when_it_has_not_answered_in_time() -> None:
    first, second = Status(worker=0, host=0), Status(worker=1, host=0, step=3)
    assert hung_worker([(first, 4.0), (second, 5.0)], 5.0) is None
    found = hung_worker([(first, 4.0), (second, 6.2)], 5.0)
    assert found is not None and (found.fault, found.where, found.traceback) == (Fault.SILENT, second, "")
    assert found.message.startswith("it has not answered for 6 s.") and "`worker_timeout_s`" in found.message


def test_a_step_stalls_when_no_worker_has_made_progress_in_time() -> None:
    statuses = [Status(worker=worker, host=0, step=2, instruction="Run `forward`") for worker in range(2)]
    assert stalled_step(statuses, 5.0, 5.0) is None
    found = stalled_step(statuses, 6.0, 5.0)
    assert found is not None and found.fault is Fault.STUCK
    assert "no worker has made progress for 5 s" in found.message


@given(
    st.permutations(
        [("Run `f`", 4, 0), ("Run `f`", 3, 3), ("Receive from stage 0", 2, 1), ("Receive from stage 1", 3, 2)]
    )
)
def test_a_worker_that_waits_for_a_message_does_not_hold_up_the_others(order: list[tuple[str, int, int]]) -> None:
    """The suspect runs something itself, in the earliest step."""
    statuses = [Status(worker=worker, host=0, step=step, instruction=text) for text, step, worker in order]
    found = stalled_step(statuses, 6.0, 5.0)
    assert found is not None and found.where.worker == 3


def test_an_error_says_where_and_why() -> None:
    status = Status(
        worker=1,
        host=0,
        pid=77,
        stage=2,
        step=5,
        instruction="instruction 3, Run `forward`",
        recent=("instruction 2, Free",),
    )
    other = Status(worker=0, host=0, pid=76, stage=1, step=5, instruction="instruction 9, Receive from stage 2")
    error = worker_error(Failure(Fault.RAISED, status, "ValueError: no", "Traceback: no"), [other, status])
    assert (error.worker, error.host, error.stage, error.instruction) == (1, 0, 2, status.instruction)
    assert (error.recent, error.remote_traceback) == (status.recent, "Traceback: no")
    assert str(error).splitlines()[:5] == [
        "Worker 1, stage 2 on host 0, process 77, failed with ValueError: no",
        "It was in step 5 at instruction 3, Run `forward`; before that: instruction 2, Free.",
        "Worker 0, stage 1 on host 0, was in step 5 at instruction 9, Receive from stage 2.",
        "Traceback of the worker:",
        "Traceback: no",
    ]
    for copy in (pickle.loads(pickle.dumps(error)), ended(error)):
        assert str(error) in str(copy)
        assert (copy.worker, copy.recent, copy.remote_traceback) == (1, status.recent, "Traceback: no")


@given(st.permutations([0, 1, 2]), st.integers(0, 3))
def test_an_error_says_of_each_worker_where_it_was(order: list[int], n_failures: int) -> None:
    """Whether it failed itself, by its peer, or answered that all is well, in any order of detection."""
    places = [
        Status(worker=worker, host=worker, stage=worker, step=7, instruction=f"instruction {worker}")
        for worker in range(3)
    ]
    death = Failure(Fault.DIED, places[0], "its process died.")
    failures = {0: death} | {w: Failure(Fault.LOST_PEER, places[w], "lost", "Traceback") for w in order[:n_failures]}
    found = [failures[w] if w else death for w in order if w in failures]
    error = session_error(found, [places[w] for w in order if w not in failures])
    assert error.worker == 0 and error.instruction == "instruction 0"
    for worker in (1, 2):
        assert f"Worker {worker}, stage {worker} on host {worker}, was in step 7 at instruction {worker}." in str(error)
    assert "had run no step" in str(session_error([death], [Status(worker=1, host=1)]))


def test_an_error_names_all_hosts_that_are_lost() -> None:
    found = [lost_host(Status(worker=i, host=i // 2), f"10.0.0.{i // 2}") for i in (2, 3, 6)]
    error = session_error(found, [Status(worker=0, host=0)])
    assert error.lost_hosts == (1, 3) and error.host == 1
    assert str(error).count("its host is lost (10.0.0.") == str(error).count("accepts no connection") == 3
    assert session_error([failure(Fault.DIED, 1)], []).lost_hosts == ()
