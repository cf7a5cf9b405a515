"""Devices that split query positions under a causal mask exchange halves: same numbers, equal work, as planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn

import minialpa
import minialpa.rules.attention
import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa import LogicalMesh, ShardParallel, VerifyError, hlo
from minialpa.attention.operation import AttentionKind, attention_gradient_p, attention_p
from minialpa.cluster import DeviceSpec
from minialpa.intra.spmd import collectives_of
from minialpa.intra.strategies.balance import balance_of
from minialpa.intra.strategies.reshard import reshard_table
from minialpa.intra.strategies.strategies import StrategySet
from minialpa.ir.equations import bytes_of, shape_of
from minialpa.plan.codec import decode
from minialpa.rules.known_rules import factors_of, forget
from minialpa.sharding import EquationSpecs
from minialpa.testing import assert_allclose
from minialpa.tracing.evaluation import eval_equation
from tests.attention_calls import causal, two_layers, two_layers_arguments
from tests.compiled_text import planned_bytes
from tests.helpers import compiled_shards, program_of, strategies_of

_B, _G, _R, _D, _E = 1, 1, 2, 4, 3
_KINDS = {
    "causal": causal(_D),
    "added": causal(_D, n_biases=3, n_masks=2),
}
#: Shapes of biases and masks of the last kind, where s stands for the number of keys, and t for the number of queries.
_ADDED = ((1, _G, _R, "t", "s"), (_B, 1, 1, 1, "s"), (1, 1, 1, "t", 1), (_B, 1, 1, "t", "s"), (1, 1, 1, 1, "s"))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rule assumes blocks of 2 positions, so that few positions may be exchanged."""
    monkeypatch.setattr(minialpa.rules.attention, "SIDE", 2)
    forget()
    yield
    forget()


@pytest.fixture
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def _equations(kind: AttentionKind, n: int) -> dict[str, tuple[JaxprEqn, list[Any]]]:
    """Attention of n positions and its gradient, each with its operands."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape))

    query, key, value = draw(_B, n, _G, _R, _D), draw(_B, n, _G, _D), draw(_B, n, _G, _E)
    at = [jnp.arange(n, dtype=jnp.int32)] * kind.n_positions
    n_added = kind.n_biases + kind.n_masks
    added = [draw(*({"t": n, "s": n}.get(x, x) for x in shape)) for shape in _ADDED[:n_added]]
    masks = [x > -1 for x in added[kind.n_biases :]]
    others = [*at, *added[: kind.n_biases], *masks]

    out, logsumexp = attention_p.bind(query, key, value, *others, kind=kind)
    dtypes, with_bias_gradient = (query.dtype.name,) * (3 + kind.n_biases), (True,) * kind.n_biases
    found = {}
    for name, primitive, operands, params in (
        ("forward", attention_p, [query, key, value, *others], {"kind": kind}),
        ("backward", attention_gradient_p, [query, key, value, out, logsumexp, draw(*out.shape), *others],
         {"kind": kind, "dtypes": dtypes, "with_bias_gradient": with_bias_gradient}),
    ):  # fmt: skip
        jaxpr = jax.make_jaxpr(lambda *xs, p=primitive, given=params: p.bind(*xs, **given))(*operands)
        (eqn,) = jaxpr.jaxpr.eqns
        found[name] = eqn, operands
    return found


def _split_by_positions(eqn: JaxprEqn, mesh: LogicalMesh) -> tuple[StrategySet, int]:
    """All strategies, and the one in which all devices split the query positions."""
    strategies = strategies_of(eqn, mesh)
    axes = tuple(axis for axis, n in enumerate(mesh.shape) if n > 1)
    numbers = [s for s, spec in enumerate(strategies.operands[0]) if spec.dims[1] == axes]
    return strategies, numbers[0]


@pytest.mark.parametrize("kind, shape", [("causal", (2, 2)), ("added", (3,))])
@pytest.mark.usefixtures("small_blocks", "doubles")
def test_balanced_devices_give_the_numbers_of_one(kind: str, shape: tuple[int, ...]) -> None:
    mesh = LogicalMesh(shape)
    for eqn, operands in _equations(_KINDS[kind], 4 * mesh.n_devices).values():
        strategies, s = _split_by_positions(eqn, mesh)
        chosen = strategies.read(s)
        assert chosen.is_balanced

        program = program_of(eqn, chosen, mesh)
        compiled = compiled_shards(program, operands)
        expected = eval_equation(eqn, operands)
        for found, wanted in zip(compiled(*operands), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-12)

        # The exchanges are the planned ones.
        exchanges = [one for one in collectives_of(program) if one.collective.kind == "collective-permute"]
        found = hlo.bytes_by_kind(hlo.collectives(compiled.as_text()))["collective-permute"]
        assert found == sum(one.collective.n_bytes * one.times for one in exchanges) > 0


@pytest.mark.parametrize("kind", [causal(_D, left=5), causal(_D, left=40), causal(_D, left=0, right=None)])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.usefixtures("small_blocks")
def test_balanced_share_is_the_work_of_the_busiest(kind: AttentionKind, n: int) -> None:
    t = 12 * n
    eqn, _ = _equations(kind, t)["forward"]
    factors = factors_of(eqn)
    (factor,) = factors.ramps
    assert factors.may_balance(factor, n)

    ahead = np.arange(t)[None] - np.arange(t)[:, None]
    left, right = (t if reach is None else reach for reach in (kind.left, kind.right))
    halves = ((ahead >= -left) & (ahead <= right)).sum(1).reshape(2 * n, -1).sum(1)
    paired = [halves[2 * i] + halves[2 * n - 1 - 2 * i] for i in range(n)]
    assert factors.n_balanced_shares(factor, n) == pytest.approx(halves.sum() / max(paired))


@pytest.mark.usefixtures("small_blocks")
def test_halves_are_whole_blocks() -> None:
    factors = factors_of(_equations(causal(_D), 12)["forward"][0])
    (factor,) = factors.ramps
    assert [n for n in range(1, 7) if factors.may_balance(factor, n)] == [3]


@pytest.mark.parametrize("kind", [AttentionKind(scale=1.0), causal(_D, left=2, right=1)], ids=["all", "both sides"])
@pytest.mark.usefixtures("small_blocks")
def test_only_positions_of_unequal_work_are_exchanged(kind: AttentionKind) -> None:
    for eqn, _ in _equations(kind, 16).values():
        strategies, s = _split_by_positions(eqn, LogicalMesh((4,)))
        assert not strategies.balanced
        specs = strategies.read(s)
        assert balance_of(factors_of(eqn), specs.operands, specs.made, (4,)) is None

    for eqn, _ in _equations(causal(_D), 16).values():
        strategies, _ = _split_by_positions(eqn, LogicalMesh((2,)))
        for s, spec in enumerate(strategies.operands[0]):  # which may split examples or heads
            assert (s in strategies.balanced) == bool(spec.dims[1])


def _device() -> DeviceSpec:
    return DeviceSpec(name="device", memory_bytes=1e12, memory_bandwidth=1e15, peak_flops=(("float32", 1e12),))


@pytest.mark.usefixtures("small_blocks")
def test_halves_are_exchanged_where_that_is_cheaper() -> None:
    """Over fast links; over slow ones, the busiest device sets the time. The price is for the program that runs."""
    eqn, _ = _equations(causal(_D), 64)["backward"]
    factors = factors_of(eqn)
    fast = LogicalMesh((4,), alpha=(1e-12,), beta=(1e-15,), device=_device())
    slow = dataclasses.replace(fast, alpha=(1e-3,))

    seconds = []
    for mesh in (fast, slow):
        strategies, s = _split_by_positions(eqn, mesh)
        assert (s in strategies.balanced) == (mesh is fast)
        seconds.append(strategies.compute_s[s])
        moved = collectives_of(program_of(eqn, strategies.read(s), mesh))
        swapped_s = sum(one.seconds(mesh) for one, *_ in moved if one.kind == "collective-permute")
        assert (swapped_s > 0) == (mesh is fast)
        assert strategies.communication_s[s] == pytest.approx(_unbalanced_s(eqn, strategies, s, mesh) + swapped_s)

    (factor,) = factors.ramps
    ratio = factors.n_shares(factor, 4) / factors.n_balanced_shares(factor, 4)
    assert ratio < 0.6
    assert seconds[0] == pytest.approx(ratio * seconds[1])


def _unbalanced_s(eqn: JaxprEqn, strategies: StrategySet, s: int, mesh: LogicalMesh) -> float:
    """Seconds to reshard the computed values to the results."""
    chosen = strategies.read(s)
    ends = zip(eqn.outvars, chosen.made, chosen.results, strict=True)
    return sum(reshard_table(shape_of(v), bytes_of(v), mesh).cost(made, left) for v, made, left in ends)


@pytest.mark.usefixtures("small_blocks", "doubles")
def test_a_step_runs_and_exchanges_as_planned() -> None:
    """Forward and backward. A mark on an equation whose devices have no halves to exchange is refused."""
    arguments = jax.tree.map(lambda x: x.astype(np.float64), two_layers_arguments(b=1, s=64))
    step = minialpa.parallelize(two_layers(minialpa.value_and_grad), method=ShardParallel(LogicalMesh((4,))))
    executable = step.get_executable(*arguments)
    plan = executable.get_parallel_plan()
    n_balanced = sum(one.is_balanced for one in plan.stages[0].equation_specs)
    assert n_balanced == 4  # of two layers, forward and backward
    assert minialpa.Plan.from_json(plan.to_json()) == plan

    (text,) = executable.get_hlo_text()
    assert "collective-permute" in planned_bytes(plan)
    assert planned_bytes(plan) == hlo.bytes_by_kind(hlo.collectives(text))

    expected = jax.jit(two_layers(jax.value_and_grad))(*arguments)
    assert_allclose(step(*arguments), expected, rtol=1e-9, atol=1e-11)

    stage = plan.stages[0]
    i = next(i for i, one in enumerate(stage.equation_specs) if not one.is_balanced)

    wrong = list(stage.equation_specs)
    wrong[i] = dataclasses.replace(wrong[i], is_balanced=True)
    plan = dataclasses.replace(plan, stages=(dataclasses.replace(stage, equation_specs=tuple(wrong)),))
    with pytest.raises(VerifyError, match=rf"equation_specs\[{i}\].*no halves to exchange"):
        minialpa.parallelize(two_layers(minialpa.value_and_grad), method=plan)(*arguments)

    with pytest.raises(VerifyError, match="`true` if it is balanced"):
        decode(EquationSpecs, [[], [], [], [], False], "specs")
