"""Equal updates of several matrices run on stacks; the step computes the same for every input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import minialpa
from benchmarks.muon import MUON, list_step, shampoo, shampoo_memory, soap, soap_memory, stacking
from benchmarks.planning import traced_step
from minialpa import ClusterSpec, Plan
from minialpa.inter.microbatch.split_step import UPDATE
from minialpa.inter.staging.stack_matrices import with_stacked_matrices
from minialpa.inter.staging.staged_step import stage_step
from minialpa.ir.equations import dtype_name, shape_of

Tree = Any


def _params(key: jax.Array, shapes: list[tuple[int, int]], dtype: Any = jnp.float32) -> Tree:
    """A layer with a matrix and a matrix of the transposed shape for each of `shapes`."""
    keys = jax.random.split(key, len(shapes))
    pairs = (jax.random.normal(k, (2, *shape)) / 4 for k, shape in zip(keys, shapes, strict=True))
    return [[a.astype(dtype), b.T.astype(dtype)] for a, b in pairs]


def _batch(key: jax.Array, dtype: Any = jnp.float32) -> Tree:
    x, y = jax.random.normal(key, (2, 16, 8)).astype(dtype)
    return {"x": x, "y": y}


def _check(step: Callable[..., Any], state: Tree, batch: Tree, method: Any, *, atol: float = 2e-6) -> Plan:
    """Two steps, compared with `jax.jit`."""
    planned = minialpa.parallelize(step, method=method, donate_argnums=())
    expected, found = state, state
    for _ in range(2):
        expected, value = jax.jit(step)(expected, batch)
        found, same = planned(found, batch)
        np.testing.assert_allclose(np.asarray(same), np.asarray(value), atol=atol, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=atol, rtol=1e-4)
    plan: Plan = planned.plan(state, batch)
    return plan


def _stacks_of(step: Callable[..., Any], state: Tree, batch: Tree, n: int) -> list[tuple[str, int]]:
    """The expensive equations of the update and the matrices of each, for stacks of `n`."""
    staged = with_stacked_matrices(stage_step(traced_step(step, state, batch), 1, (), (0,)), n)
    names = ("scan", "eigh", "qr", "cond", "dot_general")
    return [
        (op.eqn.primitive.name, shape_of(op.eqn.outvars[-1])[0])
        for op in staged.split.ops
        if op.segment == UPDATE and op.eqn.primitive.name in names
    ]


METHODS = {
    "shard": minialpa.ShardParallel(),
    "data": minialpa.DataParallel(),
    "zero2": minialpa.Zero2Parallel(num_micro_batches=2),
    "zero3": minialpa.Zero3Parallel(),
    "pipeline": minialpa.PipeshardParallel(
        num_micro_batches=2, layer_option=minialpa.AutoLayerOption(layer_num=2), stage_option="uniform"
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_muon_over_lists_of_matrices_equals_jit(name: str, key: jax.Array) -> None:
    """Ten matrices of one shape on eight devices, and two of another shape."""
    params = _params(key, [(8, 16)] * 5 + [(8, 24)])
    plan = _check(list_step(MUON.update), (params, MUON.init(params)), _batch(key), stacking(METHODS[name]))
    assert plan.stack_matrices == 8
    assert len(plan.stages) == (2 if name == "pipeline" else 1)


def test_shampoo_and_soap_equal_jit(key: jax.Array) -> None:
    params = _params(key, [(8, 12)] * 4)
    cases = (shampoo, shampoo_memory(params), "pipeline"), (soap, soap_memory(params), "shard")
    for update, memory, name in cases:
        _check(list_step(update), (params, memory), _batch(key), stacking(METHODS[name]), atol=2e-5)


def test_stacks_have_multiples_and_divisors_of_the_devices(key: jax.Array) -> None:
    params = _params(key, [(8, 16)] * 5 + [(8, 24)] * 2)
    step, state = list_step(MUON.update), (params, MUON.init(params))
    sizes = [n for name, n in _stacks_of(step, state, _batch(key), 8) if name == "scan"]
    assert sizes == [8, 2, 4]
    assert [n for name, n in _stacks_of(step, state, _batch(key), 1) if name == "scan"] == [10, 4]


def test_decompositions_run_on_stacks(key: jax.Array) -> None:
    params = _params(key, [(8, 12)] * 4)
    for update, memory, name in ((shampoo, shampoo_memory(params), "cond"), (soap, soap_memory(params), "qr")):
        found = _stacks_of(list_step(update), (params, memory), _batch(key), 4)
        assert found and {n for _, n in found} == {4}
        assert any(one == name for one, _ in found)
        # The devices divide no decomposition: copies of matrices fill the stack.
        assert {n for _, n in _stacks_of(list_step(update), (params, memory), _batch(key), 8)} == {8}
        assert {n for _, n in _stacks_of(list_step(update), (params, memory), _batch(key), 3)} == {6}


def test_a_clip_by_the_norm_of_all_matrices_stays_outside(key: jax.Array) -> None:
    params = _params(key, [(8, 8)] * 2)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), MUON)
    step, state = list_step(optimizer.update), (params, optimizer.init(params))
    assert [n for name, n in _stacks_of(step, state, _batch(key), 4) if name == "scan"] == [4]
    _check(step, state, _batch(key), stacking(minialpa.ShardParallel(), 4))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_matrix_without_numbers_leaves_the_others_alone(value: float, key: jax.Array) -> None:
    """The momentum of one matrix is not finite; every other new weight equals the weight of `jax.jit`."""
    params = _params(key, [(8, 16)] * 4)
    memory = MUON.init(params)
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(memory))
    bad = next(path for path in paths if "name='mu'" in str(path))
    memory = jax.tree_util.tree_map_with_path(
        lambda path, x: x.at[(0,) * x.ndim].set(value) if path == bad else x, memory
    )
    step, state, batch = list_step(MUON.update), (params, memory), _batch(key)
    found, _ = minialpa.parallelize(step, method=stacking(minialpa.ShardParallel()), donate_argnums=())(state, batch)
    expected, _ = jax.jit(step)(state, batch)
    broken = [not np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(found[0])]
    assert sum(broken) == 1
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-6, rtol=1e-5)


def test_sixteen_bit_updates_keep_their_types(key: jax.Array) -> None:
    params = _params(key, [(8, 16)] * 4, jnp.bfloat16)
    step, state = list_step(MUON.update), (params, MUON.init(params))
    _check(step, state, _batch(key, jnp.bfloat16), stacking(minialpa.ShardParallel()), atol=2e-2)
    products = [
        op.eqn
        for op in with_stacked_matrices(
            stage_step(traced_step(step, state, _batch(key, jnp.bfloat16)), 1, (), (0,)), 8
        ).split.ops
        if op.eqn.primitive.name == "scan"
    ]
    results = [v for eqn in products for v in eqn.outvars if len(shape_of(v)) > 1]
    assert results and {dtype_name(v) for v in results} == {"bfloat16"}


def test_a_choice_by_the_values_of_one_matrix_stays_one_by_one(key: jax.Array) -> None:
    """A stack would compute both branches for every matrix."""

    def update(gradients: Tree, memory: Tree, _: Tree) -> tuple[Tree, Tree]:
        def leaf(g: jax.Array) -> jax.Array:
            new: jax.Array = jax.lax.cond(g[0, 0] > 0, lambda g: g @ g.T @ g, lambda g: g @ g.T @ g @ g.T @ g, g)
            return -0.1 * new

        return jax.tree.map(leaf, gradients), memory

    params = _params(key, [(8, 8)] * 2)
    found = _stacks_of(list_step(update), (params, ()), _batch(key), 4)
    assert [name for name, _ in found if name == "cond"] == ["cond"] * 4
    _check(list_step(update), (params, ()), _batch(key), stacking(minialpa.ShardParallel()))


def test_the_planner_stacks_matrices_where_that_is_faster(key: jax.Array) -> None:
    """Sixteen large matrices on eight GPUs. A plan file repeats the choice."""
    params = [[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 2048), (2048, 512))] for _ in range(8)]
    state = (params, jax.eval_shape(MUON.init, params))
    batch = {name: jax.ShapeDtypeStruct((4096, 512), jnp.float32) for name in "xy"}
    gpus = ClusterSpec.preset("h100", devices_per_host=8)
    one_by_one = minialpa.plan(
        list_step(MUON.update), (state, batch), cluster=gpus, method=stacking(minialpa.ShardParallel(), 0)
    )
    plan = minialpa.plan(list_step(MUON.update), (state, batch), cluster=gpus, method=minialpa.ShardParallel())
    assert plan.stack_matrices == 8 and one_by_one.stack_matrices == 0
    assert plan.cost.total_s < one_by_one.cost.total_s
    assert Plan.from_json(plan.to_json()) == plan
    assert "matrices updated in stacks" in plan.summary()
