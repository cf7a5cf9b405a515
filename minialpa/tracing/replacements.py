"""Which argument leaf each result leaf replaces when a training loop passes the new state to the next call.

A result that replaces a donated argument, or the value of a Ref, takes over its memory (`find_aliases`). A result with
the structure of an argument, donated or not, takes its sharding, so the next call needs no transfer (`find_layouts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.extend.core import JaxprEqn, Var

from minialpa.ir.block import Block
from minialpa.ir.equations import dtype_name, is_in_host, is_inexact, is_literal, operand_vars, shape_of, sub_jaxprs
from minialpa.ir.op import is_transposed
from minialpa.support.private_jax import name_stack
from minialpa.tracing.refs import NO_REFS, OF_REF, StepRefs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """Arguments and results of a program. Fields: see `trace_step`."""

    flat: Block
    arg_of_leaf: Sequence[int]
    batch_dims: Sequence[int | None]
    gradients: Sequence[Var]
    refs: StepRefs = NO_REFS

    def leaves_of(self, arg: int) -> list[int]:
        return [i for i, owner in enumerate(self.arg_of_leaf) if owner == arg]

    def has_batch(self, leaves: Sequence[int]) -> bool:
        return any(self.batch_dims[i] is not None for i in leaves)


def find_aliases(
    values: StepValues, donate: Sequence[int] | Literal["auto"], state_like: Sequence[int]
) -> tuple[int | None, ...]:
    """For each result leaf, the number of the donated argument leaf that it replaces. Parameters: see `trace_step`."""
    args = sorted({*values.arg_of_leaf} - {OF_REF}) if donate == "auto" else sorted(donate)
    n_returned = len(values.flat.outvars) - len(values.refs.updated)
    aliases: list[int | None] = [*[None] * n_returned, *values.refs.updated]
    for arg in args:
        leaves = values.leaves_of(arg)
        if not leaves or values.has_batch(leaves):
            continue
        start = _find_replacement(values.flat, leaves, aliases)
        if start is None:
            continue

        # With "auto", equal shapes are no proof that the results are new values of the argument.
        new_values = values.flat.outvars[start : start + len(leaves)]
        must_update = donate == "auto" and arg not in state_like
        if must_update and not _is_updated(values, [values.flat.invars[i] for i in leaves], new_values):
            continue
        aliases[start : start + len(leaves)] = leaves
    return tuple(aliases)


def find_layouts(values: StepValues, aliases: Sequence[int | None]) -> tuple[int | None, ...]:
    """`aliases` and, for other results, an argument of their structure, as for gradients or a kept state."""
    layouts = list(aliases)
    aliased = {values.arg_of_leaf[i] for i in aliases if i is not None}
    for arg in sorted({*values.arg_of_leaf} - aliased - {OF_REF}):
        leaves = values.leaves_of(arg)
        # An argument of scalars only would match any scalars.
        if values.has_batch(leaves) or not any(shape_of(values.flat.invars[i]) for i in leaves):
            continue
        start = _find_replacement(values.flat, leaves, layouts)
        if start is not None:
            layouts[start : start + len(leaves)] = leaves
    return tuple(layouts)


def _find_replacement(flat: Block, leaves: Sequence[int], taken: Sequence[int | None]) -> int | None:
    """First position of consecutive free results with the shapes and dtypes of `leaves`."""
    expected = [_signature(flat.invars[i]) for i in leaves]
    results = [_signature(atom) for atom in flat.outvars]
    for start in range(len(results) - len(leaves) + 1):
        stop = start + len(leaves)
        if results[start:stop] == expected and all(replaced is None for replaced in taken[start:stop]):
            return start
    return None


def _signature(atom: Any) -> tuple[Any, ...]:
    return shape_of(atom), dtype_name(atom), is_in_host(atom.aval)


def _is_updated(values: StepValues, inputs: Sequence[Var], outputs: Sequence[Any]) -> bool:
    """Whether `outputs` are new values of `inputs` and not, for example, their gradients.

    True if there are gradients, no output is one, and each float input reaches its replacement without passing one.
    Gradients are marked, or results of backward passes of `jax.grad`.
    """
    marked = set(values.gradients) or _backward_values(values.flat)
    if not marked or any(not is_literal(atom) and atom in marked for atom in outputs):
        return False

    return all(
        not is_literal(target) and _reaches(values.flat, target, source, marked)
        for source, target in zip(inputs, outputs, strict=True)
        if is_inexact(source)
    )


def _backward_values(flat: Block) -> set[Var]:
    backward = [op.eqn for op in flat.ops if is_transposed(op.scope) or _has_backward_pass(op.eqn)]
    return {value for eqn in backward for value in eqn.outvars}


def _has_backward_pass(eqn: JaxprEqn) -> bool:
    bodies = sub_jaxprs(eqn)
    return any(is_transposed(name_stack(inner)) or _has_backward_pass(inner) for body in bodies for inner in body.eqns)


def _reaches(flat: Block, target: Var, source: Var, stop: set[Var]) -> bool:
    """Whether `target` is computed from `source` without the values in `stop`."""
    seen: set[Var] = set()
    stack = [target]
    while stack:
        var = stack.pop()
        if var is source:
            return True
        if var not in seen and var not in stop and var in flat.made_by:
            stack.extend(operand_vars(flat.eqns[flat.made_by[var]]))
        seen.add(var)
    return False
