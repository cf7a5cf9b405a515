"""The process of a worker: starts jax in it, and opens transports to other workers."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import Any, Protocol

from minialpa.errors import WorkerError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of a worker.

    Attributes:
        host: number of the host, for messages.
        ip: the address that the worker binds.
        secret: of the session.
        timeout_s: how long the worker waits for others.
        platform: "cpu" or "cuda".
    """

    number: int
    host: int
    ip: str
    secret: bytes
    timeout_s: float
    platform: str
    n_devices: int


class Process(Protocol):
    """`coordinator` is the address of jax's coordination service, for descriptions."""

    coordinator: str

    def reserve_port(self) -> tuple[str, int] | None:
        """An address for the mesh's coordination service, held until `start_jax`; or None."""

    def start_jax(self, coordinator: tuple[str, int] | None, n_workers: int, rank: int) -> list[Any]:
        """As process `rank` of the mesh's workers; returns the devices of the whole mesh, in order."""

    def open_transport(self, me: int) -> Any:
        """A transport for worker `me` of a program, not connected."""

    def end(self) -> None:
        """End the worker, even if it is busy."""


class OwnProcess:
    """A process for one worker."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._reserved: socket.socket | None = None
        self.coordinator = "none"

    def reserve_port(self) -> tuple[str, int]:
        # jax binds the port later, by the same option, while this socket still holds it.
        held = socket.socket(socket.AF_INET6 if ":" in self._settings.ip else socket.AF_INET)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((self._settings.ip, 0))
        self._reserved = held
        return self._settings.ip, held.getsockname()[1]

    def start_jax(self, coordinator: tuple[str, int] | None, n_workers: int, rank: int) -> list[Any]:
        # Otherwise, threads of a transport wait for up to 5 ms while another thread runs Python.
        sys.setswitchinterval(2e-4)
        self._configure_jax()
        if n_workers > 1:
            assert coordinator is not None
            self._join_mesh(f"{coordinator[0]}:{coordinator[1]}", n_workers, rank)
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

        devices = sorted(self._all_devices(), key=lambda d: (d.process_index, d.id))
        self._check_own(devices)
        return devices

    def open_transport(self, me: int) -> Any:
        from minialpa.runtime.transports.host_transport import HostTransport

        return HostTransport(self._settings.secret, me, self._settings.ip)

    def end(self) -> None:
        os._exit(1)

    def _configure_jax(self) -> None:
        import jax

        jax.config.update("jax_enable_x64", True)  # arrays keep the types that the traced step gave them
        jax.config.update("jax_platforms", self._settings.platform)
        if self._settings.platform == "cpu":
            jax.config.update("jax_num_cpu_devices", self._settings.n_devices)

    def _join_mesh(self, address: str, n_workers: int, rank: int) -> None:
        import jax

        from minialpa.support.private_jax import bind_gloo

        self.coordinator = address
        jax.distributed.initialize(
            address,
            n_workers,
            rank,
            cluster_detection_method="deactivate",
            initialization_timeout=60,
            # Longer than the caller's timeout: it ends the processes that wait for a hanging worker.
            heartbeat_timeout_seconds=int(self._settings.timeout_s) + 60,
            coordinator_bind_address=address if rank == 0 else None,
        )
        if self._settings.platform == "cpu":
            bind_gloo(self._settings.ip)

    def _all_devices(self) -> list[Any]:
        import jax

        settings = self._settings
        try:
            return list(jax.devices())
        except (RuntimeError, AssertionError) as error:
            if settings.platform == "cpu":
                raise
            raise WorkerError(
                f"Ray has GPUs on host {settings.host} ({settings.ip}), and jax cannot use them ({error!r}). Install "
                "`minialpa[gpu]` there, and check the GPUs with `minialpa doctor`."
            ) from error

    def _check_own(self, devices: list[Any]) -> None:
        import jax

        settings = self._settings
        n_own = sum(device.process_index == jax.process_index() for device in devices)
        if n_own != settings.n_devices:
            raise WorkerError(
                f"jax has {n_own} {settings.platform} devices on host {settings.host} ({settings.ip}), and the worker "
                f"needs {settings.n_devices}. Check variables in `worker_env` that select devices, such as XLA_FLAGS "
                "or CUDA_VISIBLE_DEVICES."
            )
