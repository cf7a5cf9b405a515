"""The session: which devices parallelized functions run on. One per process, made by `init` or by the first call."""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from minialpa.cluster import ClusterSpec, PresetName, gpu_preset
from minialpa.errors import MinialpaError, ShardingError, WorkerError
from minialpa.inter.lower.mesh_programs import split_by_mesh


@dataclass(frozen=True, slots=True)
class Session:
    """What parallelized functions run on, and its description for the planner.

    devices: those of this process, for a local session. runtime: workers on a Ray cluster, for the other kind.
    """

    devices: tuple[jax.Device, ...]
    cluster: ClusterSpec
    arguments: tuple[Any, ...] = ()
    runtime: Any = None


class _Current:
    """lock: held by the thread that starts or ends the session; others, who need one, wait for it."""

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

    "local": the devices of this process; `num_hosts` x `devices_per_host` of them, seen by the planner as that many
    hosts. "ray": hosts of a Ray cluster, whole or `num_hosts` x `devices_per_host` of it: the one at `address`, or that
    of `RAY_ADDRESS`, or that of this machine; where there is none, or `address` is "local", one is started on this
    machine. Devices are the GPUs of its nodes; without GPUs, the custom resource `minialpa_cpu_device`; without that,
    CPUs, of which each stands for a virtual CPU device unless `devices_per_host` says how many there are.

    worker_timeout_s: how long a worker waits for another one, may take to answer, and a step may take to get on from
    one instruction to the next, before the step fails and the session ends. worker_env: environment variables
    of the workers, such as XLA_FLAGS, which is empty otherwise. With `JAX_COMPILATION_CACHE_DIR`, a folder that all
    hosts see, sessions to come find what workers have compiled; `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0` keeps
    what compiles in less than a second, too.

    `address`, `num_hosts`, `devices_per_host` may also be spelt `cluster_address`, `num_nodes`,
    `num_devices_per_node`. Calling it again with the same arguments does nothing; with others it raises MinialpaError.
    After a WorkerError that has ended the session it starts a new one.
    """
    hosts = next((n for n in (num_hosts, num_nodes) if n is not None), None)
    spelt = (devices_per_host, num_devices_per_node, devices_per_node)
    per_host = next((n for n in spelt if n is not None), None)
    env = tuple(sorted((worker_env or {}).items()))
    arguments = (cluster, address or cluster_address, hosts, per_host, namespace, worker_timeout_s, env)
    with _Current.lock:
        if _Current.session is not None and not _has_failed(_Current.session):
            if _Current.session.arguments not in ((), arguments):
                raise MinialpaError("`init` was already called with other arguments. Call `minialpa.shutdown()` first.")
            if _Current.session.arguments == arguments:
                return
        elif _Current.session is not None:
            shutdown()
        if cluster == "ray":
            _Current.session = _ray_session(arguments)
        elif cluster == "local":
            _Current.session = _local_session(1 if hosts is None else hosts, per_host, arguments)
        else:
            raise MinialpaError(f'`cluster` is "local" or "ray"; got {cluster!r}.')


def shutdown() -> None:
    """End the session; the next call or `init` starts a new one. Calling it twice is fine.

    Arrays of a local session stay valid. Those on a Ray cluster are lost, except for values that were fetched: its
    workers end and its hosts are given back. Threads that wait for them get a WorkerError.
    """
    with _Current.lock:
        session, _Current.session = _Current.session, None
        if session is not None and session.runtime is not None:
            session.runtime.shutdown()


def _has_failed(session: Session) -> bool:
    """Whether the session has ended, though perhaps nobody has been told of it yet."""
    if session.runtime is None:
        return False
    try:
        session.runtime.check()
    except WorkerError:
        return True
    return False


def current_session() -> Session:
    """The session; started on all local devices if there is none."""
    session = _Current.session
    if session is None:
        with _Current.lock:
            session = _Current.session = _Current.session or _local_session(1, None, ())
    return session


def _ray_session(arguments: tuple[Any, ...]) -> Session:
    try:
        from minialpa.runtime.ray_cluster import RayCluster, Request
        from minialpa.runtime.ray_runtime import RayRuntime
    except ImportError as error:
        raise MinialpaError(
            f'`init(cluster="ray")` needs Ray ({error}). Install it with `pip install "minialpa[ray]"`.'
        ) from error
    _, address, hosts, per_host, namespace, timeout_s, env = arguments
    cluster = RayCluster(
        Request(
            address=address,
            num_hosts=hosts,
            devices_per_host=per_host,
            namespace=namespace,
            timeout_s=timeout_s,
            env=dict(env),
        )
    )
    try:
        spec = cluster.describe()
    except BaseException:
        cluster.release()
        raise
    if cluster.platform != "cpu":
        _leave_gpus_to_workers()
    split = functools.partial(split_by_mesh, cluster=spec, platform=cluster.platform)
    return Session((), spec, arguments, RayRuntime(cluster, split))


def _leave_gpus_to_workers() -> None:
    """Have jax use the CPU in this process, unless it was told otherwise: on a GPU it would keep most of the memory."""
    if jax.config.jax_platforms:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_platforms", "cpu")
    if jax.default_backend() != "cpu":  # it had started before
        jax.config.update("jax_platforms", None)
        warnings.warn(
            "jax in this process has a GPU already, most of whose memory it keeps from the worker there. Call "
            "`minialpa.init` before anything else of jax, or set JAX_PLATFORMS=cpu.",
            stacklevel=4,
        )


def _local_session(hosts: int, per_host: int | None, arguments: tuple[Any, ...]) -> Session:
    devices = jax.local_devices()
    if per_host is None:
        per_host = len(devices) // max(hosts, 1)
    if hosts < 1 or per_host < 1 or hosts * per_host > len(devices):
        raise ShardingError(
            f"{hosts} x {per_host} devices were asked for and this process has {len(devices)}. Ask for fewer, or on "
            "CPU start Python with XLA_FLAGS=--xla_force_host_platform_device_count=N."
        )
    chosen = tuple(devices[: hosts * per_host])
    return Session(chosen, describe_devices(chosen, hosts), arguments)


def describe_devices(devices: Sequence[jax.Device], hosts: int = 1) -> ClusterSpec:
    """The cluster that `devices` form, by their kind; memory as the device reports it."""
    name: PresetName = "cpu" if devices[0].platform == "cpu" else gpu_preset(devices[0].device_kind)
    spec = ClusterSpec.preset(name, num_hosts=hosts, devices_per_host=len(devices) // hosts)
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        spec = dataclasses.replace(spec, device=dataclasses.replace(spec.device, memory_bytes=float(limit)))
    return spec
