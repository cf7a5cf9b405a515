"""What people read in a plan: solved meshes in; operators, collectives, roles of arguments and floating point
operations out, with the names of the user's modules and lines.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.inter.staging.mesh_problem import TaskCollectives
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.spmd import Communication, split_axes
from minialpa.intra.strategies.loops import examples_inside, scan_body
from minialpa.intra.strategies.work import work_of
from minialpa.ir.equations import (
    Atom,
    aval_of,
    bytes_of,
    dtype_name,
    is_literal,
    operand_vars,
    shape_of,
    source_line,
    sub_jaxprs,
)
from minialpa.ir.op import Op, module_path
from minialpa.plan import Plan, PlannedAlternative, PlannedCollective, PlannedOperator
from minialpa.plan.record import ArgumentRole, Part, SplitOver
from minialpa.plan.text import variant_text
from minialpa.rules.expensive import has_contraction, is_contraction
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of, is_kernel
from minialpa.sharding import EquationSpecs
from minialpa.support.private_jax import name_stack
from minialpa.tracing.trace import TracedStep

#: Operations that pass on the numbers of their operand.
_COPIES = frozenset(
    (
        "convert_element_type",
        "copy",
        "name",
        "optimization_barrier",
        "reshape",
        "sharding_constraint",
        "squeeze",
        "transpose",
    ),
)
_MOST_ALTERNATIVES = 6
_PACKAGE = Path(__file__).parents[1]


class StepNames:
    """The names of the values and operations of a staged step."""

    def __init__(self, staged: StagedStep) -> None:
        split = staged.split
        traced = split.traced
        self._ops = {op.eqn: op for op in split.ops}
        self._made_by = {v: op for op in split.ops for v in op.eqn.outvars}
        self._made_by |= {whole: self._made_by[v] for v, whole in split.combined if v in self._made_by}
        self.example_dims = split.batch_dims
        self._paths = dict(zip(traced.flat.invars, traced.in_paths, strict=True))
        self._paths |= {rows: self._paths[whole] for whole, rows in split.micro_inputs}
        replaced = zip(split.outvars, traced.aliases, strict=True)
        self._paths |= {v: traced.in_paths[i] for v, i in replaced if i is not None and not is_literal(v)}
        self._gradient_sources = _gradient_operations(traced)

    def op(self, eqn: JaxprEqn) -> Op:
        """The operation of an equation; a bare one for an equation that a rewrite of a task has added."""
        return self._ops.get(eqn) or Op(eqn, name_stack(eqn))

    def collective(self, one: Communication, task: Task) -> tuple[Part, str, str, str]:
        """(pass, array, module, line) of a collective of `task`."""
        value, eqn = self._written_value(_outside(one), one)
        op = self._operation(value, eqn, one)
        array = self._array(value, eqn)
        if op is None:
            return _part_of(task), array, "", ""

        is_known = op.origin.direction != "other" or op.segment >= 0
        return op.origin.direction if is_known else _part_of(task), array, module_path(op.scope), user_line(op)

    def _written_value(self, value: Atom | None, one: Communication) -> tuple[Atom | None, JaxprEqn | None]:
        """An equation that a rewrite of the task has added gives way to its last operand with a name."""
        eqn = one.eqn
        if eqn is None or one.loop is not None or eqn in self._ops:
            return value, eqn
        named = [v for v in operand_vars(eqn) if v in self._made_by or v in self._paths]
        return (named[-1] if named else value), None

    def _operation(self, value: Atom | None, eqn: JaxprEqn | None, one: Communication) -> Op | None:
        """The operation that makes the value; otherwise the one of `eqn`."""
        if value is not None and not is_literal(value) and value in self._made_by:
            return self._made_by[value]
        if eqn is None:
            return None
        return self._ops[eqn] if one.loop is None else _inside(self.op(one.loop), eqn)

    def _array(self, value: Atom | None, eqn: JaxprEqn | None) -> str:
        """The name of an argument, through copies; otherwise the operation that makes the value."""
        if value is None or is_literal(value):
            return "constant"
        if value in self._paths:
            return self._paths[value]
        op = self._made_by.get(value)
        if op is not None and op.source in self._gradient_sources:
            return "gradient"
        maker = op.eqn if op is not None else eqn if eqn is not None and value in eqn.outvars else None
        if maker is None:
            return "value"
        operands = operand_vars(maker)
        if maker.primitive.name in _COPIES and len(operands) == 1:
            return self._array(operands[0], None)
        return maker.primitive.name


def _outside(one: Communication) -> Atom | None:
    """The moved value; the operand of a scan in place of a value that enters its body."""
    body = None if one.loop is None else scan_body(one.loop)
    if one.loop is None or body is None or one.value not in body.flat.invars:
        return one.value
    return cast(Atom, one.loop.invars[body.flat.invars.index(one.value)])


def _gradient_operations(traced: TracedStep) -> frozenset[int]:
    """Numbers of the operations that make the gradients of `traced`, without casts."""
    made_by = {v: i for i, op in enumerate(traced.flat.ops) for v in op.eqn.outvars}
    found = set()
    for v in traced.gradients:
        while v in made_by:
            found.add(made_by[v])
            maker = traced.flat.ops[made_by[v]].eqn
            operands = operand_vars(maker)
            if maker.primitive.name not in _COPIES or len(operands) != 1:
                break
            (v,) = operands
    return frozenset(found)


def user_line(op: Op) -> str:
    """`file:line` in the user's code; empty for an operation that a rewrite has added."""
    file = Path(source_line(op.eqn).split(" ")[0])
    is_ours = file.is_relative_to(_PACKAGE) and not file.is_relative_to(_PACKAGE / "models")
    return "" if is_ours else file.name


def _inside(scan: Op, eqn: JaxprEqn) -> Op:
    """An equation of the body of a scan, as an operation with the origin of the scan."""
    return dataclasses.replace(scan, eqn=eqn, scope=f"{scan.scope}/{name_stack(eqn)}")


def _part_of(task: Task) -> Part:
    match task.kind:
        case "forward" | "step":
            return "forward"
        case "backward" | "weights":
            return "backward"
        case _:
            return "other"


# ---- operators -------------------------------------------------------------------------------------------------------


def planned_operators(
    names: StepNames,
    problem: MeshEquations,
    sharding: MeshSharding,
    mesh: LogicalMesh,
    layer_of_group: Sequence[int],
) -> tuple[PlannedOperator, ...]:
    """The products, convolutions and kernels of a mesh, in order, with the ones in scans."""
    found: list[PlannedOperator] = []
    for eqn, specs, seconds in zip(problem.eqns, sharding.equations, sharding.compute_s, strict=True):
        if not (has_contraction(eqn) or is_kernel(eqn)):
            continue
        op = names.op(eqn)
        # Without a pipeline all forward groups are one layer; equations of no group have no layer.
        group = op.origin.group
        layer = None if group is None else layer_of_group[group] if layer_of_group else 0
        if specs.body:
            found.extend(_body_operators(op, specs, mesh, layer, 1, names.example_dims))
        elif is_contraction(eqn) or is_kernel(eqn):
            found.append(_operator(op, specs, mesh, layer, 1, names.example_dims, seconds))
    return tuple(found)


def _body_operators(
    scan: Op, specs: EquationSpecs, mesh: LogicalMesh, layer: int | None, times: int, example_dims: Mapping[Var, int]
) -> Iterator[PlannedOperator]:
    body = scan_body(scan.eqn)
    assert body is not None, scan.eqn.primitive
    inside = examples_inside(scan.eqn, body, example_dims)
    for eqn, inner in zip(body.flat.eqns, specs.body, strict=True):
        op, n = _inside(scan, eqn), times * body.length
        if inner.body:
            yield from _body_operators(op, inner, mesh, layer, n, inside)
        elif is_contraction(eqn) or is_kernel(eqn):
            yield _operator(op, inner, mesh, layer, n, inside)


def _operator(
    op: Op,
    specs: EquationSpecs,
    mesh: LogicalMesh,
    layer: int | None,
    times: int,
    example_dims: Mapping[Var, int],
    seconds: float | None = None,
) -> PlannedOperator:
    """seconds: of one run; None for the work divided by the devices that share it."""
    eqn, factors = op.eqn, factors_of(op.eqn)
    split = _split(eqn, factors, specs, mesh, example_dims)
    if seconds is None:
        work = work_of(eqn, factors, mesh)
        seconds = work.shared_s / math.prod(n for _, n in split) + work.fixed_s

    arrays = zip((*eqn.invars, *eqn.outvars), (*specs.operands, *specs.made), strict=True)
    return PlannedOperator(
        name=eqn.primitive.name,
        part=op.origin.direction,
        layer=layer,
        shape=shape_of(eqn.outvars[0]),
        result=specs.results[0],
        operands=specs.operands,
        dtype=dtype_name(eqn.invars[0]),
        module=module_path(op.scope),
        line=user_line(op),
        split=split,
        times=times,
        flops=factors.flops,
        n_bytes=sum(bytes_of(atom) / spec.n_shards(mesh.shape) for atom, spec in arrays),
        seconds=seconds,
    )


def _split(
    eqn: JaxprEqn, factors: Factors, specs: EquationSpecs, mesh: LogicalMesh, example_dims: Mapping[Var, int]
) -> tuple[tuple[SplitOver, int], ...]:
    """The divided parts of an operator, with the number of devices that divide each."""
    examples = {
        factors.leading(dims[example_dims[v]])
        for v, dims in zip((*eqn.invars, *eqn.outvars), (*factors.operands, *factors.results), strict=True)
        if not is_literal(v) and v in example_dims
    }
    found: dict[SplitOver, int] = {}
    for factor, axes in split_axes(factors, specs).items():
        reads = [factor in itertools.chain(*dims) for dims in factors.operands]
        in_result = any(factor in itertools.chain(*dims) for dims in factors.results)
        word: SplitOver = (
            "sums" if not in_result
            else "examples" if factor in examples
            else "batch" if sum(reads) > 1
            else "rows" if reads and reads[0]
            else "columns"
        )  # fmt: skip
        found[word] = found.get(word, 1) * math.prod(mesh.shape[axis] for axis in axes)
    return tuple((word, n) for word, n in found.items() if n > 1)


# ---- collectives -----------------------------------------------------------------------------------------------------


def planned_collectives(
    names: StepNames, moved: Sequence[TaskCollectives], stage: int, n_micro_batches: int
) -> list[PlannedCollective]:
    """Equal collectives are one entry with a count."""
    counts: dict[PlannedCollective, int] = {}
    for task in moved:
        # The last run of a loop may have other collectives.
        n_runs = n_micro_batches if task.task.per_micro_batch else 1
        runs = [(n_runs, task.collectives)] if task.last is None else [(n_runs - 1, task.collectives), (1, task.last)]
        for n, one in ((n, one) for n, collectives in runs if n for one in collectives):
            part, array, module, line = names.collective(one, task.task)
            moves = one.collective
            key = PlannedCollective(
                kind=moves.kind,
                n_bytes=moves.n_bytes,
                axes=moves.axes,
                stage=stage,
                times_per_step=0,
                part=part,
                array=array,
                module=module,
                line=line,
                can_hide=one.can_hide,
            )
            counts[key] = counts.get(key, 0) + n * one.times
    return [dataclasses.replace(key, times_per_step=n) for key, n in counts.items()]


# ---- arguments -------------------------------------------------------------------------------------------------------


def argument_roles(traced: TracedStep) -> tuple[ArgumentRole, ...]:
    """The role of each invar. Weights may be cast or reshaped before the forward pass reads them."""
    source: dict[Var, Var] = {v: v for v in traced.flat.invars}
    weights: set[Var] = set()
    for op in traced.flat.ops:
        read = [source[v] for v in operand_vars(op.eqn) if v in source]
        if op.origin.direction == "forward":
            weights.update(read)
        elif op.eqn.primitive.name in _COPIES and len(read) == 1:
            source.update((v, read[0]) for v in op.eqn.outvars)

    replaced = {i for i in traced.aliases if i is not None}
    roles: list[ArgumentRole] = []
    for i, (v, dim) in enumerate(zip(traced.flat.invars, traced.batch_dims, strict=True)):
        is_float = "float" in str(aval_of(v).dtype)
        is_weight = v in weights and is_float and bool(shape_of(v))
        roles.append(
            "batch" if dim is not None else "weights" if is_weight else "optimizer" if i in replaced else "other"
        )
    return tuple(roles)


def model_flops(traced: TracedStep) -> float:
    """Floating point operations of all products of one step."""
    return sum(_flops(op.eqn) for op in traced.flat.ops)


def _flops(eqn: JaxprEqn) -> float:
    if is_contraction(eqn):
        return factors_of(eqn).flops
    if not has_contraction(eqn):
        return 0.0
    bodies = [sum(map(_flops, body.eqns)) for body in sub_jaxprs(eqn)]
    times: int = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return times * (max(bodies) if eqn.primitive.name == "cond" else sum(bodies))


# ---- alternatives ----------------------------------------------------------------------------------------------------


def alternatives_to(best: Plan, made: Sequence[Plan], sketch: type[Any]) -> tuple[PlannedAlternative, ...]:
    """The fastest plan of each kind among all attempts, without the kind of `best`.

    sketch: the type of plans of which only parts were planned.
    """
    fastest: dict[str, Plan] = {}
    for plan in sorted(made, key=lambda plan: plan.cost.total_s):
        fastest.setdefault(variant_text(plan), plan)
    fastest.pop(variant_text(best), None)

    # Plans that differ in their numbers of micro-batches alone come last.
    seen = {variant_text(best, micro_batches=False)}
    first = [name for name, plan in fastest.items() if _is_new(variant_text(plan, micro_batches=False), seen)]
    chosen = sorted(
        [*first, *(name for name in fastest if name not in first)][:_MOST_ALTERNATIVES], key=list(fastest).index
    )
    return tuple(
        PlannedAlternative(
            name=name,
            total_s=plan.cost.total_s,
            peak_bytes=max(plan.cost.peak_bytes),
            is_sketch=isinstance(plan, sketch),
        )
        for name, plan in ((name, fastest[name]) for name in chosen)
    )


def _is_new(text: str, seen: set[str]) -> bool:
    """Whether `text` is not in `seen`; adds it."""
    is_new = text not in seen
    seen.add(text)
    return is_new
