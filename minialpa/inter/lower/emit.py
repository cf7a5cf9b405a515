"""Emission: a traced step and its plan in, a `Program` of instructions over numbered buffers out.

A buffer holds one (variable, micro-batch, mesh). A value that another mesh reads is transferred as soon as it exists.
Free instructions and donation follow from the last use of each buffer, see `instruction_passes`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from jax.extend.core import Var

from minialpa.inter.lower import task_functions
from minialpa.inter.lower.instruction_passes import joined_calls, last_uses, with_donations, with_frees
from minialpa.inter.lower.planned_step import PlannedStep, planned_step
from minialpa.inter.microbatch.split_step import Concatenation, is_loop
from minialpa.inter.schedule.chunks import plan_schedule
from minialpa.inter.schedule.schedules import global_order
from minialpa.inter.staging.last_pass import TaskProgram
from minialpa.inter.staging.leaf_placement import leaf_blocks
from minialpa.inter.staging.staged_step import mesh_problems, realise
from minialpa.inter.staging.tasks import Task
from minialpa.inter.staging.verify_fit import verify_staged
from minialpa.ir.equations import Atom, aval_bytes, aval_of, count_equations, is_in_host, is_literal, shape_of
from minialpa.plan import Plan
from minialpa.programs.program import (
    Accumulate,
    ConstantSlot,
    Function,
    InputSlot,
    Instruction,
    MeshShape,
    OutputSlot,
    Program,
    Run,
    Transfer,
    verify_program,
)
from minialpa.sharding import Spec
from minialpa.tracing.trace import TracedStep

#: Most bytes of a step that may be joined into one function, counted without frees.
_SMALL_BYTES = 4 * 2**20

_Name = tuple[Var, int | None, int]
"""A variable, its micro-batch (None for a value of the whole step), and its mesh."""


def emit_program(traced: TracedStep, plan: Plan) -> Program:
    """The program of `plan` for `traced`. Raises VerifyError if the plan is for another step, or does not fit it."""
    staged = realise(traced, plan).staged
    problems = mesh_problems(staged)
    verify_staged(staged, problems, plan)
    program = _Emitter(planned_step(staged, problems, plan)).run()
    verify_program(program)
    return program


class _Emitter:
    """Writes the program of a planned step, instruction by instruction.

    Attributes:
        functions_of: task -> number of the function of each run, and of the last run in its loop.
        n_equations: number of a task's function -> number of its equations.
        accumulate_of: task -> number of the function that adds its values to accumulators.
        spec_when_made: variable -> spec in which its task leaves it.
        buffers: the buffer of each value so far.
    """

    def __init__(self, step: PlannedStep) -> None:
        self.step = step
        self.plan, self.split, self.specs = step.plan, step.split, step.specs
        self.n_micro_batches = self.split.n_micro_batches
        programs = [one.program for one in step.programs]
        self.spec_when_made = {v: s for p in programs for v, s in zip(p.outvars, p.out_specs, strict=True)}

        self.program_of = {one.task: one for one in step.programs}
        self.functions: list[Function] = []
        self.functions_of: dict[Task, tuple[int, int]] = {}
        self.n_equations: dict[int, int] = {}
        self.accumulate_of: dict[Task, int] = {}
        self.instructions: list[Instruction] = []
        self.input_slots: list[InputSlot] = []
        self.constants: list[ConstantSlot] = []
        self.n_buffers = 0
        self.buffers: dict[_Name, int] = {}

    def run(self) -> Program:
        """Segment 2 k - 1 is loop k; segment 2 k follows loop k."""
        tasks = self.step.staged.tasks
        for one in self.step.programs:
            self._add_task(one)

        self._send_arguments()
        for segment in range(2 * self.split.n_loops + 1):
            self._run_segment([task for task in tasks if task.segment == segment], in_loop=is_loop(segment))
        outputs = self._without_shared_buffers(self._output_slots())

        kept = {b for slot in outputs for b in slot.buffers} | {c.buffer for c in self.constants}
        functions: Sequence[Function] = self.functions
        instructions: Sequence[Instruction] = self.instructions
        if self._may_join():
            functions, instructions = joined_calls(functions, instructions, kept, self.n_equations)
        ends = last_uses(instructions, kept)
        functions = with_donations(
            functions,
            instructions,
            ends,
            input_slots=self.input_slots,
            donated_leaves=self.step.donated_leaves,
        )
        options = self.plan.compiler_options
        return Program(
            meshes=tuple(MeshShape(stage.first_device, stage.logical_shape) for stage in self.plan.stages),
            functions=tuple(dataclasses.replace(f, compiler_options=options) for f in functions),
            inputs=tuple(self.input_slots),
            constants=tuple(self.constants),
            instructions=tuple(with_frees(instructions, ends)),
            outputs=tuple(outputs),
            donated_leaves=self.step.donated_leaves,
            n_buffers=self.n_buffers,
            blocks=leaf_blocks(self.split.traced),
        )

    def _may_join(self) -> bool:
        """Whether one function may run the step. XLA may reorder effects in a function, and keep all values."""
        has_effects = any(eqn.effects for task in self.step.staged.tasks for eqn in task.eqns)
        if len(self.plan.stages) > 1 or self.split.n_loops == 1 or has_effects:
            return False
        (stage,) = self.plan.stages
        made = (aval for x in self.instructions if isinstance(x, Run) for aval in self.functions[x.function].out_avals)
        n_bytes = sum(map(aval_bytes, made)) + self.n_micro_batches * stage.peak_bytes
        return n_bytes <= min(_SMALL_BYTES, stage.option.limit_bytes(self.plan.cluster.device) or math.inf)

    def _send_arguments(self) -> None:
        """Transfer the arguments that a mesh reads and another mesh holds between calls."""
        for task in self.step.staged.tasks:
            for v in task.invars:
                if self.step.home_of(v, task.mesh) != task.mesh:
                    self._buffer_of(v, None, task.mesh)

    def _run_segment(self, tasks: Sequence[Task], *, in_loop: bool) -> None:
        if in_loop:
            self._run_loop(tasks)
            self._finish_loop(tasks)
            return
        for task in sorted(tasks, key=lambda t: (t.level, t.mesh)):
            self._run_task(task, None)

    def _add_task(self, one: TaskProgram) -> None:
        task = one.task
        each = last = self._add_function(task_functions.task_function(task.name, task.mesh, one.program))
        if one.last is not None:
            function = task_functions.task_function(f"{task.name}.last", task.mesh, one.last.program)
            last = self._add_function(function)
        self.functions_of[task] = each, last
        self.n_equations.update(dict.fromkeys((each, last), count_equations(task.eqns)))

    def _add_function(self, function: Function) -> int:
        self.functions.append(function)
        return len(self.functions) - 1

    # ---- buffers --------------------------------------------------------------------------------------------------

    def _new_buffer(self) -> int:
        self.n_buffers += 1
        return self.n_buffers - 1

    def _buffer_of(self, var: Var, micro: int | None, mesh: int) -> int:
        """The buffer that holds `var` on `mesh`. The first read of an input or a constant makes its buffer.

        A state that several meshes read, such as tied weights, comes from the mesh where the last step leaves it.
        """
        for name in ((var, micro, mesh), (var, None, mesh)):
            if name in self.buffers:
                return self.buffers[name]

        home = self.step.home_of(var, mesh)
        if home != mesh:
            self._buffer_of(var, None, home)
            return self._transfer((var, None, home), mesh, self.specs[mesh][var])

        of_micro_batch = var is self.split.micro_index or var in self.step.full_of_micro
        assert micro is not None or not of_micro_batch, var
        buffer = self._new_buffer()
        self._fill_before_call(var, micro or 0, mesh, buffer)
        self.buffers[var, micro if of_micro_batch else None, mesh] = buffer
        return buffer

    def _fill_before_call(self, var: Var, micro: int, mesh: int, buffer: int) -> None:
        """Make a slot that fills `buffer` with a constant, an argument or the examples of a micro-batch."""
        spec = self.specs[mesh].get(var, Spec.replicated(len(shape_of(var)))).partition_spec()
        in_host = is_in_host(aval_of(var))
        if var is self.split.micro_index:
            self.constants.append(ConstantSlot(buffer, np.int32(micro), mesh, spec))
        elif var in self.step.full_of_micro:
            leaf = self.step.number_of_argument[self.step.full_of_micro[var]]
            dim = self.split.batch_dims[var]
            size = shape_of(var)[dim]
            rows = (micro * size, (micro + 1) * size, dim)
            slot = InputSlot(buffer=buffer, leaf=leaf, rows=rows, mesh=mesh, spec=spec, in_host=in_host)
            self.input_slots.append(slot)
        elif var in self.step.constants:
            self.constants.append(ConstantSlot(buffer, self.step.constants[var], mesh, spec))
        else:
            assert var in self.step.number_of_argument, f"{var} is not on mesh {mesh}"
            leaf = self.step.number_of_argument[var]
            slot = InputSlot(buffer=buffer, leaf=leaf, rows=None, mesh=mesh, spec=spec, in_host=in_host)
            self.input_slots.append(slot)

    # ---- instructions ---------------------------------------------------------------------------------------------

    def _run_task(self, task: Task, micro: int | None, *, is_last: bool = False) -> None:
        """Run a task for a micro-batch, or once per step (`micro` is None), and send its results to other meshes.

        is_last: whether it is the last run in its loop, which may be another function.
        """
        one, mesh = self.program_of[task], task.mesh
        program, ends_with = one.program, one.accumulators
        function, last = self.functions_of[task]
        if is_last and one.last is not None:
            function, program, ends_with = last, one.last.program, (*one.last.accumulators, *one.last.sums)
        self._start_accumulators(one)
        inputs = tuple(self._buffer_of(v, micro, mesh) for v in program.invars)

        # New accumulators and sums come last, and belong to no micro-batch.
        outputs = tuple(self._new_buffer() for _ in program.outvars)
        n = len(outputs) - len(ends_with)
        made = [(v, micro, mesh) for v in program.outvars[:n] if not is_literal(v)]
        self.buffers.update(zip([*made, *((v, None, mesh) for v in ends_with)], outputs, strict=True))
        self.instructions.append(Run(function, inputs, outputs))

        # Transfers overlap with the next task of this mesh.
        for v, _, _ in made:
            self._send_to_readers(v, micro, mesh)

    def _start_accumulators(self, one: TaskProgram) -> None:
        """Make zeros, to which the program of a task itself adds."""
        mesh, accumulators, specs = one.task.mesh, one.accumulators, one.program.specs
        if not accumulators or (accumulators[0], None, mesh) in self.buffers:
            return
        self._make_accumulators(
            task_functions.zeros_function(mesh, self._stored_arrays(accumulators, specs, mesh)), (), accumulators
        )

    def _make_accumulators(self, function: Function, inputs: tuple[int, ...], accumulators: Sequence[Var]) -> None:
        fresh = tuple(self._new_buffer() for _ in accumulators)
        self.instructions.append(Run(self._add_function(function), inputs, fresh))
        self.buffers.update(((v, None, function.mesh), b) for v, b in zip(accumulators, fresh, strict=True))

    def _stored_arrays(self, variables: Sequence[Var], specs: Mapping[Var, Spec], mesh: int) -> task_functions.Arrays:
        shape = self.plan.stages[mesh].logical_shape
        return [task_functions.stored(v, specs[v], shape) for v in variables]

    def _send_to_readers(self, var: Var, micro: int | None, mesh: int) -> None:
        for reader in sorted(self.step.remote_readers.get((var, mesh), ())):
            self._transfer((var, micro, mesh), reader, self.specs[reader][var])

    def _transfer(self, source: _Name, mesh: int, spec: Spec) -> int:
        """Returns the new buffer."""
        target = self._new_buffer()
        self.instructions.append(Transfer(self.buffers[source], target, mesh, spec.partition_spec()))
        self.buffers[source[0], source[1], mesh] = target
        return target

    def _run_loop(self, tasks: Sequence[Task]) -> None:
        """Run tasks in the order of the schedule."""
        by_pass = {(t.kind, t.chunk): t for t in tasks}
        if ("step", 0) in by_pass:
            for m in range(self.n_micro_batches):
                self._run_loop_task(by_pass["step", 0], m)
            return
        if not tasks:
            return
        for entry in global_order(plan_schedule(self.plan, tasks[0].loop)):
            task = by_pass.get((entry.kind, entry.chunk))
            if task is not None:
                self._run_loop_task(task, entry.micro_batch)

    def _run_loop_task(self, task: Task, micro: int) -> None:
        # The values of a single micro-batch are the values of the step.
        if self.n_micro_batches == 1:
            self._run_task(task, None)
            return
        # Every task of a loop takes the micro-batches in their order.
        self._run_task(task, micro, is_last=micro == self.n_micro_batches - 1)
        self._accumulate(task, micro)

    def _accumulate(self, task: Task, micro: int) -> None:
        """Add the values of a micro-batch to accumulators. The first values become the accumulators."""
        # The program of the task itself adds to these.
        inside = set(self.program_of[task].accumulators)
        mine = [a for a in self.split.accumulators if a.loop in task.outvars and a.complete not in inside]
        if not mine:
            return

        # An accumulator has the spec of its value.
        mesh, accumulators = task.mesh, [a.complete for a in mine]
        specs = {var: self.specs[mesh][a.loop] for a in mine for var in (a.loop, a.complete)}
        stored_values = self._stored_arrays([a.loop for a in mine], specs, mesh)
        stored_accumulators = self._stored_arrays(accumulators, specs, mesh)

        values = tuple(self.buffers[a.loop, micro, mesh] for a in mine)
        if (accumulators[0], None, mesh) not in self.buffers:
            # In new buffers: the dtype may be wider, and other tasks may read the value.
            self._make_accumulators(
                task_functions.widen_function(mesh, stored_values, stored_accumulators), values, accumulators
            )
            return

        if task not in self.accumulate_of:
            reductions = [a.reduction for a in mine]
            function = task_functions.accumulate_function(mesh, stored_accumulators, stored_values, reductions)
            self.accumulate_of[task] = self._add_function(function)
        kept = tuple(self.buffers[v, None, mesh] for v in accumulators)
        self.instructions.append(Accumulate(self.accumulate_of[task], kept, values))

    def _finish_loop(self, tasks: Sequence[Task]) -> None:
        """Combine the values of all micro-batches of a loop, and send them to their readers."""
        made = {v for task in tasks for v in task.outvars}
        concatenations = [joined for joined in self.split.concatenations if joined.loop in made]
        for joined in concatenations:
            self._concatenate(joined, min(task.mesh for task in tasks if joined.loop in task.outvars))

        accumulators = [a.complete for a in self.split.accumulators if a.loop in made] + [
            s.complete for s in concatenations
        ]
        for var in dict.fromkeys(accumulators):
            for mesh in range(self.step.staged.n_meshes):
                if (var, None, mesh) in self.buffers and (var, mesh) in self.step.remote_readers:
                    self._send_to_readers(var, None, mesh)

    def _concatenate(self, joined: Concatenation, mesh: int) -> None:
        spec = self.specs[mesh][joined.loop]
        function = self._add_function(task_functions.concatenate_function(mesh, joined, self.n_micro_batches, spec))
        parts = tuple(self.buffers[joined.loop, micro, mesh] for micro in range(self.n_micro_batches))
        self.buffers[joined.complete, None, mesh] = self._new_buffer()
        self.instructions.append(Run(function, parts, (self.buffers[joined.complete, None, mesh],)))

    # ---- results --------------------------------------------------------------------------------------------------

    def _output_slots(self) -> list[OutputSlot]:
        slots = []
        for atom, value in zip(self.split.outvars, self.step.results, strict=True):
            places = zip(value.mesh_ids, value.specs, strict=True)
            slots.append(
                OutputSlot(tuple(self._output_buffer(atom, mesh, spec) for mesh, spec in places), value.mesh_ids)
            )
        return slots

    def _output_buffer(self, atom: Atom, mesh: int, spec: Spec) -> int:
        """A buffer of a result in `spec`, after a transfer if necessary."""
        if is_literal(atom):
            buffer = self._new_buffer()
            value = np.asarray(atom.val, aval_of(atom).dtype)
            self.constants.append(ConstantSlot(buffer, value, mesh, spec.partition_spec()))
            return buffer

        home = next((m for m in range(self.step.staged.n_meshes) if (atom, None, m) in self.buffers), None)
        if (atom, None, mesh) not in self.buffers and home is not None:
            return self._transfer((atom, None, home), mesh, spec)

        buffer = self._buffer_of(atom, None, mesh)
        if self.spec_when_made.get(atom, self.specs[mesh].get(atom, spec)) == spec:
            return buffer
        target = self._new_buffer()
        self.instructions.append(Transfer(buffer, target, mesh, spec.partition_spec()))
        return target

    def _without_shared_buffers(self, slots: list[OutputSlot]) -> list[OutputSlot]:
        """Copy results that would share a buffer with a constant, an argument that stays, or another result.

        A caller may donate any result to a later call, and must not lose another array by it.
        """
        taken = self._undonatable_buffers()
        copies: dict[int, list[tuple[int, int, Atom, Spec]]] = defaultdict(list)
        out = []
        for slot, atom, value in zip(slots, self.split.outvars, self.step.results, strict=True):
            buffers = list(slot.buffers)
            for i, (buffer, mesh) in enumerate(zip(slot.buffers, slot.meshes, strict=True)):
                if buffer in taken:
                    buffers[i] = self._new_buffer()
                    copies[mesh].append((buffer, buffers[i], atom, value.specs[i]))
                taken.add(buffer)
            out.append(OutputSlot(tuple(buffers), slot.meshes))

        for mesh, mine in sorted(copies.items()):
            copied = [task_functions.stored(atom, spec, ()) for _, _, atom, spec in mine]
            function = self._add_function(task_functions.copy_function(mesh, copied))
            self.instructions.append(Run(function, tuple(c[0] for c in mine), tuple(c[1] for c in mine)))
        return out

    def _undonatable_buffers(self) -> set[int]:
        """Buffers of constants and of arguments that the caller keeps."""
        given = self.step.donated_leaves
        taken = {c.buffer for c in self.constants} | {s.buffer for s in self.input_slots if s.leaf not in given}
        for instruction in self.instructions:
            # A transfer within one device may keep the buffer.
            if isinstance(instruction, Transfer) and instruction.source in taken:
                taken.add(instruction.target)
        return taken
