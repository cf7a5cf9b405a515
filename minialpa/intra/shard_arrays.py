"""A `ShardedEquations` in; a function of jax arrays out: `spmd.walk` under `jax.shard_map`.

Barriers wait by data, because XLA for GPUs drops optimization barriers before it orders its kernels. It would recompute
values for a backward pass long before the pass needs them, and save no memory. So each array x after a barrier becomes
    where(never, 0, x)
`never` reads an element of every array before the barrier and is always false, which no compiler knows. The kernels
that read x include the `where`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from minialpa import routed
from minialpa.attention.operation import in_ring
from minialpa.attention.ring import Ring
from minialpa.errors import TraceError, VerifyError
from minialpa.intra.spmd import ShardedEquations, ShardOps, split_axes, walk
from minialpa.intra.strategies.all_reduce import all_reduce, is_narrow
from minialpa.intra.strategies.loops import ScanBody
from minialpa.intra.strategies.reshard import ReshardStep
from minialpa.intra.strategies.rings import ring_axes
from minialpa.ir.equations import Atom, aval_of, is_extended, is_in_host, is_literal, shape_of, source_line
from minialpa.ir.op import scope_in_profiles
from minialpa.rules.factors import Factors
from minialpa.rules.shards import run_shard
from minialpa.sharding import AXIS_NAMES, EquationSpecs, Spec, abstract_mesh
from minialpa.support.private_jax import name_stack, under_settings_of
from minialpa.tracing.evaluation import eval_equation

Shape = tuple[int, ...]


def shard_program(program: ShardedEquations) -> Callable[..., tuple[Any, ...]]:
    """A function of stored arrays (`Spec.stored_shape`) on all devices of the mesh."""
    mesh_shape = program.mesh.shape
    in_specs = [program.specs[v] for v in program.invars]
    ops = replace(_array_ops(mesh_shape), run=functools.partial(_run_in_order, mesh_shape))

    def on_shards(*stored: Any) -> tuple[Any, ...]:
        shards = [_shard_of(array, spec) for array, spec in zip(stored, in_specs, strict=True)]
        results = walk(program, shards, ops)
        return tuple(_stored_array(shard, spec) for shard, spec in zip(results, program.out_specs, strict=True))

    if max(mesh_shape) == 1:
        return on_shards

    return jax.shard_map(
        on_shards,
        mesh=abstract_mesh(mesh_shape),
        in_specs=tuple(spec.partition_spec() for spec in in_specs),
        out_specs=tuple(spec.partition_spec() for spec in program.out_specs),
        check_vma=False,
    )


def _shard_of(stored: Any, spec: Spec) -> Any:
    """The shard lacks the leading dimensions of partial sums."""
    return stored.reshape(stored.shape[len(spec.partial) :]) if spec.partial else stored


def _stored_array(shard: Any, spec: Spec) -> Any:
    return jnp.expand_dims(shard, range(len(spec.partial))) if spec.partial else shard


# ---- operations of the walk -----------------------------------------------------------------------------------------


def _array_ops(mesh_shape: Shape) -> ShardOps[Any]:
    move, run, loop = (functools.partial(operation, mesh_shape) for operation in (_move, _run, _loop))
    return ShardOps(lambda atom: atom.val, move, run, loop, _named)


def _named(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """Profiles show the name scopes of an equation."""
    scope = scope_in_profiles(name_stack(eqn))
    return jax.named_scope(scope) if scope else nullcontext()


def _move(mesh_shape: Shape, shard: Any, step: ReshardStep, atom: Atom) -> Any:
    if is_extended(aval_of(atom).dtype):
        # Random keys are resharded as integers.
        data = take_step(jax.random.key_data(shard), step, mesh_shape)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(shard))
    return take_step(jnp.asarray(shard, aval_of(atom).dtype), step, mesh_shape)


def _run(mesh_shape: Shape, eqn: JaxprEqn, factors: Factors, chosen: EquationSpecs, operands: list[Any]) -> list[Any]:
    if eqn.effects and max(mesh_shape) > 1:
        return _run_once(eqn, operands, len(mesh_shape))

    if passing := ring_axes(factors, chosen.operands):
        results = _run_ring(mesh_shape, eqn, chosen, operands, passing)
        _check_shapes(eqn, chosen, results, mesh_shape)
        return results

    if eqn.primitive in routed.PRIMITIVES:
        owners = chosen.operands[0].dims[0]
        devices = routed.OwnerDevices(_names(owners), math.prod(mesh_shape[axis] for axis in owners))
        results = routed.on_devices(eqn.primitive, devices)(*operands, **eqn.params)
        _check_shapes(eqn, chosen, results, mesh_shape)
        return results

    axes = split_axes(factors, chosen)
    n_splits = {factor: math.prod(mesh_shape[axis] for axis in own) for factor, own in axes.items()}
    # For rules that depend on positions.
    parts = {factor: lax.axis_index(_names(own)) for factor, own in axes.items() if factor in factors.positional}
    results = run_shard(eqn, factors, operands, n_splits, parts)
    _check_shapes(eqn, chosen, results, mesh_shape)
    return results


def _run_ring(
    mesh_shape: Shape, eqn: JaxprEqn, chosen: EquationSpecs, operands: list[Any], axes: tuple[int, ...]
) -> list[Any]:
    ring = Ring(_names(axes), math.prod(mesh_shape[axis] for axis in axes), chosen.is_balanced)
    with under_settings_of(eqn):
        return in_ring(eqn.primitive)(ring, *operands, **eqn.params)


def _run_in_order(
    mesh_shape: Shape, eqn: JaxprEqn, factors: Factors, chosen: EquationSpecs, operands: list[Any]
) -> list[Any]:
    """`_run` with barriers that every compiler keeps. Loops do not need them: iterations run in order."""
    if eqn.primitive.name == "optimization_barrier":
        return wait_for_all(operands)
    return _run(mesh_shape, eqn, factors, chosen, operands)


def _run_once(eqn: JaxprEqn, operands: list[Any], n_axes: int) -> list[Any]:
    """On the first device; the others get its results."""
    if any(type(effect).__name__ == "OrderedDebugEffect" for effect in eqn.effects):
        raise TraceError(
            f"`{eqn.primitive.name}` at {source_line(eqn)} is an ordered `jax.debug` callback, which jax runs on one "
            "device only. Set `ordered=False`, or use `jax.experimental.io_callback(..., ordered=True)`."
        )
    names = _names(range(n_axes))
    is_first = lax.axis_index(names) == 0
    zeros = [jnp.zeros(shape_of(v), aval_of(v).dtype) for v in eqn.outvars]
    results = lax.cond(is_first, lambda *xs: eval_equation(eqn, xs), lambda *_: zeros, *operands)
    return [all_reduce(result, names, "or" if result.dtype == np.bool_ else "sum") for result in results]


def _check_shapes(eqn: JaxprEqn, chosen: EquationSpecs, results: Sequence[Any], mesh_shape: Shape) -> None:
    for v, shard, spec in zip(eqn.outvars, results, chosen.made, strict=True):
        expected = spec.shard_shape(shape_of(v), mesh_shape)
        if tuple(np.shape(shard)) != expected:
            raise VerifyError(
                f"The sharding rule of `{eqn.primitive.name}` at {source_line(eqn)} makes a shard of shape "
                f"{np.shape(shard)}, but an array of shape {shape_of(v)} in the spec {spec} has shards of shape "
                f"{expected}. This is a bug in minialpa: report it with this message."
            )


def _loop(mesh_shape: Shape, eqn: JaxprEqn, body: ScanBody, inside: ShardedEquations, operands: list[Any]) -> list[Any]:
    ops = _array_ops(mesh_shape)

    def iteration(carry: Any, slices: Any) -> Any:
        inputs = [*body.flat.consts, *operands[: body.n_consts], *carry, *slices]
        shards = walk(inside, inputs, ops)
        # Literals may be Python numbers; a scan needs arrays.
        results = [
            jnp.asarray(shard, aval_of(atom).dtype) if is_literal(atom) else shard
            for shard, atom in zip(shards, inside.outvars, strict=True)
        ]
        return results[: body.n_carry], results[body.n_carry :]

    carry, stacked = lax.scan(
        iteration,
        operands[body.n_consts : body.n_lead],
        operands[body.n_lead :],
        length=body.length,
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *stacked]


def _names(axes: Sequence[int]) -> tuple[str, ...]:
    return tuple(AXIS_NAMES[axis] for axis in axes)


# ---- barriers -------------------------------------------------------------------------------------------------------


def wait_for_all(arrays: Sequence[Any]) -> list[Any]:
    return list(lax.platform_dependent(*arrays, cuda=wait_by_data, default=_barrier))


def wait_by_data(*arrays: Any) -> tuple[Any, ...]:
    """The same arrays, to the last bit, each of which depends on an element of every floating point array."""
    elements = [
        array[(0,) * array.ndim].astype(jnp.float32)
        for array in arrays
        if array.size and jnp.issubdtype(array.dtype, jnp.floating) and not is_in_host(jax.typeof(array))
    ]
    if not elements:
        return _barrier(*arrays)

    # Never true: a NaN is not equal to 0.
    read = jnp.stack(elements)
    never = jnp.any((read != read) & (read == 0))
    if any(is_in_host(jax.typeof(array)) for array in arrays):
        # XLA keeps barriers around moves, and drops a move to host memory and back without one between them.
        arrays = _barrier(*arrays, read)[:-1]
    return tuple(
        array if is_in_host(jax.typeof(array)) else jnp.where(never, jnp.zeros_like(array), array) for array in arrays
    )


def _barrier(*arrays: Any) -> tuple[Any, ...]:
    return tuple(lax.optimization_barrier(arrays))


# ---- collectives ----------------------------------------------------------------------------------------------------


def take_step(x: Any, step: ReshardStep, mesh_shape: tuple[int, ...]) -> Any:
    """The shard of this device after a step of a resharding.

    On 4 devices, `cut-halves` takes slices 2 and 5 of 8 on device 1. `swap` makes the same shard of slices 2 and 3.
    """
    if is_narrow(x.dtype):  # int2 and int4 move as int8
        return take_step(x.astype(np.int8), step, mesh_shape).astype(x.dtype)
    names = _names(step.axes)
    n_devices = math.prod(mesh_shape[axis] for axis in step.axes)
    match step.kind:
        case "cut":
            size = x.shape[step.dim] // n_devices
            return lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, step.dim)
        case "mask":
            return jnp.where(lax.axis_index(names) == 0, x, jnp.zeros_like(x))
        case "all-gather":
            return lax.all_gather(x, names, axis=step.dim, tiled=True)
        case "all-reduce":
            return all_reduce(x, names, step.reduction)
        case "reduce-scatter":
            return lax.psum_scatter(x, names, scatter_dimension=step.dim, tiled=True)
        case "all-to-all":
            return lax.all_to_all(x, names, step.dim, step.source, tiled=True)
        case "cut-halves":
            return _cut_halves(x, step.dim, lax.axis_index(names), n_devices)
        case "swap":
            return _swap(x, step.dim, names, n_devices)
        case "rotate":
            return _rotate(x, step, names, n_devices)


def _cut_halves(x: Any, dim: int, i: Any, n: int) -> Any:
    """Of 2 n slices of `x`, slices 2 i and 2 n - 1 - 2 i."""
    size = x.shape[dim] // (2 * n)
    starts = (2 * i * size, (2 * n - 1 - 2 * i) * size)
    halves = [lax.dynamic_slice_in_dim(x, start, size, dim) for start in starts]
    return jnp.concatenate(halves, axis=dim)


def _rotate(x: Any, step: ReshardStep, names: tuple[str, ...], n: int) -> Any:
    """See `intra.strategies.rotation`."""
    q, r = divmod(step.shift, x.shape[step.dim])

    def of_device_after(part: Any, by: int) -> Any:
        return lax.ppermute(part, names, [(i, (i - by) % n) for i in range(n)]) if by % n else part

    if r == 0:
        return of_device_after(x, q)
    beginning, end = jnp.split(x, [r], axis=step.dim)
    return jnp.concatenate([of_device_after(end, q), of_device_after(beginning, q + 1)], axis=step.dim)


def _swap(x: Any, dim: int, names: tuple[str, ...], n: int) -> Any:
    """The first half of this shard, then the second half of the shard of device n - 1 - i."""
    kept, sent = jnp.split(x, 2, axis=dim)
    received = lax.ppermute(sent, names, [(i, n - 1 - i) for i in range(n)])
    return lax.optimization_barrier(jnp.concatenate([kept, received], axis=dim))
