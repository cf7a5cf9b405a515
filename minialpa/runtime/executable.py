"""What a user holds of a compiled step: its plan, its programs, its placements; and the means to run it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from minialpa.plan import Plan
from minialpa.program import Accumulate, Program, Run
from minialpa.runtime.arrays import BlockedArray
from minialpa.runtime.local import LocalExecutable


class Executable:
    """A plan compiled for devices. `run(leaves)` runs one step on argument leaves and returns result leaves.

    in_tree, out_tree: pytrees of the arguments, as a tuple without the static ones, and of the results.
    """

    def __init__(
        self, plan: Plan, program: Program, devices: Sequence[jax.Device], in_tree: Any, out_tree: Any
    ) -> None:
        self._plan = plan
        self._in_tree, self._out_tree = in_tree, out_tree
        self._program = program
        self._local = LocalExecutable(program, devices)
        self._platform = devices[0].platform
        self._costs: list[float] = []
        self.run = self._local.__call__

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Argument leaves laid out as the step wants them. What the step donates never shares memory with `leaves`."""
        out = []
        for i, (leaf, placed) in enumerate(zip(leaves, self._local.place(leaves), strict=True)):
            if not isinstance(leaf, jax.Array | BlockedArray) or not isinstance(placed, type(leaf)):
                out.append(placed)
            elif leaf.sharding == placed.sharding:
                out.append(leaf)
            else:
                out.append(placed.copy() if i in self._program.donated_leaves else placed)
        return out

    def get_parallel_plan(self) -> Plan:
        return self._plan

    def get_input_placement_specs(self) -> Any:
        """The arguments, as a tuple, with a `PlacementSpec` (meshes and PartitionSpecs) in place of every leaf."""
        return jax.tree.unflatten(self._in_tree, self._plan.input_specs)

    def get_output_placement_specs(self) -> Any:
        """The results with a `PlacementSpec` in place of every leaf."""
        return jax.tree.unflatten(self._out_tree, self._plan.output_specs)

    @property
    def function_names(self) -> tuple[str, ...]:
        """Names of the stage programs, in the order of `get_hlo_text`."""
        return tuple(f"{function.name}" for function in self._program.functions)

    def get_hlo_text(self) -> list[str]:
        """Compiled HLO, one text for each stage program."""
        return [compiled.as_text() for compiled in self._local.compiled]

    def get_stage_allocation_size(self) -> list[int]:
        """Bytes per device of each mesh: arguments, results and temporaries of the largest of its programs."""
        sizes = [0] * len(self._program.meshes)
        for function, compiled in zip(self._program.functions, self._local.compiled, strict=True):
            stats = compiled.memory_analysis()
            used = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
            sizes[function.mesh] = max(sizes[function.mesh], used - stats.alias_size_in_bytes)
        return sizes

    def get_total_allocation_size(self) -> int:
        """Largest of `get_stage_allocation_size`."""
        return max(self.get_stage_allocation_size(), default=0)

    def profile_with_dummy_inputs(self, repeats: int = 3) -> list[float]:
        """Seconds of each of `repeats` steps on zeros, after one step to warm up."""
        structs = [(spec.shape, spec.dtype) for spec in self._plan.input_specs]
        self._costs = []
        for i in range(repeats + 1):
            leaves = self.place([_zeros(shape, dtype) for shape, dtype in structs])
            jax.block_until_ready(leaves)
            start = time.perf_counter()
            jax.block_until_ready(self.run(leaves))
            if i:
                self._costs.append(time.perf_counter() - start)
        return list(self._costs)

    def get_execution_time_costs(self) -> list[float]:
        """Seconds of the steps that `profile_with_dummy_inputs` ran."""
        return list(self._costs)

    def dump_debug_info(self, folder: str | Path) -> None:
        """Write the plan, its summary, the instructions, and the HLO of every stage program to `folder`."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        self._plan.save(root / "plan.json")
        (root / "summary.txt").write_text(self._plan.summary() + "\n")
        (root / "placements.txt").write_text(self._plan.explain("") + "\n")
        lines = []
        for i, instruction in enumerate(self._program.instructions):
            name = ""
            if isinstance(instruction, Run | Accumulate):
                name = f"{self._program.functions[instruction.function].name} "
            lines.append(f"{i}: {name}{instruction}")
        (root / "instructions.txt").write_text("\n".join(lines) + "\n")
        for i, (function, text) in enumerate(zip(self._program.functions, self.get_hlo_text(), strict=True)):
            (root / f"{i:02d}-{function.name}.hlo.txt").write_text(text)

    def sync(self) -> None:
        """Wait until the devices of the executable have made every array that was asked of them before."""
        mine = {device for mesh in self._local.meshes for device in mesh.devices.flat}
        for array in jax.live_arrays(self._platform):
            if not array.is_deleted() and mine & array.sharding.device_set:
                jax.block_until_ready(array)
        jax.effects_barrier()


def _zeros(shape: tuple[int, ...], dtype: str) -> Any:
    if dtype.startswith("key<"):
        keys = jax.random.split(jax.random.key(0, impl=_key_impl(dtype)), max(1, int(np.prod(shape))))
        return keys.reshape(shape)
    return np.zeros(shape, dtype)


def _key_impl(dtype: str) -> str:
    return {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}[dtype[4:-1]]
