"""Emission: the program that runs a traced step by its plan.

Buffers are named by (variable, micro-batch, mesh). A value that another mesh reads is transferred as soon as it is
made. Free instructions and donation follow from the last use of each buffer, see `lifetimes`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Var

from minialpa.inter.lower import task_functions
from minialpa.inter.lower.joined_calls import joined_calls
from minialpa.inter.lower.lifetimes import last_uses, with_donations, with_frees
from minialpa.inter.lower.planned_step import PlannedStep, planned_step
from minialpa.inter.microbatch.split_step import Stack, is_loop
from minialpa.inter.schedule.chunks import plan_schedule
from minialpa.inter.schedule.schedules import global_order
from minialpa.inter.staging.last_pass import TaskProgram
from minialpa.inter.staging.leaf_placement import leaf_blocks
from minialpa.inter.staging.staged_step import mesh_problems, realise
from minialpa.inter.staging.tasks import Task
from minialpa.inter.staging.verify_fit import verify_staged
from minialpa.ir.equations import Atom, aval_bytes, aval_of, count_equations, is_literal, shape_of
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

#: Bytes of a step that is joined into one function where that compiles sooner, if nothing in it is freed.
_SMALL_BYTES = 4 * 2**20

_Name = tuple[Var, int | None, int]
"""What a buffer holds: a variable, of a micro-batch (None for a value of the whole step), on a mesh."""


def emit_program(traced: TracedStep, plan: Plan) -> Program:
    """The program of `plan` for `traced`. Raises VerifyError if the plan is for another step, or does not fit it."""
    staged = realise(traced, plan).staged
    problems = mesh_problems(staged)
    verify_staged(staged, problems, plan)
    program = _Emitter(planned_step(staged, problems, plan)).run()
    verify_program(program)
    return program


class _Numbers(NamedTuple):
    """Numbers of the functions of a task: of each run, and of the last one in its loop."""

    each: int
    last: int


class _Emitter:
    """Writes the program of a planned step, instruction by instruction.

    Attributes:
        buffers: the buffer of each value that was written so far.
        n_equations: about how many each function has.
        made_once: the functions that add up the values of each task's micro-batches, by what they do and the task.
    """

    def __init__(self, step: PlannedStep) -> None:
        self.step = step
        self.plan, self.split, self.specs = step.plan, step.split, step.specs
        self.n_micro_batches = self.split.n_micro_batches
        programs = [one.program for one in step.programs]
        self.made_as = {v: s for p in programs for v, s in zip(p.outvars, p.out_specs, strict=True)}

        self.program_of = {one.task: one for one in step.programs}
        self.functions: list[Function] = []
        self.n_equations: list[int] = []
        self.instructions: list[Instruction] = []
        self.input_slots: list[InputSlot] = []
        self.constants: list[ConstantSlot] = []
        self.n_buffers = 0
        self.buffers: dict[_Name, int] = {}
        self.made_once: dict[tuple[str, Task], int] = {}

    def run(self) -> Program:
        tasks = self.step.staged.tasks
        number = {one.task: self._add_task(one) for one in self.step.programs}

        self._send_arguments()
        for segment in range(2 * self.split.n_loops + 1):
            self._segment([task for task in tasks if task.segment == segment], is_loop(segment), number)
        outputs = self._own_buffers(self._outputs())

        # Only the complete list of instructions says which use of a buffer is the last.
        kept = {b for slot in outputs for b in slot.buffers} | {c.buffer for c in self.constants}
        functions, instructions = self.functions, self.instructions
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
        """Whether one function may do all: on one mesh, in several loops, without effects, whose order would be left to
        XLA, and so small that it hardly matters that XLA may hold more and gather less often than the plan says."""
        one_loop = self.split.n_loops == 1
        if len(self.plan.stages) > 1 or one_loop or any(e.effects for t in self.step.staged.tasks for e in t.eqns):
            return False
        (stage,) = self.plan.stages
        made = (aval for x in self.instructions if isinstance(x, Run) for aval in self.functions[x.function].out_avals)
        n_bytes = sum(map(aval_bytes, made)) + self.n_micro_batches * stage.peak_bytes
        return n_bytes <= min(_SMALL_BYTES, stage.option.limit_bytes(self.plan.cluster.device) or math.inf)

    def _send_arguments(self) -> None:
        """Transfer first the arguments that a mesh reads and another mesh holds between calls."""
        for task in self.step.staged.tasks:
            for v in task.invars:
                if self.step.home_of(v, task.mesh) != task.mesh:
                    self._buffer(v, None, task.mesh)

    def _segment(self, tasks: Sequence[Task], in_loop: bool, number: dict[Task, _Numbers]) -> None:
        if in_loop:
            self._loop(tasks, number)
            self._finish_loop(tasks)
            return
        for task in sorted(tasks, key=lambda t: (t.level, t.mesh)):
            self._run_task(task, number[task].each, None)

    def _add_task(self, one: TaskProgram) -> _Numbers:
        task, n_equations = one.task, count_equations(one.task.eqns)
        each = self._add_function(task_functions.task_function(task.name, task.mesh, one.program), n_equations)
        if one.last is None:
            return _Numbers(each, each)
        last = task_functions.task_function(f"{task.name}.last", task.mesh, one.last.program)
        return _Numbers(each, self._add_function(last, n_equations))

    def _add_function(self, function: Function, n_equations: int | None = None) -> int:
        """n_equations: None for one equation for each result."""
        self.functions.append(function)
        self.n_equations.append(len(function.out_avals) if n_equations is None else n_equations)
        return len(self.functions) - 1

    # ---- buffers --------------------------------------------------------------------------------------------------

    def _new(self) -> int:
        self.n_buffers += 1
        return self.n_buffers - 1

    def _buffer(self, var: Var, micro: int | None, mesh: int) -> int:
        """The buffer that holds `var` on `mesh`; inputs and constants get theirs at the first read.

        A state that several meshes read, as tied weights, comes from the mesh where the last step has left it.
        """
        for name in ((var, micro, mesh), (var, None, mesh)):
            if name in self.buffers:
                return self.buffers[name]

        home = self.step.home_of(var, mesh)
        if home != mesh:
            self._buffer(var, None, home)
            return self._transfer((var, None, home), mesh, self.specs[mesh][var])

        of_micro_batch = var is self.split.micro_index or var in self.step.full_of_micro
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
        elif var in self.step.full_of_micro:
            leaf = self.step.number_of_argument[self.step.full_of_micro[var]]
            dim = self.split.batch_dims[var]
            size = shape_of(var)[dim]
            rows = (micro * size, (micro + 1) * size, dim)
            self.input_slots.append(InputSlot(buffer=buffer, leaf=leaf, rows=rows, mesh=mesh, spec=spec))
        elif var in self.step.constants:
            self.constants.append(ConstantSlot(buffer, self.step.constants[var], mesh, spec))
        else:
            assert var in self.step.number_of_argument, f"{var} is not on mesh {mesh}"
            leaf = self.step.number_of_argument[var]
            self.input_slots.append(InputSlot(buffer=buffer, leaf=leaf, rows=None, mesh=mesh, spec=spec))

    # ---- instructions ---------------------------------------------------------------------------------------------

    def _run_task(self, task: Task, function: int, micro: int | None, *, is_last: bool = False) -> None:
        """Run a task. is_last: whether it is the last run in its loop, and that is another function."""
        one, mesh = self.program_of[task], task.mesh
        program, ends_with = one.program, one.totals
        if is_last and one.last is not None:
            program, ends_with = one.last.program, (*one.last.totals, *one.last.sums)
        self._start_totals(one)
        inputs = tuple(self._buffer(v, micro, mesh) for v in program.invars)

        # Totals, which take the places of the old ones, and sums belong to no micro-batch. They come last.
        outputs = tuple(self._new() for _ in program.outvars)
        n = len(outputs) - len(ends_with)
        made = [(v, micro, mesh) for v in program.outvars[:n] if not is_literal(v)]
        self.buffers.update(zip([*made, *((v, None, mesh) for v in ends_with)], outputs, strict=True))
        self.instructions.append(Run(function, inputs, outputs))

        # Other meshes get their copies now, while this one goes on.
        for v, _, _ in made:
            self._send(v, micro, mesh)

    def _start_totals(self, one: TaskProgram) -> None:
        """Totals of zero, in front of the first micro-batch."""
        mesh, totals, specs = one.task.mesh, one.totals, one.program.specs
        if not totals or (totals[0], None, mesh) in self.buffers:
            return
        values = [(task_functions.stored(v, specs[v], self._shape(mesh)), specs[v]) for v in totals]
        function = self._add_function(task_functions.zeros_function(mesh, values))
        fresh = tuple(self._new() for _ in totals)
        self.instructions.append(Run(function, (), fresh))
        self.buffers.update(((v, None, mesh), b) for v, b in zip(totals, fresh, strict=True))

    def _shape(self, mesh: int) -> tuple[int, ...]:
        return self.plan.stages[mesh].logical_shape

    def _send(self, var: Var, micro: int | None, mesh: int) -> None:
        for reader in sorted(self.step.remote_readers.get((var, mesh), ())):
            self._transfer((var, micro, mesh), reader, self.specs[reader][var])

    def _transfer(self, source: _Name, mesh: int, spec: Spec) -> int:
        target = self._new()
        self.instructions.append(Transfer(self.buffers[source], target, mesh, spec.partition_spec()))
        self.buffers[source[0], source[1], mesh] = target
        return target

    def _loop(self, tasks: Sequence[Task], number: dict[Task, _Numbers]) -> None:
        """The passes of one loop, in the order of its schedule."""
        by_pass = {(t.kind, t.chunk): t for t in tasks}
        if ("step", 0) in by_pass:
            for m in range(self.n_micro_batches):
                self._run_loop_task(by_pass["step", 0], number, m)
            return
        if not tasks:
            return
        for entry in global_order(plan_schedule(self.plan, tasks[0].loop)):
            task = by_pass.get((entry.kind, entry.chunk))
            if task is not None:
                self._run_loop_task(task, number, entry.micro_batch)

    def _run_loop_task(self, task: Task, number: dict[Task, _Numbers], micro: int) -> None:
        # With one micro-batch its values are the step's values.
        # Every task of a loop takes the micro-batches in their order.
        is_last = self.n_micro_batches > 1 and micro == self.n_micro_batches - 1
        function = number[task].last if is_last else number[task].each
        self._run_task(task, function, micro if self.n_micro_batches > 1 else None, is_last=is_last)
        if self.n_micro_batches > 1:
            self._accumulate(task, micro)

    def _accumulate(self, task: Task, micro: int) -> None:
        """Add the values of a micro-batch to their totals; those of the first become the totals."""
        # Those that the program of the task does not add up itself.
        inside = set(self.program_of[task].totals)
        mine = [a for a in self.split.accumulators if a.loop in task.outvars and a.total not in inside]
        if not mine:
            return

        mesh = task.mesh
        combined = task_functions.TaskTotals(
            mesh=mesh,
            mesh_shape=self._shape(mesh),
            values=[a.loop for a in mine],
            totals=[a.total for a in mine],
            reductions=[a.reduction for a in mine],
            specs=self.specs[mesh],
        )
        values = tuple(self.buffers[v, micro, mesh] for v in combined.values)
        if (combined.totals[0], None, mesh) in self.buffers:
            function = self._once("accumulate", task, lambda: task_functions.accumulate_function(combined))
            kept = tuple(self.buffers[v, None, mesh] for v in combined.totals)
            self.instructions.append(Accumulate(function, kept, values))
            return

        # In new buffers: the dtype may be wider, and others may read the value.
        function = self._once("widen", task, lambda: task_functions.widen_function(combined))
        fresh = tuple(self._new() for _ in mine)
        self.instructions.append(Run(function, values, fresh))
        self.buffers.update(((v, None, mesh), b) for v, b in zip(combined.totals, fresh, strict=True))

    def _once(self, kind: str, task: Task, make: Callable[[], Function]) -> int:
        if (kind, task) not in self.made_once:
            self.made_once[kind, task] = self._add_function(make())
        return self.made_once[kind, task]

    def _finish_loop(self, tasks: Sequence[Task]) -> None:
        """Combine what the micro-batches of a loop leave, and send it to the meshes that read it."""
        made = {v for task in tasks for v in task.outvars}
        stacks = [stack for stack in self.split.stacks if stack.loop in made]
        for stack in stacks:
            self._concatenate(stack, min(task.mesh for task in tasks if stack.loop in task.outvars))

        totals = [a.total for a in self.split.accumulators if a.loop in made] + [s.total for s in stacks]
        for var in dict.fromkeys(totals):
            for mesh in range(self.step.staged.n_meshes):
                if (var, None, mesh) in self.buffers and (var, mesh) in self.step.remote_readers:
                    self._send(var, None, mesh)

    def _concatenate(self, stack: Stack, mesh: int) -> None:
        spec = self.specs[mesh][stack.loop]
        function = self._add_function(task_functions.concatenate_function(mesh, stack, self.n_micro_batches, spec))
        parts = tuple(self.buffers[stack.loop, micro, mesh] for micro in range(self.n_micro_batches))
        self.buffers[stack.total, None, mesh] = self._new()
        self.instructions.append(Run(function, parts, (self.buffers[stack.total, None, mesh],)))

    # ---- results --------------------------------------------------------------------------------------------------

    def _outputs(self) -> list[OutputSlot]:
        slots = []
        for atom, value in zip(self.split.outvars, self.step.results, strict=True):
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
        for slot, atom, value in zip(slots, self.split.outvars, self.step.results, strict=True):
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
        given = self.step.donated_leaves
        taken = {c.buffer for c in self.constants} | {s.buffer for s in self.input_slots if s.leaf not in given}
        for instruction in self.instructions:
            # A transfer within one device may keep the buffer.
            if isinstance(instruction, Transfer) and instruction.source in taken:
                taken.add(instruction.target)
        return taken

    def _home(self, var: Var) -> int | None:
        """First mesh that holds `var` already."""
        return next((m for m in range(self.step.staged.n_meshes) if (var, None, m) in self.buffers), None)

    def _constant(self, value: Any, dtype: Any, mesh: int, spec: Spec) -> int:
        buffer = self._new()
        self.constants.append(ConstantSlot(buffer, np.asarray(value, dtype), mesh, spec.partition_spec()))
        return buffer
