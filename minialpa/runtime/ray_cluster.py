"""Hosts of a Ray cluster: what a session asks for in, reserved hosts and processes on them out.

A host is a Ray node with devices: GPUs, the custom resource `minialpa_cpu_device`, or, where no node has either, CPUs,
each of which stands for one virtual CPU device unless the number is given.
"""

from __future__ import annotations

import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from minialpa.cluster import ClusterSpec, PresetName, gpu_preset
from minialpa.errors import MinialpaError, ShardingError
from minialpa.runtime.failures import Failure, Fault, Status, worker_error
from minialpa.runtime.ray_connection import answers, connect, fault_of_head
from minialpa.runtime.worker import Worker, WorkerSettings

CPU_DEVICE = "minialpa_cpu_device"
#: Seconds that the cluster has to reserve the hosts, and that the workers of a mesh have to start.
RESERVE_S, START_S = 60.0, 180.0
#: Seconds for which the head of the cluster may be away. Ray itself ends this process after a minute.
HEAD_S = 6.0
#: Seconds after which those who wait for workers look whether the session has ended.
_CHECK_S = 1.0
_ATTEMPTS = 3
_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a session asks of Ray; None leaves it to the cluster.

    address: of a running cluster; None for that of `RAY_ADDRESS`, or else one that is started on this machine.
    timeout_s: how long a worker waits for another one. env: environment variables of the workers.
    """

    address: str | None
    num_hosts: int | None
    devices_per_host: int | None
    namespace: str
    timeout_s: float
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Host:
    """A reserved host: its Ray node and its address, the port of that node, and its bundle in the placement group."""

    node_id: str
    ip: str
    port: int
    bundle: int


@dataclass(frozen=True, slots=True, eq=False)
class WorkerHandle:
    """A running worker: its number in the session, the host and devices that it has, and its actor."""

    number: int
    host: int
    first_device: int
    n_devices: int
    actor: Any


class RayCluster:
    """Hosts that this session has reserved, until `release`. Raises ShardingError if the cluster has too few."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.owns_ray = not ray.is_initialized()
        if self.owns_ray:
            connect(request.address, request.namespace)
        try:
            self.head = ray.get_runtime_context().gcs_address
            self.check_head()
            self.resource, nodes, self.devices_per_host = _choose_nodes(request)
            self.platform = "cuda" if self.resource == "GPU" else "cpu"
            self._share = _resource_share(self.resource, nodes, self.devices_per_host)
            self._group = _reserve(len(nodes), {self.resource: self._share * self.devices_per_host})
            self.hosts = _hosts(self._group)
        except BaseException:
            if self.owns_ray:
                ray.shutdown()
            raise
        self._secret = secrets.token_bytes(32)
        self._n_workers = 0
        self._released = False
        self._headless_since: float | None = None

    def release(self) -> None:
        """Give the hosts back; what was started on them ends. Calling it twice is fine."""
        if self._released:
            return
        self._released = True
        if not ray.is_initialized():
            return
        try:
            if fault_of_head(self.head) is None:
                remove_placement_group(self._group)
        finally:
            if self.owns_ray:
                ray.shutdown()

    def check_head(self) -> None:
        """Raise MinialpaError if the head of the cluster is away, or is another one than this process has joined."""
        fault = fault_of_head(self.head)
        if fault is not None:
            raise MinialpaError(
                f"The head of the Ray cluster at {self.head} {fault}, so nothing can start there. Fetch what you need "
                "of a session that runs and end it with `minialpa.shutdown()`; call `ray.shutdown()`, if you have "
                "called `ray.init`; then start again on a cluster that runs."
            )

    def headless_s(self) -> float:
        """Seconds since the first of those calls of this that have found that the head of the cluster is away."""
        if answers(self.head):
            self._headless_since = None
            return 0.0
        now = time.monotonic()
        since = self._headless_since = self._headless_since or now  # another thread may have got an answer since
        return now - since

    def lost_hosts(self, numbers: Iterable[int]) -> set[int]:
        """Those of some hosts on which nothing answers, all asked at once. Ray itself takes some time to notice."""
        asked = sorted(set(numbers))
        addresses = [f"{self.hosts[number].ip}:{self.hosts[number].port}" for number in asked]
        with ThreadPoolExecutor(max_workers=max(1, len(asked))) as pool:
            return {number for number, found in zip(asked, pool.map(answers, addresses), strict=True) if not found}

    def describe(self) -> ClusterSpec:
        """The cluster for the planner: devices by the kinds of the GPUs, or those of CPUs; links by the first kind.

        A GPU has the memory that jax takes of it.
        """
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
        """The preset of each host."""
        resources = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
        label = "accelerator_type:"
        kinds = [
            next((name.removeprefix(label) for name in resources[host.node_id] if name.startswith(label)), "unknown")
            for host in self.hosts
        ]
        presets = {kind: gpu_preset(kind) for kind in kinds}
        return [presets[kind] for kind in kinds]

    # ---- workers --------------------------------------------------------------------------------------------------

    def start_meshes(self, wanted: Sequence[tuple[int, int]], check: Callable[[], None]) -> list[list[WorkerHandle]]:
        """Workers for each (first device, number of devices), one on each host, joined in one jax runtime per mesh.

        check: called every second meanwhile; where it raises, no worker stays. Raises WorkerError if they do not start.
        """
        for attempt in range(_ATTEMPTS):
            meshes: list[list[WorkerHandle]] = []
            try:
                meshes.extend(self._spawn(*key) for key in wanted)
                failure = _join(meshes, check)
            except BaseException:
                self.end(list(itertools.chain(*meshes)))
                raise
            if failure is None:
                return meshes
            self.end(list(itertools.chain(*meshes)))
            if attempt + 1 == _ATTEMPTS or not _port_was_taken(failure):
                hint = (
                    f"{failure.message}\nIs minialpa installed on every host, with the same versions of jax and Python?"
                )
                raise worker_error(replace(failure, message=hint), (), has_ended=False)
        raise AssertionError("unreachable")

    def end(self, workers: Sequence[WorkerHandle]) -> None:
        """End the processes of workers. Those that are gone already are no error."""
        if not workers or not ray.is_initialized():
            return
        if fault_of_head(self.head) is not None:  # it passes on what `ray.kill` asks for
            for worker in workers:
                worker.actor.stop.options(concurrency_group="control").remote()
        for worker in workers:
            ray.kill(worker.actor, no_restart=True)

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
            actor = _ACTOR.options(**self._options(host, count)).remote(settings)
            workers.append(WorkerHandle(number, host, begin, count, actor))
        return workers

    def _options(self, host: int, n_devices: int) -> dict[str, Any]:
        amount = self._share * n_devices
        wanted: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "resources": {}}
        match self.resource:
            case "GPU":
                wanted["num_gpus"] = n_devices
            case "CPU":
                wanted["num_cpus"] = amount
            case custom:
                wanted["resources"] = {custom: amount}
        placed = PlacementGroupSchedulingStrategy(self._group, self.hosts[host].bundle)
        env = {**_worker_env(self.platform), **self.request.env}
        return {**wanted, "scheduling_strategy": placed, "runtime_env": {"env_vars": env}, "max_restarts": 0}


_ACTOR: Any = ray.remote(concurrency_groups={"control": 1, "life": 1})(Worker)  # type: ignore[call-overload]


def _worker_env(platform: str) -> dict[str, str]:
    """Environment of a worker, whatever that of the caller is."""
    env = {"XLA_FLAGS": "", "JAX_PLATFORMS": platform}
    if platform == "cuda":
        env[_MEMORY_FRACTION] = "0.9"
    return env


def _memory_fraction(env: Mapping[str, str]) -> float:
    """The part of a GPU's memory that the workers take. env: what the caller wants of their environment."""
    wanted = {**_worker_env("cuda"), **env}[_MEMORY_FRACTION]
    try:
        return float(wanted)
    except ValueError:
        raise MinialpaError(f"`{_MEMORY_FRACTION}` in `worker_env` is a number such as 0.8; got {wanted!r}.") from None


def _choose_nodes(request: Request) -> tuple[str, list[dict[str, Any]], int]:
    """The resource that counts devices, the nodes to use, and how many devices each gives."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    resource = next((r for r in ("GPU", CPU_DEVICE) if any(n["Resources"].get(r, 0) >= 1 for n in alive)), "CPU")
    nodes = sorted(
        (n for n in alive if n["Resources"].get(resource, 0) >= 1),
        key=lambda n: (-n["Resources"][resource], _ip_key(n["NodeManagerAddress"]), n["NodeID"]),
    )
    hosts = request.num_hosts or len(nodes)
    if not 1 <= hosts <= len(nodes):
        raise ShardingError(
            f"{hosts} hosts were asked for and the Ray cluster has {len(nodes)} with `{resource}`. Ask for fewer, or "
            "start more nodes."
        )
    chosen = nodes[:hosts]
    least = int(min(node["Resources"][resource] for node in chosen))
    per_host = request.devices_per_host or least
    if per_host < 1 or (per_host > least and resource != "CPU"):
        raise ShardingError(
            f"{per_host} devices per host were asked for and a host of the Ray cluster has {least} `{resource}`. Ask "
            "for fewer devices or fewer hosts."
        )
    return resource, chosen, per_host


def _ip_key(ip: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", ip))


def _resource_share(resource: str, nodes: Sequence[dict[str, Any]], per_host: int) -> float:
    """How much of the resource one device takes. Virtual devices may be more than the CPUs that they run on."""
    if resource != "CPU":
        return 1.0
    least = min(node["Resources"]["CPU"] for node in nodes)
    # Ray counts in ten-thousandths.
    return min(1.0, int(least * 10_000 / per_host) / 10_000)


def _reserve(n_hosts: int, bundle: dict[str, float]) -> Any:
    group = placement_group([dict(bundle) for _ in range(n_hosts)], strategy="STRICT_SPREAD")
    if not group.wait(RESERVE_S):
        remove_placement_group(group)
        raise MinialpaError(
            f"The Ray cluster did not reserve {bundle} on each of {n_hosts} hosts within {RESERVE_S:.0f} s: something "
            "else uses them. Wait for it to end, or ask for fewer hosts or devices."
        )
    return group


def _hosts(group: Any) -> tuple[Host, ...]:
    """The reserved hosts in the order of their addresses."""
    nodes = {node["NodeID"]: (node["NodeManagerAddress"], int(node["NodeManagerPort"])) for node in ray.nodes()}
    table = placement_group_table(group)["bundles_to_node_id"]
    hosts = [Host(node, *nodes[node], int(bundle)) for bundle, node in table.items()]
    return tuple(sorted(hosts, key=lambda host: (_ip_key(host.ip), host.node_id)))


def _join(meshes: Sequence[Sequence[WorkerHandle]], check: Callable[[], None]) -> Failure | None:
    """Start jax in the workers of each mesh; the first failure. The coordinator of a mesh is on its first worker."""
    ports = [workers[0].actor.reserve_port.remote() for workers in meshes]
    calls = {
        worker.actor.join.remote(port, len(workers), rank): Status(
            worker=worker.number, host=worker.host, pid=None, stage=mesh
        )
        for mesh, (workers, port) in enumerate(zip(meshes, ports, strict=True))
        for rank, worker in enumerate(workers)
    }
    deadline = time.monotonic() + START_S
    while calls:
        left_s = max(0.0, deadline - time.monotonic())
        done, _ = ray.wait(list(calls), num_returns=1, timeout=min(_CHECK_S, left_s))
        check()
        for ref in done:
            status = calls.pop(ref)
            try:
                ray.get(ref)
            except RayTaskError as error:
                return failed_call(status, error)
            except RayError as error:
                return death(status, error)
        if not done and left_s <= _CHECK_S:
            late = next(iter(calls.values()))
            return Failure(Fault.SILENT, late, f"it did not start within {START_S:.0f} s.")
    return None


def _port_was_taken(failure: Failure) -> bool:
    """Whether another process has, or may have, the port of a coordinator: some versions of jax crash then."""
    text = failure.message.lower()
    signs = ("address already in use", "failed to bind", "failed to start rpc server")
    return failure.fault is Fault.DIED or any(sign in text for sign in signs)


def death(last: Status, error: RayError) -> Failure:
    """The failure of a worker that is gone. last: where it was when it last said so."""
    lines = (line.strip() for line in str(error).splitlines())
    reason = " ".join(line for line in lines if line and not line.startswith(_LABELS))
    return Failure(Fault.DIED, last, f"its process died. {reason[:600]}")


_LABELS = ("actor_id:", "class_name:", "ip:", "name:", "namespace:", "pid:")


def failed_call(last: Status, error: RayTaskError) -> Failure:
    """The failure of a call that is no step, such as the loading of a program."""
    text = re.sub(r"\x1b\[\d+m", "", str(error))  # colours
    called = re.search(r"ray::(?:\w+\.)?(\w+)", text)  # the error that `ray.get` raises keeps no name
    where = replace(last, instruction=f"the call of `{called[1]}`" if called else "a call", recent=())
    return Failure(Fault.RAISED, where, f"{error.cause!r}" if error.cause else text, text)
