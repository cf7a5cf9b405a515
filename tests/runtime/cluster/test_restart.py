"""`restart` and `available_hosts`, in this process and on workers that are threads on hosts that can be lost."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import minialpa
from minialpa import session
from minialpa.errors import MinialpaError, WorkerError
from minialpa.runtime.cluster import cluster_runtime
from minialpa.runtime.cluster.in_process import InProcessLauncher, ThreadActor
from minialpa.session import InitArguments, Session
from minialpa.testing import assert_allclose
from tests.runtime.cluster.in_process_session import Training


@dataclass
class Hosts:
    """Two hosts of two devices each.

    Attributes:
        lost: The numbers of the hosts that do not answer.
        launched: The launcher of the last session.
    """

    lost: set[int] = field(default_factory=set)
    launched: Launcher | None = None


class Launcher(InProcessLauncher):
    """Threads on the hosts that were not lost when it was made."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.numbers = hosts, [host for host in range(2) if host not in hosts.lost]
        if not self.numbers:
            raise MinialpaError("No host answers.")
        devices = jax.devices()
        super().__init__([device for host in self.numbers for device in devices[2 * host : 2 * host + 2]], 2)
        hosts.launched = self

    def available_hosts(self) -> int:
        return 2 - len(self.hosts.lost)

    def restarted(self) -> InProcessLauncher:
        return Launcher(self.hosts)

    def lost_hosts(self, numbers: Iterable[int]) -> Mapping[int, str]:
        return {i: f"10.0.0.{self.numbers[i]}" for i in set(numbers) if self.numbers[i] in self.hosts.lost}


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """`init("ray")` starts threads on these."""
    found = Hosts()

    def start(arguments: InitArguments) -> Session:
        return session._session_on(Launcher(found), arguments)

    monkeypatch.setattr(session, "_ray_session", start)
    minialpa.shutdown()
    yield found
    minialpa.shutdown()


def _n_hosts() -> int:
    return session.current_session().cluster.num_hosts


def test_a_session_on_fewer_hosts_is_still_that_of_its_first_arguments(hosts: Hosts) -> None:
    minialpa.init("ray", num_hosts=2)
    for lost in ({1}, set[int]()):
        hosts.lost.clear()
        hosts.lost.update(lost)
        assert minialpa.available_hosts() == 2 - len(lost)
        minialpa.restart()
        assert _n_hosts() == 2 - len(lost)
        minialpa.init("ray", num_hosts=2)
        assert _n_hosts() == 2 - len(lost)
        with pytest.raises(MinialpaError, match="already called with other arguments"):
            minialpa.init("ray", num_hosts=1)


def test_a_host_that_is_cut_off_is_found_and_named(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection ends: its workers only stop to answer."""
    training = Training()
    minialpa.init("ray", num_hosts=2)
    training.advance()

    def unless_lost(reached: Any) -> Any:
        def called(self: ThreadActor, method: str, *args: Any) -> Any:
            return Future() if self._worker.settings.host in hosts.lost else reached(self, method, *args)

        return called

    monkeypatch.setattr(ThreadActor, "call", unless_lost(ThreadActor.call))
    monkeypatch.setattr(ThreadActor, "call_aside", unless_lost(ThreadActor.call_aside))
    monkeypatch.setattr(cluster_runtime, "_LATE_S", 0.2)
    monkeypatch.setattr(cluster_runtime, "_GRACE_S", 0.2)
    session.current_session().runtime._watch.interval_s = 0.1
    hosts.lost.add(1)
    begun_s = time.monotonic()
    with pytest.raises(WorkerError, match=r"its host is lost \(10\.0\.0\.1 accepts no connection\)") as caught:
        np.asarray(training.step(training.state, training.batch)[1])
    assert time.monotonic() - begun_s < 20  # the workers have 60 s to answer
    assert caught.value.lost_hosts == (1,) and "`minialpa.restart()`" in str(caught.value)

    # The failed session still counts the hosts.
    assert minialpa.available_hosts() == 1
    minialpa.restart()
    assert _n_hosts() == 1
    Training().advance()


def test_the_example_of_the_documents_goes_on_after_a_loss_and_takes_the_host_back(hosts: Hosts) -> None:
    text = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text()
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "restart()" in code)
    names: dict[str, Any] = {}
    exec(example, names)

    training = Training()
    minialpa.init("ray", num_hosts=2)
    sizes = []

    def step(state: Any, batch: int) -> Any:
        sizes.append((batch, _n_hosts()))
        if sizes == [(0, 2), (1, 2), (2, 2), (3, 2)]:
            assert hosts.launched is not None
            hosts.lost.add(1)
            hosts.launched.end([w for w in session.current_session().runtime.workers if w.host == 1])
        elif batch == 3:
            hosts.lost.clear()
        state, metrics = training.step(state, training.batch)
        return state, metrics

    state = names["train"](step, training.state, range(6), save_every=2)
    expected = training.state
    for _ in range(6):
        expected, _ = training.plain(expected, training.batch)
    assert_allclose(state, expected, rtol=1e-4, atol=1e-5)
    assert sizes == [(0, 2), (1, 2), (2, 2), (3, 2), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_a_restart_without_hosts_ends_the_session_and_may_be_tried_again(hosts: Hosts) -> None:
    training = Training()
    minialpa.init("ray", num_hosts=2)
    training.advance()
    hosts.lost.update({0, 1})
    for _ in range(2):
        with pytest.raises(MinialpaError, match="No host answers"):
            minialpa.restart()
        # No thread goes on in a session in this process by mistake.
        with pytest.raises(WorkerError, match=r"The session has ended\. `minialpa.restart\(\)` was called"):
            training.step(training.state, training.batch)
        assert minialpa.available_hosts() == 0
    hosts.lost.clear()
    minialpa.restart()
    training.advance()


def test_a_session_in_this_process_starts_again_with_its_arrays() -> None:
    step = minialpa.parallelize(lambda x: 2.0 * x, batch_argnums=())
    try:
        for arguments, n_hosts in ((None, 1), ({"num_hosts": 2, "devices_per_host": 2}, 2)):
            minialpa.shutdown()
            if arguments is None:
                step(np.ones(8, np.float32))  # starts the session
            else:
                minialpa.init(**arguments)
            before = session.current_session()
            doubled = step(np.ones(8, np.float32))
            assert minialpa.available_hosts() == n_hosts
            minialpa.restart()
            assert session.current_session() == before
            np.testing.assert_array_equal(step(doubled), np.full(8, 4.0, np.float32))
    finally:
        minialpa.shutdown()


@pytest.mark.parametrize("function", [minialpa.restart, minialpa.available_hosts])
def test_without_a_session_both_say_what_to_call(function: Any) -> None:
    minialpa.shutdown()
    with pytest.raises(MinialpaError, match=r"needs a session, and there is none. Call `minialpa.init` first"):
        function()
