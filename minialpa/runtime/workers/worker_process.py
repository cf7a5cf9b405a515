"""The process of a worker: starts jax in it, as one of the processes of its mesh, and opens transports to others."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import Any, Protocol

from minialpa.errors import WorkerError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of a worker: it binds the address `ip`, knows the secret of its session, and waits for others for
    `timeout_s`.

    `host` is the number of the host, for messages; `platform` is "cpu" or "cuda".
    """

    number: int
    host: int
    ip: str
    secret: bytes
    timeout_s: float
    platform: str
    n_devices: int


class Process(Protocol):
    """The process of a worker. `coordinator` is the address of jax's coordination service, for descriptions."""

    coordinator: str

    def reserve_port(self) -> tuple[str, int] | None:
        """An address of this host on a free port, for the coordination service of the mesh; held until `start_jax`."""

    def start_jax(self, coordinator: tuple[str, int] | None, n_workers: int, rank: int) -> list[Any]:
        """Start jax as process `rank` of the mesh's workers; returns the devices of all of them, in order."""

    def open_transport(self, me: int) -> Any:
        """A transport for worker `me` of a program, with its `address`, yet to `connect`."""

    def end(self) -> None:
        """End the worker, even if it is busy."""


class OwnProcess:
    """A process that is the worker's own."""

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
        # The threads of the transport would wait for up to 5 ms each time while another one runs Python.
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
            # Longer than the caller's own timeout: this would end the processes that wait for a hanging worker.
            heartbeat_timeout_seconds=int(self._settings.timeout_s) + 60,
            coordinator_bind_address=address if rank == 0 else None,
        )
        if self._settings.platform == "cpu":
            bind_gloo(self._settings.ip)

    def _all_devices(self) -> list[Any]:
        import jax

        own = self._settings
        try:
            return list(jax.devices())
        except (RuntimeError, AssertionError) as error:
            if own.platform == "cpu":
                raise
            raise WorkerError(
                f"Ray has GPUs on host {own.host} ({own.ip}), and jax cannot use them ({error!r}). Is `minialpa[gpu]` "
                "installed there, and does `minialpa doctor` see them?"
            ) from error

    def _check_own(self, devices: list[Any]) -> None:
        import jax

        own = self._settings
        n_own = sum(device.process_index == jax.process_index() for device in devices)
        if n_own != own.n_devices:
            raise WorkerError(
                f"Host {own.host} ({own.ip}) has {n_own} {own.platform} devices for a worker of {own.n_devices}."
            )
