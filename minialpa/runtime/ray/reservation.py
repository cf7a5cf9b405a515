"""Nodes of a Ray cluster that answer go in, a placement group on some of them comes out.

A host is a Ray node with devices: GPUs, the custom resource `minialpa_cpu_device`, or, if no node has either, CPUs.
Each CPU stands for one virtual CPU device unless the user gives a number.

Ray would try to reserve a lost node. So nodes are probed first, and each bundle of the placement group names its node.

Errors are ShardingError for too few hosts or devices, and MinialpaError if they are not free.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.util.placement_group import placement_group, remove_placement_group

from minialpa.errors import MinialpaError, ShardingError
from minialpa.runtime.ray.private_ray import available_resources
from minialpa.runtime.ray.ray_connection import nodes_that_answer

_RESERVE_TIMEOUT_S = 60.0
#: Seconds until nodes are chosen a second time, since one may be lost.
_TRY_S = 5.0
#: Seconds that nodes of an ended session have to become free.
_FREE_TIMEOUT_S = 10.0
#: Seconds between reads of free resources.
_POLL_S = 0.1
#: Seconds to accept a connection: before a session starts, and while one runs.
_PROBE_S, _QUICK_PROBE_S = 2.0, 0.3
_NODE_LABEL = "ray.io/node-id"
CPU_DEVICE = "minialpa_cpu_device"


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The nodes of a session.

    Attributes:
        resource: the Ray resource that counts devices.
        nodes: as `ray.nodes` describes them; most devices first, then by address.
    """

    resource: str
    nodes: tuple[Mapping[str, Any], ...]
    devices_per_host: int

    @property
    def resource_per_device(self) -> float:
        """For one device: less than a CPU if there are more virtual devices than CPUs."""
        if self.resource != "CPU":
            return 1.0
        least = min(node["Resources"]["CPU"] for node in self.nodes)
        # Ray counts resources in ten-thousandths.
        return min(1.0, int(least * 10_000 / self.devices_per_host) / 10_000)


def choose_nodes(nodes: Sequence[Mapping[str, Any]], num_hosts: int | None, devices_per_host: int | None) -> NodeChoice:
    """The `num_hosts` nodes with the most devices, each with `devices_per_host`. None is as in `HostRequest`. Raises
    ShardingError if there are too few.
    """
    # The first of GPUs, virtual CPU devices and CPUs that any node has.
    alive = [node for node in nodes if node["Alive"]]
    resource = next((r for r in ("GPU", CPU_DEVICE) if any(n["Resources"].get(r, 0) >= 1 for n in alive)), "CPU")
    with_devices = sorted(
        (n for n in alive if n["Resources"].get(resource, 0) >= 1),
        key=lambda n: (-n["Resources"][resource], ip_key(n["NodeManagerAddress"]), n["NodeID"]),
    )

    n_hosts = num_hosts or len(with_devices)
    if not 1 <= n_hosts <= len(with_devices):
        raise ShardingError(
            f"{num_hosts or 1} hosts were requested, and the Ray cluster has {len(with_devices)} with `{resource}`. "
            "Pass a smaller `num_hosts` to `minialpa.init`, or start more nodes with `ray start`."
        )

    # Virtual devices may share CPUs.
    chosen = tuple(with_devices[:n_hosts])
    least = int(min(node["Resources"][resource] for node in chosen))
    per_host = devices_per_host or least
    if per_host < 1 or (per_host > least and resource != "CPU"):
        raise ShardingError(
            f"{per_host} devices per host were requested, and host {chosen[-1]['NodeManagerAddress']} of the Ray "
            f"cluster has {least} `{resource}`. Pass a smaller `devices_per_host` or `num_hosts` to `minialpa.init`."
        )
    return NodeChoice(resource, chosen, per_host)


def nodes_to_restart_on(
    nodes: Sequence[Mapping[str, Any]],
    *,
    resource: str,
    devices_per_host: int | None,
    available: Mapping[str, Mapping[str, float]],
    held: Collection[str] = (),
) -> list[Mapping[str, Any]]:
    """The nodes that a restarted session may have.

    Args:
        resource: the resource of the ended session: a session on GPUs does not restart on CPUs.
        available: the free amount of each resource, by `NodeID`.
        held: the nodes of the ended session, by `NodeID`. They count as free.
    """

    def may_have(node: Mapping[str, Any]) -> bool:
        total = node["Resources"].get(resource, 0)
        needed = total if devices_per_host is None else devices_per_host
        if resource == "CPU":
            needed = min(needed, total)  # Virtual devices share CPUs.
        is_free = node["NodeID"] in held or available.get(node["NodeID"], {}).get(resource, 0) >= needed
        return bool(total >= max(1, needed) and is_free)

    return [node for node in nodes if node["Alive"] and may_have(node)]


def ip_key(ip: str) -> tuple[int, ...]:
    """Sorts addresses by number: 10.0.0.9 before 10.0.0.10."""
    return tuple(int(part) for part in re.findall(r"\d+", ip))


# ---- the reservation -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRequest:
    """None stands for all hosts, and for as many devices as every host has. A restarted session has the `resource` and
    the nodes that the ended session `held`, and takes fewer hosts if there are fewer.
    """

    num_hosts: int | None
    devices_per_host: int | None
    resource: str | None = None
    held: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Host:
    """`bundle` is its number in the placement group."""

    node_id: str
    ip: str
    port: int
    bundle: int


@dataclass(frozen=True, slots=True)
class Reservation:
    group: Any
    choice: NodeChoice

    @property
    def hosts(self) -> tuple[Host, ...]:
        """In the order of their addresses."""
        hosts = [
            Host(node["NodeID"], node["NodeManagerAddress"], int(node["NodeManagerPort"]), bundle)
            for bundle, node in enumerate(self.choice.nodes)
        ]
        return tuple(sorted(hosts, key=lambda host: (ip_key(host.ip), host.node_id)))


def n_available(requested: HostRequest) -> int:
    n_nodes = len(_usable_nodes(nodes_that_answer(_QUICK_PROBE_S), requested))
    return n_nodes if requested.num_hosts is None else min(requested.num_hosts, n_nodes)


def reserve(requested: HostRequest) -> Reservation:
    """Reserve hosts when they are free. Raises MinialpaError after `_RESERVE_TIMEOUT_S`."""
    deadline = time.monotonic() + _RESERVE_TIMEOUT_S
    while True:
        choice = _choose_for_restart(requested) if requested.resource else _choose_for_new_session(requested)
        bundle = {choice.resource: choice.resource_per_device * choice.devices_per_host}
        group = placement_group(
            [dict(bundle) for _ in choice.nodes],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{_NODE_LABEL: node["NodeID"]} for node in choice.nodes],
        )

        # An interrupt must remove the group, too.
        is_reserved = False
        try:
            is_reserved = group.wait(_TRY_S)
        finally:
            if not is_reserved:
                remove_placement_group(group)
        if is_reserved:
            return Reservation(group, choice)

        if time.monotonic() >= deadline:
            raise MinialpaError(
                f"The Ray cluster did not reserve {bundle} on each of {len(choice.nodes)} hosts within "
                f"{_RESERVE_TIMEOUT_S:.0f} s, because other programs use them. Wait for the end of these programs, or "
                "pass a smaller `num_hosts` or `devices_per_host` to `minialpa.init`."
            )


def _choose_for_new_session(requested: HostRequest) -> NodeChoice:
    return choose_nodes(nodes_that_answer(_PROBE_S), requested.num_hosts, requested.devices_per_host)


def _choose_for_restart(requested: HostRequest) -> NodeChoice:
    """Choose once the ended session has left its nodes, or after `_FREE_TIMEOUT_S`."""
    nodes = nodes_that_answer(_PROBE_S)
    deadline = time.monotonic() + _FREE_TIMEOUT_S
    usable = _usable_nodes(nodes, requested)
    free = _free_nodes(nodes, requested)
    while len(free) < len(usable) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        free = _free_nodes(nodes, requested)

    if not free:
        devices = f"{requested.devices_per_host or 'all of its'} `{requested.resource}`"
        raise MinialpaError(
            f"No host of the Ray cluster answers and has {devices} free. Start nodes, or wait for other programs to "
            "end, until `minialpa.available_hosts()` is not 0; then call `minialpa.restart()`."
        )
    n_hosts = len(free) if requested.num_hosts is None else min(requested.num_hosts, len(free))
    return choose_nodes(free, n_hosts, requested.devices_per_host)


def _usable_nodes(nodes: Sequence[Mapping[str, Any]], requested: HostRequest) -> list[Mapping[str, Any]]:
    """Free now, or after the end of the session that holds them."""
    assert requested.resource is not None
    return nodes_to_restart_on(
        nodes,
        resource=requested.resource,
        devices_per_host=requested.devices_per_host,
        available=available_resources(),
        held=requested.held,
    )


def _free_nodes(nodes: Sequence[Mapping[str, Any]], requested: HostRequest) -> list[Mapping[str, Any]]:
    return _usable_nodes(nodes, replace(requested, held=frozenset()))
