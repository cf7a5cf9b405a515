"""The reservation of hosts: the nodes of a Ray cluster that answer go in; a placement group on some of them comes out.

Ray lists a node that was lost as alive for up to a minute, and would try to reserve it. So nodes are probed first, and
each bundle of the placement group names its node. A session that starts again takes the nodes that it can have, at
most as many as were asked for; what the ended session held is free some moments after its end.

The process is connected to Ray, whose head answers. Errors are ShardingError if the cluster has too few hosts or
devices, and MinialpaError if they are not free.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.util.placement_group import placement_group, remove_placement_group

from minialpa.errors import MinialpaError
from minialpa.runtime.ray.node_choice import NodeChoice, choose_nodes, ip_key, nodes_to_restart_on
from minialpa.runtime.ray.private_ray import available_resources
from minialpa.runtime.ray.ray_connection import nodes_that_answer

#: Seconds that the cluster has to reserve the hosts.
_RESERVE_TIMEOUT_S = 60.0
#: Seconds after which the nodes are probed again, since one of those chosen may have been lost meanwhile.
_TRY_S = 5.0
#: Seconds that the nodes of an ended session have to become free. Its workers end at once, unless they hang.
_FREE_TIMEOUT_S = 10.0
#: Seconds between two looks at what is free.
_POLL_S = 0.1
#: Seconds that a node has to take a connection, before a session starts, and while another one runs.
_PROBE_S, _QUICK_PROBE_S = 2.0, 0.3
#: The label by which Ray tells nodes apart.
_NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The hosts that a session asks for.

    Attributes:
        num_hosts: The number of hosts; None for all.
        devices_per_host: The number of devices of each host; None for as many as every host has.
        resource: The Ray resource that counted the devices of the session before this one; None for a first session,
            which gets exactly what it asks for.
        held: The `NodeID`s of the hosts that the session before held.
    """

    num_hosts: int | None
    devices_per_host: int | None
    resource: str | None = None
    held: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Host:
    """A reserved host.

    Attributes:
        node_id: Its Ray node.
        ip: Its address.
        port: The port at which its Ray node answers.
        bundle: Its bundle in the placement group.
    """

    node_id: str
    ip: str
    port: int
    bundle: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Reserved hosts, until the placement group is removed.

    Attributes:
        group: The placement group.
        choice: The nodes in it, with their devices.
    """

    group: Any
    choice: NodeChoice

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts in the order of their addresses."""
        hosts = [
            Host(node["NodeID"], node["NodeManagerAddress"], int(node["NodeManagerPort"]), bundle)
            for bundle, node in enumerate(self.choice.nodes)
        ]
        return tuple(sorted(hosts, key=lambda host: (ip_key(host.ip), host.node_id)))


def n_available(wanted: Wanted) -> int:
    """How many hosts `reserve` would get now for a session that starts again. Takes less than half a second."""
    n_nodes = len(_usable(nodes_that_answer(_QUICK_PROBE_S), wanted))
    return n_nodes if wanted.num_hosts is None else min(wanted.num_hosts, n_nodes)


def reserve(wanted: Wanted) -> Reservation:
    """Reserve hosts, as soon as they are free."""
    deadline = time.monotonic() + _RESERVE_TIMEOUT_S
    while True:
        choice = _choose_again(wanted) if wanted.resource else _choose_first(wanted)
        bundle = {choice.resource: choice.resource_per_device * choice.devices_per_host}
        group = placement_group(
            [dict(bundle) for _ in choice.nodes],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{_NODE_LABEL: node["NodeID"]} for node in choice.nodes],
        )

        # An interrupt must not leave the group behind.
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
                f"{_RESERVE_TIMEOUT_S:.0f} s: something else uses them. Wait for it to end, or ask for fewer hosts or "
                "devices."
            )


def _choose_first(wanted: Wanted) -> NodeChoice:
    return choose_nodes(nodes_that_answer(_PROBE_S), wanted.num_hosts, wanted.devices_per_host)


def _choose_again(wanted: Wanted) -> NodeChoice:
    """The nodes for a session that starts again, once those of the ended session are free, or after some seconds."""
    nodes = nodes_that_answer(_PROBE_S)
    deadline = time.monotonic() + _FREE_TIMEOUT_S
    usable = _usable(nodes, wanted)
    free = _free(nodes, wanted)
    while len(free) < len(usable) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        free = _free(nodes, wanted)

    if not free:
        devices = f"{wanted.devices_per_host or 'all of its'} `{wanted.resource}`"
        raise MinialpaError(
            f"No host of the Ray cluster answers and has {devices} free. Start nodes, or wait for what uses them to "
            "end, until `minialpa.available_hosts()` is not 0; then call `minialpa.restart()` again."
        )
    n_hosts = len(free) if wanted.num_hosts is None else min(wanted.num_hosts, len(free))
    return choose_nodes(free, n_hosts, wanted.devices_per_host)


def _usable(nodes: Sequence[Mapping[str, Any]], wanted: Wanted) -> list[Mapping[str, Any]]:
    """The nodes that are free, or will be when the session that holds them has ended."""
    assert wanted.resource is not None
    return nodes_to_restart_on(
        nodes,
        resource=wanted.resource,
        devices_per_host=wanted.devices_per_host,
        available=available_resources(),
        held=wanted.held,
    )


def _free(nodes: Sequence[Mapping[str, Any]], wanted: Wanted) -> list[Mapping[str, Any]]:
    """The nodes that are free now."""
    return _usable(nodes, replace(wanted, held=frozenset()))
