"""Which nodes of a Ray cluster a session gets, and how many devices each has: a pure choice from what Ray says of them.

A host is a Ray node with devices: GPUs, the custom resource `minialpa_cpu_device`, or, if no node has either, CPUs,
each of which stands for one virtual CPU device unless the user gives a number. Nothing here asks Ray;
`ray_cluster.py` does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minialpa.errors import ShardingError

CPU_DEVICE = "minialpa_cpu_device"


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The nodes that a session gets.

    Attributes:
        resource: The Ray resource that counts devices.
        nodes: The nodes, as `ray.nodes` describes them; those with the most devices first, then by address.
        devices_per_host: The number of devices that each of them gives.
    """

    resource: str
    nodes: tuple[Mapping[str, Any], ...]
    devices_per_host: int

    @property
    def resource_per_device(self) -> float:
        """How much of the resource one device takes: less than a CPU if there are more virtual devices than CPUs."""
        if self.resource != "CPU":
            return 1.0
        least = min(node["Resources"]["CPU"] for node in self.nodes)
        # Ray counts resources in ten-thousandths.
        return min(1.0, int(least * 10_000 / self.devices_per_host) / 10_000)


def choose_nodes(nodes: Sequence[Mapping[str, Any]], num_hosts: int | None, devices_per_host: int | None) -> NodeChoice:
    """The `num_hosts` nodes with the most devices, each with `devices_per_host` devices.

    None stands for all nodes, and for as many devices as each of them has. Raises ShardingError if there are too few.
    """
    # GPUs before virtual CPU devices before CPUs: the first of these that any node has.
    alive = [node for node in nodes if node["Alive"]]
    resource = next((r for r in ("GPU", CPU_DEVICE) if any(n["Resources"].get(r, 0) >= 1 for n in alive)), "CPU")
    with_devices = sorted(
        (n for n in alive if n["Resources"].get(resource, 0) >= 1),
        key=lambda n: (-n["Resources"][resource], ip_key(n["NodeManagerAddress"]), n["NodeID"]),
    )

    n_hosts = num_hosts or len(with_devices)
    if not 1 <= n_hosts <= len(with_devices):
        raise ShardingError(
            f"{n_hosts} hosts were asked for and the Ray cluster has {len(with_devices)} with `{resource}`. Ask for "
            "fewer, or start more nodes."
        )

    # Every host gives the same number of devices. More virtual devices than CPUs are fine, since they share them.
    chosen = tuple(with_devices[:n_hosts])
    least = int(min(node["Resources"][resource] for node in chosen))
    per_host = devices_per_host or least
    if per_host < 1 or (per_host > least and resource != "CPU"):
        raise ShardingError(
            f"{per_host} devices per host were asked for and a host of the Ray cluster has {least} `{resource}`. Ask "
            "for fewer devices or fewer hosts."
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
    """The nodes of which a session that starts again may have `devices_per_host` devices, or all without a number.

    They have the resource that the ended session used: one that ran on GPUs does not go on with CPUs. What they have
    of it is free, or belongs to that session.

    Args:
        nodes: Nodes that answer, as `ray.nodes` describes them.
        resource: The Ray resource that counts devices.
        devices_per_host: As the user has given it.
        available: What is free of each resource, for each `NodeID`.
        held: `NodeID`s of the nodes that the ended session holds.
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
    """A key that sorts addresses by their numbers: 10.0.0.9 before 10.0.0.10."""
    return tuple(int(part) for part in re.findall(r"\d+", ip))
