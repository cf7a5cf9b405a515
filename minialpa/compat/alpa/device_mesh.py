"""Alpa's clusters and meshes: the session's devices go in; views of them, for the `devices` of methods, come out.

The session starts all workers, so physical and virtual meshes are one class.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

import minialpa
from minialpa.arrays import RemoteArray
from minialpa.compat.alpa import names
from minialpa.errors import ShardingError
from minialpa.session import current_session, describe_devices

#: Arrays on workers. In a local session, arrays are jax's own.
DistributedArray = ReplicatedDistributedArray = RemoteArray


class DeviceMesh:
    """A (hosts, devices per host) mesh. `method_devices` are its jax devices or its cluster, for minialpa's methods."""

    def __init__(self, shape: tuple[int, int], devices: list[jax.Device] | minialpa.ClusterSpec) -> None:
        self.shape, self.method_devices = shape, devices
        self.num_hosts, self.num_devices_per_host = shape
        self.num_devices = math.prod(shape)

    def get_logical_mesh(
        self,
        mesh_shape: Sequence[int] | None = None,
        mesh_alpha: Sequence[float] | None = None,
        mesh_beta: Sequence[float] | None = None,
    ) -> minialpa.LogicalMesh:
        """These devices as an array of `mesh_shape`, by default (hosts, devices per host).

        With `mesh_alpha` (seconds) and `mesh_beta` (seconds per byte), or other units, only communication has a cost,
        as in Alpa. By default, the session's devices and links have their costs.
        """
        cluster = self.method_devices
        if isinstance(cluster, list):
            if list(current_session().devices[: self.num_devices]) != cluster:
                raise ShardingError(
                    "A logical mesh stands for the first devices of the session, and these are others. Use "
                    "`minialpa.ShardParallel(devices=[...], logical_shape=...)` with a list of jax devices."
                )
            cluster = describe_devices(cluster)

        with_prices = cluster.logical_mesh(self.shape, tuple(mesh_shape or self.shape))
        if mesh_alpha is None and mesh_beta is None:
            return with_prices
        return minialpa.LogicalMesh(with_prices.shape, tuple(mesh_alpha or ()), tuple(mesh_beta or ()))

    def get_physical_mesh(self, mesh_id: int = 0) -> DeviceMesh:
        return self

    def sync_workers(self) -> None:
        """Wait for every array of this process. On a cluster, use `executable.sync()`."""
        jax.block_until_ready(jax.live_arrays())

    def shutdown(self, forced: bool = False) -> None:
        """No effect: the session ends with `shutdown()`."""


VirtualPhysicalMesh = PhysicalDeviceMesh = DistributedPhysicalDeviceMesh = DeviceMesh


class LocalPhysicalDeviceMesh(DeviceMesh):
    """Devices of this process, by default all local devices."""

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        chosen = list(jax.local_devices() if devices is None else devices)
        super().__init__((1, len(chosen)), chosen)


class DeviceCluster:
    """The hosts of the session; starts one on the local devices if necessary."""

    def __init__(self) -> None:
        self._session = current_session()
        cluster = self._session.cluster
        self.num_hosts, self.num_devices = cluster.num_hosts, cluster.n_devices
        self.host_num_devices = [cluster.devices_per_host] * self.num_hosts

    def get_virtual_physical_mesh(
        self, host_ids: Sequence[int] | None = None, num_devices_per_host: int | None = None
    ) -> DeviceMesh:
        """The first `num_devices_per_host` devices of some hosts, by default all devices.

        Several hosts, and hosts of workers, must be the first ones with all their devices, else ShardingError is
        raised.
        """
        cluster, all_of_host = self._session.cluster, self.host_num_devices[0]
        hosts = list(range(self.num_hosts)) if host_ids is None else list(host_ids)
        shape = len(hosts), num_devices_per_host or all_of_host
        are_known = set(hosts) <= set(range(self.num_hosts)) and shape[1] <= all_of_host
        if are_known and self._session.devices and len(hosts) == 1:
            first = hosts[0] * all_of_host
            return DeviceMesh(shape, list(self._session.devices[first : first + shape[1]]))

        if hosts != list(range(len(hosts))) or not are_known or (len(hosts) > 1 and shape[1] < all_of_host):
            raise ShardingError(
                f"The session has {self.num_hosts} hosts with {all_of_host} devices each, and minialpa runs on the "
                f"first of them, with all their devices; got {shape[1]} devices of each of the hosts {hosts}. Choose "
                "hosts with `init(num_nodes=..., num_devices_per_node=...)`."
            )
        host_devices = cluster.host_devices[: len(hosts)]
        chosen = dataclasses.replace(cluster, num_hosts=shape[0], devices_per_host=shape[1], host_devices=host_devices)
        return DeviceMesh(shape, chosen)

    get_physical_mesh = get_virtual_physical_mesh

    def profile_all(self, *args: Any, **kwargs: Any) -> None:
        raise names.NotHereError(names.not_here("profile_all"))


class _Global:
    """For methods without `devices`."""

    mesh: DeviceMesh | None = None


def read_devices(devices: Any) -> Any:
    """minialpa's `devices` for a script's; by default the script's global mesh, if any."""
    chosen = _Global.mesh if devices is None else devices
    return chosen.method_devices if isinstance(chosen, DeviceMesh) else chosen


def get_global_cluster() -> DeviceCluster:
    return DeviceCluster()


def get_global_virtual_physical_mesh() -> DeviceMesh:
    """The script's mesh, or all devices of the session."""
    return _Global.mesh or DeviceCluster().get_virtual_physical_mesh()


def get_global_physical_mesh(create_if_not_exist: bool = False) -> DeviceMesh:
    """The same mesh. It always exists."""
    return get_global_virtual_physical_mesh()


def set_global_virtual_physical_mesh(mesh: DeviceMesh | None) -> None:
    """Choose the devices of methods without `devices`, until `shutdown`. None: all devices."""
    _Global.mesh = mesh


set_global_physical_mesh = set_global_virtual_physical_mesh


def get_global_num_devices() -> int:
    return DeviceCluster().num_devices
