"""Gather and scatter at the own position: `x[jnp.arange(b), i]`, which works on each example by itself, says so.

A flat program goes in, the same program comes out, bit for bit. Where a component of the index vectors is the position
along a dimension of the indices, the operand and the indices have that dimension in common:

    gather  [b V w], [b 2] at (0, 1)  ->  gather  [b V w], [b 1] at (1), with b as a batch dimension of both

The rules of named factors split batch dimensions, so micro-batches and mesh axes can split the examples. Bodies of
loops and branches are rewritten, too. An index that pairs examples, such as `arange(b) - 1`, stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, called, is_call, shape_of, with_bodies, with_called
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.affine import At
from minialpa.tracing.affine_programs import Outside, Program, inputs_of_scan, inside
from minialpa.tracing.new_equations import equations_for

_SCATTERS = ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub")


def with_own_positions(flat: Block) -> Block:
    """The program, with batch dimensions in gathers and scatters that look up their own position."""
    producers = {value: flat.eqns[i] for value, i in flat.made_by.items()}
    program = Program(producers, dict(zip(flat.constvars, flat.consts, strict=True)))
    return flat.with_each_written_as([_rewritten(eqn, program) for eqn in flat.eqns])


def _rewritten(eqn: JaxprEqn, program: Program) -> list[JaxprEqn]:
    """The equations in the place of `eqn`, whose operands come from `program`."""
    name = eqn.primitive.name
    if name == "gather":
        return _gather(eqn, program)
    if name in _SCATTERS:
        return _scatter(eqn, program)
    if is_call(eqn):
        inner, operands = called(eqn)
        body = _body(inner, program, [Outside(atom) for atom in operands])
        return [eqn if body is inner else with_called(eqn, body)]
    return [with_bodies(eqn, _bodies(eqn, program))] if name in ("scan", "while", "cond") else [eqn]


# ---- loops and branches ----------------------------------------------------------------------------------------------


def _bodies(eqn: JaxprEqn, program: Program) -> dict[str, Any]:
    """The parameters of control flow that hold programs, rewritten."""
    params = eqn.params
    if eqn.primitive.name == "cond":
        index, *operands = eqn.invars
        inputs = [Outside(atom) for atom in operands]
        branches = [_body(branch, program, inputs, (index, k)) for k, branch in enumerate(params["branches"])]
        return {"branches": tuple(branches)}
    if eqn.primitive.name == "scan":
        return {"jaxpr": _body(params["jaxpr"], program, inputs_of_scan(eqn))}

    # The test and the body have constants of their own; carries that the body passes on are constants, too.
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    outside = [Outside(atom) for atom in eqn.invars]
    jaxpr = params["body_jaxpr"].jaxpr
    kept = [
        carry if out is var else None
        for carry, var, out in zip(outside[n_test + n_body :], jaxpr.invars[n_body:], jaxpr.outvars, strict=True)
    ]
    return {
        "cond_jaxpr": _body(params["cond_jaxpr"], program, [*outside[:n_test], *kept]),
        "body_jaxpr": _body(params["body_jaxpr"], program, [*outside[n_test : n_test + n_body], *kept]),
    }


def _body(
    closed: Any, around: Program, inputs: Sequence[Outside | None], branch: tuple[Atom, int] | None = None
) -> Any:
    """A jaxpr with its equations rewritten; itself, if none changes, since planning knows bodies by identity.

    The arguments are as in `affine_programs.inside`.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    program = inside(closed, around, inputs, branch)
    written = [_rewritten(eqn, program) for eqn in jaxpr.eqns]
    if all(len(eqns) == 1 and eqns[0] is eqn for eqn, eqns in zip(jaxpr.eqns, written, strict=True)):
        return closed
    new = jaxpr.replace(eqns=[eqn for eqns in written for eqn in eqns])
    return closed.replace(jaxpr=new) if closed is not jaxpr else new


# ---- gather and scatter ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Own:
    """A component of the index vectors that is the own position.

    Attributes:
        component: its number in the index vectors.
        operand_dim: the dimension of the operand that it points into.
        index_dim: the dimension of the indices whose position it is.
    """

    component: int
    operand_dim: int
    index_dim: int


def _own_components(
    eqn: JaxprEqn, program: Program, places: Sequence[int], single: Sequence[int], taken: Sequence[int]
) -> list[_Own]:
    """The components of the index vectors that can become batch dimensions.

    places: for each component the dimension of the operand.
    single: dimensions of the operand of which one position is taken, and that no window has.
    taken: dimensions of the indices that are batch dimensions already.
    """
    shape, indices = shape_of(eqn.invars[0]), eqn.invars[1]
    index_shape = shape_of(indices)
    found: list[_Own] = []
    for component, operand_dim in enumerate(places):
        if operand_dim not in single or shape[operand_dim] == 1:
            continue
        x = program.affine(indices, At(len(index_shape) - 1, component))
        index_dim = None if x is None else x.dim
        if index_dim is None or index_dim in (*taken, *(own.index_dim for own in found)):
            continue
        # All positions are then in bounds, so no mode changes them.
        if index_shape[index_dim] == shape[operand_dim]:
            found.append(_Own(component, operand_dim, index_dim))
    return found


def _gather(eqn: JaxprEqn, program: Program) -> list[JaxprEqn]:
    numbers = eqn.params["dimension_numbers"]
    taken = numbers.start_indices_batching_dims
    own = _own_components(eqn, program, numbers.start_index_map, numbers.collapsed_slice_dims, taken)
    if not own:
        return [eqn]

    operand_dims, index_dims = _batch_dims(numbers.operand_batching_dims, taken, own)
    changed = lax.GatherDimensionNumbers(
        offset_dims=numbers.offset_dims,
        collapsed_slice_dims=_without(numbers.collapsed_slice_dims, operand_dims),
        start_index_map=_without(numbers.start_index_map, operand_dims),
        operand_batching_dims=operand_dims,
        start_indices_batching_dims=index_dims,
    )
    return _with_indices(eqn, own, changed)


def _scatter(eqn: JaxprEqn, program: Program) -> list[JaxprEqn]:
    numbers = eqn.params["dimension_numbers"]
    taken = numbers.scatter_indices_batching_dims
    places = numbers.scatter_dims_to_operand_dims
    own = _own_components(eqn, program, places, numbers.inserted_window_dims, taken)
    if not own:
        return [eqn]

    operand_dims, index_dims = _batch_dims(numbers.operand_batching_dims, taken, own)
    changed = lax.ScatterDimensionNumbers(
        update_window_dims=numbers.update_window_dims,
        inserted_window_dims=_without(numbers.inserted_window_dims, operand_dims),
        scatter_dims_to_operand_dims=_without(places, operand_dims),
        operand_batching_dims=operand_dims,
        scatter_indices_batching_dims=index_dims,
    )
    return _with_indices(eqn, own, changed)


def _batch_dims(
    operand_dims: Sequence[int], index_dims: Sequence[int], own: Sequence[_Own]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Batch dimensions of the operand, in order as jax wants them, and those of the indices that belong to them."""
    pairs = sorted([*zip(operand_dims, index_dims, strict=True), *((one.operand_dim, one.index_dim) for one in own)])
    return tuple(i for i, _ in pairs), tuple(j for _, j in pairs)


def _without(dims: Sequence[int], removed: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in dims if d not in removed)


def _with_indices(eqn: JaxprEqn, own: Sequence[_Own], numbers: Any) -> list[JaxprEqn]:
    """The equation with these dimension numbers, on indices without the components that are the own position."""
    indices = eqn.invars[1]
    last = len(shape_of(indices)) - 1
    left = sorted(set(range(shape_of(indices)[last])) - {one.component for one in own})

    def components(x: Any) -> Any:
        parts = [lax.slice_in_dim(x, k, k + 1, axis=last) for k in left]
        return jnp.concatenate(parts, last) if parts else lax.slice_in_dim(x, 0, 0, axis=last)

    eqns, (shorter,) = equations_for(components, indices)
    # Sorted pairs (i, j) need not be sorted in j.
    params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
    changed = eqn.replace(invars=[eqn.invars[0], shorter, *eqn.invars[2:]], params=params)
    return [*(with_source_of(one, eqn) for one in eqns), changed]
