"""Devices that split query positions under a causal mask exchange halves: same numbers, equal work, as planned."""

from __future__ import annotations

import dataclasses
import pathlib
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

import minialpa
import minialpa.rules.attention
import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa import LogicalMesh, ShardParallel, VerifyError, hlo
from minialpa.attention.operation import Attention, attention_gradient_p, attention_p
from minialpa.cluster import DeviceSpec
from minialpa.intra.memory.recording import record_program
from minialpa.intra.memory.xla.model import XLA_CPU
from minialpa.intra.shard_arrays import shard_program
from minialpa.intra.spmd import ShardedEquations, collectives_of
from minialpa.intra.strategies.balance import balance_of
from minialpa.intra.strategies.reshard import reshard_table
from minialpa.intra.strategies.strategies import StrategySet
from minialpa.ir.equations import bytes_of, shape_of
from minialpa.plan.codec import decode
from minialpa.rules.known_rules import factors_of, forget
from minialpa.sharding import AXIS_NAMES, EquationSpecs, Spec
from minialpa.tracing.evaluation import eval_equation
from tests.attention_calls import causal, two_layers, two_layers_arguments
from tests.helpers import strategies_of

_B, _G, _R, _D, _E = 1, 1, 2, 4, 3
_KINDS = {
    "causal": causal(_D),
    "window": causal(_D, left=5),
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


def _equations(kind: Attention, n: int, dtype: Any = None) -> dict[str, tuple[JaxprEqn, list[Any]]]:
    """Attention of n positions and its gradient, each with its operands."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    query, key, value = draw(_B, n, _G, _R, _D), draw(_B, n, _G, _D), draw(_B, n, _G, _E)
    at = [jnp.arange(n, dtype=jnp.int32)] * kind.n_positions
    n_added = kind.n_biases + kind.n_masks
    added = [draw(*({"t": n, "s": n}.get(x, x) for x in shape)) for shape in _ADDED[:n_added]]
    masks = [x > -1 for x in added[kind.n_biases :]]
    others = [*at, *added[: kind.n_biases], *masks]

    out, logsumexp = attention_p.bind(query, key, value, *others, kind=kind)
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
    strategies = strategies_of(eqn, mesh)
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
        equations={eqn: chosen},
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


@pytest.mark.parametrize("kind, shape", [("causal", (2, 2)), ("added", (3,)), ("window", (4,)), ("finite", (2,))])
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
            for one, times in ((moved.collective, moved.times) for moved in collectives_of(program)):
                planned[one.kind] += int(one.n_bytes) * times
            assert planned["collective-permute"] > 0
            assert _kinds_and_bytes(compiled.as_text())["collective-permute"] == planned["collective-permute"]


_SIDE = minialpa.rules.attention.SIDE


@pytest.mark.parametrize("kind", [causal(_D, left=5), causal(_D, left=40), causal(_D, left=0, right=None)])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.usefixtures("small_blocks")
def test_balanced_share_is_the_work_of_the_busiest(kind: Attention, n: int) -> None:
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


@pytest.mark.parametrize("t, n, expected", [(12, 3, True), (12, 2, False), (16, 1, False)])
@pytest.mark.usefixtures("small_blocks")
def test_halves_are_whole_blocks(t: int, n: int, expected: bool) -> None:
    factors = factors_of(_equations(causal(_D), t)["forward"][0])
    (factor,) = factors.ramps
    assert factors.may_balance(factor, n) == expected


@pytest.mark.parametrize("kind", [Attention(scale=1.0), causal(_D, left=2, right=1)], ids=["all", "both sides"])
@pytest.mark.usefixtures("small_blocks")
def test_only_positions_of_unequal_work_are_exchanged(kind: Attention) -> None:
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
    """Over fast links; over slow ones, the busiest device sets the time. Either way, the price is that of what runs."""
    eqn, _ = _equations(causal(_D), 64)["backward"]
    factors = factors_of(eqn)
    fast = LogicalMesh((4,), alpha=(1e-12,), beta=(1e-15,), device=_device())
    slow = dataclasses.replace(fast, alpha=(1e-3,))

    seconds = []
    for mesh in (fast, slow):
        strategies, s = _split_by_positions(eqn, mesh)
        assert (s in strategies.balanced) == (mesh is fast)
        seconds.append(strategies.compute_s[s])
        moved = collectives_of(_program(eqn, strategies.read(s), mesh))
        swapped_s = sum(one.seconds(mesh) for one, *_ in moved if one.kind == "collective-permute")
        assert (swapped_s > 0) == (mesh is fast)
        assert strategies.communication_s[s] == pytest.approx(_unbalanced_s(eqn, strategies, s, mesh) + swapped_s)

    (factor,) = factors.ramps
    ratio = factors.n_shares(factor, 4) / factors.n_balanced_shares(factor, 4)
    assert ratio < 0.6
    assert seconds[0] == pytest.approx(ratio * seconds[1])


def _unbalanced_s(eqn: JaxprEqn, strategies: StrategySet, s: int, mesh: LogicalMesh) -> float:
    """Seconds of turning what is made into the results."""
    chosen = strategies.read(s)
    ends = zip(eqn.outvars, chosen.made, chosen.results, strict=True)
    return sum(reshard_table(shape_of(v), bytes_of(v), mesh).cost(made, left) for v, made, left in ends)


@pytest.mark.usefixtures("small_blocks")
def test_a_step_runs_and_exchanges_as_planned(tmp_path: pathlib.Path) -> None:
    """Forward and backward, with the plan read from its file."""
    with jax.enable_x64(True):
        _check_step(tmp_path)


def _check_step(tmp_path: pathlib.Path) -> None:
    arguments = jax.tree.map(lambda x: x.astype(np.float64), two_layers_arguments(b=1, s=64))
    method = ShardParallel(LogicalMesh((4,)))
    plan = minialpa.parallelize(two_layers(minialpa.value_and_grad), method=method).plan(*arguments)
    n_balanced = sum(one.is_balanced for one in plan.stages[0].equation_specs)
    assert n_balanced == 4  # of two layers, forward and backward

    plan.save(tmp_path / "plan.json")
    loaded = minialpa.Plan.load(tmp_path / "plan.json")
    assert loaded == plan

    step = minialpa.parallelize(two_layers(minialpa.value_and_grad), method=loaded)
    executable = step.get_executable(*arguments)
    planned: Counter[str] = Counter()
    for one in plan.collectives:
        planned[one.kind] += int(one.n_bytes) * one.times_per_step
    assert planned["collective-permute"] > 0
    assert _kinds_and_bytes(*executable.get_hlo_text()) == planned

    expected = jax.jit(two_layers(jax.value_and_grad))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), step(*arguments), expected)


@pytest.mark.usefixtures("small_blocks")
def test_a_plan_that_balances_what_cannot_be_is_refused() -> None:
    """The mark is on an equation whose devices have nothing to exchange, or is no mark."""
    arguments = two_layers_arguments(b=1, s=64)
    step = minialpa.parallelize(two_layers(minialpa.value_and_grad), method=ShardParallel(LogicalMesh((4,))))
    plan = step.plan(*arguments)
    stage = plan.stages[0]
    i = next(i for i, one in enumerate(stage.equation_specs) if not one.is_balanced)

    wrong = list(stage.equation_specs)
    wrong[i] = dataclasses.replace(wrong[i], is_balanced=True)
    plan = dataclasses.replace(plan, stages=(dataclasses.replace(stage, equation_specs=tuple(wrong)),))
    with pytest.raises(VerifyError, match=rf"equation_specs\[{i}\].*nothing to exchange"):
        minialpa.parallelize(two_layers(minialpa.value_and_grad), method=plan)(*arguments)

    for mark in (False, 1, "true"):
        with pytest.raises(VerifyError, match="`true` if it is balanced"):
            decode(EquationSpecs, [[], [], [], [], mark], "specs")


def test_memory_has_room_for_what_is_exchanged() -> None:
    mesh = LogicalMesh((2,))
    eqn, operands = _equations(_KINDS["causal"], 4 * _SIDE, dtype=np.float32)["backward"]
    strategies, s = _split_by_positions(eqn, mesh)
    chosen = strategies.read(s)
    assert chosen.is_balanced
    predicted = {}
    for is_balanced in (True, False):
        program = _program(eqn, dataclasses.replace(chosen, is_balanced=is_balanced), mesh)
        predicted[is_balanced] = sum(record_program(program, XLA_CPU).temporaries())
    program = _program(eqn, chosen, mesh)
    needed = _compiled(program, operands).memory_analysis().temp_size_in_bytes
    # The kernels of CPUs are fused as those of GPUs, which keep less.
    assert needed / 2 <= predicted[True] <= 2 * needed
    assert predicted[True] >= predicted[False]
