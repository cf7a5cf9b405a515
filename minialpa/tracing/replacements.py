"""Which argument of a step each result replaces, as a training loop passes the state that it gets to the next call.

A result that replaces a donated argument takes over its memory (`find_aliases`). A result with the structure of an
argument is sharded like it, donated or not (`find_layouts`), so that it can be passed on without a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.extend.core import JaxprEqn, Var

from minialpa.ir.block import Block
from minialpa.ir.equations import is_inexact, is_literal, operand_vars, shape_of, sub_jaxprs
from minialpa.ir.scopes import is_transposed
from minialpa.support.private_jax import name_stack


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """The arguments and results of a traced program.

    Attributes:
        flat: the program; its invars are the argument leaves.
        arg_of_leaf: for each leaf, the number of its argument.
        batch_dims: for each leaf, the dimension that holds the examples, or None.
        gradients: the marked gradients.
    """

    flat: Block
    arg_of_leaf: Sequence[int]
    batch_dims: Sequence[int | None]
    gradients: Sequence[Var]

    def leaves_of(self, arg: int) -> list[int]:
        """Numbers of the leaves of an argument."""
        return [i for i, owner in enumerate(self.arg_of_leaf) if owner == arg]

    def has_batch(self, leaves: Sequence[int]) -> bool:
        """Whether one of these leaves holds examples."""
        return any(self.batch_dims[i] is not None for i in leaves)


def find_aliases(
    values: StepValues, donate: Sequence[int] | Literal["auto"], state_like: Sequence[int]
) -> tuple[int | None, ...]:
    """For each result leaf, the number of the donated argument leaf that it replaces. See `trace_step` for the rest."""
    args = sorted(set(values.arg_of_leaf)) if donate == "auto" else sorted(donate)
    aliases: list[int | None] = [None] * len(values.flat.outvars)
    for arg in args:
        leaves = values.leaves_of(arg)
        if not leaves or values.has_batch(leaves):
            continue
        start = _find_replacement(values.flat, leaves, aliases)
        if start is None:
            continue

        # Results of the right shapes need not be new values of an argument that the user did not name.
        new_values = values.flat.outvars[start : start + len(leaves)]
        must_update = donate == "auto" and arg not in state_like
        if must_update and not _is_updated(values, [values.flat.invars[i] for i in leaves], new_values):
            continue
        aliases[start : start + len(leaves)] = leaves
    return tuple(aliases)


def find_layouts(values: StepValues, aliases: Sequence[int | None]) -> tuple[int | None, ...]:
    """`aliases`, completed by results with the structure of some other argument, such as gradients or a kept state."""
    layouts = list(aliases)
    aliased = {values.arg_of_leaf[i] for i in aliases if i is not None}
    for arg in sorted(set(values.arg_of_leaf) - aliased):
        leaves = values.leaves_of(arg)
        # Scalars look alike, so an argument of nothing else would match any of them.
        if values.has_batch(leaves) or not any(shape_of(values.flat.invars[i]) for i in leaves):
            continue
        start = _find_replacement(values.flat, leaves, layouts)
        if start is not None:
            layouts[start : start + len(leaves)] = leaves
    return tuple(layouts)


def _find_replacement(flat: Block, leaves: Sequence[int], taken: Sequence[int | None]) -> int | None:
    """First position of consecutive results that have the shapes and dtypes of `leaves` and are not `taken`."""
    wanted = [_signature(flat.invars[i]) for i in leaves]
    results = [_signature(atom) for atom in flat.outvars]
    n_leaves = len(leaves)
    for start in range(len(results) - n_leaves + 1):
        stop = start + n_leaves
        if results[start:stop] == wanted and all(replaced is None for replaced in taken[start:stop]):
            return start
    return None


def _signature(atom: Any) -> tuple[Any, ...]:
    return (shape_of(atom), str(getattr(atom.aval, "dtype", "")))


def _is_updated(values: StepValues, inputs: Sequence[Var], outputs: Sequence[Any]) -> bool:
    """Whether `outputs` are new values of `inputs`, and not, for example, gradients with respect to them.

    True if there are gradients, no output is one, and each float input contributes to its own replacement by operations
    after the gradients. Gradients are marked, or what backward passes of `jax.grad` compute.
    """
    marked = set(values.gradients) or _backward_values(values.flat)
    if not marked or any(not is_literal(atom) and atom in marked for atom in outputs):
        return False

    producers = {var: eqn for eqn in values.flat.eqns for var in eqn.outvars}
    for source, target in zip(inputs, outputs, strict=True):
        if not is_inexact(source):
            continue
        if is_literal(target) or not _reaches(target, source, producers, marked):
            return False
    return True


def _backward_values(flat: Block) -> set[Var]:
    """The results of equations of a backward pass, and of loops and branches that have one inside."""
    backward = [op.eqn for op in flat.ops if is_transposed(op.scope) or _has_backward_pass(op.eqn)]
    return {value for eqn in backward for value in eqn.outvars}


def _has_backward_pass(eqn: JaxprEqn) -> bool:
    bodies = sub_jaxprs(eqn)
    return any(is_transposed(name_stack(inner)) or _has_backward_pass(inner) for body in bodies for inner in body.eqns)


def _reaches(target: Var, source: Var, producers: dict[Var, JaxprEqn], stop: set[Var]) -> bool:
    """Whether `target` is computed from `source` without the values in `stop`."""
    seen: set[Var] = set()
    stack = [target]
    while stack:
        var = stack.pop()
        if var is source:
            return True
        if var in seen or var in stop or var not in producers:
            continue
        seen.add(var)
        stack.extend(operand_vars(producers[var]))
    return False
