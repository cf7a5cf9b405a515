"""Layers that repeat are decided once, and that costs next to nothing in the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import JaxprEqn

import minialpa
from minialpa import AutoShardingOption, ClusterSpec, LogicalMesh, models
from minialpa.inter.staging.mesh_problem import mesh_equations
from minialpa.inter.staging.staged_step import stage_step
from minialpa.intra.graph.builder import GraphBuilder
from minialpa.intra.graph.folding import Folding, fold
from minialpa.intra.solver.solve import solve_graph
from minialpa.ir.equations import dtype_name, shape_of
from minialpa.tracing.flattening import trace_flat
from tests.helpers import trace

MESH = LogicalMesh((2, 4), alpha=(1e-5, 1e-6), beta=(1e-9, 1e-10), device=ClusterSpec.preset("a100-80gb").device)


def folded(fun: Callable[..., Any], *args: Any) -> tuple[list[JaxprEqn], Folding | None]:
    flat, _ = trace_flat(fun, *args)

    def kind(i: int) -> Any:
        eqn = flat.eqns[i]
        return eqn.primitive.name, *((shape_of(v), dtype_name(v)) for v in (*eqn.invars, *eqn.outvars))

    return list(flat.eqns), fold(flat.eqns, flat.invars, kind, shape_of, [1] * len(flat.eqns))


def layers(n: int) -> tuple[Any, jax.Array]:
    return [jnp.ones((8, 8))] * n, jnp.ones((4, 8))


def chain(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def test_layers_are_folded_in_pairs_after_the_first() -> None:
    eqns, folding = folded(chain, *layers(16))
    assert folding is not None
    leaders = [folding.leaders[i] for i, eqn in enumerate(eqns) if eqn.primitive.name == "dot_general"]
    # The first pair reads the batch. After it there are two kinds of layers.
    assert len(set(leaders)) == 4
    assert leaders[4::2] == [leaders[2]] * 6
    assert leaders[5::2] == [leaders[3]] * 6
    weights = [folding.inputs[eqn.invars[1]] for eqn in eqns if eqn.primitive.name == "dot_general"]
    assert len(set(weights)) == 4
    assert weights[2::2] == [weights[2]] * 7


def test_what_stands_in_the_place_of_an_operand_adds_up() -> None:
    eqns, folding = folded(chain, *layers(16))
    assert folding is not None
    assert folding.varied  # the second pair reads what the first made, the others what pairs like them made
    for i, operands in folding.varied.items():
        for k, parts in operands.items():
            assert sum(part for _, part in parts) == pytest.approx(1)
            assert eqns[i].invars[k] in {v for v, _ in parts}
    assert sum(folding.times.values()) == len(eqns)


def test_a_few_layers_are_not_folded() -> None:
    assert folded(chain, *layers(6))[1] is None


def test_a_layer_that_reads_something_else_stays_apart() -> None:
    def fun(params: Any, x: jax.Array) -> jax.Array:
        first = x
        for i, w in enumerate(params):
            x = jnp.tanh((first if i == 9 else x) @ w)
        return x

    eqns, folding = folded(fun, *layers(20))
    assert folding is not None
    dots = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "dot_general"]
    assert folding.times[folding.leaders[dots[9]]] == 1


def test_the_best_plan_of_layers_alike_is_as_good_as_the_best_of_all() -> None:
    case = models.build("mlp", n_layers=12)
    state = jax.eval_shape(case.init, jax.random.key(0))
    traced = trace(case.train_step(minialpa.value_and_grad), state, case.make_batch(0, case.batch_size))
    problem = mesh_equations(stage_step(traced, 1, (), (0,)), 0)
    folded_graph, free = (GraphBuilder(problem, MESH, AutoShardingOption(), folded=folded) for folded in (True, False))
    assert folded_graph.folding is not None
    assert len(folded_graph.costs.nodes) < 0.8 * len(free.costs.nodes)
    alike, each = solve_graph(folded_graph.graph()), solve_graph(free.graph())
    assert each.optimal
    assert each.cost * (1 - 1e-9) <= alike.cost <= each.cost * 1.01
