"""Gives gathers and scatters that index each example at its position, as `x[jnp.arange(b), i]`, a batch dimension.

The rewritten program computes the same, bit for bit. Where a component of the index vectors is proved to be the
position along a dimension of the indices, this dimension becomes a batch dimension of operand and indices:

    gather  [b V w], [b 2] at (0, 1)  ->  gather  [b V w], [b 1] at (1), with b as a batch dimension of both

Micro-batches and mesh axes split batch dimensions. Bodies of loops and branches are rewritten, too. An index that pairs
examples, such as `arange(b) - 1`, stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, called, is_call, shape_of, with_bodies, with_called
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.affine import At
from minialpa.tracing.affine_programs import AffineProgram, Outside, inputs_of_scan, inside
from minialpa.tracing.new_equations import equations_for
from minialpa.tracing.values import producers_of

_SCATTERS = ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub")


class _Fields(NamedTuple):
    """Names of fields of jax's dimension numbers.

    Attributes:
        single: the operand's dimensions that are indexed by one position and are in no window.
        places: the operand's dimension for each component of the index vectors.
        taken: the batch dimensions of the indices.
    """

    single: str
    places: str
    taken: str


_GATHER_FIELDS = _Fields("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims")
_SCATTER_FIELDS = _Fields("inserted_window_dims", "scatter_dims_to_operand_dims", "scatter_indices_batching_dims")


def with_batched_lookups(flat: Block) -> Block:
    """The program with batch dimensions in gathers and scatters at the position of the example."""
    program = AffineProgram(producers_of(flat), dict(zip(flat.constvars, flat.consts, strict=True)))
    return flat.with_each_written_as([_rewritten_equation(eqn, program) for eqn in flat.eqns])


def _rewritten_equation(eqn: JaxprEqn, program: AffineProgram) -> list[JaxprEqn]:
    """Equations that replace `eqn`; the same object without a change."""
    name = eqn.primitive.name
    if name == "gather":
        return _with_batch_dims(eqn, program, _GATHER_FIELDS)
    if name in _SCATTERS:
        return _with_batch_dims(eqn, program, _SCATTER_FIELDS)
    if is_call(eqn):
        inner, operands = called(eqn)
        body = _rewritten_body(inner, program, [Outside(atom) for atom in operands])
        return [eqn if body is inner else with_called(eqn, body)]
    return [with_bodies(eqn, _rewritten_bodies(eqn, program))] if name in ("scan", "while", "cond") else [eqn]


# ---- loops and branches ----------------------------------------------------------------------------------------------


def _rewritten_bodies(eqn: JaxprEqn, program: AffineProgram) -> dict[str, Any]:
    params = eqn.params
    if eqn.primitive.name == "cond":
        index, *operands = eqn.invars
        inputs = [Outside(atom) for atom in operands]
        branches = [_rewritten_body(branch, program, inputs, (index, k)) for k, branch in enumerate(params["branches"])]
        return {"branches": tuple(branches)}
    if eqn.primitive.name == "scan":
        return {"jaxpr": _rewritten_body(params["jaxpr"], program, inputs_of_scan(eqn))}

    # A carry that the body of a `while` returns unchanged is constant in test and body.
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    outside = [Outside(atom) for atom in eqn.invars]
    jaxpr = params["body_jaxpr"].jaxpr
    kept = [
        carry if out is var else None
        for carry, var, out in zip(outside[n_test + n_body :], jaxpr.invars[n_body:], jaxpr.outvars, strict=True)
    ]
    return {
        "cond_jaxpr": _rewritten_body(params["cond_jaxpr"], program, [*outside[:n_test], *kept]),
        "body_jaxpr": _rewritten_body(params["body_jaxpr"], program, [*outside[n_test : n_test + n_body], *kept]),
    }


def _rewritten_body(
    closed: Any, around: AffineProgram, inputs: Sequence[Outside | None], branch: tuple[Atom, int] | None = None
) -> Any:
    """The jaxpr, rewritten; the same object without a change. Arguments: see `inside`."""
    jaxpr = getattr(closed, "jaxpr", closed)
    program = inside(closed, around, inputs, branch)
    written = [_rewritten_equation(eqn, program) for eqn in jaxpr.eqns]
    if all(len(eqns) == 1 and eqns[0] is eqn for eqn, eqns in zip(jaxpr.eqns, written, strict=True)):
        return closed
    new = jaxpr.replace(eqns=[eqn for eqns in written for eqn in eqns])
    return closed.replace(jaxpr=new) if closed is not jaxpr else new


# ---- gather and scatter ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _BatchIndex:
    """A component of the index vectors, for `operand_dim`, that is the position along `index_dim` of the indices."""

    component: int
    operand_dim: int
    index_dim: int


def _batch_components(
    eqn: JaxprEqn, program: AffineProgram, places: Sequence[int], single: Sequence[int], taken: Sequence[int]
) -> list[_BatchIndex]:
    """The components that can become batch dimensions. Arguments: see `_Fields`."""
    shape, indices = shape_of(eqn.invars[0]), eqn.invars[1]
    index_shape = shape_of(indices)
    found: list[_BatchIndex] = []
    for component, operand_dim in enumerate(places):
        if operand_dim not in single or shape[operand_dim] == 1:
            continue
        x = program.affine(indices, At(len(index_shape) - 1, component))
        index_dim = None if x is None else x.dim
        if index_dim is None or index_dim in (*taken, *(batch_indices.index_dim for batch_indices in found)):
            continue
        # With equal lengths, all positions are in bounds, under every mode.
        if index_shape[index_dim] == shape[operand_dim]:
            found.append(_BatchIndex(component, operand_dim, index_dim))
    return found


def _with_batch_dims(eqn: JaxprEqn, program: AffineProgram, fields: _Fields) -> list[JaxprEqn]:
    """A gather or scatter with all possible batch dimensions."""
    numbers = eqn.params["dimension_numbers"]
    single, places, taken = (getattr(numbers, name) for name in fields)
    batch_indices = _batch_components(eqn, program, places, single, taken)
    if not batch_indices:
        return [eqn]

    # jax requires the operand's batch dimensions in order.
    pairs = [
        *zip(numbers.operand_batching_dims, taken, strict=True),
        *((one.operand_dim, one.index_dim) for one in batch_indices),
    ]
    operand_dims, index_dims = zip(*sorted(pairs), strict=True)
    changed = {
        "operand_batching_dims": operand_dims,
        fields.single: tuple(d for d in single if d not in operand_dims),
        fields.places: tuple(d for d in places if d not in operand_dims),
        fields.taken: index_dims,
    }
    return _with_indices(eqn, batch_indices, numbers._replace(**changed))


def _with_indices(eqn: JaxprEqn, batch_indices: Sequence[_BatchIndex], numbers: Any) -> list[JaxprEqn]:
    """A lookup without the components `batch_indices` in its index vectors."""
    indices = eqn.invars[1]
    last = len(shape_of(indices)) - 1
    left = sorted(set(range(shape_of(indices)[last])) - {one.component for one in batch_indices})

    def components(x: Any) -> Any:
        parts = [lax.slice_in_dim(x, k, k + 1, axis=last) for k in left]
        return jnp.concatenate(parts, last) if parts else lax.slice_in_dim(x, 0, 0, axis=last)

    eqns, (shorter,) = equations_for(components, indices)
    # Pairs (i, j) may be sorted while the values j are not.
    params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
    changed = eqn.replace(invars=[eqn.invars[0], shorter, *eqn.invars[2:]], params=params)
    return [*(with_source_of(one, eqn) for one in eqns), changed]
