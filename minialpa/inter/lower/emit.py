"""Emission: the program that runs a traced step by its plan.

Buffers are named by (variable, micro-batch, mesh). A value that another mesh reads is transferred as soon as it is
made. Free instructions and donation follow from the last read of each buffer.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Var

from minialpa.inter.lower import task_functions
from minialpa.inter.microbatch.split_step import Stack, is_loop
from minialpa.inter.schedule.chunks import plan_schedule
from minialpa.inter.schedule.schedules import global_order
from minialpa.inter.staging.leaf_placement import leaf_blocks, values_of_parts
from minialpa.inter.staging.mesh_problem import ShardedView, task_program
from minialpa.inter.staging.staged_step import bind_specs, final_specs, mesh_problems, realise
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.inter.staging.transfers import remote_readers
from minialpa.inter.staging.verify_fit import verify_staged
from minialpa.intra.graph.problem import MeshEquations
from minialpa.intra.spmd import ShardedEquations
from minialpa.plan import Plan
from minialpa.programs.program import (
    Accumulate,
    ConstantSlot,
    Free,
    Function,
    InputSlot,
    Instruction,
    MeshShape,
    OutputSlot,
    Program,
    Run,
    Transfer,
    reads,
    verify_program,
    writes,
)
from minialpa.sharding import EquationSpecs, Spec
from minialpa.tracing.jaxprs import Atom, aval_of, is_literal, shape_of
from minialpa.tracing.trace import TracedStep

Name = tuple[Var, int | None, int]  # variable, micro-batch, mesh


def emit_program(traced: TracedStep, plan: Plan) -> Program:
    """The program of `plan` for `traced`. Raises VerifyError if the plan is for another step, or does not fit it."""
    staged = realise(traced, plan)
    problems = mesh_problems(staged)
    verify_staged(staged, problems, plan)
    program = _Emitter(staged, problems, plan).run()
    verify_program(program)
    return program


class _Emitter:
    def __init__(self, staged: StagedStep, problems: Sequence[MeshEquations], plan: Plan) -> None:
        self.staged, self.plan = staged, plan
        self.split = staged.split
        self.n = self.split.n_micro_batches
        self.outputs = values_of_parts(plan.outputs, self.split.traced.out_parts)
        self.specs: list[dict[Var, Spec]] = []
        self.equations: dict[int, dict[int, EquationSpecs]] = {}
        for mesh, (problem, stage) in enumerate(zip(problems, plan.stages, strict=True)):
            specs, equations = bind_specs(problem, stage)
            self.specs.append(specs)
            self.equations[mesh] = {id(e): s for e, s in zip(problem.eqns, equations, strict=True)}
        self.functions: list[Function] = []
        self.made_once: dict[tuple[str, int], int] = {}
        self.instructions: list[Instruction] = []
        self.buffers: dict[Name, int] = {}
        self.input_slots: list[InputSlot] = []
        self.constants: list[ConstantSlot] = []
        self.n_buffers = 0
        self.remote_readers = remote_readers(staged)
        self.micro_source = {micro: full for full, micro in self.split.micro_inputs}
        self.number_of_input = {v: i for i, v in enumerate(self.split.traced.flat.invars)}
        self.consts = dict(zip(self.split.traced.flat.constvars, self.split.traced.flat.consts, strict=True))
        replaced = zip(self.split.traced.layouts, self.outputs, strict=True)
        self.home_of_input: dict[int | None, int] = {
            number: value.mesh_ids[0] for number, value in replaced if number is not None
        }

    def run(self) -> Program:
        tasks = self.staged.tasks
        programs = [self._program(task) for task in tasks]
        self.made_as = {v: s for p in programs for v, s in zip(p.outvars, p.out_specs, strict=True)}
        number = {
            id(task): self._add_function(task_functions.task_function(task.name, task.mesh, program))
            for task, program in zip(tasks, programs, strict=True)
        }

        self._send_arguments()
        for segment in range(2 * self.split.n_loops + 1):
            self._segment([task for task in tasks if task.segment == segment], is_loop(segment), number)

        outputs = self._own_buffers(self._outputs())
        self._insert_frees(outputs)
        return Program(
            meshes=tuple(MeshShape(stage.first_device, stage.logical_shape) for stage in self.plan.stages),
            functions=tuple(self.functions),
            inputs=tuple(self.input_slots),
            constants=tuple(self.constants),
            instructions=tuple(self.instructions),
            outputs=tuple(outputs),
            donated_leaves=self._donated_leaves(),
            n_buffers=self.n_buffers,
            blocks=leaf_blocks(self.split.traced),
        )

    def _send_arguments(self) -> None:
        """Transfer first the arguments that a mesh reads and another mesh holds between calls."""
        for task in self.staged.tasks:
            for v in task.invars:
                if self._home_of_argument(v, task.mesh) != task.mesh:
                    self._buffer(v, None, task.mesh)

    def _segment(self, tasks: Sequence[Task], in_loop: bool, number: dict[int, int]) -> None:
        if in_loop:
            self._loop(tasks, number)
            self._finish_loop(tasks)
            return
        for task in sorted(tasks, key=lambda t: (t.level, t.mesh)):
            self._run_task(task, number[id(task)], None)

    def _donated_leaves(self) -> frozenset[int]:
        return frozenset(a for a in self.split.traced.aliases if a is not None)

    # ---- functions ------------------------------------------------------------------------------------------------

    def _add_function(self, function: Function) -> int:
        self.functions.append(function)
        return len(self.functions) - 1

    def _program(self, task: Task) -> ShardedEquations:
        stage = self.plan.stages[task.mesh]
        view = ShardedView(stage.mesh, stage.forbidden)
        results = final_specs(self.staged, self.plan, task.mesh)
        return task_program(self.staged, task, self.specs[task.mesh], self.equations[task.mesh], view, results)

    # ---- buffers --------------------------------------------------------------------------------------------------

    def _new(self) -> int:
        self.n_buffers += 1
        return self.n_buffers - 1

    def _home_of_argument(self, var: Var, mesh: int) -> int:
        """The mesh from which `mesh` gets an argument: the one that holds a state between steps, or itself."""
        if var in self.micro_source:
            return mesh
        return self.home_of_input.get(self.number_of_input.get(var), mesh)

    def _buffer(self, var: Var, micro: int | None, mesh: int) -> int:
        """The buffer that holds `var` on `mesh`; inputs and constants get theirs at the first read.

        A state that several meshes read, as tied weights, comes from the mesh where the last step has left it.
        """
        for name in ((var, micro, mesh), (var, None, mesh)):
            if name in self.buffers:
                return self.buffers[name]

        home = self._home_of_argument(var, mesh)
        if home != mesh:
            self._buffer(var, None, home)
            return self._transfer((var, None, home), mesh, self.specs[mesh][var])

        of_micro_batch = var is self.split.micro_index or var in self.micro_source
        assert micro is not None or not of_micro_batch, var
        buffer = self._new()
        self._fill_before_call(var, micro or 0, mesh, buffer)
        self.buffers[var, micro if of_micro_batch else None, mesh] = buffer
        return buffer

    def _fill_before_call(self, var: Var, micro: int, mesh: int, buffer: int) -> None:
        """Let a constant, an argument or the rows of a micro-batch fill `buffer`."""
        spec = self.specs[mesh].get(var, Spec.replicated(len(shape_of(var)))).partition_spec()
        if var is self.split.micro_index:
            self.constants.append(ConstantSlot(buffer, np.int32(micro), mesh, spec))
        elif var in self.micro_source:
            leaf = self.number_of_input[self.micro_source[var]]
            dim = self.split.batch_dims[var]
            size = shape_of(var)[dim]
            rows = (micro * size, (micro + 1) * size, dim)
            self.input_slots.append(InputSlot(buffer=buffer, leaf=leaf, rows=rows, mesh=mesh, spec=spec))
        elif var in self.consts:
            self.constants.append(ConstantSlot(buffer, self.consts[var], mesh, spec))
        else:
            assert var in self.number_of_input, f"{var} is not on mesh {mesh}"
            leaf = self.number_of_input[var]
            self.input_slots.append(InputSlot(buffer=buffer, leaf=leaf, rows=None, mesh=mesh, spec=spec))

    # ---- instructions ---------------------------------------------------------------------------------------------

    def _run_task(self, task: Task, function: int, micro: int | None) -> None:
        inputs = tuple(self._buffer(v, micro, task.mesh) for v in task.invars)
        outputs = []
        for v in task.outvars:
            self.buffers[v, micro, task.mesh] = self._new()
            outputs.append(self.buffers[v, micro, task.mesh])
        self.instructions.append(Run(function, inputs, tuple(outputs)))
        for v in task.outvars:
            self._send(v, micro, task.mesh)

    def _send(self, var: Var, micro: int | None, mesh: int) -> None:
        for reader in sorted(self.remote_readers.get((var, mesh), ())):
            self._transfer((var, micro, mesh), reader, self.specs[reader][var])

    def _transfer(self, source: Name, mesh: int, spec: Spec) -> int:
        target = self._new()
        self.instructions.append(Transfer(self.buffers[source], target, mesh, spec.partition_spec()))
        self.buffers[source[0], source[1], mesh] = target
        return target

    def _loop(self, tasks: Sequence[Task], number: dict[int, int]) -> None:
        """The passes of one loop, in the order of its schedule."""
        by_pass = {(t.kind, t.chunk): t for t in tasks}
        if ("step", 0) in by_pass:
            for m in range(self.n):
                self._run_loop_task(by_pass["step", 0], number, m)
            return
        if not tasks:
            return
        for entry in global_order(plan_schedule(self.plan, tasks[0].loop)):
            task = by_pass.get((entry.kind, entry.chunk))
            if task is not None:
                self._run_loop_task(task, number, entry.micro_batch)

    def _run_loop_task(self, task: Task, number: dict[int, int], micro: int) -> None:
        # With one micro-batch its values are the step's values.
        self._run_task(task, number[id(task)], micro if self.n > 1 else None)
        if self.n > 1:
            self._accumulate(task, micro)

    def _accumulate(self, task: Task, micro: int) -> None:
        mine = [a for a in self.split.accumulators if a.loop in task.outvars]
        if not mine:
            return

        mesh, specs = task.mesh, self.specs[task.mesh]
        shape = self.plan.stages[mesh].logical_shape
        loops, totals = [a.loop for a in mine], [a.total for a in mine]
        values = tuple(self.buffers[v, micro, mesh] for v in loops)
        if (totals[0], None, mesh) in self.buffers:
            function = self._once("accumulate", task, lambda: task_functions.accumulate_function(
                mesh, shape, loops, totals, [a.reduction for a in mine], specs))  # fmt: skip
            kept = tuple(self.buffers[v, None, mesh] for v in totals)
            self.instructions.append(Accumulate(function, kept, values))
            return

        # The first values become the totals, in new buffers where the dtype is wider or others read the value.
        function = self._once("widen", task, lambda: task_functions.widen_function(mesh, shape, loops, totals, specs))
        fresh = tuple(self._new() for _ in totals)
        self.instructions.append(Run(function, values, fresh))
        self.buffers.update(((v, None, mesh), b) for v, b in zip(totals, fresh, strict=True))

    def _once(self, kind: str, task: Task, make: Callable[[], Function]) -> int:
        if (kind, id(task)) not in self.made_once:
            self.made_once[kind, id(task)] = self._add_function(make())
        return self.made_once[kind, id(task)]

    def _finish_loop(self, tasks: Sequence[Task]) -> None:
        """Combine what the micro-batches of a loop leave, and send it to the meshes that read it."""
        made = {v for task in tasks for v in task.outvars}
        stacks = [stack for stack in self.split.stacks if stack.loop in made]
        for stack in stacks:
            self._concatenate(stack, min(task.mesh for task in tasks if stack.loop in task.outvars))

        totals = [a.total for a in self.split.accumulators if a.loop in made] + [s.total for s in stacks]
        for var in dict.fromkeys(totals):
            for mesh in range(self.staged.n_meshes):
                if (var, None, mesh) in self.buffers and (var, mesh) in self.remote_readers:
                    self._send(var, None, mesh)

    def _concatenate(self, stack: Stack, mesh: int) -> None:
        spec = self.specs[mesh][stack.loop]
        function = self._add_function(
            task_functions.concatenate_function(mesh, stack.loop, stack.total, stack.dim, self.n, spec)
        )
        parts = tuple(self.buffers[stack.loop, micro, mesh] for micro in range(self.n))
        self.buffers[stack.total, None, mesh] = self._new()
        self.instructions.append(Run(function, parts, (self.buffers[stack.total, None, mesh],)))

    # ---- results --------------------------------------------------------------------------------------------------

    def _outputs(self) -> list[OutputSlot]:
        slots = []
        for atom, value in zip(self.split.outvars, self.outputs, strict=True):
            places = zip(value.mesh_ids, value.specs, strict=True)
            slots.append(OutputSlot(tuple(self._output(atom, mesh, spec) for mesh, spec in places), value.mesh_ids))
        return slots

    def _output(self, atom: Atom, mesh: int, spec: Spec) -> int:
        """The buffer on `mesh` with a result, resharded to `spec` if it is made by another one."""
        if is_literal(atom):
            return self._constant(atom.val, aval_of(atom).dtype, mesh, spec)

        home = self._home(atom)
        if (atom, None, mesh) not in self.buffers and home is not None:
            return self._transfer((atom, None, home), mesh, spec)

        buffer = self._buffer(atom, None, mesh)
        if self.made_as.get(atom, self.specs[mesh].get(atom, spec)) == spec:
            return buffer
        target = self._new()
        self.instructions.append(Transfer(buffer, target, mesh, spec.partition_spec()))
        return target

    def _own_buffers(self, slots: list[OutputSlot]) -> list[OutputSlot]:
        """Copies of results that would share a buffer with a constant, an argument that stays, or another result.

        A caller may donate any result to a later call, which must not take another array with it.
        """
        taken = self._not_to_donate()
        copies: dict[int, list[tuple[int, int, Any, Spec]]] = defaultdict(list)
        out = []
        for slot, atom, value in zip(slots, self.split.outvars, self.outputs, strict=True):
            buffers = list(slot.buffers)
            for i, (buffer, mesh) in enumerate(zip(slot.buffers, slot.meshes, strict=True)):
                if buffer in taken:
                    buffers[i] = self._new()
                    copies[mesh].append((buffer, buffers[i], atom.aval, value.specs[i]))
                taken.add(buffer)
            out.append(OutputSlot(tuple(buffers), slot.meshes))

        for mesh, wanted in sorted(copies.items()):
            copied = [(aval, spec) for _, _, aval, spec in wanted]
            function = self._add_function(task_functions.copy_function(mesh, copied))
            self.instructions.append(Run(function, tuple(w[0] for w in wanted), tuple(w[1] for w in wanted)))
        return out

    def _not_to_donate(self) -> set[int]:
        """Buffers that hold a constant, or an argument that the caller keeps."""
        given = self._donated_leaves()
        taken = {c.buffer for c in self.constants} | {s.buffer for s in self.input_slots if s.leaf not in given}
        for instruction in self.instructions:
            # A transfer within one device may keep the buffer.
            if isinstance(instruction, Transfer) and instruction.source in taken:
                taken.add(instruction.target)
        return taken

    def _home(self, var: Var) -> int | None:
        """First mesh that holds `var` already."""
        return next((m for m in range(self.staged.n_meshes) if (var, None, m) in self.buffers), None)

    def _constant(self, value: Any, dtype: Any, mesh: int, spec: Spec) -> int:
        buffer = self._new()
        self.constants.append(ConstantSlot(buffer, np.asarray(value, dtype), mesh, spec.partition_spec()))
        return buffer

    def _insert_frees(self, outputs: list[OutputSlot]) -> None:
        """Free each buffer behind its last read, and let functions take over buffers that end with them."""
        kept = {b for slot in outputs for b in slot.buffers} | {c.buffer for c in self.constants}
        last = {
            b: i for i, instruction in enumerate(self.instructions) for b in (*reads(instruction), *writes(instruction))
        }
        ends: dict[int, list[int]] = defaultdict(list)
        for buffer, i in last.items():
            if buffer not in kept:
                ends[i].append(buffer)

        self._donate(ends)
        out: list[Instruction] = []
        for i, instruction in enumerate(self.instructions):
            out.append(instruction)
            if ends[i]:
                out.append(Free(tuple(sorted(ends[i]))))
        self.instructions = out

    def _donate(self, ends: dict[int, list[int]]) -> None:
        aliased = self._donated_leaves()
        is_micro = {s.buffer for s in self.input_slots if s.rows is not None}
        foreign = {s.buffer for s in self.input_slots if s.leaf not in aliased} - is_micro
        given = {s.buffer for s in self.input_slots if s.leaf in aliased}

        # One compiled function serves all of its runs, so it may take over only what ends with each of them.
        may: dict[int, set[int]] = {}
        arguments: dict[int, set[int]] = defaultdict(set)
        for i, instruction in enumerate(self.instructions):
            if isinstance(instruction, Run):
                arguments[instruction.function] |= {k for k, b in enumerate(instruction.inputs) if b in given}
                over = set(ends[i]) - foreign
                counts = Counter(instruction.inputs)
                mine = {k for k, b in enumerate(instruction.inputs) if b in over and counts[b] == 1}
                may[instruction.function] = may.get(instruction.function, mine) & mine

        for number, positions in may.items():
            function = self.functions[number]
            # The caller's arrays first: what the step makes itself is freed anyway.
            first = sorted(positions, key=lambda k: (k not in arguments[number], k))
            usable = _usable_donations(function, first)
            self.functions[number] = dataclasses.replace(function, donated=usable)


def _usable_donations(function: Function, positions: list[int]) -> tuple[int, ...]:
    """Inputs for which there is an output of the same shape, dtype and layout that no earlier input takes."""
    free = Counter((o.shape, str(o.dtype), s) for o, s in zip(function.out_avals, function.out_specs, strict=True))
    usable = []
    for k in positions:
        aval = function.in_avals[k]
        key = (aval.shape, str(aval.dtype), function.in_specs[k])
        if free[key] > 0:
            free[key] -= 1
            usable.append(k)
    return tuple(sorted(usable))
