"""Alpa's clusters and meshes: views of the session's devices, which methods take as `devices`.

The session starts all workers, so one class serves as physical and as virtual mesh.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

import minialpa
from minialpa.arrays import RemoteArray
from minialpa.errors import MinialpaError, ShardingError
from minialpa.session import Session, current_session, describe_devices

#: Arrays on workers; in a session in one process, arrays are jax's own.
DistributedArray = RemoteArray
ReplicatedDistributedArray = RemoteArray


class DeviceMesh:
    """Some hosts of a session, by their numbers, with the first `num_devices_per_host` devices of each."""

    def __init__(self, session: Session, host_ids: Sequence[int], num_devices_per_host: int) -> None:
        self._session = session
        self.host_ids = tuple(host_ids)
        self.num_devices_per_host = num_devices_per_host

    @property
    def shape(self) -> tuple[int, int]:
        """(hosts, devices per host)."""
        return len(self.host_ids), self.num_devices_per_host

    @property
    def num_hosts(self) -> int:
        return len(self.host_ids)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> list[list[int]]:
        """For each host, numbers of its devices."""
        return [list(range(self.num_devices_per_host)) for _ in self.host_ids]

    @property
    def _numbers(self) -> list[int]:
        """Numbers of the devices in the session, in order."""
        per_host = self._session.cluster.devices_per_host
        return [host * per_host + i for host in self.host_ids for i in range(self.num_devices_per_host)]

    @property
    def _is_first(self) -> bool:
        """Whether these are the first devices of the session, where plans for a cluster or logical mesh run."""
        return self._numbers == list(range(self.num_devices))

    def get_logical_mesh(
        self,
        mesh_shape: Sequence[int] | None = None,
        mesh_alpha: Sequence[float] | None = None,
        mesh_beta: Sequence[float] | None = None,
    ) -> minialpa.LogicalMesh:
        """These devices as an array of `mesh_shape`; without one, (hosts, devices per host).

        With `mesh_alpha` and `mesh_beta`, only communication has a price, as in Alpa: seconds and seconds per byte, or
        other units. Without them, the session's devices and links have their prices.
        """
        n, own, current = self.num_devices, self._session.devices, current_session().devices
        if not self._is_first or own[:n] != current[:n]:
            raise ShardingError(
                f"A logical mesh stands for the first devices of the session, and these are others: "
                f"{[own[i] for i in self._numbers] if own else self._numbers}. Use "
                "`ShardParallel(devices=[...], logical_shape=...)` with a list of jax devices."
            )
        shape = tuple(mesh_shape or self.shape)
        if math.prod(shape) != n:
            raise ShardingError(f"{n} devices cannot be viewed as {shape}.")
        if mesh_alpha is None and mesh_beta is None:
            return self._session.cluster.logical_mesh(self.shape, shape)
        return minialpa.LogicalMesh(shape, tuple(mesh_alpha or ()), tuple(mesh_beta or ()))

    def get_physical_mesh(self, mesh_id: int = 0) -> DeviceMesh:
        """The same devices, in Alpa's class for them."""
        if self._session.devices and self.num_hosts == 1:
            return LocalPhysicalDeviceMesh([self._session.devices[i] for i in self._numbers])
        return self

    def target(self) -> Any:
        """The `devices` of minialpa's methods for this mesh."""
        if self._session.devices and self.num_hosts == 1:
            return [self._session.devices[i] for i in self._numbers]
        if self._is_first:
            hosts, per_host = self.shape
            return dataclasses.replace(
                self._session.cluster,
                num_hosts=hosts,
                devices_per_host=per_host,
                host_devices=self._session.cluster.host_devices[:hosts],
            )
        raise ShardingError(
            "minialpa runs on the first hosts of a session, in order, with all their devices, and these are "
            f"{self.num_devices_per_host} devices of each of the hosts {list(self.host_ids)}. Choose hosts with "
            "`init(num_nodes=..., num_devices_per_node=...)`."
        )

    def sync_workers(self) -> None:
        """Wait until every array of this process has its value."""
        if not self._session.devices:
            raise MinialpaError("On a cluster, wait with `executable.sync()`.")
        jax.block_until_ready(jax.live_arrays())

    def shutdown(self, forced: bool = False) -> None:
        """No effect: the session ends with `shutdown()`."""


VirtualPhysicalMesh = PhysicalDeviceMesh = DistributedPhysicalDeviceMesh = DeviceMesh


class LocalPhysicalDeviceMesh(DeviceMesh):
    """A mesh of devices of this process; all local devices by default."""

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        chosen = tuple(jax.local_devices() if devices is None else devices)
        if not chosen or not all(isinstance(device, jax.Device) for device in chosen):
            raise ShardingError(f"`devices` is a list of jax devices, or None for all; got {devices!r}.")
        super().__init__(Session(chosen, describe_devices(chosen)), (0,), len(chosen))


class DeviceCluster:
    """The hosts of the session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def num_hosts(self) -> int:
        return self._session.cluster.num_hosts

    @property
    def num_devices(self) -> int:
        return self._session.cluster.n_devices

    @property
    def host_num_devices(self) -> list[int]:
        return [self._session.cluster.devices_per_host] * self.num_hosts

    def get_virtual_physical_mesh(
        self, host_ids: Sequence[int] | None = None, num_devices_per_host: int | None = None
    ) -> DeviceMesh:
        """The first `num_devices_per_host` devices of some hosts; without arguments, all devices."""
        hosts = list(range(self.num_hosts)) if host_ids is None else list(host_ids)
        per_host = num_devices_per_host or self._session.cluster.devices_per_host
        if not set(hosts) <= set(range(self.num_hosts)) or per_host > self._session.cluster.devices_per_host:
            raise ShardingError(
                f"The session has {self.num_hosts} hosts with {self._session.cluster.devices_per_host} devices each; "
                f"got hosts {hosts} with {per_host} devices each."
            )
        return DeviceMesh(self._session, hosts, per_host)

    def get_physical_mesh(
        self, host_ids: Sequence[int] | None = None, num_devices_per_host: int | None = None
    ) -> DeviceMesh:
        """`get_virtual_physical_mesh` as a physical mesh."""
        return self.get_virtual_physical_mesh(host_ids, num_devices_per_host).get_physical_mesh()

    def profile_all(self, *args: Any, **kwargs: Any) -> None:
        """Not supported: raises MinialpaError."""
        raise MinialpaError(
            "minialpa profiles nothing before it plans: give the figures of devices and links as "
            "`devices=minialpa.ClusterSpec(...)` of the method."
        )


class _Global:
    """The script's mesh for methods without `devices`."""

    mesh: DeviceMesh | None = None


def _chosen_mesh() -> DeviceMesh | None:
    """The script's mesh, unless its session has ended."""
    mesh = _Global.mesh
    if mesh is not None and not isinstance(mesh, LocalPhysicalDeviceMesh) and mesh._session is not current_session():
        return None
    return mesh


def read_devices(devices: Any) -> Any:
    """The `devices` of minialpa's methods for a script's; None stands for the global mesh of the script, if any."""
    chosen = _chosen_mesh() if devices is None else devices
    return chosen.target() if isinstance(chosen, DeviceMesh) else chosen


def get_global_cluster() -> DeviceCluster:
    """The hosts of the session, which starts on the local devices if necessary."""
    return DeviceCluster(current_session())


def get_global_virtual_physical_mesh() -> DeviceMesh:
    """All devices of the session, or the mesh that the script chose."""
    return _chosen_mesh() or get_global_cluster().get_virtual_physical_mesh()


def get_global_physical_mesh(create_if_not_exist: bool = False) -> DeviceMesh:
    """The same mesh as a physical one. It always exists."""
    return get_global_virtual_physical_mesh().get_physical_mesh()


def set_global_virtual_physical_mesh(mesh: DeviceMesh | None) -> None:
    """Choose the devices of methods without `devices`, until `shutdown`; None: all devices."""
    _Global.mesh = mesh


set_global_physical_mesh = set_global_virtual_physical_mesh


def get_global_num_devices() -> int:
    return get_global_cluster().num_devices
