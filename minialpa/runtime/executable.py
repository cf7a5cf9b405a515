"""`Executable`: a plan, its program and a runner, to call, inspect and measure."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from minialpa.plan import PlacedValue, PlacementSpec, Plan
from minialpa.programs.mesh_program import KEY_NAMES
from minialpa.programs.program import MeshShape, Program
from minialpa.runtime.arrays import BlockedArray, BlockedTarget, DistributedTarget, dtype_named
from minialpa.runtime.calls_on_mesh import CallsOnMesh
from minialpa.runtime.debug_files import DebugParts, debug_files
from minialpa.runtime.ref_calls import RefCalls
from minialpa.runtime.runner import BlockedCalls, Runner
from minialpa.runtime.steps.step_trace import TaskTime
from minialpa.sharding import Spec, placed
from minialpa.support.files import write_text
from minialpa.support.private_jax import api_boundaries, value_of_ref
from minialpa.tracing.host_memory import memory_kind_of
from minialpa.tracing.refs import NO_REFS, StepRefs
from minialpa.tracing.user_meshes import UsersSharding

#: Methods of jax's compiled functions, and their replacements.
_INSTEAD = {
    "as_text": "`get_hlo_text()`",
    "cost_analysis": "`get_parallel_plan().summary()` and `profile_with_dummy_inputs()`",
    "input_shardings": "`get_input_targets()` or `get_input_placement_specs()`",
    "memory_analysis": "`get_stage_allocation_size()` or `get_parallel_plan().summary()`",
    "output_shardings": "`get_output_placement_specs()`",
}


@api_boundaries
class Executable:
    """A plan compiled for devices. `run(leaves)` runs one step on argument leaves and returns result leaves.

    Attributes:
        out_tree: pytree of the results.
        run, place: `Runner.__call__` and `Runner.place`, for leaves of the step in place of leaves of the program.
        call: calls with the arguments of the step.
        refs: the Refs of the step, which `run` reads and updates.
        name: of the user's function.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        runner: Runner,
        in_tree: Any,
        out_tree: Any,
        *,
        placements: tuple[Sequence[PlacementSpec], Sequence[PlacementSpec]] | None = None,
        refs: StepRefs = NO_REFS,
        result_shardings: Sequence[UsersSharding | None] = (),
        planning_texts: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`in_tree` is the pytree of the argument tuple without static arguments. `placements` are the specs of
        argument and result leaves, if the program follows the plan of another step. `result_shardings`, empty without a
        mesh of the user: see `CallsOnMesh`. `planning_texts`: see `DebugParts`.
        """
        self._plan = plan
        self._in_tree, self.out_tree = in_tree, out_tree
        self._input_specs, self._output_specs = placements or (plan.input_specs, plan.output_specs)
        self._program = program
        self.runner = runner
        self.name = "step"
        self.planning_texts = planning_texts
        self._costs: list[float] = []

        calls = BlockedCalls(runner, program.blocks) if program.blocks else runner
        self._run_on_arrays, self._place_arrays = calls.__call__, calls.place
        on_mesh = CallsOnMesh(calls, result_shardings) if result_shardings else calls
        by_refs = RefCalls(on_mesh, refs, [value.path for value in plan.inputs]) if refs else on_mesh
        self.run, self.place, self.refs = by_refs.__call__, by_refs.place, refs
        self.call: Callable[[Executable, tuple[Any, ...], dict[str, Any]], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. Pass static arguments too.

        Raises TraceError if structure, shapes or dtypes differ from the compiled ones.
        """
        assert self.call is not None
        return self.call(self, args, kwargs)

    if not TYPE_CHECKING:  # type checkers report names that are missing

        def __getattr__(self, name: str) -> Any:
            advice = f" It may have programs on several meshes: use {_INSTEAD[name]}." if name in _INSTEAD else ""
            raise AttributeError(f"An `Executable` has no attribute {name!r}.{advice}")

    @property
    def program(self) -> Program:
        return self._program

    def get_parallel_plan(self) -> Plan:
        return self._plan

    def get_input_placement_specs(self) -> Any:
        """The argument tuple with a `PlacementSpec` (meshes and PartitionSpecs) for each leaf."""
        return self._as_arguments(self._input_specs)

    def _as_arguments(self, values: Sequence[Any]) -> Any:
        """Values of captured Refs are left out."""
        return jax.tree.unflatten(self._in_tree, values[: self._in_tree.num_leaves])

    def get_input_targets(self) -> Any:
        """The argument tuple with the type of an array in its planned sharding for each leaf, for `restore_checkpoint`.

        The types are `jax.ShapeDtypeStruct`, `BlockedTarget` for leaves in blocks of rows, and `DistributedTarget` for
        arrays on the workers of a session. Leaves that no step reads, and typed keys on a cluster, have no sharding.
        """
        meshes, session = self.runner.meshes, self.runner.session
        targets: list[Any] = [_target(spec, meshes) for spec in self._plan.input_specs]
        if session is not None:
            targets = [
                _target_on_workers(target, spec, layouts, session)
                for target, spec, layouts in zip(targets, self._plan.input_specs, self._layouts(), strict=True)
            ]
        return self._as_arguments(targets)

    def _layouts(self) -> list[tuple[_Layouts, ...]]:
        """For each argument leaf and block, the meshes and shardings in which the program reads it.

        Empty for leaves that the program reads in micro-batches.
        """
        of_leaf: dict[int, dict[tuple[MeshShape, PartitionSpec], None]] = {}
        for slot in self._program.inputs:
            if slot.rows is None:
                of_leaf.setdefault(slot.leaf, {})[self._program.meshes[slot.mesh], slot.spec] = None

        blocks = self._program.blocks.arguments or (None,) * len(self._plan.input_specs)
        numbers = itertools.count()
        return [tuple(tuple(of_leaf.get(next(numbers), ())) for _ in rows or (None,)) for rows in blocks]

    def get_output_placement_specs(self) -> Any:
        """The results with a `PlacementSpec` for each leaf."""
        return jax.tree.unflatten(self.out_tree, self._output_specs[: self.out_tree.num_leaves])

    def placement_of(self, leaf: Any, path: str) -> PlacedValue | None:
        """Meshes and specs of the array `leaf`; None if a part is on no mesh of this executable."""
        leaf = value_of_ref(leaf)
        is_blocked = isinstance(leaf, BlockedArray)
        blocks = leaf.blocks if is_blocked else (leaf,)
        homes = [self.runner.homes(block) for block in blocks]
        if not all(homes):
            return None

        copies = [(i, mesh, spec) for i, of_block in enumerate(homes) for mesh, spec in of_block]
        return PlacedValue(
            path=path,
            shape=leaf.shape,
            dtype=str(leaf.dtype),
            mesh_ids=tuple(mesh for _, mesh, _ in copies),
            specs=tuple(Spec.of(spec, len(leaf.shape)) for *_, spec in copies),
            rows=tuple(leaf.ranges[i] for i, *_ in copies) if is_blocked else (),
            memory_kind="device" if memory_kind_of(blocks[0]) is None else "pinned_host",
        )

    @property
    def function_names(self) -> tuple[str, ...]:
        """Names of the compiled functions."""
        return tuple(f"{function.name}" for function in self._program.functions)

    def get_hlo_text(self) -> list[str]:
        """Compiled HLO, in the order of `function_names`."""
        return self.runner.hlo_texts()

    def get_stage_allocation_size(self) -> list[int]:
        """For each mesh, bytes per device of its largest function: arguments, results and temporaries."""
        sizes = [0] * len(self._program.meshes)
        for function, size in zip(self._program.functions, self.runner.allocation_sizes(), strict=True):
            sizes[function.mesh] = max(sizes[function.mesh], size)
        return sizes

    def get_total_allocation_size(self) -> int:
        """Maximum of `get_stage_allocation_size`."""
        return max(self.get_stage_allocation_size(), default=0)

    def profile_with_dummy_inputs(self, repeats: int = 3) -> list[float]:
        """Seconds of each of `repeats` steps on zeros, after one step to warm up."""
        costs = []
        with self.runner.turn():
            for _ in range(repeats + 1):
                leaves = self._dummy_inputs()
                start = time.perf_counter()
                results = self._run_on_arrays(leaves)
                self.sync()
                del results
                costs.append(time.perf_counter() - start)
        self._costs = costs[1:]
        return list(self._costs)

    def get_execution_time_costs(self) -> list[float]:
        """Seconds of the steps that `profile_with_dummy_inputs` ran last."""
        return list(self._costs)

    def _dummy_inputs(self) -> list[Any]:
        leaves = self._place_arrays([_zeros(spec.shape, spec.dtype) for spec in self._input_specs])
        self.sync()
        return leaves

    def stage_timeline(self) -> tuple[TaskTime, ...]:
        """The measured times of all functions of a step on zeros, after one step to warm up.

        A function starts when it has been issued, the previous function of its mesh has ended and, in one process, its
        inputs have arrived. It ends when its results are ready. Other tracks show transfers, or on a cluster the
        instructions of each worker, where a `Receive` starts with its wait. The clocks of hosts are assumed to agree.

        The first call compiles each function a second time. Other steps stay unchanged.
        """
        with self.runner.turn():
            for _ in range(2):
                self._run_on_arrays(self._dummy_inputs(), traced=True)
                tasks = self.runner.timeline()
        return tasks

    def dump_stage_execution_trace(self, path: str | Path) -> None:
        """Write `stage_timeline`, beside the predicted passes, as a trace for ui.perfetto.dev."""
        self._plan.to_trace(path, measured=self.stage_timeline())

    def to_html(self, path: str | Path, *, title: str = "", measured: bool = False) -> None:
        """Write `Plan.to_html` of the plan.

        measured: run two steps on zeros, and draw their `stage_timeline` beside the predicted one.
        """
        self._plan.to_html(path, title=title, measured=self.stage_timeline() if measured else ())

    def dump_debug_info(self, folder: str | Path) -> None:
        """Write all facts about the step to `folder`; README.txt there has a line for each file.

        For a step NAME, `NAME_stage_0.hlo` is the first compiled program of stage 0, and others are
        `NAME_stage_0_backward0.hlo`, for example. Without a pipeline, it is `NAME.hlo`. Other files are memory,
        transfers, placements, phases of planning, and possible shardings.
        """
        root = Path(folder)
        parts = DebugParts(
            name=self.name,
            plan=self._plan,
            program=self._program,
            runner=self.runner,
            placements=(self._input_specs, self._output_specs),
            planning_texts=self.planning_texts,
        )
        for file in debug_files(parts):
            path = root / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, file.text if file.text.endswith("\n") else f"{file.text}\n")

    def sync(self) -> None:
        """Wait until all arrays of earlier calls are computed."""
        self.runner.sync()


def _target(spec: PlacementSpec, meshes: Sequence[Mesh]) -> jax.ShapeDtypeStruct | BlockedTarget:
    """An argument in its planned sharding, the first of several; without a sharding if `meshes` is empty."""
    dtype = dtype_named(spec.dtype)
    shardings = tuple(
        placed(meshes[i], p, in_host=spec.memory_kind != "device")
        for i, p in zip(spec.mesh_ids, spec.partition_specs, strict=True)
        if meshes
    )
    if spec.rows and shardings:
        return BlockedTarget(spec.shape, dtype, spec.rows, shardings)
    return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=shardings[0] if shardings else None)


_Layouts = tuple[tuple[MeshShape, PartitionSpec], ...]


def _target_on_workers(target: Any, spec: PlacementSpec, layouts: tuple[_Layouts, ...], session: Any) -> Any:
    """In all its layouts on workers; unchanged for typed keys, or if a block has no layout."""
    if jnp.issubdtype(target.dtype, jax.dtypes.extended) or not all(layouts):
        return target
    return DistributedTarget(
        shape=target.shape,
        dtype=target.dtype,
        in_host=spec.memory_kind != "device",
        session=session,
        rows=spec.rows,
        layouts=layouts,
    )


def _zeros(shape: tuple[int, ...], dtype: str) -> Any:
    if dtype.startswith("key<"):
        keys = jax.random.split(jax.random.key(0, impl=KEY_NAMES[dtype[4:-1]]), max(1, int(np.prod(shape))))
        return keys.reshape(shape)
    return np.zeros(shape, dtype)
