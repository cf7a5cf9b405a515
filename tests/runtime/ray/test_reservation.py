"""The choice and reservation of nodes: nodes whose devices answer and are free, or become free. Without Ray."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import ray

from minialpa.errors import MinialpaError, ShardingError
from minialpa.runtime.ray import reservation
from minialpa.runtime.ray.ray_connection import nodes_that_answer
from minialpa.runtime.ray.reservation import CPU_DEVICE, HostRequest, choose_nodes, nodes_to_restart_on

pytestmark = pytest.mark.ray


def node(ip: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": f"node-{ip}", "NodeManagerAddress": ip, "Alive": alive, "Resources": resources}


def addresses(nodes: Any) -> list[str]:
    return [node["NodeManagerAddress"] for node in nodes]


def test_hosts_have_the_best_devices_and_are_ordered_by_the_number_of_them_and_by_address() -> None:
    nodes = [node("10.0.0.1", CPU=8), node("10.0.0.2", CPU=8, **{CPU_DEVICE: 4}), node("10.0.0.3", CPU=8, GPU=2)]
    for n, resource, devices in ((3, "GPU", 2), (2, CPU_DEVICE, 4), (1, "CPU", 8)):
        choice = choose_nodes(nodes[:n], None, None)
        assert (choice.resource, choice.devices_per_host) == (resource, devices)
        assert addresses(choice.nodes) == [f"10.0.0.{n}"]

    nodes = [node(f"10.0.0.{i}", GPU=gpus, alive=i != 3) for i, gpus in ((10, 4), (9, 4), (1, 2), (3, 4), (2, 8))]
    assert addresses(choose_nodes(nodes, None, None).nodes) == ["10.0.0.2", "10.0.0.9", "10.0.0.10", "10.0.0.1"]
    choice = choose_nodes(nodes, 3, None)
    assert addresses(choice.nodes) == ["10.0.0.2", "10.0.0.9", "10.0.0.10"] and choice.devices_per_host == 4


def test_virtual_devices_may_be_more_than_cpus_and_share_them() -> None:
    choice = choose_nodes([node("10.0.0.1", CPU=2)], None, 6)
    assert choice.devices_per_host == 6 and choice.resource_per_device == 0.3333
    assert choose_nodes([node("10.0.0.1", CPU=8)], None, 2).resource_per_device == 1.0


def test_too_few_hosts_or_devices_are_errors() -> None:
    nodes = [node("10.0.0.1", GPU=4), node("10.0.0.2", GPU=8)]
    with pytest.raises(
        ShardingError, match=r"3 hosts were requested, and the Ray cluster has 2 with `GPU`. Pass a smaller `num_hosts`"
    ):
        choose_nodes(nodes, 3, None)
    with pytest.raises(
        ShardingError, match=r"5 devices per host were requested, and host \S+ of the Ray cluster has 4 `GPU`"
    ):
        choose_nodes(nodes, 2, 5)
    with pytest.raises(ShardingError, match="the Ray cluster has 0 with `CPU`"):
        choose_nodes([], None, None)


def test_a_session_starts_again_on_nodes_that_are_free_or_that_it_held() -> None:
    nodes = [node(f"10.0.0.{i}", CPU=8, GPU=gpus) for i, gpus in ((1, 4), (2, 4), (3, 4), (4, 2))]
    nodes.append(node("10.0.0.5", CPU=8))  # no GPUs, so it is no host of this session
    available = {f"node-10.0.0.{i}": {"CPU": 8.0, "GPU": free} for i, free in ((2, 0.0), (3, 4.0), (4, 2.0), (5, 0.0))}

    def found(devices_per_host: int | None, held: tuple[str, ...]) -> list[str]:
        return addresses(
            nodes_to_restart_on(
                nodes, resource="GPU", devices_per_host=devices_per_host, available=available, held=held
            )
        )

    assert found(4, ("node-10.0.0.1",)) == ["10.0.0.1", "10.0.0.3"]
    assert found(2, ()) == found(None, ()) == ["10.0.0.3", "10.0.0.4"]


def test_a_session_with_more_virtual_devices_than_cpus_starts_again_on_their_nodes() -> None:
    cpus = [node("10.0.0.1", CPU=2)]
    for free, requested in ((2.0, cpus), (1.0, [])):
        available = {"node-10.0.0.1": {"CPU": free}}
        assert nodes_to_restart_on(cpus, resource="CPU", devices_per_host=6, available=available) == requested


# ---- waiting for nodes -----------------------------------------------------------------------------------------------


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> dict[str, Mapping[str, float]]:
    """The free resources of three nodes with two devices each, all of which answer; at first, no device is free."""
    nodes = [
        {"NodeID": f"n{i}", "NodeManagerAddress": f"10.0.0.{i}", "Alive": True, "Resources": {CPU_DEVICE: 2.0}}
        for i in (1, 2, 3)
    ]
    free: dict[str, Mapping[str, float]] = {}
    monkeypatch.setattr(reservation, "nodes_that_answer", lambda timeout_s: nodes)
    monkeypatch.setattr(reservation, "available_resources", lambda: free)
    monkeypatch.setattr(reservation, "_FREE_TIMEOUT_S", 0.3)
    return free


def _chosen(requested: HostRequest) -> list[str]:
    return [node["NodeID"] for node in reservation._choose_for_restart(requested).nodes]


def _wanted(num_hosts: int | None, *held: str) -> HostRequest:
    return HostRequest(num_hosts=num_hosts, devices_per_host=None, resource=CPU_DEVICE, held=frozenset(held))


def test_the_nodes_of_the_ended_session_are_waited_for(available: dict[str, Mapping[str, float]]) -> None:
    available["n3"] = {CPU_DEVICE: 2.0}
    requested = _wanted(None, "n1")
    assert reservation.n_available(requested) == 2
    threading.Timer(0.1, lambda: available.update(n1={CPU_DEVICE: 2.0})).start()
    assert _chosen(requested) == ["n1", "n3"]


def test_nodes_that_do_not_become_free_are_left_out(available: dict[str, Mapping[str, float]]) -> None:
    available.update(n2={CPU_DEVICE: 2.0}, n3={CPU_DEVICE: 1.0})
    assert _chosen(_wanted(3, "n2")) == ["n2"]  # no call waits for the others
    assert _chosen(_wanted(3, "n1", "n2")) == ["n2"]


def test_a_session_never_gets_more_hosts_than_it_has_asked_for(available: dict[str, Mapping[str, float]]) -> None:
    available.update({name: {CPU_DEVICE: 2.0} for name in ("n1", "n2", "n3")})
    assert reservation.n_available(_wanted(2)) == 2 and _chosen(_wanted(2)) == ["n1", "n2"]
    assert reservation.n_available(_wanted(None)) == 3 and len(_chosen(_wanted(None))) == 3


@pytest.mark.usefixtures("available")
def test_without_nodes_the_error_says_what_to_do() -> None:
    with pytest.raises(MinialpaError, match=r"has all of its `\w+` free\. Start.*call `minialpa.restart\(\)`"):
        _chosen(_wanted(2, "n1"))


def test_a_node_that_ray_lists_and_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as gone:
        ports = [server.getsockname()[1] for server in (there, gone)]
        gone.close()
        nodes: list[dict[str, Any]] = [
            {"NodeManagerAddress": address, "NodeManagerPort": port, "Alive": alive}
            for address, port, alive in (
                ("127.0.0.1", ports[0], True),
                ("127.0.0.1", ports[1], True),
                ("192.0.2.250", 9, True),  # neither accepts nor refuses a connection
                ("127.0.0.1", ports[0], False),
            )
        ]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        assert nodes_that_answer(0.3) == nodes[:1]
