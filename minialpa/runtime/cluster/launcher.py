"""What the runtime of a cluster needs from a launcher of workers. Ray is one (`ray_cluster`), threads are another
(`in_process`).

A worker is launched as an actor: calls of one actor run one after the other, and each returns a reply at once. A reply
is later a value, an error that the call raised (`CallRaised`), or the end of the worker (`WorkerEnded`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minialpa.cluster import ClusterSpec

Reply = Any
"""The future answer to a call: hashable, and known to the launcher that made it."""


class CallRaised(Exception):
    """A call raised an error in a worker, which goes on.

    Attributes:
        method: name of the method, None if it is not known.
        message: the error, in one line.
        traceback: of the worker.
    """

    def __init__(self, method: str | None, message: str, traceback: str) -> None:
        super().__init__(message)
        self.method, self.message, self.traceback = method, message, traceback


class WorkerEnded(Exception):
    """The worker ended before it answered; says why, as far as the launcher knows."""


class Actor(Protocol):
    """A `Worker` in a process, or a thread, of its own."""

    def call(self, method: str, *args: Any) -> Reply:
        """Call a method after those that were called before. Arguments are copied."""

    def call_aside(self, method: str, *args: Any) -> Reply:
        """Call `status`, `live`, `stop`, `read` or `write_copies`, which do not wait for other calls."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WorkerHandle:
    """A running worker.

    Attributes:
        number: unique in the session.
        host: number of its host.
        first_device: its devices are consecutive ones of the cluster, from this one on.
        n_devices: how many.
        actor: takes its calls.
    """

    number: int
    host: int
    first_device: int
    n_devices: int
    actor: Actor


class Launcher(Protocol):
    """Hosts that a session has reserved, and workers on them, until `release`.

    Attributes:
        platform: of the devices, "cpu" or "cuda".
        devices_per_host: devices are numbered host by host.
        timeout_s: how long a worker may keep others waiting.
    """

    platform: str
    devices_per_host: int
    timeout_s: float

    def start_meshes(self, keys: Sequence[tuple[int, int]], check: Callable[[], None]) -> list[list[WorkerHandle]]:
        """Start workers for each (first device, number of devices): one on each host, in one jax runtime per mesh.

        `check` is called about once a second meanwhile. If it raises, all of these workers end. Raises WorkerError if
        they do not start.
        """

    def end(self, workers: Sequence[WorkerHandle]) -> None:
        """End workers, whatever they do. It is no error if some have ended already."""

    def release(self) -> None:
        """Give the hosts back. Calling it twice is fine."""

    # ---- hosts ----------------------------------------------------------------------------------------------------

    def describe(self) -> ClusterSpec:
        """The hosts and their devices, for the planner."""

    def available_hosts(self) -> int:
        """How many hosts `restarted` would reserve now; 0 if the cluster is gone. Disturbs no worker."""

    def restarted(self) -> Launcher:
        """A launcher for the same request on the hosts that answer now, at most as many as were asked for.

        This one has been released. Raises MinialpaError if no host can be reserved; calling it again is fine.
        """

    # ---- calls ----------------------------------------------------------------------------------------------------

    def share(self, value: Any) -> Any:
        """A value to pass as an argument to several workers, which is copied to each host once."""

    def check_room(self, n_bytes: int) -> None:
        """Raise MinialpaError if large arguments of so many bytes find no room on the way to the workers.

        The kernel ends a process that writes to shared memory which is full.
        """

    def wait(self, replies: Sequence[Reply], timeout_s: float) -> list[Reply]:
        """Wait until one of the replies is there, and return it, or none after `timeout_s` seconds."""

    def ready(self, replies: Sequence[Reply]) -> list[Reply]:
        """The replies that are there now."""

    def answer(self, reply: Reply) -> Any:
        """The value of a reply. Raises CallRaised or WorkerEnded."""

    # ---- faults ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise MinialpaError if no worker can start."""

    def fault(self) -> str | None:
        """What has befallen the cluster as a whole, and what to do about it; None while it is usable."""

    def lost_hosts(self, numbers: Iterable[int]) -> Mapping[int, str]:
        """The hosts, of those with these numbers, on which nothing answers, and their addresses."""
