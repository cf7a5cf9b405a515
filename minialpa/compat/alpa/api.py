"""`parallelize` and the session of minialpa with Alpa's arguments, defaults and executables."""

from __future__ import annotations

import functools
import inspect
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import minialpa
from minialpa.compat.alpa.device_mesh import set_global_virtual_physical_mesh
from minialpa.compat.alpa.global_env import global_config
from minialpa.compat.alpa.names import INSTEAD
from minialpa.compat.alpa.parallel_method import ShardParallel
from minialpa.errors import MinialpaError, ShardingError


def init(
    cluster: Any = "ray",
    cluster_address: str | None = None,
    num_nodes: int | None = None,
    num_devices_per_node: int | None = None,
    namespace: str = "alpa_default_space",
    **options: Any,
) -> None:
    """`minialpa.init`, with Alpa's arguments and defaults; `options` are others of `minialpa.init`."""
    minialpa.init(
        cluster,
        cluster_address=cluster_address,
        num_nodes=num_nodes,
        num_devices_per_node=num_devices_per_node,
        namespace=namespace,
        **options,
    )


def shutdown() -> None:
    """`minialpa.shutdown`, which also forgets the global mesh of the script."""
    set_global_virtual_physical_mesh(None)
    minialpa.shutdown()


def set_seed(seed: int) -> None:
    """Warns: random numbers depend on the keys of the step alone."""
    warnings.warn(
        "`set_seed` has no effect: a step draws the random numbers that its keys determine, as on one device. Pass "
        "keys to the step.",
        stacklevel=2,
    )
    object.__setattr__(global_config, "runtime_random_seed", seed)


def clear_executable_cache() -> None:
    """Warns: compiled programs belong to their parallelized function, and are released with it."""
    warnings.warn(
        "`clear_executable_cache` has no effect: each parallelized function holds its own programs. Delete the "
        "function to release them.",
        stacklevel=2,
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """An argument leaf of an executable of minialpa, by its number among all `n_leaves`."""

    runtime: Any
    number: int
    n_leaves: int


class PlacementSpec(minialpa.PlacementSpec):
    """`minialpa.PlacementSpec` with Alpa's arguments and attributes. Specs of different arguments may be equal.

    source: the executable, and the number of its leaf; None for a spec from a script.
    """

    source: _Source | None = None

    def __init__(self, aval: Any, mesh_ids: Sequence[int], sharding_specs: Sequence[PartitionSpec]) -> None:
        """`aval` has a shape and a dtype; `sharding_specs` are PartitionSpecs, one for each mesh."""
        super().__init__(
            path="",
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            mesh_ids=tuple(mesh_ids),
            partition_specs=tuple(sharding_specs),
        )

    @staticmethod
    def of(spec: minialpa.PlacementSpec, source: _Source | None = None) -> PlacementSpec:
        new = PlacementSpec(spec, spec.mesh_ids, spec.partition_specs)
        for name, value in (("path", spec.path), ("rows", spec.rows), ("source", source)):
            object.__setattr__(new, name, value)
        return new

    def _compared(self) -> tuple[Any, ...]:
        # A PartitionSpec may leave out trailing Nones.
        specs = tuple((*spec, *(None,) * (len(self.shape) - len(spec))) for spec in self.partition_specs)
        return self.shape, self.dtype, self.mesh_ids, specs, self.rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacementSpec) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def sharding_specs(self) -> tuple[PartitionSpec, ...]:
        return self.partition_specs


class Invocation(NamedTuple):
    """One run of a stage program: seconds from the start of the step, numbers of the hosts and of the devices."""

    start: float
    stop: float
    node_ids: tuple[int, ...]
    devices: tuple[int, ...]


class Executable:
    """minialpa's executable with Alpa's attributes, beside its own. costs: seconds of timed steps."""

    def __init__(self, runtime: Any, costs: list[float]) -> None:
        self._runtime, self._costs = runtime, costs

    def __getattr__(self, name: str) -> Any:
        # A copy in the making lacks them.
        if name in ("_runtime", "_costs"):
            raise AttributeError(name)
        if sentence := INSTEAD.get(f"executable.{name}"):
            raise AttributeError(f"`executable.{name}` of Alpa is not here. {sentence}")
        return getattr(self._runtime, name)

    def __call__(self, *args: Any) -> Any:
        """One step on the arguments without static ones, or on their leaves."""
        leaves = jax.tree.leaves(args)
        self._check(leaves)
        return jax.tree.unflatten(self._runtime.out_tree, self._runtime.run(leaves))

    def preshard_dynamic_args(self, *leaves: Any) -> list[Any]:
        """The leaves of the arguments on the devices, unread ones too."""
        self._check(leaves)
        return list(map(self._on_devices, self._runtime.place(list(leaves))))

    def _on_devices(self, leaf: Any) -> Any:
        """The leaf; an array of this process without a mesh is placed on all devices of the first mesh."""
        meshes = self._runtime.runner.meshes
        is_here = isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)
        if not meshes or not is_here or isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf
        return jax.device_put(leaf, NamedSharding(meshes[0], PartitionSpec()))

    def _check(self, leaves: Sequence[Any]) -> None:
        """Raise ShardingError unless the step was compiled for leaves of these types."""
        specs = jax.tree.leaves(self._runtime.get_input_placement_specs())
        if len(leaves) != len(specs):
            raise ShardingError(
                f"The executable takes {len(specs)} arrays, and got {len(leaves)}. Pass the arguments of the function "
                "without the static ones, or their leaves."
            )
        for leaf, spec in zip(leaves, specs, strict=True):
            shape, dtype = type_of(leaf)
            if (shape, dtype) != (spec.shape, spec.dtype):
                raise ShardingError(
                    f"The executable was compiled for `{spec.path}` of {spec.dtype}{list(spec.shape)}, and got "
                    f"{dtype}{list(shape)}. Call the parallelized function, which compiles for it."
                )

    @property
    def function_names(self) -> tuple[str, ...]:
        """Names of the stage programs, in the order of `get_hlo_text`."""
        return tuple(function.name for function in self._stage_programs().values())

    def _stage_programs(self) -> dict[int, Any]:
        """The programs of stages by number, without minialpa's own between them."""
        functions = self._runtime.program.functions
        return {i: function for i, function in enumerate(functions) if _STAGE_PROGRAM.match(function.name)}

    def get_hlo_text(self, status: Any = None) -> str | list[str]:
        """Compiled HLO: one text of all programs if there is one mesh, else a list with one for each stage program."""
        texts: list[str] = self._runtime.get_hlo_text()
        if len(self.get_parallel_plan().stages) == 1:
            return "\n".join(texts)
        return [texts[i] for i in self._stage_programs()]

    def get_input_placement_specs(self) -> Any:
        """The arguments, as a tuple, with a `PlacementSpec` in place of every leaf."""
        specs, tree = jax.tree.flatten(self._runtime.get_input_placement_specs())
        sources = [_Source(self._runtime, i, len(specs)) for i in range(len(specs))]
        return jax.tree.unflatten(tree, map(PlacementSpec.of, specs, sources))

    def get_output_placement_specs(self) -> Any:
        """The results with a `PlacementSpec` in place of every leaf."""
        return jax.tree.map(PlacementSpec.of, self._runtime.get_output_placement_specs())

    def get_execution_time_costs(self) -> list[float]:
        """Seconds of timed steps, or else of the steps of `profile_with_dummy_inputs`."""
        costs: list[float] = self._costs or self._runtime.get_execution_time_costs()
        if not costs:
            raise MinialpaError(
                "No step was timed. Set `global_config.shard_parallel_sync_for_timer` or "
                "`global_config.pipeline_sync_for_timer` to True before the steps, or call "
                "`profile_with_dummy_inputs()`."
            )
        return list(costs)

    def get_stage_execution_info(self) -> list[list[Invocation]]:
        """Runs one step on zeros and returns, for each stage program in `function_names`, when it ran."""
        stages = self.get_parallel_plan().stages
        per_host = self.get_parallel_plan().cluster.devices_per_host
        runs: dict[tuple[int, str], list[Invocation]] = {
            (program.mesh, program.name): [] for program in self._stage_programs().values()
        }
        first_host: dict[int, int] = {}
        for task in self.stage_timeline():
            # All hosts of a mesh time the same calls.
            is_first = first_host.setdefault(task.mesh, task.host) == task.host
            if task.instruction is not None and is_first and (task.mesh, task.name) in runs:
                stage = stages[task.mesh]
                devices = tuple(range(stage.first_device, stage.first_device + stage.n_devices))
                hosts = tuple(sorted({device // per_host for device in devices}))
                runs[task.mesh, task.name].append(Invocation(task.start_s, task.stop_s, hosts, devices))
        return list(runs.values())


#: The start of the names of programs with equations of the step.
_STAGE_PROGRAM = re.compile(r"(prologue|forward|backward|step|update)\d")


def type_of(leaf: Any) -> tuple[tuple[int, ...], str]:
    """The shape and the dtype that jax gives an array or a number."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    is_key = jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    return np.shape(leaf), str(dtype if is_key else jax.dtypes.canonicalize_dtype(dtype))


class ParallelizedFunc(minialpa.ParallelizedFunc):
    """`minialpa.ParallelizedFunc` with Alpa's executables."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (global_config.shard_parallel_sync_for_timer or global_config.pipeline_sync_for_timer):
            return super().__call__(*args, **kwargs)
        return self._timed_call(args, kwargs)

    def _timed_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A step is timed without compiling.
        executable = self.get_executable(*args, **kwargs)
        executable.sync()
        start = time.perf_counter()
        results = super().__call__(*args, **kwargs)
        executable.sync()
        executable._costs.append(time.perf_counter() - start)
        return results

    def get_executable(self, *args: Any, **kwargs: Any) -> Any:
        """Plan and compile for these arguments, arrays or `jax.ShapeDtypeStruct`s, without running."""
        return self._with_costs(super().get_executable(*args, **kwargs))

    def preshard_dynamic_args(self, *args: Any, **kwargs: Any) -> Any:
        placed = super().preshard_dynamic_args(*args, **kwargs)
        executable = self.get_last_executable()
        placed = jax.tree.map(executable._on_devices, placed)
        if kwargs:
            return placed
        static = {name for name, _ in self._bind(args, kwargs).static}
        return tuple(arg for i, arg in enumerate(placed, len(self._bound)) if i not in static)

    def get_last_executable(self) -> Any:
        runtime = super().get_last_executable()
        return None if runtime is None else self._with_costs(runtime)

    def _with_costs(self, runtime: Any) -> Executable:
        # One object for each executable of minialpa: it keeps the timed costs.
        known: dict[Any, Executable] = vars(self).setdefault("_alpa_executables", {})
        return known.setdefault(runtime, Executable(runtime, []))


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
    chosen = ShardParallel() if method is None else method
    if fun is None:
        return functools.partial(parallelize, method=chosen, **options)
    if batch_argnums == (1,) and not _takes_two(fun):  # the default is for every function
        options["batch_argnums"] = ()
    return ParallelizedFunc(fun, chosen, **options)


def _takes_two(fun: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # a builtin has no signature
        return True
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
