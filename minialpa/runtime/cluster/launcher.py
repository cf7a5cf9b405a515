"""The interface of launchers of workers. Ray is one (`ray_cluster`), threads are another (`in_process`).

A launched worker is an actor: its calls run one after the other, and each returns a reply at once. A reply later holds
a value, an error that the call raised (`CallRaised`), or the end of the worker (`WorkerEnded`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minialpa.cluster import ClusterSpec

Reply = Any
"""The future answer to a call: hashable, and known to the launcher that made it."""


class CallRaised(Exception):
    """A call raised an error in a worker, which goes on. `message` is the error in one line."""

    def __init__(self, method: str | None, message: str, traceback: str) -> None:
        super().__init__(message)
        self.method, self.message, self.traceback = method, message, traceback


class WorkerEnded(Exception):
    """The worker ended before it answered. The message is the reason, as far as the launcher knows it."""


class Actor(Protocol):
    """A `Worker` in a process, or a thread, of its own."""

    def call(self, method: str, *args: Any) -> Reply:
        """Call a method after all earlier calls. Arguments are copied."""

    def call_aside(self, method: str, *args: Any) -> Reply:
        """Call `status`, `live`, `stop`, `read` or `write_copies`, which do not wait for other calls."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WorkerHandle:
    """A running worker: its number in the session, its host, its consecutive devices, and the actor that takes its
    calls.
    """

    number: int
    host: int
    first_device: int
    n_devices: int
    actor: Actor


class Launcher(Protocol):
    """Hosts that a session has reserved, with devices numbered host by host, and workers on them, until `release`.

    `platform` is "cpu" or "cuda". A worker may keep others waiting for `timeout_s`.
    """

    platform: str
    devices_per_host: int
    timeout_s: float

    def start_meshes(self, keys: Sequence[tuple[int, int]], check: Callable[[], None]) -> list[list[WorkerHandle]]:
        """Start workers for each (first device, number of devices): one on each host, in one jax runtime per mesh.

        Calls `check` about once a second meanwhile. If it raises, all of these workers end. Raises WorkerError if they
        do not start.
        """

    def end(self, workers: Sequence[WorkerHandle]) -> None:
        """End workers, whether they are busy or have ended already."""

    def release(self) -> None:
        """Give the hosts back. Calling it twice is fine."""

    # ---- hosts ----------------------------------------------------------------------------------------------------

    def describe(self) -> ClusterSpec:
        """The hosts and their devices, for the planner."""

    def available_hosts(self) -> int:
        """How many hosts `restarted` would reserve now; 0 if the cluster is gone. Disturbs no worker."""

    def restarted(self) -> Launcher:
        """A launcher for the same request on the hosts that answer now, at most as many as the request names.

        Call it after `release`. Raises MinialpaError if no host can be reserved; calling it twice is fine.
        """

    # ---- calls ----------------------------------------------------------------------------------------------------

    def share(self, value: Any) -> Any:
        """A value to pass as an argument to several workers; it is copied to each host once."""

    def check_room(self, n_bytes: int) -> None:
        """Raise MinialpaError if large arguments of so many bytes find no room on the way to the workers.

        The kernel ends a process that writes to full shared memory.
        """

    def wait(self, replies: Sequence[Reply], timeout_s: float) -> list[Reply]:
        """Wait until one of the replies is there, and return it, or an empty list after `timeout_s` seconds."""

    def ready(self, replies: Sequence[Reply]) -> list[Reply]:
        """The replies that are there now."""

    def answer(self, reply: Reply) -> Any:
        """The value of a reply. Raises CallRaised or WorkerEnded."""

    # ---- faults ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise MinialpaError if no worker can start."""

    def fault(self) -> str | None:
        """The fault of the cluster as a whole, and its remedy; None while the cluster is usable."""

    def lost_hosts(self, numbers: Iterable[int]) -> Mapping[int, str]:
        """Of the hosts with these numbers, those on which nothing answers, with their addresses."""
