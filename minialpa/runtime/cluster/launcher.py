"""The interface of launchers: requests for meshes go in, workers that take calls come out.

Ray is one launcher (`ray_cluster`), threads are another (`in_process`). A worker runs its calls one after the other,
and each call returns a reply at once. A reply later holds a value, `CallRaised` or `WorkerEnded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minialpa.cluster import ClusterSpec

Reply = Any
"""A future answer: hashable, and known to the launcher that made it."""


class CallRaised(Exception):
    """The worker goes on. `message` is the error in one line."""

    def __init__(self, method: str | None, message: str, traceback: str) -> None:
        super().__init__(message)
        self.method, self.message, self.traceback = method, message, traceback


class WorkerEnded(Exception):
    """The message is the reason, if known."""


class Actor(Protocol):
    """A `Worker` in its own process or thread."""

    def call(self, method: str, *args: Any) -> Reply:
        """After all earlier calls. Arguments are copied."""

    def call_aside(self, method: str, *args: Any) -> Reply:
        """Call `status`, `live`, `stop`, `read` or `write_copies` beside other calls."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WorkerHandle:
    """Devices are consecutive, and numbered over the cluster."""

    number: int
    host: int
    first_device: int
    n_devices: int
    actor: Actor


class Launcher(Protocol):
    """Reserved hosts, with devices numbered host by host, and their workers, until `release`.

    Attributes:
        platform: "cpu" or "cuda".
        timeout_s: how long a worker may keep others waiting.
    """

    platform: str
    devices_per_host: int
    timeout_s: float

    def start_meshes(self, keys: Sequence[tuple[int, int]], check: Callable[[], None]) -> list[list[WorkerHandle]]:
        """Start workers for each (first device, number of devices): one on each host, in one jax runtime per mesh.

        Calls `check` about once a second; if it raises, these workers end. Raises WorkerError if they do not start.
        """

    def end(self, workers: Sequence[WorkerHandle]) -> None:
        """End workers, which may be busy or ended."""

    def release(self) -> None:
        """Ends the workers. A second call has no effect."""

    # ---- hosts ----------------------------------------------------------------------------------------------------

    def describe(self) -> ClusterSpec:
        """The hosts and their devices, for the planner."""

    def available_hosts(self) -> int:
        """Hosts that `restarted` would reserve; 0 if the cluster is gone. Disturbs no worker."""

    def restarted(self) -> Launcher:
        """After `release`: a launcher for the same request on the hosts that answer.

        Raises MinialpaError if no host can be reserved; a later call may succeed.
        """

    # ---- calls ----------------------------------------------------------------------------------------------------

    def share(self, value: Any) -> Any:
        """For several workers: copied to each host once."""

    def check_memory(self, n_bytes: int) -> None:
        """Raise MinialpaError if the way to the workers has less than `n_bytes` of free memory.

        The kernel ends a process that writes to full shared memory.
        """

    def wait(self, replies: Sequence[Reply], timeout_s: float) -> list[Reply]:
        """Replies that have come, at least one; empty after `timeout_s` seconds."""

    def ready(self, replies: Sequence[Reply]) -> list[Reply]:
        """The replies that have come."""

    def answer(self, reply: Reply) -> Any:
        """Raises CallRaised or WorkerEnded."""

    # ---- faults ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise MinialpaError if no worker can start."""

    def fault(self) -> str | None:
        """With its remedy; None while the cluster is usable."""

    def lost_hosts(self, numbers: Iterable[int]) -> Mapping[int, str]:
        """Hosts that accept no connection, with their addresses."""
