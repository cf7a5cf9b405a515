"""Alpa's `parallelize`, session and checkpoints: Alpa's arguments and defaults go in, minialpa's functions run."""

from __future__ import annotations

import enum
import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import jax
from jax.sharding import PartitionSpec

import minialpa
from minialpa.compat.alpa.device_mesh import set_global_virtual_physical_mesh
from minialpa.compat.alpa.names import INSTEAD, not_here
from minialpa.compat.alpa.parallel_method import read_method
from minialpa.errors import MinialpaError, ShardingError


def init(
    cluster: Any = "ray",
    cluster_address: str | None = None,
    num_nodes: int | None = None,
    num_devices_per_node: int | None = None,
    namespace: str = "alpa_default_space",
    **options: Any,
) -> None:
    """`minialpa.init` with Alpa's arguments and defaults, and `options` of `minialpa.init`."""
    options |= {"num_hosts": num_nodes, "devices_per_host": num_devices_per_node, "namespace": namespace}
    minialpa.init(cluster, address=cluster_address, **options)


def shutdown() -> None:
    """`minialpa.shutdown`; also forgets the global mesh of the script."""
    set_global_virtual_physical_mesh(None)
    minialpa.shutdown()


def set_seed(seed: int) -> None:
    """Warns, since random numbers depend only on the keys of the step."""
    text = "`set_seed` has no effect: the keys of the step determine its random numbers. Pass keys to the step."
    warnings.warn(text, stacklevel=2)


def clear_executable_cache() -> None:
    """Warns, since each parallelized function has its own programs."""
    text = "`clear_executable_cache` has no effect: delete a parallelized function to release its programs."
    warnings.warn(text, stacklevel=2)


# ---- steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlacementSpec(minialpa.PlacementSpec):
    """`minialpa.PlacementSpec` with Alpa's attributes and an empty path: specs of different arguments may be equal.

    Attributes:
        executable: minialpa's executable with the argument; None for a result.
        leaf: the number of the argument leaf.
    """

    executable: Any = field(default=None, compare=False, repr=False)
    leaf: int = field(default=0, compare=False, repr=False)

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def sharding_specs(self) -> tuple[PartitionSpec, ...]:
        return self.partition_specs


def _alpas_spec(spec: minialpa.PlacementSpec, executable: Any = None, leaf: int = 0) -> PlacementSpec:
    given = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return PlacementSpec(**given | {"path": ""}, executable=executable, leaf=leaf)


def leaves_of_executable(specs: Any) -> tuple[list[PlacementSpec], Any]:
    """The leaves of a tree of placement specs, and their executable. Raises ShardingError unless they share one."""
    leaves = jax.tree.leaves(specs)
    executables = [spec.executable if isinstance(spec, PlacementSpec) else None for spec in leaves]
    if not leaves or executables[0] is None or any(other is not executables[0] for other in executables):
        raise ShardingError(
            "Pass a part of `executable.get_input_placement_specs()` of one executable; got a "
            f"{type(specs).__name__} with {len(leaves)} leaves."
        )
    return leaves, executables[0]


class HloStatus(enum.Enum):
    """The state of the HLO that a script asks for."""

    UNOPTIMIZED = 0
    SHARDING_ANNOTATED = 1
    SPMD_PARTITIONED = 2
    FULLY_OPTIMIZED = 3


class Executable:
    """minialpa's executable with Alpa's methods in addition."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable

    def __call__(self, *args: Any) -> Any:
        return self._executable(*args)

    def __getattr__(self, name: str) -> Any:
        if name in INSTEAD:
            raise AttributeError(not_here(name))
        # A copy in the making has no executable yet.
        if name == "_executable":
            raise AttributeError(name)
        return getattr(self._executable, name)

    def get_hlo_text(self, status: HloStatus = HloStatus.FULLY_OPTIMIZED) -> str | list[str]:
        """Compiled HLO: one text for one mesh, else a list of one text per program. Warns for another `status`."""
        if status is not HloStatus.FULLY_OPTIMIZED:
            warnings.warn(
                f"`get_hlo_text` returns compiled HLO, because minialpa has no text for {status}. Pass "
                "`HloStatus.FULLY_OPTIMIZED`.",
                stacklevel=2,
            )
        texts: list[str] = self._executable.get_hlo_text()
        return "\n".join(texts) if len(self.get_parallel_plan().stages) == 1 else texts

    def get_input_placement_specs(self) -> Any:
        """The tuple of arguments, with a `PlacementSpec` in place of each leaf."""
        specs, tree = jax.tree.flatten(self._executable.get_input_placement_specs())
        return jax.tree.unflatten(tree, [_alpas_spec(spec, self._executable, i) for i, spec in enumerate(specs)])

    def get_output_placement_specs(self) -> Any:
        """The results, with a `PlacementSpec` in place of each leaf."""
        return jax.tree.map(_alpas_spec, self._executable.get_output_placement_specs())

    def get_execution_time_costs(self) -> list[float]:
        """Seconds of each step in `profile_with_dummy_inputs`. Raises MinialpaError before its call."""
        costs: list[float] = self._executable.get_execution_time_costs()
        if not costs:
            raise MinialpaError("minialpa times no steps by itself. Call `executable.profile_with_dummy_inputs()`.")
        return costs


class ParallelizedFunc(minialpa.ParallelizedFunc):
    """`minialpa.ParallelizedFunc` with Alpa's executables."""

    def get_executable(self, *args: Any, **kwargs: Any) -> Any:
        return Executable(super().get_executable(*args, **kwargs))

    def get_last_executable(self) -> Any:
        executable = super().get_last_executable()
        return None if executable is None else Executable(executable)


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: Any = "auto",
    donate_argnums: Any = "auto",
    batch_argnums: Any = (1,),
    method: Any = None,
) -> Any:
    """`minialpa.parallelize` with Alpa's default method, `ShardParallel`."""
    options = {"static_argnums": static_argnums, "donate_argnums": donate_argnums, "batch_argnums": batch_argnums}
    if fun is None:
        return functools.partial(parallelize, method=method, **options)
    # The default also works for functions of one argument.
    if batch_argnums == (1,) and not _takes_two(fun):
        options["batch_argnums"] = ()
    return ParallelizedFunc(fun, read_method(method), **options)


def _takes_two(fun: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # a builtin has no signature
        return True
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def save_checkpoint(ckpt_dir: Any, target: Any, step: int, local_cache_dir: Any = None) -> None:
    """`minialpa.save_checkpoint`. `local_cache_dir` has no effect."""
    minialpa.save_checkpoint(ckpt_dir, target, step=step)


def restore_checkpoint(ckpt_dir: Any, step: int, placement_specs: Any) -> Any:
    """`minialpa.restore_checkpoint` with the placement specs of an executable."""
    specs, executable = leaves_of_executable(placement_specs)
    targets = jax.tree.leaves(executable.get_input_targets())
    like = jax.tree.unflatten(jax.tree.structure(placement_specs), [targets[spec.leaf] for spec in specs])
    return minialpa.restore_checkpoint(ckpt_dir, like, step=step)
