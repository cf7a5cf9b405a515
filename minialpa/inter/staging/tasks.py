"""Tasks: a split step and the chunk of each forward group in, the equations of each mesh by task out (`StagedStep`).

`placement` places each equation of loops and updates. Here equations become tasks, inputs and results of the step get
their meshes, and prologues are copied to every mesh that reads them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.split_step import LOOP, PROLOGUE, SplitStep, is_loop
from minialpa.inter.staging.placement import ChunkedStep, place_loops, place_updates
from minialpa.ir.equations import Atom, bytes_of, is_literal, live_equations, operand_vars
from minialpa.ir.repeats import NO_REPEATS, Repeats
from minialpa.plan import PassName, PlannedTransfer
from minialpa.rules.expensive import has_contraction
from minialpa.tracing.trace import TracedStep

TaskKind = Literal["prologue", "forward", "backward", "weights", "step", "update"]
#: Kinds of the tasks of a chunk.
_OF_CHUNKS = ("forward", "backward", "weights")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """Equations that run together on one mesh. Their variables are in a fixed order.

    Attributes:
        kind: `step` is forward and backward in one, for a single stage; `weights` makes the gradients of a backward
            pass that no other chunk reads; `update` runs after a loop.
        segment: 2 l - 1 in loop l, 2 l after it.
        chunk: of a forward, backward or weights task, counted over the pipeline; 0 for other tasks.
        level: order among the updates of a mesh in a segment; level l + 1 waits for results of level l from other
            meshes.
        invars, outvars: variables from inputs or other tasks, and for other tasks or results of the step.
    """

    kind: TaskKind
    segment: int
    mesh: int
    chunk: int
    level: int
    eqns: tuple[JaxprEqn, ...]
    invars: tuple[Var, ...]
    outvars: tuple[Var, ...]

    @property
    def name(self) -> str:
        number = self.chunk if self.kind in _OF_CHUNKS else self.mesh
        loop = f"_loop{self.loop}" if self.loop > 1 else ""
        return f"{self.kind}{number}" + (f".{self.level}" if self.level else "") + loop

    @property
    def loop(self) -> int:
        """The loop of the task, or the loop before it; 0 for a prologue."""
        return (self.segment + 1) // 2

    @property
    def per_micro_batch(self) -> bool:
        return self.kind in (*_OF_CHUNKS, "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedStep:
    """A step as tasks on meshes, in the order of segments, and in the order of one micro-batch within a loop.

    Attributes:
        mesh_of_chunk: the mesh of each chunk of the pipeline; one chunk without a pipeline.
        input_meshes: for each input (constants first, then arguments), the meshes that read the full-batch array.
        output_meshes: for each result, the mesh that holds it at the end; for the replacement of a donated input, the
            first mesh that reads that input.
        splits_backward: whether gradients of weights have passes of their own.
        repeats: the equations that stand for several, in a short step.
    """

    split: SplitStep
    mesh_of_chunk: tuple[int, ...]
    tasks: tuple[Task, ...]
    input_meshes: tuple[tuple[int, ...], ...]
    output_meshes: tuple[tuple[int, ...], ...]
    splits_backward: bool = False
    repeats: Repeats = NO_REPEATS

    @property
    def n_meshes(self) -> int:
        return max(self.mesh_of_chunk) + 1

    def tasks_of(self, mesh: int) -> list[Task]:
        return [task for task in self.tasks if task.mesh == mesh]

    def trains(self, loop: int) -> bool:
        return any(task.kind == "backward" and task.loop == loop for task in self.tasks)

    @property
    def inputs(self) -> tuple[Var, ...]:
        return self.split.inputs

    @property
    def live_on_entry(self) -> frozenset[Var]:
        """The values before the first loop: inputs and results of prologues."""
        return frozenset((*self.inputs, *(v for task in self.tasks if task.kind == "prologue" for v in task.outvars)))


def traced_positions(step: TracedStep, chunk_of_group: Sequence[int], n_chunks: int) -> list[int | None]:
    """The position of each traced equation with a forward group, else None.

    Chunk c is position c forward and 2 n_chunks - 1 - c backward.
    """
    positions: list[int | None] = []
    for origin in step.origins:
        if origin.group is None:
            positions.append(None)
        else:
            chunk = chunk_of_group[origin.group]
            positions.append(2 * n_chunks - 1 - chunk if origin.direction == "backward" else chunk)
    return positions


def stage_split(
    split: SplitStep, chunk_of_group: Sequence[int], mesh_of_chunk: Sequence[int], *, splits_backward: bool = False
) -> StagedStep:
    """Place every operation of `split`.

    chunk_of_group: the chunk of each forward group.
    splits_backward: whether a `weights` task makes the gradients that no other chunk reads.
    """
    if len(mesh_of_chunk) == 1 and split.n_micro_batches == 1:
        return _one_task(split)
    labels = traced_positions(split.traced, chunk_of_group, len(mesh_of_chunk))
    step = ChunkedStep(split, labels, tuple(mesh_of_chunk))
    placement = _placement(step)
    tasks = _tasks(step, placement)
    splits_backward = splits_backward and len(mesh_of_chunk) > 1
    if splits_backward:
        tasks = _with_weights_tasks(split, tasks, placement.floating)
    inputs, outputs = _input_and_output_meshes(split, tasks)
    return StagedStep(
        split=split,
        mesh_of_chunk=step.mesh_of_chunk,
        tasks=tasks,
        input_meshes=inputs,
        output_meshes=outputs,
        splits_backward=splits_backward,
    )


def _one_task(split: SplitStep) -> StagedStep:
    """The step as one task on one mesh."""
    eqns = tuple(op.eqn for op in split.ops)
    results = set(split.results)
    read = {v for eqn in eqns for v in operand_vars(eqn)}
    invars, outvars = _paired_variables(
        split,
        [v for v in split.inputs if v in read],
        [v for eqn in eqns for v in eqn.outvars if v in results],
    )
    task = Task(kind="step", segment=LOOP, mesh=0, chunk=0, level=0, eqns=eqns, invars=invars, outvars=outvars)

    # A donated argument stays on the mesh for its replacement, even without a reader.
    replaced = {split.traced.flat.invars[i] for i in split.traced.aliases if i is not None}
    kept = read | results | replaced
    return StagedStep(
        split=split,
        mesh_of_chunk=(0,),
        tasks=(task,) if eqns else (),
        input_meshes=tuple((0,) if v in kept else () for v in split.inputs),
        output_meshes=((0,),) * len(split.outvars),
    )


# ---- where equations run --------------------------------------------------------------------------------------------


class _TaskKey(NamedTuple):
    """Identity and order of a task. order: position in a loop, or level between loops."""

    segment: int
    order: int
    mesh: int


@dataclass(frozen=True, slots=True)
class _Placement:
    """The equations of each task, in order.

    floating: variables that each task of a loop computes for itself if it reads them.
    """

    eqns: Mapping[_TaskKey, Sequence[JaxprEqn]]
    floating: frozenset[Var]


def _placement(step: ChunkedStep) -> _Placement:
    loops = place_loops(step)
    eqns: dict[_TaskKey, Sequence[JaxprEqn]] = {}
    for segment, loop in loops.items():
        eqns.update((_TaskKey(segment, p, step.mesh_at(p)), mine) for p, mine in loop.eqns.items())
    for segment, update in place_updates(step, loops).items():
        eqns.update((_TaskKey(segment, level, mesh), mine) for (level, mesh), mine in update.items())
    eqns.update(_prologues(step.split, eqns))
    return _Placement(eqns, frozenset[Var]().union(*(loop.floating for loop in loops.values())))


def _prologues(split: SplitStep, placed: Mapping[_TaskKey, Sequence[JaxprEqn]]) -> dict[_TaskKey, list[JaxprEqn]]:
    """The equations before the loops, on each mesh that reads them; results of the step on mesh 0."""
    prologue = [op.eqn for op in split.in_segment(PROLOGUE)]
    if not prologue:
        return {}

    made = {v for eqn in prologue for v in eqn.outvars}
    required: dict[int, set[Var]] = defaultdict(set)
    for key, eqns in placed.items():
        required[key.mesh].update(v for eqn in eqns for v in operand_vars(eqn) if v in made)
    required[0].update(v for v in split.results if v in made)

    copies = {}
    for mesh, needed in required.items():
        live = live_equations(prologue, needed)
        if any(live):
            copies[_TaskKey(PROLOGUE, 0, mesh)] = [eqn for eqn, keep in zip(prologue, live, strict=True) if keep]
    return copies


# ---- tasks ----------------------------------------------------------------------------------------------------------


def _tasks(step: ChunkedStep, placement: _Placement) -> tuple[Task, ...]:
    split, keys = step.split, sorted(placement.eqns)
    reads = {key: _read_from_outside(placement.eqns[key]) for key in keys}
    required = set(split.results).union(*reads.values(), (value for value, _ in split.combined))

    tasks = []
    for key in keys:
        eqns, kind = placement.eqns[key], _task_kind(step, key)
        # Each task of a loop has its own copy of floating equations, and keeps their results.
        hidden = placement.floating if is_loop(key.segment) else frozenset[Var]()
        task_results = _unique_variables(v for eqn in eqns for v in eqn.outvars if v in required and v not in hidden)
        invars, outvars = _paired_variables(split, reads[key], task_results)
        task = Task(
            kind=kind,
            segment=key.segment,
            mesh=key.mesh,
            chunk=step.chunk_at(key.order) if kind in ("forward", "backward") else 0,
            level=key.order if kind == "update" else 0,
            eqns=tuple(eqns),
            invars=invars,
            outvars=outvars,
        )
        tasks.append(task)
    return tuple(tasks)


def _with_weights_tasks(split: SplitStep, tasks: Sequence[Task], floating: frozenset[Var]) -> tuple[Task, ...]:
    """The tasks with split backward tasks. In each loop, the `weights` tasks come after all backward tasks."""
    read = {v for task in tasks if task.per_micro_batch for v in task.invars}
    result: list[Task] = []
    for _, segment in itertools.groupby(tasks, key=lambda task: task.segment):
        pairs = [_split_backward(split, task, read, floating) for task in segment]
        result += [first for first, _ in pairs]
        result += [weights for _, weights in pairs if weights is not None]
    return tuple(result)


def _split_backward(
    split: SplitStep, task: Task, read: AbstractSet[Var], floating: frozenset[Var]
) -> tuple[Task, Task | None]:
    """A backward task without what only gradients of parameters need, and the task of these; or the whole task, None.

    read: the values that passes read. The second task reads what the first task has computed, so that both never
    compute the same, except for `floating` values.
    """
    sent = [v for v in task.outvars if v in read]
    if task.kind != "backward" or not sent:
        return task, None
    first = _live(task.eqns, sent)
    made = {v for eqn in first for v in eqn.outvars}
    rest = [eqn for eqn in task.eqns if made.isdisjoint(eqn.outvars) or not floating.isdisjoint(eqn.outvars)]
    weights = _live(rest, [v for v in task.outvars if v not in made])
    if not any(map(has_contraction, weights)):
        return task, None

    reads = _read_from_outside(weights)
    results = [v for v in task.outvars if v in made]
    return (
        _with_equations(split, task, "backward", first, [*results, *(v for v in reads if v in made)]),
        _with_equations(split, task, "weights", weights, [v for v in task.outvars if v not in made]),
    )


def _live(eqns: Sequence[JaxprEqn], outputs: Iterable[Var]) -> list[JaxprEqn]:
    return [eqn for eqn, keep in zip(eqns, live_equations(eqns, outputs), strict=True) if keep]


def _with_equations(
    split: SplitStep, task: Task, kind: TaskKind, eqns: Sequence[JaxprEqn], results: Sequence[Var]
) -> Task:
    invars, outvars = _paired_variables(split, _read_from_outside(eqns), results)
    return replace(task, kind=kind, eqns=tuple(eqns), invars=invars, outvars=outvars)


def _read_from_outside(eqns: Sequence[JaxprEqn]) -> tuple[Var, ...]:
    made = {v for eqn in eqns for v in eqn.outvars}
    return _unique_variables(v for eqn in eqns for v in operand_vars(eqn) if v not in made)


def _task_kind(step: ChunkedStep, key: _TaskKey) -> TaskKind:
    if not is_loop(key.segment):
        return "prologue" if key.segment == PROLOGUE else "update"
    if step.n_chunks == 1:
        return "step"
    return "forward" if key.order < step.n_chunks else "backward"


def _input_and_output_meshes(
    split: SplitStep, tasks: Sequence[Task]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    makers, readers = _makers(split, tasks), _readers(tasks)
    outputs: list[tuple[int, ...]] = []
    for atom, replaced in zip(split.outvars, split.traced.layouts, strict=True):
        home = _first_home(atom, makers, readers)
        if replaced is not None:
            argument = split.traced.flat.invars[replaced]
            # An argument without a reader is on the mesh of its replacement, which the next call passes back.
            if is_literal(atom):
                readers[argument].add(0)
            elif not readers[argument]:
                readers[argument] |= makers.get(atom, set())
            home = tuple(sorted(readers[argument]))[:1] or home
        outputs.append(home or (0,))

    inputs = split.inputs
    given = frozenset(inputs)
    for atom, where in zip(split.outvars, outputs, strict=True):
        if not is_literal(atom) and atom in given:
            readers[atom].update(where)
    return tuple(tuple(sorted(readers.get(v, ()))) for v in inputs), tuple(outputs)


def _makers(split: SplitStep, tasks: Sequence[Task]) -> dict[Var, set[int]]:
    """The meshes that make each variable. An accumulator is made on the meshes of the values that it adds."""
    makers: dict[Var, set[int]] = defaultdict(set)
    for task in tasks:
        for v in task.outvars:
            makers[v].add(task.mesh)
    for of_micro_batch, of_batch in split.combined:
        makers[of_batch] |= makers[of_micro_batch]
    return makers


def _readers(tasks: Sequence[Task]) -> dict[Var, set[int]]:
    readers: dict[Var, set[int]] = defaultdict(set)
    for task in tasks:
        for v in task.invars:
            readers[v].add(task.mesh)
    return readers


def _first_home(atom: Atom, makers: Mapping[Var, set[int]], readers: Mapping[Var, set[int]]) -> tuple[int, ...]:
    if is_literal(atom):
        return ()
    return tuple(sorted(makers.get(atom) or readers.get(atom) or ()))[:1]


def _unique_variables(variables: Iterable[Var]) -> tuple[Var, ...]:
    return tuple(dict.fromkeys(variables))


def _paired_variables(
    split: SplitStep, invars: Sequence[Var], outvars: Sequence[Var]
) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
    """Inputs and outputs of a task; first the arguments that it replaces and their replacements, in the same order.

    `jax.jit` gives the first donated input of a shape to the first output of that shape, and so on. XLA copies an array
    that is not paired with its own replacement.
    """
    arguments = split.traced.flat.invars
    read, made = set(invars), set(outvars)
    replacement: dict[Var, Var] = {}
    for atom, number in zip(split.outvars, split.traced.aliases, strict=True):
        if number is not None and not is_literal(atom) and atom in made and arguments[number] in read:
            replacement[arguments[number]] = atom
    return _unique_variables((*replacement, *invars)), _unique_variables((*replacement.values(), *outvars))


# ---- between meshes --------------------------------------------------------------------------------------------------


def remote_readers(staged: StagedStep) -> dict[tuple[Var, int], set[int]]:
    """(variable, first mesh that makes it) -> other meshes that read it and do not make it."""
    makers = _makers(staged.split, staged.tasks)

    # A mesh that makes a variable itself needs no copy; of several makers, the first one sends.
    readers: dict[tuple[Var, int], set[int]] = defaultdict(set)
    for task in staged.tasks:
        for v in task.invars:
            if v in makers and task.mesh not in makers[v]:
                readers[v, min(makers[v])].add(task.mesh)
    return readers


def planned_transfers(staged: StagedStep) -> tuple[PlannedTransfer, ...]:
    """Bytes between passes of different meshes. A mesh gets a value once, for its first reader."""
    maker = {(v, task.mesh): task for task in staged.tasks for v in task.outvars}
    loop_of = {v: task.loop for task in staged.tasks for v in task.outvars}
    loop_of.update({accumulator: loop_of[value] for value, accumulator in staged.split.combined if value in loop_of})

    n_bytes: dict[tuple[PassName, PassName], float] = defaultdict(float)
    for (v, mesh), readers in remote_readers(staged).items():
        task = maker.get((v, mesh))
        # A combined value has no task: it is sent after the loop, like results of its mesh's first update.
        source = _pass_of(task) if task else PassName("update", mesh, loop_of[v])
        for reader in sorted(readers):
            # Tasks are in the order of one micro-batch, so this is the first that needs the value.
            first = next(task for task in staged.tasks if task.mesh == reader and v in task.invars)
            n_bytes[source, _pass_of(first)] += bytes_of(v)
    return tuple(PlannedTransfer(source, target, size) for (source, target), size in sorted(n_bytes.items()))


def _pass_of(task: Task) -> PassName:
    if task.kind == "forward" or task.kind == "backward" or task.kind == "weights":
        return PassName(task.kind, task.chunk, task.loop)
    # Every mesh computes the prologue that it reads, and `step` is for a single mesh.
    assert task.kind == "update", task.kind
    return PassName("update", task.mesh, task.loop)
