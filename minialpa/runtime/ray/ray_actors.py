"""Workers as Ray actors: calls, replies and errors of Ray, by the interface in `launcher`."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from minialpa.errors import MinialpaError
from minialpa.runtime.cluster.launcher import CallRaised, Reply, WorkerEnded
from minialpa.runtime.ray.private_ray import folder_of_shared_memory
from minialpa.runtime.workers.worker import Worker
from minialpa.support.sizes import bytes_text

#: Each concurrency group has its own thread in the actor. A call of `live` never returns.
_GROUP_OF_METHOD = {"status": "control", "stop": "control", "live": "life", "read": "samples", "write_copies": "files"}

_ACTOR: Any = ray.remote(  # type: ignore[call-overload]
    concurrency_groups={"control": 1, "life": 1, "samples": 1, "files": 1}
)(Worker)

#: Beginnings of lines without a reason in Ray's errors.
_LABELS = ("actor_id:", "class_name:", "ip:", "name:", "namespace:", "pid:")


@dataclass(frozen=True, slots=True, eq=False)
class RayActor:
    handle: Any

    def call(self, method: str, *args: Any) -> Reply:
        return getattr(self.handle, method).remote(*args)

    def call_aside(self, method: str, *args: Any) -> Reply:
        return getattr(self.handle, method).options(concurrency_group=_GROUP_OF_METHOD[method]).remote(*args)


def start_actor(options: dict[str, Any], *args: Any) -> RayActor:
    return RayActor(_ACTOR.options(**options).remote(*args))


class RayCalls:
    _shared_memory: Path | None = None

    def share(self, value: Any) -> Any:
        return ray.put(value)

    def check_memory(self, n_bytes: int) -> None:
        folder = self._shared_memory = self._shared_memory or folder_of_shared_memory()
        free_bytes = math.inf if folder is None else shutil.disk_usage(folder).free
        if n_bytes > free_bytes:
            raise MinialpaError(
                f"Arrays of {bytes_text(n_bytes)} go to the workers through `{folder}`, which has "
                f"{bytes_text(free_bytes)} free. Remove files there, or make it larger (in Docker with `--shm-size`); "
                "the session goes on."
            )

    def wait(self, replies: Sequence[Reply], timeout_s: float) -> list[Reply]:
        return list(ray.wait(list(replies), num_returns=1, timeout=timeout_s)[0])

    def ready(self, replies: Sequence[Reply]) -> list[Reply]:
        return list(ray.wait(list(replies), num_returns=len(replies), timeout=0)[0]) if replies else []

    def answer(self, reply: Reply) -> Any:
        try:
            return ray.get(reply)
        except RayTaskError as error:
            raise _call_raised(error) from error
        except RayError as error:
            raise WorkerEnded(_reason(error)) from error


def _call_raised(error: RayTaskError) -> CallRaised:
    text = re.sub(r"\x1b\[\d+m", "", str(error))  # colours
    called = re.search(r"ray::(?:\w+\.)?(\w+)", text)  # the error has no field for the name
    return CallRaised(called[1] if called else None, f"{error.cause!r}" if error.cause else text, text)


def _reason(error: RayError) -> str:
    """Why an actor has ended, in one line."""
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(line for line in lines if line and not line.startswith(_LABELS))[:600]
