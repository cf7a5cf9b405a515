"""Devices that pass keys and values around a ring: the numbers of one device, the planned bytes, equal work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

import minialpa
import minialpa.attention.ring
import minialpa.rules.attention
from minialpa import LogicalMesh, ShardParallel, hlo
from minialpa.attention.operation import AttentionKind, attention_gradient_p, attention_p
from minialpa.attention.ring import Ring
from minialpa.intra.spmd import collectives_of
from minialpa.intra.strategies.strategies import StrategySet
from minialpa.rules.known_rules import forget
from minialpa.sharding import EquationSpecs
from minialpa.tracing.evaluation import eval_equation
from tests.attention_calls import causal, two_layers, two_layers_arguments
from tests.compiled_text import planned_bytes
from tests.helpers import compiled_shards, program_of, strategies_of

_D = 8
_N = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rule assumes blocks of 2 positions, so that few positions may be exchanged."""
    monkeypatch.setattr(minialpa.rules.attention, "SIDE", 2)
    forget()
    yield
    forget()


@pytest.fixture
def several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the keys of each device."""
    monkeypatch.setattr(minialpa.attention.ring, "MOST_SIDE", 16)
    monkeypatch.setattr(minialpa.attention.ring, "PLAIN_SIDES", (4, 2))


def _equations(
    kind: AttentionKind, n_keys: int, dtype: Any, first_key: int = 0
) -> Iterator[tuple[JaxprEqn, list[jax.Array]]]:
    """An attention and its gradient, with their operands. The first query has position 0."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    query, key, value = draw(2, _N, 1, 2, _D), draw(2, n_keys, 1, _D), draw(2, n_keys, 1, 4)
    at = [jnp.arange(_N, dtype=jnp.int32), jnp.arange(n_keys, dtype=jnp.int32) + first_key][: kind.n_positions]
    documents = jnp.sort(jnp.asarray(rng.integers(0, 5, (2, 1, 1, n_keys)), jnp.int32))
    at += [documents[:, :, :, :_N, None], documents[:, :, :, None]][: 2 * kind.n_segments]
    if kind.n_segments == 2:  # padding
        at += [jnp.ones((1,) * 5, bool), jnp.asarray(rng.integers(0, 2, (2, 1, 1, 1, n_keys)), bool)]
    out, logsumexp = attention_p.bind(query, key, value, *at, kind=kind)
    gradient = {"kind": kind, "dtypes": (query.dtype.name,) * 3, "with_bias_gradient": ()}
    for primitive, operands, params in (
        (attention_p, [query, key, value, *at], {"kind": kind}),
        (attention_gradient_p, [query, key, value, out, logsumexp, draw(*out.shape), *at], gradient),
    ):
        jaxpr = jax.make_jaxpr(lambda *xs, p=primitive, given=params: p.bind(*xs, **given))(*operands)
        yield jaxpr.jaxpr.eqns[0], operands


def _ring(strategies: StrategySet, axes: tuple[int, ...]) -> EquationSpecs:
    """The first strategy with a ring of `axes`."""
    return next(strategies.read(s) for s, keys in enumerate(strategies.operands[1]) if keys.dims[1] == axes)


@pytest.mark.usefixtures("several_pieces")
@pytest.mark.parametrize(
    "kind, n_keys, first_key",
    [
        (AttentionKind(scale=0.3), _N, 0),
        (causal(_D), _N, 0),
        (causal(_D), _N, 1),  # the first query sees no key: NaN, as on one device
        (causal(_D, left=9), _N, 0),
        (causal(_D, masked_score=-1e9), _N, 1),  # the mean of all values
        (causal(_D, left=9, masked_score=-1e9), _N // 2, 0),
        (causal(_D, right=None, left=5), 2 * _N, 0),
        (causal(_D, n_segments=1), _N, 0),
        (causal(_D, n_segments=2, masked_score=-1e9), _N, 0),
        (AttentionKind(scale=0.3, n_segments=1, masked_score=-1e9), 2 * _N, 0),
    ],
)
@pytest.mark.parametrize("shape, axes", [((4,), (0,)), ((2, 2), (1,)), ((2, 2), (0, 1))])
def test_a_ring_gives_the_numbers_of_one_device(
    kind: AttentionKind, n_keys: int, first_key: int, shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    mesh = LogicalMesh(shape)
    with jax.enable_x64(True):
        for eqn, operands in _equations(kind, n_keys, np.float64, first_key):
            chosen = _ring(strategies_of(eqn, mesh), axes)
            assert chosen.is_balanced == (kind.right is not None and n_keys == _N)
            program = program_of(eqn, chosen, mesh)
            compiled = compiled_shards(program, operands)
            for found, expected in zip(compiled(*operands), eval_equation(eqn, operands), strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-11)

            planned: dict[str, float] = {}
            for one, times, *_ in collectives_of(program):
                planned[one.kind] = planned.get(one.kind, 0) + times * one.n_bytes
            assert planned == hlo.bytes_by_kind(hlo.collectives(compiled.as_text()))


@pytest.mark.usefixtures("several_pieces")
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("place", range(3), ids=["query", "key", "value"])
def test_a_number_that_is_not_finite_goes_where_it_goes_on_one_device(wrong: float, place: int) -> None:
    mesh = LogicalMesh((4,))
    for eqn, operands in _equations(causal(_D, masked_score=-1e9), _N, np.float32):
        operands[place] = operands[place].at[0, _N // 2, 0, ..., 1].set(wrong)
        compiled = compiled_shards(program_of(eqn, _ring(strategies_of(eqn, mesh), (0,)), mesh), operands)
        for found, expected in zip(compiled(*operands), eval_equation(eqn, operands), strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)


def test_sums_in_16_bits_are_rounded_once_for_each_device() -> None:
    mesh = LogicalMesh((4,))
    for (eqn, operands), (exact, wide) in zip(
        _equations(causal(_D), _N, jnp.bfloat16), _equations(causal(_D), _N, np.float32), strict=True
    ):
        wide = [x.astype(y.dtype) for x, y in zip(operands, wide, strict=True)]
        compiled = compiled_shards(program_of(eqn, _ring(strategies_of(eqn, mesh), (0,)), mesh), operands)
        for found, expected in zip(compiled(*operands), eval_equation(exact, wide), strict=True):
            np.testing.assert_allclose(np.float32(found), expected, atol=4 * 2**-8 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize(
    "wide, narrow", [(np.float64, np.float32), (np.float64, jnp.bfloat16), (np.float32, np.float64)]
)
def test_gradients_of_a_ring_may_have_another_dtype(wide: Any, narrow: Any) -> None:
    """As of queries that the step converts to float64."""
    mesh = LogicalMesh((4,))
    with jax.enable_x64(True):
        _, (eqn, operands) = _equations(causal(_D), _N, wide)
        params = {**eqn.params, "dtypes": (np.dtype(narrow).name,) * 3}
        traced = jax.make_jaxpr(lambda *xs: attention_gradient_p.bind(*xs, **params))(*operands)
        eqn = traced.jaxpr.eqns[0]
        compiled = compiled_shards(program_of(eqn, _ring(strategies_of(eqn, mesh), (0,)), mesh), operands)
        for found, expected in zip(compiled(*operands), eval_equation(eqn, operands), strict=True):
            assert found.dtype == expected.dtype == narrow
            atol = 4 * max(float(jnp.finfo(one).eps) for one in (wide, narrow)) * float(jnp.abs(expected).max())
            np.testing.assert_allclose(np.float64(found), np.float64(expected), atol=atol)


def test_devices_of_a_balanced_ring_see_equally_many_keys() -> None:
    n = 4
    mesh = jax.make_mesh((n,), ("x",))
    ring = Ring(("x",), n, is_balanced=True)

    def visible(at: jax.Array) -> jax.Array:
        queries = ring.block(at[None], 0)[0]
        pairs = [(ring.block(at[None], k) <= queries[:, None]).sum() for k in range(n)]
        return jnp.stack(pairs)[None]

    found = jax.jit(jax.shard_map(visible, mesh=mesh, in_specs=P(), out_specs=P("x")))(jnp.arange(_N))
    assert found.sum() == _N * (_N + 1) // 2
    # Each step, too: devices wait for each other.
    assert np.ptp(np.asarray(found), axis=0).max() == 0


def test_a_ring_needs_the_memory_of_its_shards() -> None:
    """Eight devices cannot split four heads."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        attend = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        out, pull = jax.vjp(attend, *batch[:3])
        return state, (out, *pull(batch[3]))

    x = jax.ShapeDtypeStruct((1, 1 << 18, 4, 128), jnp.bfloat16)
    arguments = (jax.ShapeDtypeStruct((8,), jnp.float32), (x, x, x, x))
    cluster = minialpa.ClusterSpec.preset("h100", devices_per_host=8)
    with jax.numpy_dtype_promotion("standard"):
        plan = minialpa.plan(step, arguments, cluster=cluster, method=ShardParallel())
    (stage,) = plan.stages
    assert {one.kind for one in plan.collectives} == {"collective-permute"}
    # Four arguments, four results, and keys, values and their cotangents on their way. The sums of the cotangent of
    # queries take two more, the pieces that are sent and computed one and a half.
    shard = math.prod(x.shape) * 2 / 8
    assert stage.peak_bytes < 1.025 * (4 + 4 + 4 + 2 + 1.75) * shard


def test_a_step_with_rings_runs_as_planned() -> None:
    arguments = two_layers_arguments(b=1, s=64)
    method = ShardParallel(LogicalMesh((8,)))
    step = minialpa.parallelize(two_layers(minialpa.value_and_grad), method=method)
    executable = step.get_executable(*arguments)
    plan = executable.get_parallel_plan()
    assert minialpa.Plan.from_json(plan.to_json()) == plan
    (text,) = executable.get_hlo_text()
    assert planned_bytes(plan) == hlo.bytes_by_kind(hlo.collectives(text))
    minialpa.testing.assert_allclose(step(*arguments), jax.jit(two_layers(jax.value_and_grad))(*arguments), rtol=1e-4)
    assert dataclasses.is_dataclass(plan)
