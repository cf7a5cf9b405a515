"""Which nodes are reserved: those that answer and are free, or become so. Ray is not asked here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import ray

from minialpa.errors import MinialpaError
from minialpa.runtime.ray import reservation
from minialpa.runtime.ray.node_choice import CPU_DEVICE
from minialpa.runtime.ray.ray_connection import nodes_that_answer
from minialpa.runtime.ray.reservation import Wanted

pytestmark = pytest.mark.ray


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> dict[str, Mapping[str, float]]:
    """What is free of three nodes with two devices each, all of which answer; nothing is, at first."""
    nodes = [
        {"NodeID": f"n{i}", "NodeManagerAddress": f"10.0.0.{i}", "Alive": True, "Resources": {CPU_DEVICE: 2.0}}
        for i in (1, 2, 3)
    ]
    free: dict[str, Mapping[str, float]] = {}
    monkeypatch.setattr(reservation, "nodes_that_answer", lambda timeout_s: nodes)
    monkeypatch.setattr(reservation, "available_resources", lambda: free)
    monkeypatch.setattr(reservation, "_FREE_TIMEOUT_S", 1.0)
    return free


def _chosen(wanted: Wanted) -> list[str]:
    return [node["NodeID"] for node in reservation._choose_again(wanted).nodes]


def _wanted(num_hosts: int | None, *held: str) -> Wanted:
    return Wanted(num_hosts=num_hosts, devices_per_host=None, resource=CPU_DEVICE, held=frozenset(held))


def test_the_nodes_of_the_ended_session_are_waited_for(available: dict[str, Mapping[str, float]]) -> None:
    available["n3"] = {CPU_DEVICE: 2.0}
    wanted = _wanted(None, "n1")
    assert reservation.n_available(wanted) == 2
    threading.Timer(0.3, lambda: available.update(n1={CPU_DEVICE: 2.0})).start()
    assert _chosen(wanted) == ["n1", "n3"]


def test_nodes_that_do_not_become_free_are_left_out(available: dict[str, Mapping[str, float]]) -> None:
    available.update(n2={CPU_DEVICE: 2.0}, n3={CPU_DEVICE: 1.0})
    assert _chosen(_wanted(3, "n2")) == ["n2"]  # nobody waits for the others
    assert _chosen(_wanted(3, "n1", "n2")) == ["n2"]


def test_a_session_never_gets_more_hosts_than_it_has_asked_for(available: dict[str, Mapping[str, float]]) -> None:
    available.update({name: {CPU_DEVICE: 2.0} for name in ("n1", "n2", "n3")})
    assert reservation.n_available(_wanted(2)) == 2 and _chosen(_wanted(2)) == ["n1", "n2"]
    assert reservation.n_available(_wanted(None)) == 3 and len(_chosen(_wanted(None))) == 3


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize("held", [(), ("n1",)])
def test_without_nodes_the_error_says_what_to_do(held: tuple[str, ...]) -> None:
    with pytest.raises(MinialpaError, match=r"has all of its `\w+` free\. Start.*call `minialpa.restart\(\)` again"):
        _chosen(_wanted(2, *held))


def test_a_node_that_ray_lists_and_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as gone:
        ports = [server.getsockname()[1] for server in (there, gone)]
        gone.close()
        nodes: list[dict[str, Any]] = [
            {"NodeManagerAddress": address, "NodeManagerPort": port, "Alive": alive}
            for address, port, alive in (
                ("127.0.0.1", ports[0], True),
                ("127.0.0.1", ports[1], True),
                ("192.0.2.250", 9, True),  # takes no connection, and refuses none
                ("127.0.0.1", ports[0], False),
            )
        ]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        assert nodes_that_answer(0.3) == nodes[:1]
