"""A session reserves hosts of a Ray cluster and starts workers on them.

Any thread may call `fault` and `lost_hosts`; one thread at a time starts and ends workers. Ray can end this process if
the head is gone, so calls with this risk first check whether the head answers.

Errors are ShardingError for too few hosts or devices, WorkerError if workers do not start, else MinialpaError.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from minialpa.cluster import ClusterSpec, PresetName, gpu_preset
from minialpa.errors import MinialpaError
from minialpa.runtime.cluster.launcher import CallRaised, WorkerEnded, WorkerHandle
from minialpa.runtime.ray.ray_actors import RayActor, RayCalls, start_actor
from minialpa.runtime.ray.ray_connection import answers, connect, each_answers, fault_of_head
from minialpa.runtime.ray.reservation import HostRequest, n_available, reserve
from minialpa.runtime.workers.failures import Failure, Fault, Status, call_raised, died, lost_host, worker_error
from minialpa.runtime.workers.worker_process import WorkerSettings

#: Seconds that workers have to start.
_START_TIMEOUT_S = 180.0
#: Seconds that the head may be unreachable. Ray itself would end this process after a minute.
_HEAD_TIMEOUT_S = 6.0
#: Seconds between checks for the end of the session, while workers start.
_CHECK_INTERVAL_S = 1.0
_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """`timeout_s` is as in `Launcher`, None as in `HostRequest`."""

    address: str | None
    num_hosts: int | None
    devices_per_host: int | None
    namespace: str
    timeout_s: float
    env: Mapping[str, str]


class RayCluster(RayCalls):
    """The reserved hosts of a session and their workers, until `release`.

    Attributes:
        owns_ray: whether this object connects the process to Ray, and disconnects it.
        owns_cluster: whether it has also started the cluster, which ends with the connection.
        head: the address of the cluster's head.
        hosts: in the order of their addresses.
    """

    def __init__(self, request: SessionRequest, before: RayCluster | None = None) -> None:
        """Reserve the request; after `before`, as much of it as is available."""
        self.request = request
        self.timeout_s = request.timeout_s
        self.owns_ray = not ray.is_initialized()
        self.owns_cluster = self.owns_ray and connect(request.address, request.namespace)

        try:
            self.head = ray.get_runtime_context().gcs_address
            self.check()
            reservation = reserve(before.same_hosts() if before else _requested_hosts(request))
        except BaseException:
            if self.owns_ray:
                ray.shutdown()
            raise

        choice = reservation.choice
        self._resource = choice.resource
        self._resource_per_device = choice.resource_per_device
        self._group = reservation.group
        self.devices_per_host = choice.devices_per_host
        self.platform = "cuda" if choice.resource == "GPU" else "cpu"
        self.hosts = reservation.hosts

        self._secret = secrets.token_bytes(32)
        self._n_workers = 0
        self._is_released = False
        self._head_lost_at_s: float | None = None

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        if not ray.is_initialized():
            return

        try:
            # Without the head, the removal would make Ray end this process.
            if fault_of_head(self.head) is None:
                remove_placement_group(self._group)
        finally:
            if self.owns_ray:
                ray.shutdown()

    def same_hosts(self) -> HostRequest:
        held = frozenset(host.node_id for host in self.hosts)
        return replace(_requested_hosts(self.request), resource=self._resource, held=held)

    def available_hosts(self) -> int:
        """How many hosts `restarted` would reserve. After `release`, connects for a moment, which takes seconds."""
        if self._is_released and self.owns_cluster:
            return 1  # `restarted` starts a new cluster on this machine.
        if ray.is_initialized():
            return 0 if fault_of_head(self.head) is not None else n_available(self.same_hosts())

        if not answers(self.head):
            return 0
        try:
            connect(self.head, self.request.namespace)
        except MinialpaError:  # `restart` raises it
            return 0
        try:
            return n_available(self.same_hosts())
        finally:
            ray.shutdown()

    def restarted(self) -> RayCluster:
        """Without the address, Ray might find or start another cluster after the head is gone."""
        address = "local" if self.owns_cluster else self.head
        return RayCluster(replace(self.request, address=address), before=self)

    def check(self) -> None:
        """Raises MinialpaError if the head is unreachable or has restarted."""
        fault = fault_of_head(self.head)
        if fault is not None:
            raise MinialpaError(
                f"The head of the Ray cluster at {self.head} {fault}, so no worker can start there. Fetch arrays that "
                "you need from a running session and end it with `minialpa.shutdown()`; call `ray.shutdown()`, if you "
                "have called `ray.init`; then call `minialpa.init` on a running cluster."
            )

    def fault(self) -> str | None:
        """The head may be silent for `_HEAD_TIMEOUT_S` after the first failed probe."""
        if answers(self.head):
            self._head_lost_at_s = None
            return None
        now_s = time.monotonic()
        # One assignment: another thread may set this to None.
        lost_at_s = self._head_lost_at_s = self._head_lost_at_s or now_s
        if now_s - lost_at_s <= _HEAD_TIMEOUT_S:
            return None
        return (
            f"The head of the Ray cluster at {self.head} has not answered for {_HEAD_TIMEOUT_S:.0f} s. Start a cluster "
            "and call `minialpa.init` again; restore the state from a checkpoint."
        )

    def lost_hosts(self, numbers: Iterable[int]) -> dict[int, str]:
        asked = [(number, self.hosts[number]) for number in sorted(set(numbers))]
        found = each_answers([f"{host.ip}:{host.port}" for _, host in asked])
        return {number: host.ip for (number, host), is_there in zip(asked, found, strict=True) if not is_there}

    def describe(self) -> ClusterSpec:
        """Links of the first host's kind of GPU, and the GPU memory that jax takes."""
        presets: Sequence[PresetName] = self._gpu_presets() if self.platform == "cuda" else ("cpu",)
        specs = [
            ClusterSpec.preset(preset, num_hosts=len(self.hosts), devices_per_host=self.devices_per_host)
            for preset in presets
        ]

        devices = [spec.device for spec in specs]
        if self.platform == "cuda":
            fraction = _memory_fraction(self.request.env)
            devices = [replace(device, memory_bytes=fraction * device.memory_bytes) for device in devices]
        return replace(specs[0], device=devices[0], host_devices=tuple(devices) if len(set(devices)) > 1 else ())

    def _gpu_presets(self) -> list[PresetName]:
        resources = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
        label = "accelerator_type:"
        kinds = [
            next((name.removeprefix(label) for name in resources[host.node_id] if name.startswith(label)), "unknown")
            for host in self.hosts
        ]
        presets = {kind: gpu_preset(kind) for kind in kinds}
        return [presets[kind] for kind in kinds]

    # ---- workers --------------------------------------------------------------------------------------------------

    def start_meshes(self, keys: Sequence[tuple[int, int]], check: Callable[[], None]) -> list[list[WorkerHandle]]:
        meshes: list[list[WorkerHandle]] = []
        try:
            meshes.extend(self._spawn(*key) for key in keys)
            failure = self._join(meshes, check)
            if failure is not None:
                hint = "Check that every host has minialpa, with the same versions of jax and Python."
                raise worker_error(replace(failure, message=f"{failure.message}\n{hint}"), (), has_ended=False)
        except BaseException:
            self.end(list(itertools.chain(*meshes)))
            raise
        return meshes

    def end(self, workers: Sequence[WorkerHandle]) -> None:
        if not workers or not ray.is_initialized():
            return
        # `ray.kill` works through the head. Without it, the workers have to end themselves.
        if fault_of_head(self.head) is not None:
            for worker in workers:
                worker.actor.call_aside("stop")
        for worker in workers:
            assert isinstance(worker.actor, RayActor)
            ray.kill(worker.actor.handle, no_restart=True)

    def _spawn(self, first_device: int, n_devices: int) -> list[WorkerHandle]:
        per_host = self.devices_per_host
        workers = []
        for host in range(first_device // per_host, (first_device + n_devices - 1) // per_host + 1):
            begin = max(first_device, host * per_host)
            count = min(first_device + n_devices, (host + 1) * per_host) - begin
            number = self._n_workers
            self._n_workers += 1

            settings = WorkerSettings(
                number=number,
                host=host,
                ip=self.hosts[host].ip,
                secret=self._secret,
                timeout_s=self.request.timeout_s,
                platform=self.platform,
                n_devices=count,
            )
            actor = start_actor(self._options(host, count), settings)
            workers.append(WorkerHandle(number=number, host=host, first_device=begin, n_devices=count, actor=actor))
        return workers

    def _join(self, meshes: Sequence[Sequence[WorkerHandle]], check: Callable[[], None]) -> Failure | None:
        """Join the workers of each mesh in one jax runtime; returns the first failure, if any.

        Calls `check` about once a second, which may raise.
        """
        # The coordinator of a mesh runs on its first worker, which reserves the port.
        ports = [workers[0].actor.call("reserve_port") for workers in meshes]
        pending = {
            worker.actor.call("join", port, len(workers), rank): Status(
                worker=worker.number, host=worker.host, stage=mesh
            )
            for mesh, (workers, port) in enumerate(zip(meshes, ports, strict=True))
            for rank, worker in enumerate(workers)
        }

        deadline = time.monotonic() + _START_TIMEOUT_S
        while pending:
            left_s = max(0.0, deadline - time.monotonic())
            done = self.wait(list(pending), min(_CHECK_INTERVAL_S, left_s))
            check()

            for ref in done:
                status = pending.pop(ref)
                try:
                    self.answer(ref)
                except CallRaised as error:
                    return call_raised(status, error.method, error.message, error.traceback)
                except WorkerEnded as error:
                    return died(status, str(error))

            # Ray needs a minute to notice a host that was cut off.
            if not done:
                lost = self.lost_hosts(status.host for status in pending.values())
                gone = next((status for status in pending.values() if status.host in lost), None)
                if gone is not None:
                    return lost_host(gone, lost[gone.host])

            # This wait has reached the deadline.
            if not done and left_s <= _CHECK_INTERVAL_S:
                late = next(iter(pending.values()))
                return Failure(Fault.SILENT, late, f"it did not start within {_START_TIMEOUT_S:.0f} s.")
        return None

    def _options(self, host: int, n_devices: int) -> dict[str, Any]:
        amount = self._resource_per_device * n_devices
        resources: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "resources": {}}
        match self._resource:
            case "GPU":
                resources["num_gpus"] = n_devices
            case "CPU":
                resources["num_cpus"] = amount
            case custom:
                resources["resources"] = {custom: amount}

        placed = PlacementGroupSchedulingStrategy(self._group, self.hosts[host].bundle)
        env = {**_worker_env(self.platform), **self.request.env}
        return {**resources, "scheduling_strategy": placed, "runtime_env": {"env_vars": env}, "max_restarts": 0}


def _worker_env(platform: str) -> dict[str, str]:
    """Independent of this process."""
    env = {"XLA_FLAGS": "", "JAX_PLATFORMS": platform}
    if platform == "cuda":
        env[_MEMORY_FRACTION] = "0.9"
    return env


def _memory_fraction(env: Mapping[str, str]) -> float:
    text = {**_worker_env("cuda"), **env}[_MEMORY_FRACTION]
    try:
        return float(text)
    except ValueError:
        raise MinialpaError(
            f"Set `{_MEMORY_FRACTION}` in `worker_env` to a number such as 0.8; got {text!r}."
        ) from None


def _requested_hosts(request: SessionRequest) -> HostRequest:
    return HostRequest(num_hosts=request.num_hosts, devices_per_host=request.devices_per_host)
