"""The costs of a mesh: the graph of a program must not depend on how jax shares parts of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa import AutoShardingOption, InfeasibleError, LogicalMesh
from minialpa.errors import MinialpaError
from minialpa.inter.staging.mesh_problem import mesh_equations
from minialpa.inter.staging.staged_step import stage_step
from minialpa.intra.graph import solve as graph_solve
from minialpa.intra.graph.builder import GraphBuilder
from minialpa.intra.graph.memory_constraints import MemoryLimit
from minialpa.intra.graph.solve import MeshSolver
from minialpa.intra.solver.clock import Deadline
from tests.helpers import trace

MESH = LogicalMesh((2, 2), alpha=(1e-5, 1e-6), beta=(1e-9, 1e-10))


def layer() -> Callable[..., Any]:
    """The body of a scan with a sum that one equation reads; each call makes another function."""

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w) / jnp.sum(x**2), None

    return body


def costs_of(first: Callable[..., Any], second: Callable[..., Any]) -> GraphBuilder:
    """The graph of a step with two scans, whose bodies are `first` and `second`."""

    def step(params: tuple[jax.Array, jax.Array], batch: jax.Array) -> tuple[Any, jax.Array]:
        x, _ = jax.lax.scan(first, batch, params[0])
        x, _ = jax.lax.scan(second, x, params[1])
        return params, x

    weights = jnp.ones((3, 16, 16))
    traced = trace(step, (weights, weights), jnp.ones((8, 16)))
    problem = mesh_equations(stage_step(traced, 1, (), (0,)), 0)
    return GraphBuilder(problem, MESH, AutoShardingOption())


def n_scan_bodies(builder: GraphBuilder) -> int:
    return len({id(eqn.params["jaxpr"]) for eqn in builder.problem.eqns if eqn.primitive.name == "scan"})


def test_scans_that_share_a_jaxpr_cost_what_scans_with_equal_jaxprs_cost() -> None:
    body = layer()
    shared, apart = costs_of(body, body), costs_of(layer(), layer())
    assert n_scan_bodies(shared) < n_scan_bodies(apart)

    assert len(shared.costs.nodes) == len(apart.costs.nodes)
    for a, b in zip(shared.costs.nodes, apart.costs.nodes, strict=True):
        np.testing.assert_array_equal(a, b)
    for one, other in zip(shared.costs.edges, apart.costs.edges, strict=True):
        assert (one.a, one.b) == (other.a, other.b)
        np.testing.assert_array_equal(one.cost.dense(), other.cost.dense())


def experts(params: tuple[jax.Array, ...], batch: jax.Array) -> tuple[Any, jax.Array]:
    """Tokens t go to the slots c of their experts e, and back."""
    router, up, down = params
    chosen = jax.nn.one_hot(jnp.argmax(batch @ router, axis=-1), 8)
    slot = jnp.sum((jnp.cumsum(chosen, axis=0) - 1) * chosen, axis=-1).astype(jnp.int32)
    mask = chosen[:, :, None] * jax.nn.one_hot(slot, 16)[:, None, :]
    sent = jnp.einsum("tec,td->ecd", mask, batch)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", sent, up))
    return params, jnp.einsum("tec,ecd->td", mask, jnp.einsum("ecf,efd->ecd", hidden, down))


def test_costs_on_three_axes_need_memory_for_pairs_of_specs_and_not_of_strategies() -> None:
    weights = (jnp.ones((16, 8)), jnp.ones((8, 16, 32)), jnp.ones((8, 32, 16)))
    problem = mesh_equations(stage_step(trace(experts, weights, jnp.ones((64, 16))), 1, (), (0,)), 0)
    mesh = LogicalMesh((2, 2, 2), alpha=(1e-5, 1e-6, 1e-6), beta=(1e-9, 1e-10, 1e-10))

    builder = GraphBuilder(problem, mesh, AutoShardingOption())
    n_strategies = [len(costs) for costs in builder.costs.nodes]
    matrix_bytes = sum(8 * n_strategies[edge.a] * n_strategies[edge.b] for edge in builder.costs.edges)
    assert max(n_strategies) > 500 and builder.n_bytes < matrix_bytes / 10


def test_a_planner_without_memory_names_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    builder = costs_of(layer(), layer())
    solver = MeshSolver(builder.problem, MESH, AutoShardingOption())
    monkeypatch.setattr(graph_solve, "solve_graph", no_memory)
    monkeypatch.setattr(graph_solve, "GraphBuilder", no_memory)
    for plan in (
        lambda: solver.solve(None, Deadline(1.0)),
        lambda: MeshSolver(builder.problem, MESH, AutoShardingOption()),
    ):
        with pytest.raises(MinialpaError, match=r"more memory .* logical mesh of shape \(2, 2\).*fewer axes"):
            plan()


def test_a_limit_below_the_least_bytes_is_refused_with_the_largest_tensors() -> None:
    with pytest.raises(InfeasibleError, match=r"at least [\d.]+ kB per device, [\d.]+ k?B above .* 1 kB") as error:
        costs_of(layer(), layer()).graph(MemoryLimit(1000.0, name_of=lambda _: "weights"))
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 2 and all("weights float32[3, 16, 16]: 768 B per device" in line for line in lines)
