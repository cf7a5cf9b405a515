"""Arrays move before conversions to wider types, and after conversions to narrower ones: the same bits arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa import LogicalMesh
from minialpa.intra.narrow_moves import with_narrow_moves
from minialpa.intra.shard_arrays import shard_program
from minialpa.intra.spmd import ShardedEquations, collectives_of
from minialpa.sharding import AXIS_NAMES, EquationSpecs, Spec

ROWS, COLUMNS = Spec(((0,), ())), Spec(((), (0,)))
SUMMED = Spec(((), ()), (0,))
SHAPE = (8, 16)


def _program(fun: Callable[..., Any], dtype: Any, specs: Sequence[Spec], out: Sequence[Spec]) -> ShardedEquations:
    """One operand, one result for each equation. specs: of the operand and of each equation."""
    jaxpr = jax.make_jaxpr(fun)(jnp.zeros(SHAPE, dtype)).jaxpr
    equations = {
        eqn: EquationSpecs((spec,) * len(eqn.invars), (spec,), (spec,))
        for eqn, spec in zip(jaxpr.eqns, specs[1:], strict=True)
    }
    made = [*jaxpr.invars, *(eqn.outvars[0] for eqn in jaxpr.eqns)]
    return ShardedEquations(
        eqns=tuple(jaxpr.eqns),
        invars=tuple(jaxpr.invars),
        outvars=tuple(jaxpr.outvars),
        specs=dict(zip(made, specs, strict=True)),
        equations=equations,
        out_specs=tuple(out),
        mesh=LogicalMesh((4,)),
    )


def _moved(program: ShardedEquations) -> float:
    return sum(one.times * one.collective.n_bytes for one in collectives_of(program))


def _run(program: ShardedEquations, x: jax.Array) -> list[np.ndarray[Any, Any]]:
    mesh = Mesh(np.array(jax.devices()[:4]), AXIS_NAMES[:1], axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, P())
    return [np.asarray(out) for out in jax.jit(shard_program(program), out_shardings=replicated)(x)]


def _widened(x: jax.Array) -> jax.Array:
    return jnp.sin(x.astype(jnp.float32))


def _narrowed(x: jax.Array) -> jax.Array:
    return jnp.sin(x.astype(jnp.bfloat16))


def _widened_and_read_twice(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(jnp.float32)
    return jnp.sin(wide), jnp.cos(wide)


def _narrowed_beside_a_reader(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x.astype(jnp.bfloat16), jnp.sin(x)


def _widened_twice(x: jax.Array) -> jax.Array:
    return jnp.sin(x.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize(
    ("fun", "dtype", "specs", "out", "part"),
    [
        (_widened, jnp.bfloat16, (ROWS, ROWS, COLUMNS), (COLUMNS,), 0.5),
        (_narrowed, jnp.float32, (ROWS, COLUMNS, COLUMNS), (COLUMNS,), 0.5),
        (_widened_twice, jnp.float8_e4m3fn, (ROWS, ROWS, ROWS, COLUMNS), (COLUMNS,), 0.25),
        (_widened_and_read_twice, jnp.bfloat16, (ROWS, ROWS, COLUMNS, COLUMNS), (COLUMNS, COLUMNS), 0.5),
        # The other reader needs the rows, which are present; or an array that moves for another reader anyway.
        (_widened_and_read_twice, jnp.bfloat16, (ROWS, ROWS, COLUMNS, ROWS), (COLUMNS, ROWS), 1),
        (_narrowed_beside_a_reader, jnp.float32, (ROWS, COLUMNS, COLUMNS), (COLUMNS, COLUMNS), 1),
        # A sum of wide numbers differs from a sum of narrow ones.
        (_widened, jnp.bfloat16, (SUMMED, SUMMED, COLUMNS), (COLUMNS,), 1),
    ],
)
def test_the_narrower_type_moves(fun: Any, dtype: Any, specs: Sequence[Spec], out: Sequence[Spec], part: float) -> None:
    """part: fraction of the bytes that would move in the wider type."""
    program = _program(fun, dtype, specs, out)
    changed = with_narrow_moves(program)
    assert _moved(changed) == part * _moved(program) > 0
    if not specs[0].partial:
        x = jax.random.normal(jax.random.key(0), SHAPE).astype(dtype)
        for found, wanted in zip(_run(changed, x), _run(program, x), strict=True):
            np.testing.assert_array_equal(found, wanted)
