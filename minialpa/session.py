"""The session: arguments of `init` go in; the devices that parallelized functions run on come out.

A process has one session at a time. Any thread may call these functions, which wait while a session starts or ends.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import jax

from minialpa.cluster import ClusterSpec, PresetName, gpu_preset
from minialpa.errors import MinialpaError, ShardingError, WorkerError
from minialpa.field_types import Count, Positive, check_fields, check_value
from minialpa.inter.lower.mesh_programs import split_by_mesh
from minialpa.support.private_jax import api_boundary, warn

if TYPE_CHECKING:
    from minialpa.runtime.cluster.launcher import Launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class InitArguments:
    cluster: Literal["local", "ray"]
    address: str | None
    num_hosts: Count | None
    devices_per_host: Count | None
    namespace: str
    worker_timeout_s: Positive
    worker_env: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Session:
    """The devices of parallelized functions.

    Attributes:
        devices: of this process; empty for a session on a Ray cluster.
        arguments: the arguments of `init`; None if the call of a function started the session.
        runtime: the `ClusterRuntime` of a session on a cluster, else None.
        training_steps: compiled training steps, the latest last; see `api.following`.
    """

    devices: tuple[jax.Device, ...]
    cluster: ClusterSpec
    arguments: InitArguments | None = None
    runtime: Any = None
    training_steps: list[Any] = field(default_factory=list, compare=False, repr=False)


class _Current:
    #: Reading it needs no lock; replacing it does.
    session: Session | None = None
    lock = threading.RLock()


@api_boundary
def init(
    cluster: Literal["local", "ray"] = "local",
    *,
    address: str | None = None,
    num_hosts: int | None = None,
    devices_per_host: int | None = None,
    namespace: str = "minialpa",
    worker_timeout_s: float = 300.0,
    worker_env: Mapping[str, str] | None = None,
    cluster_address: str | None = None,
    num_nodes: int | None = None,
    num_devices_per_node: int | None = None,
    devices_per_node: int | None = None,
) -> None:
    """Choose the devices for parallelized functions. Without it, the first call takes all local devices.

    "local": the devices of this process, or `num_hosts` x `devices_per_host` of them, planned as `num_hosts` hosts.

    "ray": all hosts of a Ray cluster, or `num_hosts` x `devices_per_host` devices of it. The cluster is at `address`,
    at `RAY_ADDRESS`, or on this machine. If there is none, or `address` is "local", `init` starts one on this machine.
    Devices are the GPUs of the nodes. A node without GPUs has virtual CPU devices: the number in its custom resource
    `minialpa_cpu_device`, else `devices_per_host`, else one per CPU.

    A second call with the same arguments has no effect; after a WorkerError, it starts a new session.

    Args:
        address: of a Ray cluster. Also spelt `cluster_address`.
        num_hosts: number of hosts; None for all. Also spelt `num_nodes`.
        devices_per_host: devices of each host; None for all. Also spelt `num_devices_per_node` or `devices_per_node`.
        namespace: the Ray namespace.
        worker_timeout_s: seconds for which a worker may wait for another one, not answer, or run one instruction. Then
            the step fails and the session ends.
        worker_env: environment variables of the workers, such as XLA_FLAGS, which is empty otherwise. With
            `JAX_COMPILATION_CACHE_DIR`, a folder that all hosts see, later sessions reuse compiled programs;
            `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0` includes programs that compile in less than a second.

    Raises MinialpaError if the session has other arguments or no Ray cluster answers, and ShardingError for more local
    devices than there are.
    """
    check_value("worker_env", worker_env, Mapping[str, str] | None)
    arguments = InitArguments(
        cluster=cluster,
        address=address or cluster_address,
        num_hosts=_first_given(num_hosts, num_nodes),
        devices_per_host=_first_given(devices_per_host, num_devices_per_node, devices_per_node),
        namespace=namespace,
        worker_timeout_s=worker_timeout_s,
        worker_env=tuple(sorted((worker_env or {}).items())),
    )
    with _Current.lock:
        session = _Current.session
        if session is not None and failure(session) is not None:
            shutdown()
        elif session is not None and session.arguments == arguments:
            return
        elif session is not None and session.arguments is not None:
            raise MinialpaError("`init` was already called with other arguments. Call `minialpa.shutdown()` first.")

        # A session that a function's call started is local: no workers to end.
        _Current.session = _start_session(arguments)


def _first_given(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _start_session(arguments: InitArguments) -> Session:
    match arguments.cluster:
        case "ray":
            return _ray_session(arguments)
        case "local":
            return _local_session(arguments)


@api_boundary
def shutdown() -> None:
    """End the session; the next call or `init` starts a new one. You may call it twice.

    Arrays of a local session stay valid. On a Ray cluster, workers end, hosts are returned, and arrays are lost, except
    fetched values. Threads that wait for workers get a WorkerError.
    """
    with _Current.lock:
        session, _Current.session = _Current.session, None
        if session is not None and session.runtime is not None:
            session.runtime.shutdown()


@api_boundary
def available_hosts() -> int:
    """The number of hosts that `restart` would get: hosts of the session that still answer, and free hosts.

    It is at most `num_hosts` of `init`, constant for a session in this process, and 0 if the head of the Ray cluster
    does not answer or was restarted. It connects to each node, since Ray still lists lost nodes for a while; the
    session continues. This takes less than half a second, or some seconds after a failure.

    Raises MinialpaError if there is no session.
    """
    with _Current.lock:
        session = _session_for("available_hosts")
        return session.cluster.num_hosts if session.runtime is None else session.runtime.available_hosts()


@api_boundary
def restart() -> None:
    """End the session, and start one with the same arguments on the hosts that answer.

    On a Ray cluster, the new session has at most `num_hosts` hosts: with `num_hosts=4`, it continues on two hosts after
    two were lost, and a later `restart` may have four. Cluster and kind of devices stay the same. With
    `devices_per_host`, only nodes with so many free devices are hosts. Arrays are lost, except fetched values: restore
    a checkpoint. The next call makes a new plan.

    In this process, devices stay the same and arrays valid.

    Raises MinialpaError if there is no session, or if neither the head of the cluster nor a host answers. Then the
    session has ended, and you may call `restart` later.
    """
    with _Current.lock:
        session = _session_for("restart")
        if session.runtime is None:
            _Current.session = _local_session(session.arguments)
        else:
            # Until then, other threads get the old session's error and start no local session.
            _Current.session = _session_on(session.runtime.restarted(), session.arguments)


def _session_for(function: str) -> Session:
    if _Current.session is None:
        raise MinialpaError(f"`{function}` needs a session, and there is none. Call `minialpa.init` first.")
    return _Current.session


def failure(session: Session) -> WorkerError | None:
    """The error that has ended a session, if any, even before a call raises it."""
    if session.runtime is None:
        return None
    try:
        session.runtime.check()
    except WorkerError as error:
        return error
    return None


def current_session() -> Session:
    """The session; starts one on all local devices if necessary."""
    session = _Current.session
    if session is None:
        with _Current.lock:
            # Another thread may have started one.
            session = _Current.session = _Current.session or _local_session(None)
    return session


def running_session() -> Session | None:
    """Neither starts a session nor waits."""
    return _Current.session


def has_workers() -> bool:
    """Whether a session runs, on workers."""
    return _Current.session is not None and _Current.session.runtime is not None


def _ray_session(arguments: InitArguments) -> Session:
    # Ray is an optional dependency, and takes a second to import.
    try:
        from minialpa.runtime.ray.ray_cluster import RayCluster, SessionRequest
    except ImportError as error:
        raise MinialpaError(
            f'`init(cluster="ray")` needs Ray ({error}). Install it with `pip install "minialpa[ray]"`.'
        ) from error

    cluster = RayCluster(
        SessionRequest(
            address=arguments.address,
            num_hosts=arguments.num_hosts,
            devices_per_host=arguments.devices_per_host,
            namespace=arguments.namespace,
            timeout_s=arguments.worker_timeout_s,
            env=dict(arguments.worker_env),
        )
    )
    return _session_on(cluster, arguments)


def _session_on(cluster: Launcher, arguments: InitArguments | None) -> Session:
    from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime

    # Until a session owns the reserved hosts, an error must return them.
    try:
        spec = cluster.describe()
    except BaseException:
        cluster.release()
        raise

    if cluster.platform != "cpu":
        _leave_gpus_to_workers()
    split = functools.partial(split_by_mesh, cluster=spec, platform=cluster.platform)
    return Session((), spec, arguments, ClusterRuntime(cluster, split))


def _leave_gpus_to_workers() -> None:
    """Otherwise jax in this process would take most of the GPU memory. The user's `jax_platforms` stays."""
    if jax.config.jax_platforms:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_platforms", "cpu")
    # The setting comes too late for a running backend.
    if jax.default_backend() != "cpu":
        jax.config.update("jax_platforms", None)
        warn(
            "jax in this process already uses a GPU and most of its memory, which the worker needs. Call "
            "`minialpa.init` before anything else of jax, or set JAX_PLATFORMS=cpu.",
        )


def _local_session(arguments: InitArguments | None) -> Session:
    devices = jax.local_devices()
    n_hosts = arguments.num_hosts if arguments else None
    per_host = arguments.devices_per_host if arguments else None
    if n_hosts is None:
        n_hosts = 1
    if per_host is None:
        per_host = len(devices) // n_hosts
    if per_host < 1 or n_hosts * per_host > len(devices):
        raise ShardingError(
            f"{n_hosts} x {per_host} devices (hosts x devices per host) were requested and this process has "
            f"{len(devices)}. Pass other values of `num_hosts` and `devices_per_host`, or on CPU start Python with "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N."
        )
    chosen = tuple(devices[: n_hosts * per_host])
    return Session(chosen, describe_devices(chosen, n_hosts), arguments)


def describe_devices(devices: Sequence[jax.Device], hosts: int = 1) -> ClusterSpec:
    """The preset for these devices, with the memory of the first."""
    name: PresetName = "cpu" if devices[0].platform == "cpu" else gpu_preset(devices[0].device_kind)
    spec = ClusterSpec.preset(name, num_hosts=hosts, devices_per_host=len(devices) // hosts)
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        spec = dataclasses.replace(spec, device=dataclasses.replace(spec.device, memory_bytes=float(limit)))
    return spec
