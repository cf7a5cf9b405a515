"""Arrays that workers keep under a number, with copies on one or several meshes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import PartitionSpec

from minialpa.arrays import RemoteArray
from minialpa.errors import DeletedArrayError, WorkerError
from minialpa.programs.mesh_program import ArrayType
from minialpa.programs.program import MeshShape
from minialpa.runtime.cluster.launcher import WorkerHandle
from minialpa.support.private_jax import class_of_remote_keys


class Holder(Protocol):
    """A `ClusterRuntime`."""

    def fetch(self, arrays: Sequence[DistributedArray]) -> list[Any]: ...

    def turn_even_if_ended(self) -> AbstractContextManager[None]: ...

    def sync(self) -> None: ...


@dataclass(slots=True, eq=False)
class MeshWorkers:
    """The workers of consecutive devices, from `first_device` of the cluster.

    freed: numbers of arrays without references; the next call frees them.
    """

    first_device: int
    n_devices: int
    workers: list[WorkerHandle]
    alive: bool = True
    freed: deque[int] = field(default_factory=deque)
    arrays: weakref.WeakValueDictionary[int, DistributedArray] = field(default_factory=weakref.WeakValueDictionary)

    @property
    def devices(self) -> range:
        return range(self.first_device, self.first_device + self.n_devices)

    def take_freed(self) -> list[int]:
        return [self.freed.popleft() for _ in range(len(self.freed))]


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """On the workers of one mesh, in the logical mesh `shape` and the sharding `spec`."""

    mesh: MeshWorkers
    shape: MeshShape
    spec: PartitionSpec


class DistributedArray(RemoteArray):
    """An array on a mesh of a session, or on several meshes with a copy each.

    A step that reads it on one of these meshes, in the same sharding, uses it in place. After its last reference is
    gone, the next call frees its memory.
    """

    def __init__(self, runtime: Holder, number: int, type: ArrayType, copies: tuple[Copy, ...]) -> None:
        self.runtime, self.number, self.type, self.copies = runtime, number, type, copies
        self.shape, self.dtype, self.weak_type = type.shape, type.jax_dtype, type.weak_type
        self.in_host = type.in_host
        for copy in copies:
            copy.mesh.arrays[number] = self
        self._host_value: Any = None
        self._is_deleted = False

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(copy.spec for copy in self.copies)

    def is_on(self, shape: MeshShape, spec: PartitionSpec) -> bool:
        return any(copy.mesh.alive and copy.shape == shape and copy.spec == spec for copy in self.copies)

    def add(self, copy: Copy) -> None:
        self.copies = (*self.copies, copy)
        copy.mesh.arrays[self.number] = self

    def is_deleted(self) -> bool:
        return self._is_deleted

    def delete(self) -> None:
        """The next call frees the memory. Later uses raise DeletedArrayError."""
        with self.runtime.turn_even_if_ended():  # no step is about to read this array
            if not self._is_deleted:
                self._is_deleted = True
                self._host_value = None
                self._release()

    def used_up(self) -> None:
        """A step has taken over the memory. Later uses raise DeletedArrayError."""
        self._is_deleted = True
        self._host_value = None

    def keep(self, value: Any) -> None:
        """Hold the value here too, unless the array is used up.

        It becomes read-only, because `np.asarray` returns it without a copy and steps read it.
        """
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        if not self._is_deleted:
            self._host_value = value

    @property
    def kept(self) -> Any:
        """None if the value was not fetched, or the array is used up."""
        return self._host_value

    @property
    def held_here(self) -> bool:
        return self._host_value is not None

    def block_until_ready(self) -> DistributedArray:
        self.check_usable()
        if self._host_value is None:
            self.runtime.sync()
            is_lost = not any(copy.mesh.alive for copy in self.copies)
            if is_lost and self._host_value is None:
                raise WorkerError(
                    f"An array of shape {self.shape} is lost, because the session that held it has ended. Restore it "
                    "from a checkpoint; next time, call `jax.device_get` on values that you need before the session "
                    "ends."
                )
        return self

    def _fetch(self) -> Any:
        self.check_usable()
        value = self._host_value  # another thread may donate the array at any time
        return self.runtime.fetch([self])[0] if value is None else value

    def fetch_once(self) -> Any:
        """This process keeps the value only if it had the value before."""
        had_value = self._host_value is not None
        value = self._fetch()
        if not had_value:
            self._host_value = None
        return value

    @classmethod
    def _fetch_all(cls, arrays: Sequence[Any]) -> None:
        for array in arrays:
            array.check_usable()
        missing = [array for array in arrays if not array.held_here]
        if missing:
            missing[0].runtime.fetch(missing)

    def check_usable(self) -> None:
        if self._is_deleted:
            raise DeletedArrayError(
                f"An array of shape {self.shape} was deleted or donated to a step. Use that step's result, or keep "
                "arguments alive with `donate_argnums=()`."
            )

    def _release(self) -> None:
        for copy in self.copies:
            if copy.mesh.alive:
                copy.mesh.freed.append(self.number)

    def __del__(self) -> None:
        if not getattr(self, "_is_deleted", True):
            self._release()


#: Functions of `jax.random` fetch these typed keys.
DistributedKeys = class_of_remote_keys(DistributedArray)


def distributed_array(runtime: Holder, number: int, type: ArrayType, copies: tuple[Copy, ...]) -> DistributedArray:
    """A `DistributedKeys` for typed keys."""
    is_keys = jax.numpy.issubdtype(type.jax_dtype, jax.dtypes.extended)
    made: DistributedArray = (DistributedKeys if is_keys else DistributedArray)(runtime, number, type, copies)
    return made
