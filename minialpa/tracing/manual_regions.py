"""A `shard_map` equation goes in; a program on whole arrays comes out, which computes the same for any devices.

Each manual axis of the user's mesh becomes a dimension at the front of the arrays that vary along it, as under
`jax.vmap(axis_name=...)`, and each collective an operation along that dimension. The planner splits these dimensions
as any others, so the plan's mesh may have another shape than the user's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from minialpa.errors import TraceError
from minialpa.ir.equations import (
    Atom,
    all_equations,
    aval_of,
    called,
    is_call,
    is_literal,
    source_line,
    type_of,
    with_bodies,
    with_each_body,
)
from minialpa.support.private_jax import (
    NO_MESH,
    at_line_of,
    batched_program,
    in_context_of,
    is_pmap,
    name_stack,
    rebind,
    under_mesh,
    with_constants_as_arguments,
)
from minialpa.tracing.collectives import COLLECTIVES, along_axis, on_each
from minialpa.tracing.divergence import collective_axes, same_along, summed_over, with_sums_after
from minialpa.tracing.ragged_products import grouped_product
from minialpa.tracing.user_meshes import UsersSharding, auto_mesh, without_meshes, without_meshes_inside

REGION = "shard_map"
_REMATS = ("remat2", "checkpoint")


# ---- whole arrays ----------------------------------------------------------------------------------------------------


def whole_program(eqn: JaxprEqn) -> ClosedJaxpr:
    """The `shard_map` equation as a program on its operands. Raises TraceError for collectives without a rule."""
    with under_mesh(NO_MESH):
        return _whole_program(eqn)


def _whole_program(eqn: JaxprEqn) -> ClosedJaxpr:
    mesh, body = eqn.params["mesh"], without_meshes_inside(eqn.params["jaxpr"], {})
    sizes = {axis: n for axis, n in mesh.shape.items() if axis in eqn.params["newly_manual_axes"]}
    in_specs = [_entries(*pair) for pair in zip(eqn.params["in_specs"], eqn.invars, strict=True)]
    out_specs = [_entries(*pair) for pair in zip(eqn.params["out_specs"], body.outvars, strict=True)]
    varying = [[axis for axis in sizes if any(axis in entry for entry in spec)] for spec in in_specs]
    whole_mesh = auto_mesh(mesh)
    program, in_front = _on_all_devices(body, whole_mesh, sizes, varying)

    # Dimensions of a part are whole, or split over the axes that are not manual.
    rest = None if len(sizes) == len(mesh.axis_names) else PartitionSpec.UNCONSTRAINED

    def as_by_user(parts: Any, axes: list[str]) -> Any:
        spec = PartitionSpec(*axes, *[rest] * (parts.ndim - len(axes)))
        return lax.with_sharding_constraint(parts, NamedSharding(whole_mesh, spec)) if parts.ndim else parts

    def whole(*arrays: Any) -> list[Any]:
        with at_line_of(eqn):
            given = zip(arrays, in_specs, varying, strict=True)
            parts = [as_by_user(_split(array, spec, axes, sizes), axes) for array, spec, axes in given]
            made = zip(map(jnp.asarray, jaxpr_as_fun(program)(*parts)), out_specs, in_front, strict=True)
            return [_joined(as_by_user(parts, axes), spec, axes, sizes) for parts, spec, axes in made]

    return without_meshes(jax.make_jaxpr(whole)(*map(_type, eqn.invars)))


def _on_all_devices(
    body: Jaxpr, mesh: AbstractMesh, sizes: Mapping[str, int], varying: Sequence[Sequence[str]]
) -> tuple[ClosedJaxpr, list[list[str]]]:
    """The program of one device, as a program on the parts of all devices, in dimensions in front of its own.

    varying: the axes of these dimensions for each argument. Returns the program, and the axes for each result.
    """
    program = jax.make_jaxpr(partial(_evaluate, mesh, body, ()), axis_env=list(sizes.items()))(*map(_type, body.invars))
    in_front: list[list[str]] = [[] for _ in body.outvars]
    for axis in reversed(list(sizes)):
        program, is_mapped = batched_program(program, axis, sizes, [axis in axes for axes in varying])
        in_front = [[axis, *axes] if now else axes for axes, now in zip(in_front, is_mapped, strict=True)]
    return program, in_front


def _type(atom: Atom) -> Any:
    return type_of(aval_of(atom))


def _entries(spec: Any, atom: Atom) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension."""
    given = [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return [*given, *[()] * (len(atom.aval.shape) - len(given))]


def _split(array: Any, spec: list[tuple[str, ...]], axes: list[str], sizes: Mapping[str, int]) -> Any:
    """The parts of an array, in dimensions `axes` in front of the dimensions of a part."""
    shape: list[int] = []
    places: dict[str, int] = {}
    own: list[int] = []
    for length, entry in zip(array.shape, spec, strict=True):
        for axis in entry:
            places[axis] = len(shape)
            shape.append(sizes[axis])
        own.append(len(shape))
        shape.append(length // math.prod(sizes[axis] for axis in entry))
    if not axes:
        return array
    return jnp.transpose(jnp.reshape(array, shape), [*(places[axis] for axis in axes), *own])


def _joined(array: Any, spec: list[tuple[str, ...]], axes: list[str], sizes: Mapping[str, int]) -> Any:
    """The inverse of `_split`. Parts along an axis that no dimension has are equal: the first is taken."""
    split = [axis for entry in spec for axis in entry]
    for axis in [axis for axis in axes if axis not in split]:
        array = lax.index_in_dim(array, 0, axes.index(axis), keepdims=False)
        axes = [other for other in axes if other != axis]
    for axis in [axis for axis in split if axis not in axes]:
        array, axes = jnp.broadcast_to(array, (sizes[axis], *array.shape)), [axis, *axes]
    if not axes:
        return array

    order, shape = [], []
    for dim, entry in enumerate(spec):
        order += [*map(axes.index, entry), len(axes) + dim]
        shape.append(math.prod(sizes[axis] for axis in entry) * array.shape[len(axes) + dim])
    return jnp.reshape(jnp.transpose(array, order), shape)


# ---- the border of the step ------------------------------------------------------------------------------------------


class Border(NamedTuple):
    """Shardings in which a `shard_map` or `pmap` reads arguments of the step, or makes results.

    of_pmap: the mesh of the first `pmap`, also in gradients and loops.
    """

    arguments: tuple[UsersSharding | None, ...]
    results: tuple[UsersSharding | None, ...]
    of_pmap: Mesh | None


def border_of(jaxpr: Jaxpr) -> Border:
    regions = (eqn for eqn in all_equations(jaxpr) if eqn.primitive.name == REGION and is_pmap(eqn))
    of_pmap = next((eqn.params["mesh"] for eqn in regions if isinstance(eqn.params["mesh"], Mesh)), None)
    known = _by_regions(jaxpr, only_pmaps=False)
    results = [None if is_literal(atom) else known.get(atom) for atom in jaxpr.outvars]
    return Border(tuple(map(known.get, jaxpr.invars)), tuple(results), of_pmap)


def _by_regions(jaxpr: Jaxpr, only_pmaps: bool) -> dict[Var, UsersSharding]:
    """Operands and results of regions. only_pmaps: inside a gradient, `shard_map` has the arrays of one layer."""
    found: dict[Var, UsersSharding] = {}
    for eqn in jaxpr.eqns:
        for atom, sharding in _at_ends(eqn, only_pmaps or "jvp(" in name_stack(eqn)):
            if not is_literal(atom):
                found.setdefault(atom, sharding)
    return found


def _at_ends(eqn: JaxprEqn, only_pmaps: bool) -> Iterator[tuple[Atom, UsersSharding]]:
    """Results and operands of a region, also of a region in a call. A `pmap` refuses other shardings."""
    if eqn.primitive.name == REGION:
        mesh, is_exact = eqn.params["mesh"], is_pmap(eqn)
        if isinstance(mesh, Mesh) and (is_exact or not only_pmaps):
            atoms, specs = [*eqn.outvars, *eqn.invars], [*eqn.params["out_specs"], *eqn.params["in_specs"]]
            for atom, spec in zip(atoms, specs, strict=True):
                yield atom, UsersSharding(NamedSharding(mesh, spec), is_exact)
    elif is_call(eqn):
        program, operands = called(eqn)
        body = getattr(program, "jaxpr", program)
        inside = _by_regions(body, only_pmaps)
        for atom, var in zip([*eqn.outvars, *operands], [*body.outvars, *body.invars], strict=True):
            if not is_literal(var) and var in inside:
                yield atom, inside[var]


# ---- the program of one device ---------------------------------------------------------------------------------------

#: They change no value: only types record along which axes values vary.
_UNCHANGED = ("pvary",)
_WITHOUT_RULE = (
    *("all_gather_reduced", "pbroadcast_dynamic", "preduced", "precv", "psend", "ragged_all_to_all"),
    *("reduced_vary_cast", "unreduced_pmax", "unreduced_pmin", "unreduced_psum", "unreduced_psum_scatter"),
    *("unreduced_reduce_scatter", "vary_unreduced_cast", "vary_unreduced_cast_p"),
)


#: Under `jax.vmap`, they draw other numbers from several keys of "rbg" than from each by itself.
_DRAWS = ("random_bits", "rng_bit_generator")


def _evaluate(mesh: AbstractMesh, jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Trace the program of one device, with collectives as operations of this module."""
    env: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        operands = [atom.val if is_literal(atom) else env[atom] for atom in eqn.invars]
        with in_context_of(eqn):
            env.update(zip(eqn.outvars, _results(mesh, eqn, operands), strict=True))
    return [atom.val if is_literal(atom) else env[atom] for atom in jaxpr.outvars]


def _results(mesh: AbstractMesh, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in _UNCHANGED:
        return operands
    _check_rule(eqn)
    if name in COLLECTIVES:
        return [COLLECTIVES[name](partial(along_axis, mesh), x, eqn.params) for x in operands]
    if name in _DRAWS:
        return _drawn(eqn, operands)
    if name == "ragged_dot_general":  # which jax batches along the first dimension only
        return grouped_product(*operands, **eqn.params)
    if name == REGION:
        program = whole_program(eqn)
        return _evaluate(mesh, program.jaxpr, program.consts, *operands)
    if name in _REMATS:
        body = _local_body(mesh, eqn.params["jaxpr"], ())
        params = {**eqn.params, "jaxpr": with_constants_as_arguments(body.jaxpr)}
        return list(rebind(eqn, [*body.consts, *operands], params))
    if is_call(eqn):
        inner, atoms = called(eqn)
        by_atom = {id(atom): x for atom, x in zip(eqn.invars, operands, strict=True)}
        given = [by_atom[id(atom)] for atom in atoms]
        return _evaluate(mesh, getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), *given)
    if name == "cond":
        return _branch(mesh, eqn, operands)

    local = _with_local_bodies(mesh, eqn)
    if name == "while":
        local = _with_shared_decisions(local, collective_axes(eqn))
    found = rebind(local, operands, local.params)
    return found if eqn.primitive.multiple_results else [found]


def _check_rule(eqn: JaxprEqn) -> None:
    """Raise TraceError for a collective without a rule."""
    if eqn.primitive.name in _WITHOUT_RULE:
        raise _refusal(eqn, "has no rule", "Use `psum`, `all_gather`, `psum_scatter`, `all_to_all` or `ppermute`")
    if eqn.primitive.name in COLLECTIVES and eqn.params.get("axis_index_groups") is not None:
        remedy = "Make a mesh with one axis for the groups, and name the other"
        raise _refusal(eqn, "has `axis_index_groups`", remedy)


def _branch(mesh: AbstractMesh, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    eqn, sums = with_sums_after(eqn)
    local = _with_local_bodies(mesh, eqn)
    index = same_along(collective_axes(eqn), eqn, operands[0])
    return summed_over(rebind(local, [index, *operands[1:]], local.params), sums)


def _with_shared_decisions(loop: JaxprEqn, axes: tuple[str, ...]) -> JaxprEqn:
    """A `while` that `same_along` checks along `axes`."""
    if not axes:
        return loop
    goes_on = loop.params["cond_jaxpr"]
    decide = jaxpr_as_fun(goes_on)
    decided = jax.make_jaxpr(lambda *args: [same_along(axes, loop, decide(*args)[0])])(*goes_on.in_avals)
    return with_bodies(loop, {"cond_jaxpr": decided})


def _with_local_bodies(mesh: AbstractMesh, eqn: JaxprEqn) -> JaxprEqn:
    return with_each_body(lambda body: _local_body(mesh, body.jaxpr, body.consts), eqn)


def _drawn(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """The numbers that each device draws."""

    @jax.custom_batching.custom_vmap
    def draw(*args: Any) -> Any:
        return rebind(eqn, args, eqn.params)

    @draw.def_vmap
    def _each(axis_size: int, is_mapped: Sequence[bool], *args: Any) -> tuple[Any, Any]:
        pairs = zip(args, is_mapped, strict=True)
        results = lax.map(lambda one: draw(*one), [x if mapped else on_each(x, axis_size) for x, mapped in pairs])
        return results, jax.tree.map(lambda _: True, results)

    found = draw(*operands)
    return found if eqn.primitive.multiple_results else [found]


def _local_body(mesh: AbstractMesh, jaxpr: Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(partial(_evaluate, mesh, jaxpr, consts))(*map(_type, jaxpr.invars))


def _refusal(eqn: JaxprEqn, what: str, remedy: str) -> TraceError:
    return TraceError(f"`{eqn.primitive.name}` at {source_line(eqn)}, in a `shard_map`, {what}. {remedy}.")
