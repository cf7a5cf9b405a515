"""Devices that split query positions under a causal mask exchange halves: same numbers, equal work, as it was planned."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import minialpa.rules.attention
import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa import LogicalMesh, hlo
from minialpa.attention.operation import Attention, attention_gradient_p, attention_p
from minialpa.cluster import DeviceSpec
from minialpa.intra.spmd import ShardedEquations, collectives_of, shard_program, take_step
from minialpa.intra.strategies.balance import balance_of
from minialpa.intra.strategies.reshard import ReshardStep
from minialpa.intra.strategies.strategies import StrategySet, enumerate_strategies
from minialpa.rules.factors import factors_of, forget
from minialpa.sharding import AXIS_NAMES, EquationSpecs, Spec
from minialpa.tracing.jaxprs import eval_equation, shape_of
from tests.attention_calls import causal

_B, _G, _R, _D, _E = 1, 1, 2, 4, 3
_KINDS = {
    "causal": causal(_D),
    "window": causal(_D, left=5),
    "ahead": causal(_D, left=0, right=None),
    "finite": causal(_D, masked_score=-1e9),
    "added": causal(_D, n_biases=3, n_masks=2),
}
#: Shapes of biases and masks of the last kind, where s stands for the number of keys and t for that of queries.
_ADDED = ((1, _G, _R, "t", "s"), (_B, 1, 1, 1, "s"), (1, 1, 1, "t", 1), (_B, 1, 1, "t", "s"), (1, 1, 1, 1, "s"))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rule believes in blocks of 2 positions, so that few positions may be exchanged."""
    monkeypatch.setattr(minialpa.rules.attention, "SIDE", 2)
    forget()
    yield
    forget()


def _equations(kind: Attention, n: int, positions: Any = None) -> dict[str, tuple[JaxprEqn, list[Any]]]:
    """Attention of n positions and its gradient, each with its operands."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape))

    query, key, value = draw(_B, n, _G, _R, _D), draw(_B, n, _G, _D), draw(_B, n, _G, _E)
    at = [jnp.arange(n, dtype=jnp.int32) if positions is None else positions] * kind.n_positions
    n_added = kind.n_biases + kind.n_masks
    added = [draw(*({"t": n, "s": n}.get(x, x) for x in shape)) for shape in _ADDED[:n_added]]
    masks = [x > -1 for x in added[kind.n_biases :]]
    others = [*at, *added[: kind.n_biases], *masks]

    out, logsumexp = attention_p.bind(query, key, value, *others, kind=kind)
    # All positions of queries and keys are one array, which the equation reads in two specs.
    dtypes, wants_bias = (query.dtype.name,) * (3 + kind.n_biases), (True,) * kind.n_biases
    found = {}
    for name, primitive, operands, params in (
        ("forward", attention_p, [query, key, value, *others], {"kind": kind}),
        ("backward", attention_gradient_p, [query, key, value, out, logsumexp, draw(*out.shape), *others],
         {"kind": kind, "dtypes": dtypes, "wants_bias": wants_bias}),
    ):  # fmt: skip
        jaxpr = jax.make_jaxpr(lambda *xs, p=primitive, given=params: p.bind(*xs, **given))(*operands)
        (eqn,) = jaxpr.jaxpr.eqns
        found[name] = eqn, operands
    return found


def _split_by_positions(eqn: JaxprEqn, mesh: LogicalMesh) -> tuple[StrategySet, int]:
    """All strategies, and the one in which all devices split the query positions."""
    strategies = enumerate_strategies(eqn, factors_of(eqn).on_mesh(), mesh)
    axes = tuple(axis for axis, n in enumerate(mesh.shape) if n > 1)
    numbers = [s for s, spec in enumerate(strategies.operands[0]) if spec.dims[1] == axes]
    return strategies, numbers[0]


def _program(eqn: JaxprEqn, chosen: EquationSpecs, mesh: LogicalMesh) -> ShardedEquations:
    """One equation, whose operands are replicated, as its results are to be."""
    arrays = [*eqn.invars, *eqn.outvars]
    replicated = {v: Spec.replicated(len(shape_of(v))) for v in arrays}
    return ShardedEquations(
        eqns=(eqn,),
        invars=tuple(eqn.invars),
        outvars=tuple(eqn.outvars),
        specs=replicated | dict(zip(eqn.outvars, chosen.results, strict=True)),
        equations={id(eqn): chosen},
        out_specs=tuple(replicated[v] for v in eqn.outvars),
        mesh=mesh,
    )


def _compiled(program: ShardedEquations, operands: list[Any]) -> Any:
    mesh_shape = program.mesh.shape
    devices = np.array(jax.devices()[: program.mesh.n_devices]).reshape(mesh_shape)
    names = AXIS_NAMES[: len(mesh_shape)]
    replicated = NamedSharding(Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names)), P())
    fun = jax.jit(shard_program(program), in_shardings=replicated, out_shardings=replicated)
    return fun.lower(*operands).compile()


def _kinds_and_bytes(text: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in hlo.collectives(text):
        found[one.kind] += int(one.n_bytes) * one.times
    return found


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.usefixtures("small_blocks")
def test_balanced_devices_give_the_numbers_of_one(kind: str, shape: tuple[int, ...]) -> None:
    mesh = LogicalMesh(shape)
    with jax.enable_x64(True):
        for eqn, operands in _equations(_KINDS[kind], 4 * mesh.n_devices).values():
            strategies, s = _split_by_positions(eqn, mesh)
            chosen = strategies.read(s)
            assert chosen.is_balanced

            program = _program(eqn, chosen, mesh)
            compiled = _compiled(program, operands)
            expected = eval_equation(eqn, operands)
            for found, wanted in zip(compiled(*operands), expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-12)

            # What is exchanged is what was planned.
            planned: Counter[str] = Counter()
            for one, times, _ in collectives_of(program):
                planned[one.kind] += int(one.n_bytes) * times
            assert planned["collective-permute"] > 0
            assert _kinds_and_bytes(compiled.as_text())["collective-permute"] == planned["collective-permute"]
