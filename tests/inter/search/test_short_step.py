"""Short steps have the problems of the whole step, for all numbers of micro-batches and all rematerialisations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import example, given, settings

import minialpa
from minialpa import AutoLayerOption, AutoShardingOption, AutoStageOption, ClusterSpec
from minialpa.errors import TraceError
from minialpa.inter.context import compiler_of
from minialpa.inter.layers.forward import assign_layers
from minialpa.inter.search import sublayer_solver
from minialpa.inter.search.joint_search import FoundPipeline, StageSearch
from minialpa.inter.search.short_step import NotShortened, SublayeredStep, runs_of
from minialpa.inter.search.stage_bounds import StageBounds
from minialpa.inter.search.stage_cost import SublayerCosts
from minialpa.inter.search.sublayer_solver import SublayerSearch, SublayerSolver
from minialpa.inter.search.submeshes import Candidate, Space, candidates, columns_of
from minialpa.options import Remat
from minialpa.tracing.trace import TracedStep
from tests.helpers import trace

V100 = ClusterSpec.preset("v100-p3.16xlarge", num_hosts=1, devices_per_host=4)
N_LAYERS, WIDTH, N_EXPERTS, N_DEVICES = 10, 16, 4, 2
#: Numbers of micro-batches and rematerialisations of the steps. The whole step has the first pair.
WAYS: tuple[tuple[int, Remat], ...] = ((2, "none"), (1, "dots"), (4, "full"), (2, "dots"), (1, "none"))


def search_of(traced: TracedStep, n_layers: int) -> SublayerSearch:
    space = Space(
        micro_batches=(1, 2, 4),
        remats=("none", "dots", "full"),
        candidates=tuple(candidates(V100, AutoStageOption())),
        schedule="1f1b",
        use_all_devices=False,
        tolerance=0.01,
    )
    return SublayerSearch(
        traced=traced,
        layer_of_group=assign_layers(traced, AutoLayerOption(layer_num=n_layers)),
        cluster=V100,
        compiler=compiler_of(V100),
        space=space,
        option=AutoShardingOption(),
    )


def solver_of(traced: TracedStep, n_layers: int) -> SublayerSolver:
    search = search_of(traced, n_layers)
    return SublayerSolver(search, columns_of(search.space, V100, search.option), {})


def of_whole(solver: SublayerSolver, n: int, remat: Remat) -> SublayerCosts:
    """The sublayers of the whole step: the result of a search that stages only the whole step."""
    return solver._costs_of(solver._whole, solver._staging(n, remat, N_DEVICES))


def assert_same_problems(solver: SublayerSolver) -> None:
    for n, remat in WAYS:
        found, expected = solver._sublayer_costs(n, remat, N_DEVICES), of_whole(solver, n, remat)
        digests = [[sublayers.digests[place] for place in sublayers.place] for sublayers in (found, expected)]
        wrong = [sublayer for sublayer, (a, b) in enumerate(zip(*digests, strict=True)) if a != b]
        assert not wrong, (n, remat, wrong)
        assert found.kind == expected.kind


# ---- steps -----------------------------------------------------------------------------------------------------------


def block(w: jax.Array, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w)


def plain(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = block(w, x)
    return jnp.mean(x**2)


def alternating(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for i, w in enumerate(params):
        x = block(w, x if i % 2 else jnp.cumsum(x, 1))
    return jnp.mean(x**2)


def decayed(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    return plain(params, x) + 0.01 * sum(jnp.sum(w**2) for w in params)


def weights(n: int = N_LAYERS) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * n


def with_experts() -> TracedStep:
    """Each layer sorts its tokens by expert."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            tokens = x.reshape(-1, WIDTH)
            _, ids = jax.lax.top_k(tokens @ w[0, :, :N_EXPERTS], 1)
            order, sizes = jnp.argsort(ids[:, 0]), jnp.bincount(ids[:, 0], length=N_EXPERTS)
            out = jax.lax.ragged_dot(tokens[order], w, sizes)[jnp.argsort(order)]
            x = x + out.reshape(x.shape)
        return jnp.mean(x**2)

    experts = [jax.ShapeDtypeStruct((N_EXPERTS, WIDTH, WIDTH), jnp.float32)] * N_LAYERS
    return trained(loss, params=experts)


EXAMPLES = jax.ShapeDtypeStruct((8, 4, WIDTH), jnp.float32)
Loss = Callable[[Sequence[jax.Array], jax.Array], jax.Array]


def trained(loss: Loss, tx: Any = None, params: Any = None) -> TracedStep:
    """A step that trains by an optimizer of optax."""
    params, tx = weights() if params is None else params, tx or optax.sgd(0.1)

    def step(state: Any, x: jax.Array) -> Any:
        params, moments = state
        value, grads = minialpa.value_and_grad(loss)(params, x)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    with jax.numpy_dtype_promotion("standard"):
        return trace(step, (params, jax.eval_shape(tx.init, params)), EXAMPLES)


def clipped() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def with_dropout() -> TracedStep:
    """A key for each layer."""

    def step(state: Any, x: jax.Array) -> Any:
        params, key = state

        def loss(params: Any, x: jax.Array) -> jax.Array:
            keys = jax.random.split(key, N_LAYERS)
            for i, w in enumerate(params):
                x = block(w, x) * jax.random.bernoulli(keys[i], 0.9, x.shape).astype(x.dtype)
            return jnp.mean(x**2)

        value, grads = minialpa.value_and_grad(loss)(params, x)
        return ([w - 0.1 * g for w, g in zip(params, grads, strict=True)], jax.random.fold_in(key, 1)), value

    return trace(step, (weights(), jax.eval_shape(lambda: jax.random.key(0))), EXAMPLES)


@dataclass(frozen=True)
class Case:
    make: Callable[[], TracedStep]
    n_layers: int = N_LAYERS


SHORT = {
    "global norm": Case(lambda: trained(plain, clipped())),
    "two kinds in turn": Case(lambda: trained(alternating, params=weights(2 * N_LAYERS)), 2 * N_LAYERS),
    "dropout": Case(with_dropout),
    "experts": Case(with_experts),
}


def short_of(solver: SublayerSolver) -> SublayeredStep | NotShortened | None:
    for n, remat in WAYS[:2]:
        solver._sublayer_costs(n, remat, N_DEVICES)
    return solver.short


@pytest.mark.parametrize("name", SHORT)
def test_a_short_step_has_the_problems_of_the_whole_step(name: str) -> None:
    case = SHORT[name]
    solver = solver_of(case.make(), case.n_layers)
    short = short_of(solver)
    assert isinstance(short, SublayeredStep), short
    assert short.n_sublayers < solver.n_sublayers
    assert len(short.step.flat.eqns) < len(solver._whole.step.flat.eqns)
    assert_same_problems(solver)


def test_what_cannot_be_shortened_is_staged_as_a_whole() -> None:
    """The last sublayers are equal problems, but differ as soon as some values are recomputed."""
    solver = solver_of(trained(decayed), N_LAYERS)
    short = short_of(solver)
    assert isinstance(short, NotShortened) and "No 5 neighbouring sublayers" in short.reason, short
    assert_same_problems(solver)


def test_sublayers_of_one_kind_cost_the_same() -> None:
    """Although they read different keys."""
    sublayers = of_whole(solver_of(with_dropout(), N_LAYERS), 2, "dots")
    for candidate in (Candidate((1, 1), (1,), None), Candidate((1, 4), (2, 2), None)):
        for sublayer, kind in enumerate(sublayers.kind):
            costs = []
            for one in (sublayer, kind):
                sublayers.known = {}
                costs.append(sublayers.cost(one, candidate, None, 0.0, limited=True))
            assert costs[0] == costs[1], (sublayer, kind, candidate)


def test_a_search_finds_the_same_with_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_of(trained(plain, clipped()), N_LAYERS)

    def found() -> tuple[FoundPipeline, SublayerSolver]:
        bounds = StageBounds(search)
        return StageSearch(bounds, lambda what, done, total: None).best(), bounds.sublayers

    with_short, sublayers = found()
    assert isinstance(sublayers.short, SublayeredStep)
    monkeypatch.setattr(sublayer_solver, "shortened", lambda sublayers: NotShortened("by the test"))
    without, sublayers = found()
    assert sublayers.short == NotShortened("by the test")
    assert with_short == without


# ---- what would be wrong ---------------------------------------------------------------------------------------------


def test_a_short_step_with_another_problem_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    solver, shortened = solver_of(trained(plain), N_LAYERS), sublayer_solver.shortened

    def costed_wrongly(sublayers: Any) -> SublayeredStep:
        short = shortened(sublayers)
        assert isinstance(short, SublayeredStep)
        # The first sublayer, which differs from all others, as the second one.
        return dataclasses.replace(short, kept={**short.kept, 0: short.kept[1]})

    monkeypatch.setattr(sublayer_solver, "shortened", costed_wrongly)
    assert short_of(solver) == NotShortened("Sublayer 1 is another problem in the short step.")
    assert_same_problems(solver)


def test_a_short_step_that_cannot_be_split_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    solver, staged = solver_of(trained(plain), N_LAYERS), sublayer_solver.stage_step

    def refuses_short_steps(step: TracedStep, n: int, *args: Any) -> Any:
        if n == 4 and isinstance(solver.short, SublayeredStep):
            raise TraceError("by the test")
        return staged(step, n, *args)

    monkeypatch.setattr(sublayer_solver, "stage_step", refuses_short_steps)
    assert isinstance(short_of(solver), SublayeredStep)
    assert solver._sublayer_costs(4, "none", N_DEVICES).kind == of_whole(solver, 4, "none").kind
    assert solver.short == NotShortened("by the test")


# ---- laws ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=24))
@example([0, *[1] * 8, 2])
@example([0, *[1, 2] * 6, 3, *[4] * 5])
def test_runs_repeat_and_do_not_overlap(kinds: list[int]) -> None:
    end = 0
    for run in runs_of(kinds):
        assert end <= run.first and run.last.stop <= len(kinds) and run.left_out
        end = run.last.stop
        assert all(kinds[i] == kinds[i - run.period] for i in range(run.first + run.period, end))
        stay = [*run.unit(0), *run.unit(1), *run.third, *run.last]
        assert sorted([*stay, *run.left_out]) == list(range(run.first, end))


BLOCKS: dict[str, Callable[..., jax.Array]] = {
    "residual": lambda w, x, start: block(w, x),
    "narrow": lambda w, x, start: jax.nn.relu(x @ w[:, : WIDTH // 2]) @ w[: WIDTH // 2],
    "reads the input": lambda w, x, start: block(w, x) + 0.5 * start,
    "normalised": lambda w, x, start: block(w, x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)),
    "attention": lambda w, x, start: x + jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ w, x), -1) @ x,
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "clipped adam": clipped,
    "lamb": lambda: optax.lamb(1e-3),
}


@dataclass(frozen=True)
class Stack:
    """Blocks in turn, `n_turns` times, with one weight for `n_tied` of them."""

    blocks: tuple[str, ...]
    n_turns: int
    n_tied: int
    optimizer: str
    adds_losses: bool
    ends_tied: bool

    def traced(self) -> TracedStep:
        names = self.blocks * self.n_turns

        def loss(params: Any, x: jax.Array) -> jax.Array:
            start, added = x, jnp.zeros(())
            for i, name in enumerate(names):
                x = BLOCKS[name](params[i // self.n_tied], x, start)
                if self.adds_losses:
                    added += jnp.mean(jnp.abs(x))
            return jnp.mean((x @ params[0 if self.ends_tied else -1].T) ** 2) + added

        n_weights = -(-len(names) // self.n_tied) + 1
        return trained(loss, OPTIMIZERS[self.optimizer](), weights(n_weights))


STACKS = st.builds(
    Stack,
    st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=3).map(tuple),
    st.integers(5, 9),
    st.integers(1, 3),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.booleans(),
    st.booleans(),
)


@given(STACKS)
@settings(max_examples=3)
def test_drawn_stacks_keep_their_problems(stack: Stack) -> None:
    assert_same_problems(solver_of(stack.traced(), len(stack.blocks) * stack.n_turns))
