"""Splitting: a step over micro-batches and the stage of each layer in, the tasks of every mesh out.

Positions order one loop of a micro-batch: 0..S-1 are the forward passes of the chunks, S..2S-1 their backward passes
in reverse, so position p is chunk p or 2S-1-p. A chunk is what a stage runs in one piece; most stages have one. A
tagged equation goes to the position of its layer. An equation that autodiff left untagged goes to the earliest position
where its operands are at hand. Cheap equations that depend on no example are copied into every task that wants them.
What runs between loops, as an update, follows the mesh of its largest operand, that is, of the gradient; what depends
on inputs alone (step counters, learning rates) is computed on every mesh that wants it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.split_step import LOOP, Op, SplitStep, is_loop
from minialpa.tracing.jaxprs import bytes_of, is_literal, live_equations, operand_vars, sub_jaxprs
from minialpa.tracing.trace import TracedStep

TaskKind = Literal["prologue", "forward", "backward", "step", "update"]
_HEAVY = ("dot_general", "conv_general_dilated", "sort", "cholesky", "qr", "svd", "eigh", "lu")


@dataclass(frozen=True, slots=True)
class Task:
    """Equations that run together on one mesh.

    kind: `step` is forward and backward in one, for a single stage; `update` is what runs behind a loop. segment: when
    it runs, see `segments`. chunk: of a forward or backward task, counted over the pipeline, else 0. level: order among
    the updates of a mesh in a segment; tasks of level l + 1 wait for other meshes' results of level l.
    invars, outvars: values read from, and left for, other tasks, in a fixed order.
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
        number = self.chunk if self.kind in ("forward", "backward") else self.mesh
        loop = f"_loop{self.loop}" if self.loop > 1 else ""
        return f"{self.kind}{number}" + (f".{self.level}" if self.level else "") + loop

    @property
    def loop(self) -> int:
        """The loop that the task is part of, or runs behind; 0 for a prologue."""
        return (self.segment + 1) // 2

    @property
    def per_micro_batch(self) -> bool:
        return self.kind in ("forward", "backward", "step")


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step as tasks on meshes.

    mesh_of_chunk: the mesh of each chunk of the pipeline; one chunk without a pipeline.
    input_meshes: for each input (constants first, then arguments), the meshes that read it whole.
    output_meshes: for each result, the mesh that holds it at the end; for the replacement of a donated input, the first
        one that reads that input.
    """

    split: SplitStep
    mesh_of_chunk: tuple[int, ...]
    tasks: tuple[Task, ...]
    input_meshes: tuple[tuple[int, ...], ...]
    output_meshes: tuple[tuple[int, ...], ...]

    @property
    def n_meshes(self) -> int:
        return max(self.mesh_of_chunk) + 1

    def trains(self, loop: int) -> bool:
        """Whether a loop has backward passes."""
        return any(task.kind == "backward" and task.loop == loop for task in self.tasks)

    @property
    def inputs(self) -> tuple[Var, ...]:
        return (*self.split.traced.flat.constvars, *self.split.traced.flat.invars)


def traced_positions(step: TracedStep, chunk_of_group: Sequence[int], n_chunks: int) -> list[int | None]:
    """Position of each traced equation that has a forward group, else None."""
    out: list[int | None] = []
    for origin in step.origins:
        if origin.group is None:
            out.append(None)
        else:
            chunk = chunk_of_group[origin.group]
            out.append(2 * n_chunks - 1 - chunk if origin.direction == "backward" else chunk)
    return out


def stage_split(split: SplitStep, chunk_of_group: Sequence[int], mesh_of_chunk: Sequence[int]) -> StagedStep:
    """Place every operation of `split`; `chunk_of_group[g]` is the chunk of forward group g (see `Origin`)."""
    if len(mesh_of_chunk) == 1 and split.n_micro_batches == 1:
        return _one_task(split)
    return _Placer(split, chunk_of_group, mesh_of_chunk).run()


def _one_task(split: SplitStep) -> StagedStep:
    """Everything in one program: no pipeline and no micro-batches."""
    flat = split.traced.flat
    inputs = (*flat.constvars, *flat.invars)
    eqns = tuple(op.eqn for op in split.ops)
    read = {v for eqn in eqns for v in operand_vars(eqn)}
    outputs = {v for v in split.outvars if not is_literal(v)}
    made = tuple(v for eqn in eqns for v in eqn.outvars if v in outputs)
    task = Task("step", LOOP, 0, 0, 0, eqns, *_paired(split, tuple(v for v in inputs if v in read), made))
    donated = {alias for alias in split.traced.aliases if alias is not None}
    kept = read | outputs | {flat.invars[i] for i in donated}
    input_meshes = tuple((0,) if v in kept else () for v in inputs)
    return StagedStep(split, (0,), (task,) if eqns else (), input_meshes, ((0,),) * len(split.outvars))


Key = tuple[int, int, int]  # (segment, position in a loop or level between loops, mesh)


class _Placer:
    def __init__(self, split: SplitStep, chunk_of_group: Sequence[int], mesh_of_chunk: Sequence[int]) -> None:
        self.split, self.mesh_of_chunk, self.n_chunks = split, mesh_of_chunk, len(mesh_of_chunk)
        self.labels = traced_positions(split.traced, chunk_of_group, self.n_chunks)
        self.own = set(split.traced.flat.invars) | set(split.traced.flat.constvars)
        self.segment = 0
        # Positions of the variables of the loop that is being placed, and of the loops before it; chunks whose forward
        # passes read a variable.
        self.position: dict[Var, int] = {}
        self.earlier: dict[Var, int] = {}
        self.forward_uses: dict[Var, set[int]] = defaultdict(set)
        self.floating: dict[Var, JaxprEqn] = {}
        self.homes: dict[Var, set[int]] = defaultdict(set)
        self.content: dict[Key, list[JaxprEqn]] = defaultdict(list)

    def chunk_of(self, position: int) -> int:
        return min(position, 2 * self.n_chunks - 1 - position)

    def mesh_of(self, position: int) -> int:
        return self.mesh_of_chunk[self.chunk_of(position)]

    def run(self) -> StagedStep:
        for segment in range(1, 2 * self.split.n_loops + 1):
            self.segment = segment
            ops = self.split.in_segment(segment)
            if is_loop(segment):
                self._find_floating(ops)
                self._place_loop(ops)
                self._note_homes()
            else:
                self._place_between([op.eqn for op in ops])
        self._add_prologues()
        return self._finish()

    # ---- loops ----------------------------------------------------------------------------------------------------

    def _find_floating(self, ops: Sequence[Op]) -> None:
        """Operations of a loop that read no example and are cheap; results of the step stay where they are labelled."""
        micro = {v for _, v in self.split.micro_inputs}
        if self.split.n_micro_batches == 1:
            dims = self.split.traced.batch_dims
            micro = {v for v, dim in zip(self.split.traced.flat.invars, dims, strict=True) if dim is not None}
        kept = {a.loop for a in self.split.accumulators} | {s.loop for s in self.split.stacks}
        kept.update(v for v in self.split.outvars if not is_literal(v))
        elsewhere = (op for op in self.split.ops if op.segment != self.segment)
        kept.update(v for op in elsewhere for v in operand_vars(op.eqn))
        fixed = set(micro)
        for op in ops:
            eqn = op.eqn
            heavy = eqn.primitive.name in _HEAVY or bool(sub_jaxprs(eqn)) or bool(eqn.effects)
            if heavy or any(v in fixed for v in operand_vars(eqn)) or any(v in kept for v in eqn.outvars):
                fixed.update(eqn.outvars)
            else:
                self.floating.update((v, eqn) for v in eqn.outvars)

    def _place_loop(self, every: Sequence[Op]) -> None:
        self.earlier.update(self.position)
        self.position = {}
        ops = [op for op in every if not op.eqn.outvars or op.eqn.outvars[0] not in self.floating]
        placed = [self._early_position(op) for op in ops]
        for i in range(len(ops) - 1, -1, -1):  # what reads nothing placed goes to its first reader
            if placed[i] is None:
                behind = zip(ops[i + 1 :], placed[i + 1 :], strict=True)
                placed[i] = min((p for op, p in behind if p is not None and _reads(op.eqn, ops[i].eqn)), default=0)
                self.position.update((v, placed[i] or 0) for v in ops[i].eqn.outvars)
        if self.n_chunks == 1:
            placed = [0] * len(ops)
            self.position = dict.fromkeys(self.position, 0)
        for op, position in zip(ops, placed, strict=True):
            assert position is not None
            self.content[self.segment, position, self.mesh_of(position)].append(op.eqn)
        self._copy_floating(every)

    def _early_position(self, op: Op) -> int | None:
        label = self.labels[op.source] if op.source >= 0 else None
        behind = [self.position[v] for v in operand_vars(op.eqn) if v in self.position]
        is_backward = op.source >= 0 and self.split.traced.origins[op.source].direction == "backward"
        if label is None and is_backward:
            label = self._residual_position(op.eqn, max([self.n_chunks, *behind]))
        known = [p for p in (label, *behind) if p is not None]
        if not known:
            return None
        position = max(known)
        if position < self.n_chunks:
            for v in op.eqn.invars:
                if not is_literal(v):
                    self.forward_uses[v].add(position)
        self.position.update((v, position) for v in op.eqn.outvars)
        return position

    def _residual_position(self, eqn: JaxprEqn, at_least: int) -> int:
        """First backward position not before `at_least` whose chunk holds what the forward pass left for `eqn`."""
        position = at_least
        for v in eqn.invars:
            if is_literal(v):
                continue
            chunks = set(self.forward_uses.get(v, ()))
            made_at = self.position.get(v, self.earlier.get(v, self.n_chunks))
            if made_at < self.n_chunks:
                chunks.add(made_at)
            candidates = [2 * self.n_chunks - 1 - c for c in chunks if 2 * self.n_chunks - 1 - c >= at_least]
            position = max(position, min(candidates, default=position))
        return position

    def _copy_floating(self, ops: Sequence[Op]) -> None:
        order = {id(op.eqn): i for i, op in enumerate(ops)}
        for key, eqns in self.content.items():
            if key[0] != self.segment:
                continue
            wanted: dict[int, JaxprEqn] = {}
            stack = [v for eqn in eqns for v in operand_vars(eqn)]
            while stack:
                eqn = self.floating.get(stack.pop())
                if eqn is not None and id(eqn) not in wanted:
                    wanted[id(eqn)] = eqn
                    stack.extend(operand_vars(eqn))
            self.content[key] = sorted([*wanted.values(), *eqns], key=lambda e: order[id(e)])

    def _note_homes(self) -> None:
        """Meshes of the inputs that a loop reads, and of what it leaves."""
        for (segment, _, mesh), eqns in self.content.items():
            if segment == self.segment:
                for eqn in eqns:
                    for v in eqn.invars:
                        if not is_literal(v) and v in self.own:
                            self.homes[v].add(mesh)
        for v, position in self.position.items():
            self.homes[v].add(self.mesh_of(position))
        for acc in self.split.accumulators:
            if acc.loop in self.position:
                self.homes[acc.total] = set(self.homes[acc.loop])
        for stack in self.split.stacks:
            if stack.loop in self.position:
                self.homes[stack.total] = set(self.homes[stack.loop])

    # ---- between loops --------------------------------------------------------------------------------------------

    def _place_between(self, eqns: list[JaxprEqn]) -> None:
        homes = self.homes
        meshes: list[set[int]] = []
        for eqn in eqns:
            ranked = sorted((-bytes_of(v), min(homes[v])) for v in operand_vars(eqn) if homes.get(v))
            where = {ranked[0][1]} if ranked and not self._only_inputs(eqn) else set[int]()
            meshes.append(where)
            for v in eqn.outvars:
                homes[v] = set(where)
        self._pull_unplaced(eqns, meshes)
        level: dict[tuple[Var, int], int] = {}
        for eqn, where in zip(eqns, meshes, strict=True):
            for mesh in sorted(where):
                depth = max((self._level(v, mesh, homes, level) for v in operand_vars(eqn)), default=0)
                level.update(((v, mesh), depth) for v in eqn.outvars)
                self.content[self.segment, depth, mesh].append(eqn)

    def _only_inputs(self, eqn: JaxprEqn) -> bool:
        """Whether the equation reads inputs of the step only; then any mesh can compute it."""
        return all(is_literal(v) or v in self.own for v in eqn.invars)

    def _pull_unplaced(self, eqns: list[JaxprEqn], meshes: list[set[int]]) -> None:
        """Operations and inputs without a mesh go wherever their readers are."""
        wanted: dict[Var, set[int]] = defaultdict(set)
        traced = self.split.traced
        for atom, alias in zip(self.split.outvars, traced.layouts, strict=True):
            if alias is not None and not is_literal(atom):
                wanted[atom] |= self.homes.get(traced.flat.invars[alias], set())
        for op in self.split.ops:
            label = self.labels[op.source] if op.source >= 0 and op.segment > self.segment else None
            if label is not None and is_loop(op.segment):
                for v in op.eqn.invars:
                    if not is_literal(v):
                        wanted[v].add(self.mesh_of(label))
        for i in range(len(eqns) - 1, -1, -1):
            if not meshes[i]:
                meshes[i] = set[int]().union(*(wanted[v] for v in eqns[i].outvars)) or {0}
                self.homes.update((v, set(meshes[i])) for v in eqns[i].outvars)
            for atom in eqns[i].invars:
                if not is_literal(atom):
                    wanted[atom] |= meshes[i]

    @staticmethod
    def _level(v: Var, mesh: int, homes: dict[Var, set[int]], level: dict[tuple[Var, int], int]) -> int:
        if (v, mesh) in level:
            return level[v, mesh]
        remote = [level[v, m] for m in homes.get(v, ()) if (v, m) in level]
        return min(remote) + 1 if remote else 0

    def _add_prologues(self) -> None:
        prologue = [op.eqn for op in self.split.in_segment(0)]
        if not prologue:
            return
        made = {v for eqn in prologue for v in eqn.outvars}
        wanted: dict[int, set[Var]] = defaultdict(set)
        for (_, _, mesh), eqns in self.content.items():
            wanted[mesh].update(v for eqn in eqns for v in operand_vars(eqn) if v in made)
        wanted[0].update(v for v in self.split.outvars if not is_literal(v) and v in made)
        for mesh, needed in wanted.items():
            keep = live_equations(prologue, needed)
            if any(keep):
                self.content[0, 0, mesh] = [eqn for eqn, k in zip(prologue, keep, strict=True) if k]

    # ---- result ---------------------------------------------------------------------------------------------------

    def _finish(self) -> StagedStep:
        keys = sorted(self.content)
        defined = {key: {v for eqn in self.content[key] for v in eqn.outvars} for key in keys}
        reads = {
            key: _unique(v for eqn in self.content[key] for v in operand_vars(eqn) if v not in defined[key])
            for key in keys
        }
        wanted = {v for key in keys for v in reads[key]}
        wanted.update(a.loop for a in self.split.accumulators)
        wanted.update(s.loop for s in self.split.stacks)
        wanted.update(v for v in self.split.outvars if not is_literal(v))
        floating = set(self.floating)
        tasks = []
        for key in keys:
            outvars = _unique(
                v
                for eqn in self.content[key]
                for v in eqn.outvars
                if v in wanted and (not is_loop(key[0]) or v not in floating)
            )
            kind = self._kind(key)
            level = key[1] if kind == "update" else 0
            chunk = self.chunk_of(key[1]) if kind in ("forward", "backward") else 0
            ends = _paired(self.split, reads[key], outvars)
            tasks.append(Task(kind, key[0], key[2], chunk, level, tuple(self.content[key]), *ends))
        return self._with_homes(tasks)

    def _kind(self, key: Key) -> TaskKind:
        if not is_loop(key[0]):
            return "prologue" if key[0] == 0 else "update"
        if self.n_chunks == 1:
            return "step"
        return "forward" if key[1] < self.n_chunks else "backward"

    def _with_homes(self, tasks: list[Task]) -> StagedStep:
        traced = self.split.traced
        inputs = (*traced.flat.constvars, *traced.flat.invars)
        readers: dict[Var, set[int]] = defaultdict(set)
        made: dict[Var, set[int]] = defaultdict(set)
        for task in tasks:
            for v in task.invars:
                readers[v].add(task.mesh)
            for v in task.outvars:
                made[v].add(task.mesh)
        for acc in self.split.accumulators:
            made[acc.total] |= made[acc.loop]
        for stack in self.split.stacks:
            made[stack.total] |= made[stack.loop]
        offset = len(traced.flat.constvars)
        outputs: list[tuple[int, ...]] = []
        for atom, alias in zip(self.split.outvars, traced.layouts, strict=True):
            home = () if is_literal(atom) else tuple(sorted(made.get(atom, ()) or readers.get(atom, ())))[:1]
            if alias is not None:
                own = inputs[offset + alias]
                readers[own] |= readers[own] or made.get(atom, set()) if not is_literal(atom) else {0}
                home = tuple(sorted(readers[own]))[:1] or home
            outputs.append(home or (0,))
        for atom, where in zip(self.split.outvars, outputs, strict=True):
            if not is_literal(atom) and atom in inputs:
                readers[atom] |= set(where)
        input_meshes = tuple(tuple(sorted(readers.get(v, ()))) for v in inputs)
        return StagedStep(self.split, tuple(self.mesh_of_chunk), tuple(tasks), input_meshes, tuple(outputs))


def _unique(variables: Iterable[Var]) -> tuple[Var, ...]:
    return tuple(dict.fromkeys(variables))


def _reads(reader: JaxprEqn, producer: JaxprEqn) -> bool:
    made = set(producer.outvars)
    return any(not is_literal(v) and v in made for v in reader.invars)


def _paired(split: SplitStep, invars: Sequence[Var], outvars: Sequence[Var]) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
    """Inputs and outputs of a task, the arguments that it replaces and their replacements first, in the same order.

    `jax.jit` lets the first output of a shape take over the first donated input of that shape, and so on. Where an
    array is not paired with its own replacement, XLA copies it.
    """
    arguments = split.traced.flat.invars
    read, made = set(invars), set(outvars)
    pairs = {
        arguments[i]: v
        for v, i in zip(split.outvars, split.traced.aliases, strict=True)
        if i is not None and not is_literal(v) and v in made and arguments[i] in read
    }
    return _unique((*pairs, *invars)), _unique((*pairs.values(), *outvars))
