"""The session: which devices parallelized functions run on.

A process has one session at a time. `init` starts it, or the first call of a parallelized function does, on all local
devices; `shutdown` ends it. A session on a Ray cluster owns the hosts that it has reserved and the workers there.
`restart` goes on with the hosts that answer, after some were lost or when there are more.

Any thread may call these functions. One lock is held while a session starts or ends, so other threads wait until it
has.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import jax

from minialpa.cluster import ClusterSpec, PresetName, gpu_preset
from minialpa.errors import MinialpaError, ShardingError, WorkerError
from minialpa.inter.lower.mesh_programs import split_by_mesh

if TYPE_CHECKING:
    from minialpa.runtime.cluster.launcher import Launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class InitArguments:
    """The arguments of `init`, by which a second call of it is compared with the first.

    Attributes:
        cluster: "local" or "ray".
        address: The address of a Ray cluster.
        num_hosts: The number of hosts; None for all.
        devices_per_host: The number of devices of each host; None for all.
        namespace: The Ray namespace.
        worker_timeout_s: Seconds that a worker may take to answer, and a step to make progress.
        worker_env: Environment variables of the workers, sorted by name.
    """

    cluster: str
    address: str | None
    num_hosts: int | None
    devices_per_host: int | None
    namespace: str
    worker_timeout_s: float
    worker_env: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Session:
    """The devices that parallelized functions run on.

    Attributes:
        devices: The devices of this process; none for a session on a Ray cluster.
        cluster: The description of all devices for the planner.
        arguments: The arguments of `init`; None if a first call has started the session.
        runtime: The `ClusterRuntime` of a session on a cluster, else None.
        training_steps: The training steps that were called or compiled in it, the latest last; see `api.following`.
    """

    devices: tuple[jax.Device, ...]
    cluster: ClusterSpec
    arguments: InitArguments | None = None
    runtime: Any = None
    training_steps: list[Any] = field(default_factory=list, compare=False, repr=False)


class _Current:
    """The session of this process, if there is one.

    Attributes:
        session: The session. It is replaced under the lock, and read without.
        lock: Held while a session starts or ends. Threads that need a session meanwhile wait for it.
    """

    session: Session | None = None
    lock = threading.RLock()


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
    """Choose the devices that parallelized functions run on.

    With "local", these are the devices of this process, or `num_hosts` x `devices_per_host` of them, which the planner
    sees as that many hosts.

    With "ray", they are the hosts of a Ray cluster, all of them or `num_hosts` x `devices_per_host`. The cluster is
    the one at `address`, or at `RAY_ADDRESS`, or the one that runs on this machine. If there is none, or `address` is
    "local", one is started on this machine. Devices are the GPUs of the cluster's nodes. Without GPUs, nodes have as
    many virtual CPU devices as their custom resource `minialpa_cpu_device` says. Without that, they have one for each
    CPU, or `devices_per_host`.

    Calling it again with the same arguments does nothing; with others it raises MinialpaError. After a WorkerError that
    has ended the session, it starts a new one.

    Args:
        cluster: "local" or "ray".
        address: The address of a Ray cluster. Also spelt `cluster_address`.
        num_hosts: The number of hosts. Also spelt `num_nodes`.
        devices_per_host: The number of devices of each host. Also spelt `num_devices_per_node` or `devices_per_node`.
        namespace: The Ray namespace.
        worker_timeout_s: Seconds after which a step fails and the session ends: if a worker waits so long for another
            one, does not answer for so long, or takes so long from one instruction to the next.
        worker_env: Environment variables of the workers, such as XLA_FLAGS, which is empty otherwise. With
            `JAX_COMPILATION_CACHE_DIR`, a folder that all hosts see, later sessions reuse what workers have compiled;
            `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0` also keeps what compiles in less than a second.
    """
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

        # A session that a first call has started is local, so it has nothing to end.
        _Current.session = _start_session(arguments)


def _first_given(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _start_session(arguments: InitArguments) -> Session:
    match arguments.cluster:
        case "ray":
            return _ray_session(arguments)
        case "local":
            return _local_session(arguments)
        case other:
            raise MinialpaError(f'`cluster` is "local" or "ray"; got {other!r}.')


def shutdown() -> None:
    """End the session; the next call or `init` starts a new one. Calling it twice is fine.

    Arrays of a local session stay valid. On a Ray cluster, the workers end and the hosts are returned, so arrays there
    are lost, except for values that were fetched. Threads that wait for workers get a WorkerError.
    """
    with _Current.lock:
        session, _Current.session = _Current.session, None
        if session is not None and session.runtime is not None:
            session.runtime.shutdown()


def available_hosts() -> int:
    """How many hosts `restart` would get now: those of the session that still answer, and others that are free.

    They are at most `num_hosts` of `init`, if that was given. A session in this process always has the same. On a Ray
    cluster, each node is asked for a connection, so nodes that Ray still lists after their loss do not count, and the
    session goes on undisturbed. This takes less than half a second; after a session has failed, some seconds if the
    process has to connect to Ray for it. If the head of the cluster does not answer, or was restarted, the number is 0.

    Raises MinialpaError if there is no session.
    """
    with _Current.lock:
        session = _session_for("available_hosts")
        return session.cluster.num_hosts if session.runtime is None else session.runtime.available_hosts()


def restart() -> None:
    """End the session, whether it has failed or not, and start one with the same arguments on the hosts that answer.

    On a Ray cluster, `num_hosts` of `init` is now the most hosts that the session takes, and it may start with fewer:
    with `num_hosts=4`, it goes on with two hosts after two were lost, and later has four again. All other arguments
    stay, and so do the cluster and the kind of devices. With `devices_per_host`, only nodes with that many free devices
    are hosts. Arrays of the ended session are lost, except for values that were fetched: restore a checkpoint. Parallel
    functions are planned again when they are called.

    In this process, the session starts again on the same devices, and arrays stay valid.

    Raises MinialpaError if there is no session, if the head of the cluster does not answer, or if no host does. Then
    the session has ended, and calling `restart` again is fine.
    """
    with _Current.lock:
        session = _session_for("restart")
        if session.runtime is None:
            _Current.session = _local_session(session.arguments)
        else:
            # Until it has, the ended session stays, so that other threads get an error and do not start a local one.
            _Current.session = _session_on(session.runtime.restarted(), session.arguments)


def _session_for(function: str) -> Session:
    if _Current.session is None:
        raise MinialpaError(f"`{function}` needs a session, and there is none. Call `minialpa.init` first.")
    return _Current.session


def failure(session: Session) -> WorkerError | None:
    """The error that has ended a session, even if no call has raised it yet; None while it goes on."""
    if session.runtime is None:
        return None
    try:
        session.runtime.check()
    except WorkerError as error:
        return error
    return None


def current_session() -> Session:
    """The session. If there is none, one is started on all local devices."""
    session = _Current.session
    if session is None:
        with _Current.lock:
            # Another thread may have started one while this one waited for the lock.
            session = _Current.session = _Current.session or _local_session(None)
    return session


def running_session() -> Session | None:
    """The session, or None if there is none. Starts none and waits for none."""
    return _Current.session


def _ray_session(arguments: InitArguments) -> Session:
    # Ray is an optional dependency, and takes a second to import.
    try:
        from minialpa.runtime.ray.ray_cluster import RayCluster, Request
    except ImportError as error:
        raise MinialpaError(
            f'`init(cluster="ray")` needs Ray ({error}). Install it with `pip install "minialpa[ray]"`.'
        ) from error

    cluster = RayCluster(
        Request(
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
    """A session on the hosts that a launcher has reserved."""
    from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime

    # The hosts are reserved now. Until a session owns them, an error or an interrupt has to return them.
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
    """Have jax use the CPU in this process, unless the user has set `jax_platforms`.

    On a GPU it would keep most of the memory, which the worker there needs.
    """
    if jax.config.jax_platforms:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_platforms", "cpu")
    # A backend that runs already stays: the setting comes too late.
    if jax.default_backend() != "cpu":
        jax.config.update("jax_platforms", None)
        warnings.warn(
            "jax in this process has a GPU already, most of whose memory it keeps from the worker there. Call "
            "`minialpa.init` before anything else of jax, or set JAX_PLATFORMS=cpu.",
            stacklevel=6,  # The caller of `init`.
        )


def _local_session(arguments: InitArguments | None) -> Session:
    """A session on the devices of this process that `arguments` ask for; on all of them without arguments."""
    devices = jax.local_devices()
    n_hosts, per_host = (arguments.num_hosts, arguments.devices_per_host) if arguments else (None, None)
    if n_hosts is None:
        n_hosts = 1
    if per_host is None:
        per_host = len(devices) // max(n_hosts, 1)
    if n_hosts < 1 or per_host < 1 or n_hosts * per_host > len(devices):
        raise ShardingError(
            f"{n_hosts} x {per_host} devices were asked for and this process has {len(devices)}. Ask for fewer, or on "
            "CPU start Python with XLA_FLAGS=--xla_force_host_platform_device_count=N."
        )
    chosen = tuple(devices[: n_hosts * per_host])
    return Session(chosen, describe_devices(chosen, n_hosts), arguments)


def describe_devices(devices: Sequence[jax.Device], hosts: int = 1) -> ClusterSpec:
    """The cluster that `devices` form: the preset of their kind, with the memory that the first device reports."""
    name: PresetName = "cpu" if devices[0].platform == "cpu" else gpu_preset(devices[0].device_kind)
    spec = ClusterSpec.preset(name, num_hosts=hosts, devices_per_host=len(devices) // hosts)
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        spec = dataclasses.replace(spec, device=dataclasses.replace(spec.device, memory_bytes=float(limit)))
    return spec
