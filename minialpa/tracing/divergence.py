"""Branches and loops with collectives, for which devices that exchange values must go the same way.

A derivative of a branch may end with sums over devices that take other branches: jax sums the values of all branches
then, and so do sums after the branches (`with_sums_after`). Otherwise `same_along` refuses devices that part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxprs_in_params

from minialpa.errors import TraceError
from minialpa.ir.equations import all_equations, is_literal, operand_vars, source_line, with_bodies
from minialpa.support.private_jax import define_axis_batching, new_aval

_SUMS = ("psum", "psum_invariant")


def collective_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes over which the bodies of a branch or loop have collectives; `axis_index` is none."""
    found: dict[str, None] = {}
    for body in jaxprs_in_params(eqn.params):
        for inner in all_equations(body):
            names = inner.params.get("axes", inner.params.get("axis_name", ()))
            if inner.primitive.name not in ("axis_index", "pvary"):
                entries = names if isinstance(names, tuple) else (names,)
                found.update((name, None) for name in entries if isinstance(name, str))
    return tuple(found)


def with_sums_after(eqn: JaxprEqn) -> tuple[JaxprEqn, Mapping[int, tuple[str, ...]]]:
    """A `cond` without the sums that end all its branches, and their axes by the number of the result."""
    branches = [closed.jaxpr for closed in eqn.params["branches"]]
    axes = {k: _axes_of_last_sums(branches, k) for k in range(len(eqn.outvars))}
    sums = {k: found for k, found in axes.items() if found is not None}
    if not sums:
        return eqn, {}
    bodies = tuple(_without_sums(closed, sums) for closed in eqn.params["branches"])
    return with_bodies(eqn, {"branches": bodies}), sums


def _axes_of_last_sums(branches: Sequence[Any], k: int) -> tuple[str, ...] | None:
    """The axes of the sums that make result `k` in all branches, in some of which it may be zero."""
    found = [_axes_of_sum(branch, branch.outvars[k]) for branch in branches]
    others = [branch for branch, axes in zip(branches, found, strict=True) if axes is None]
    axes = {one for one in found if one is not None}
    return axes.pop() if len(axes) == 1 and all(_is_zero(branch, branch.outvars[k]) for branch in others) else None


def _without_sums(closed: Any, sums: Mapping[int, tuple[str, ...]]) -> ClosedJaxpr:
    branch = closed.jaxpr
    ends = [_before_sum(branch, atom) if k in sums else atom for k, atom in enumerate(branch.outvars)]
    read = {v for eqn in branch.eqns for v in operand_vars(eqn)} | {v for v in ends if not is_literal(v)}
    eqns = [eqn for eqn in branch.eqns if eqn.primitive.name not in _SUMS or not read.isdisjoint(eqn.outvars)]
    return ClosedJaxpr(branch.replace(eqns=eqns, outvars=ends), closed.consts)


def _maker(branch: Any, atom: Any) -> JaxprEqn | None:
    return None if is_literal(atom) else next((eqn for eqn in branch.eqns if atom in eqn.outvars), None)


def _axes_of_sum(branch: Any, atom: Any) -> tuple[str, ...] | None:
    eqn = _maker(branch, atom)
    if eqn is None or eqn.primitive.name not in _SUMS or eqn.params.get("axis_index_groups") is not None:
        return None
    axes: tuple[str, ...] = eqn.params["axes"]
    return axes


def _is_zero(branch: Any, atom: Any) -> bool:
    if is_literal(atom):
        return not atom.val
    eqn = _maker(branch, atom)
    return eqn is not None and eqn.primitive.name == "broadcast_in_dim" and _is_zero(branch, eqn.invars[0])


def _before_sum(branch: Any, atom: Any) -> Any:
    eqn = _maker(branch, atom)
    return atom if eqn is None or eqn.primitive.name not in _SUMS else eqn.invars[eqn.outvars.index(atom)]


# ---- decisions that devices share ------------------------------------------------------------------------------------

_SAME_P = Primitive("same_along_axes")


def same_along(axes: tuple[str, ...], eqn: JaxprEqn, x: Any) -> Any:
    """`x`, which decides where `eqn` goes. `jax.vmap` over one of `axes` raises TraceError if `x` differs along it."""
    return _SAME_P.bind(x, axes=axes, name=eqn.primitive.name, line=source_line(eqn)) if axes else x


def _batch(axis: str, size: int, x: Any, dim: int | None, *, axes: tuple[str, ...], **place: str) -> Any:
    if axis in axes and dim is not None:
        raise TraceError(
            f"`{place['name']}` at {place['line']}, in a `shard_map`, has collectives over the axis `{axis}`, and "
            "devices along it may go different ways, so some would wait for others. Decide with a value that is equal "
            "on these devices, such as `jax.lax.pmax` of it, or take the collectives out."
        )
    rest = tuple(one for one in axes if one != axis)
    return (_SAME_P.bind(x, axes=rest, **place) if rest else x), dim


_SAME_P.def_abstract_eval(lambda x, **_: new_aval(x.shape, x.dtype))
define_axis_batching(_SAME_P, _batch)


def summed_over(results: Sequence[Any], sums: Mapping[int, tuple[str, ...]]) -> list[Any]:
    return [lax.psum(x, sums[k]) if k in sums else x for k, x in enumerate(results)]
