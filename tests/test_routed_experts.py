"""Layers of experts without a token limit: tokens sorted on their devices, or sent to the devices of their experts."""

from __future__ import annotations

import functools
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import minialpa
from minialpa import (
    AutoShardingOption,
    ClusterSpec,
    DataParallel,
    PipeshardParallel,
    ShardParallel,
    UniformStageOption,
    routed,
)
from minialpa.inter.staging.staged_step import stage_step
from minialpa.ir.equations import all_equations
from minialpa.routing import tables
from minialpa.routing.rows import RowSharing, with_rows_in_slots
from minialpa.routing.slots import SlotShape, slots_of
from minialpa.tracing.evaluation import eval_flat
from tests.helpers import trace
from tests.rules.rule_programs import floats

EXPERTS, TOP_K, WIDTH, INNER, TOKENS = 8, 2, 16, 24, 64
Layer = Callable[[Any, Any], Any]


# ---- slots -----------------------------------------------------------------------------------------------------------


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(st.data())
def test_each_row_has_a_slot_of_its_group(data: st.DataObject) -> None:
    n_owners, n_each = data.draw(st.sampled_from([(1, 3), (2, 2), (4, 1)]))
    n_rows, n_groups = data.draw(st.integers(1, 12)), n_owners * n_each
    capacity = data.draw(st.integers(-(-n_rows // n_owners), n_rows)) if n_owners > 1 else n_rows
    ids = np.array(data.draw(st.lists(st.integers(0, n_groups - 1), min_size=2 * n_rows, max_size=2 * n_rows)))
    ids = ids.reshape(2, n_rows).astype(np.int32)
    slots = jax.tree.map(np.asarray, slots_of(ids, SlotShape(2, n_rows, n_groups, n_owners, capacity)))
    for block in range(2):
        places = slots.slot_of_row[block]
        assert len(set(places)) == n_rows
        np.testing.assert_array_equal(slots.row_of_slot[block].reshape(-1)[places], np.arange(n_rows))
        groups = np.full((n_owners, capacity), -1)
        for owner in range(n_owners):
            bounds = [(owner * n_each, slots.starts, slots.ends), (0, slots.foreign_starts, slots.foreign_ends)]
            for first, starts, ends in bounds:
                for i, (start, end) in enumerate(zip(starts[owner, block], ends[owner, block], strict=True)):
                    assert (groups[owner, start:end] == -1).all()
                    groups[owner, start:end] = first + i
        np.testing.assert_array_equal(groups.reshape(-1)[places], ids[block])
        assert (groups >= 0).sum() == n_rows


# ---- recognition -----------------------------------------------------------------------------------------------------


def _chosen(p: Any, x: Any) -> Any:
    return lax.top_k(jax.nn.softmax(x @ p["router"]), TOP_K)


def _experts(p: Any, rows: Any, sizes: Any) -> Any:
    hidden = jax.nn.silu(lax.ragged_dot(rows, p["gate"], sizes)) * lax.ragged_dot(rows, p["up"], sizes)
    return lax.ragged_dot(hidden, p["down"], sizes)


def _plain(p: Any, x: Any) -> Any:
    weights, chosen = _chosen(p, x)
    order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    out = _experts(p, x[order // TOP_K], sizes)[jnp.argsort(order)]
    return jnp.einsum("tkd,tk->td", out.reshape(-1, TOP_K, WIDTH), weights)


def _repeated(p: Any, x: Any) -> Any:
    weights, chosen = _chosen(p, x)
    ids = jnp.ravel(chosen)
    order = jnp.argsort(ids)
    out = _experts(p, jnp.take(jnp.repeat(x, TOP_K, axis=0), order, axis=0), jnp.bincount(ids, length=EXPERTS))
    out = jnp.take(out, jnp.argsort(order), axis=0).reshape(-1, TOP_K, WIDTH)
    return jnp.einsum("tkd,tk->td", out, weights)


def _weighed_in_order(p: Any, x: Any) -> Any:
    weights, chosen = _chosen(p, x)
    ids = chosen.reshape(-1)
    order, sizes = jnp.argsort(ids), jax.nn.one_hot(ids, EXPERTS, dtype=jnp.int32).sum(0)
    out = _experts(p, x[order // TOP_K], sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // TOP_K].add(out)


def _with_biases(p: Any, x: Any) -> Any:
    weights, chosen = _chosen(p, x)
    ids = chosen.reshape(-1)
    order, sizes = jnp.argsort(ids), jnp.bincount(ids, length=EXPERTS)
    out = (_experts(p, x[order // TOP_K], sizes) + p["bias"][ids[order]])[jnp.argsort(order)]
    return jnp.einsum("tkd,tk->td", out.reshape(-1, TOP_K, WIDTH), weights)


def _wrong_sizes(p: Any, x: Any) -> Any:
    weights, chosen = _chosen(p, x)
    order, sizes = jnp.argsort(chosen.reshape(-1)), TOP_K * jnp.bincount(chosen[:, 0], length=EXPERTS)
    out = _experts(p, x[order // TOP_K], sizes)[jnp.argsort(order)]
    return jnp.einsum("tkd,tk->td", out.reshape(-1, TOP_K, WIDTH), weights)


def _by_place(p: Any, x: Any) -> Any:
    weights, chosen = _chosen(p, x)
    order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    rows = x[order // TOP_K] * (jnp.arange(len(order)) / len(order))[:, None]
    out = _experts(p, rows, sizes)[jnp.argsort(order)]
    return jnp.einsum("tkd,tk->td", out.reshape(-1, TOP_K, WIDTH), weights)


def _parameters(skew: float = 0.0) -> Any:
    shapes = {
        "router": (WIDTH, EXPERTS),
        "gate": (EXPERTS, WIDTH, INNER),
        "up": (EXPERTS, WIDTH, INNER),
        "down": (EXPERTS, INNER, WIDTH),
        "bias": (EXPERTS, WIDTH),
    }
    params = {name: 0.5 * floats(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    params["router"][:, 3] += skew
    params["router"][:, 4] += 0.9 * skew
    return params


def _loss(layer: Layer) -> Callable[[Any, Any], Any]:
    return lambda p, x: jnp.sum(jnp.sin(layer(p, x)))


def _with_float_counts(p: Any, x: Any) -> Any:
    weights, chosen = _chosen(p, x)
    ids = chosen.reshape(-1)
    order, sizes = jnp.argsort(ids), jax.nn.one_hot(ids, EXPERTS).sum(0).astype(jnp.int32)
    token = jnp.repeat(jnp.arange(len(x)), TOP_K)[order]
    out = _experts(p, x[token], sizes) * weights.reshape(-1)[order][:, None]
    return jax.ops.segment_sum(out, token, num_segments=len(x))


def _placed(p: Any, x: Any) -> Any:
    weights, chosen = _chosen(p, x)
    ids, order = lax.sort_key_val(chosen.reshape(-1), jnp.arange(chosen.size))
    out = _experts(p, x[order // TOP_K], jnp.bincount(chosen.reshape(-1), length=EXPERTS)) + p["bias"][ids]
    out = jnp.zeros((chosen.size, WIDTH)).at[order].set(out)
    return jnp.einsum("tkd,tk->td", out.reshape(-1, TOP_K, WIDTH), weights)


def _in_scan(layer: Layer, p: Any, x: Any, **options: Any) -> Any:
    stack = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), p)

    def body(h: Any, p: Any) -> Any:
        return h + 0.1 * layer(p, h), None

    return lax.scan(jax.checkpoint(body, **options) if options else body, x, stack)[0]


PROVEN = {
    "plain": _plain,
    "repeated": _repeated,
    "weighed": _weighed_in_order,
    "biases": _with_biases,
    "float counts": _with_float_counts,
    "placed": _placed,
    "scan": functools.partial(_in_scan, _plain),
    "scan of sorted rows": functools.partial(_in_scan, _with_float_counts),
}


@pytest.mark.parametrize("layer", PROVEN)
def test_rows_sorted_by_expert_are_found(layer: str) -> None:
    found, names = _rewritten(PROVEN[layer])
    assert found and names["minialpa_routed_product"] == 6 and names["minialpa_routed_sum"] == 3
    assert names["sort"] == 2 and not any("grouped" in name for name in names)


@pytest.mark.parametrize("layer", [jax.checkpoint(_plain), functools.partial(_in_scan, _plain, prevent_cse=False)])
def test_recomputed_products_are_recomputed_in_slots(layer: Layer) -> None:
    found, names = _rewritten(layer)
    assert found and names["minialpa_routed_product"] == 9 and names["minialpa_routed_sum"] == 3


def _descending(p: Any, x: Any) -> Any:
    weights, chosen = _chosen(p, x)
    ids = chosen.reshape(-1)
    order, sizes = jnp.argsort(ids, descending=True), jnp.bincount(ids, length=EXPERTS)[::-1]
    out = _experts({name: w[::-1] for name, w in p.items()}, x[order // TOP_K], sizes)
    out = out[jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))]
    return jnp.einsum("tkd,tk->td", out.reshape(-1, TOP_K, WIDTH), weights)


def _with_sorted_values(p: Any, x: Any) -> Any:
    weights, chosen = _chosen(p, x)
    token = jnp.repeat(jnp.arange(len(x)), TOP_K)
    ids, token, weights = lax.sort((chosen.reshape(-1), token, weights.reshape(-1)), num_keys=1)
    out = _experts(p, x[token], jnp.diff(jnp.searchsorted(ids, jnp.arange(EXPERTS + 1)))) * weights[:, None]
    return jnp.zeros_like(x).at[token].add(out)


def _of_any_ids(p: Any, x: Any) -> Any:
    """Some ids are negative, others are at least the number of experts."""
    ids = jnp.round(12 * x[:, :TOP_K] - 2).astype(jnp.int32).reshape(-1)
    order, sizes = jnp.argsort(ids), jax.nn.one_hot(ids, EXPERTS, dtype=jnp.int32).sum(0)
    return 0.1 * _experts(p, x[order // TOP_K], sizes)[jnp.argsort(order)].reshape(-1, TOP_K, WIDTH).sum(1)


def _sorted_by(
    index: Callable[[Any], Any] = lambda order: order, ids_of: Callable[[Any], Any] = lambda ids: ids
) -> Layer:
    def layer(p: Any, x: Any) -> Any:
        weights, chosen = _chosen(p, x)
        ids = ids_of(chosen.reshape(-1))
        order, sizes = jnp.argsort(ids), jnp.bincount(ids, length=EXPERTS)
        out = _experts(p, x[index(order) // TOP_K], sizes)[jnp.argsort(order)]
        return jnp.einsum("tkd,tk->td", out.reshape(-1, TOP_K, WIDTH), weights)

    return layer


def test_micro_batches_do_not_wait_for_the_tokens_of_others() -> None:
    """Without slots, a sort of all tokens divides the loop over micro-batches."""

    def step(p: Any, x: Any) -> Any:
        return minialpa.value_and_grad(lambda p: jnp.sum(jnp.sin(_plain(p, x))))(p)

    traced = trace(step, _parameters(), floats((TOKENS, WIDTH), 9))
    in_slots = with_rows_in_slots(traced, RowSharing(n_micro_batches=16, n_devices=2, skew=1.0))
    n_loops = [stage_step(one, 16, (), (0,)).split.n_loops for one in (traced, in_slots)]
    assert n_loops[0] > 1 and n_loops[1] == 1


def test_groups_keep_their_numbers() -> None:
    """Layers are found before rows are in slots."""

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = x + _plain(p, x)
        return jnp.sum(jnp.sin(x))

    arguments = [_parameters(), _parameters()], floats((TOKENS, WIDTH), 9)
    traced = trace(jax.value_and_grad(loss), *arguments)
    new = with_rows_in_slots(traced, RowSharing(n_micro_batches=2, n_devices=2, skew=1.0))
    group_of = {op.eqn.outvars[0]: op.origin.group for op in traced.flat.ops if op.eqn.outvars}
    kept = [op for op in new.flat.ops if op.eqn.outvars and op.eqn.outvars[0] in group_of]
    assert len({op.origin.group for op in traced.flat.ops}) > len({op.origin.group for op in new.flat.ops})
    assert [op.origin.group for op in kept] == [group_of[op.eqn.outvars[0]] for op in kept]


def _counting(equal: Callable[[Any, Any], Any]) -> Layer:
    """As many rows as experts, so that a sum over the other dimension has the same shape."""

    def layer(p: Any, x: Any) -> Any:
        ids = jnp.argmax(x[:EXPERTS] @ p["router"], axis=1)
        order, sizes = jnp.argsort(ids), jnp.sum(equal(ids, jnp.arange(EXPERTS)), axis=0, dtype=jnp.int32)
        return _experts(p, x[order], sizes)[jnp.argsort(order)]

    return layer


@pytest.mark.parametrize(
    "layer",
    [
        _wrong_sizes,
        _descending,
        _with_sorted_values,
        _of_any_ids,
        _sorted_by(ids_of=lambda ids: ids.astype(jnp.bfloat16).astype(jnp.int32)),
        _sorted_by(ids_of=lambda ids: ids.astype(bool).astype(jnp.int32)),
        _sorted_by(ids_of=lambda ids: lax.select_n(True, ids, jnp.remainder(ids, EXPERTS))),
    ],
)
def test_any_order_and_any_sizes_are_found(layer: Layer) -> None:
    found, names = _rewritten(layer)
    assert found and names["minialpa_routed_product"] == 6 and not any("grouped" in name for name in names)


_PLACES = jnp.arange(TOKENS * TOP_K)


@pytest.mark.parametrize(
    "layer",
    [
        _by_place,
        _sorted_by(lambda order: jnp.maximum(order, _PLACES)),  # equal where a row stays in its place
        _sorted_by(lambda order: 0 * order + _PLACES),
        _sorted_by(lambda order: jnp.where(order.at[order].set(jnp.full_like(order, 4) + 1) == 0, order, 0)),
        _counting(lambda ids, groups: groups[:, None] == ids[None]),
        _counting(lambda ids, groups: ids[:, None] == ids[None]),
    ],
)
def test_rows_that_depend_on_their_place_stay_as_written(layer: Layer) -> None:
    assert not _rewritten(layer)[0]


def _last_row_differs(p: Any, x: Any) -> Any:
    weights, chosen = _chosen(p, x)
    order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    index = jnp.where(order == len(order) - 1, 0, order // TOP_K)
    out = _experts(p, x[index], sizes)[jnp.argsort(order)]
    return jnp.einsum("tkd,tk->td", out.reshape(-1, TOP_K, WIDTH), weights)


@pytest.mark.parametrize("most_values", [50, 1 << 18])
def test_indices_of_many_rows_are_compared_part_by_part(most_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_VALUES", most_values)
    assert _rewritten(_plain)[0] and not _rewritten(_last_row_differs)[0]


def test_a_proof_keeps_no_tables() -> None:
    n = 1 << 18
    flat = trace(lambda order: (order // 4, order // 4 + 1), jax.ShapeDtypeStruct((n,), jnp.int32)).flat
    producers = {var: eqn for eqn in flat.eqns for var in eqn.outvars}
    found = tables.Tables(producers, {flat.invars[0]: "order"}.get, n)
    tracemalloc.start()
    assert [found.is_quotient(out, "order", 4) for out in flat.outvars] == [True, False]
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 4 * n / 10 and peak > 4 * n


def _rewritten(layer: Layer) -> tuple[bool, Counter[str]]:
    """Also checks values and gradients."""
    step = jax.value_and_grad(_loss(layer), (0, 1))
    arguments = _parameters(), floats((TOKENS, WIDTH), 9)
    traced = trace(step, *arguments)
    new = with_rows_in_slots(traced, RowSharing(n_micro_batches=1, n_devices=8, skew=1.0))
    results = jax.jit(lambda *leaves: eval_flat(new.flat, leaves))(*jax.tree.leaves(arguments))
    for expected, one in zip(jax.tree.leaves(jax.jit(step)(*arguments)), results, strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-4)
    return new is not traced, Counter(eqn.primitive.name for eqn in all_equations(new.flat))


# ---- devices ---------------------------------------------------------------------------------------------------------

METHODS = {
    "rows stay": DataParallel(),
    "rows go to their experts": ShardParallel(auto_sharding_option=AutoShardingOption(allow_all_gather=False)),
    "no free slots": ShardParallel(auto_sharding_option=AutoShardingOption(allow_all_gather=False, expert_skew=1.0)),
    "micro-batches": ShardParallel(num_micro_batches=2),
    "more micro-batches than devices": ShardParallel(num_micro_batches=16),
    "pipeline": PipeshardParallel(num_micro_batches=4, stage_option=UniformStageOption(2)),
    "scan": ShardParallel(auto_sharding_option=AutoShardingOption(allow_all_gather=False)),
    "any order": ShardParallel(auto_sharding_option=AutoShardingOption(allow_all_gather=False)),
}
LAYERS = {"scan": PROVEN["scan"], "any order": _with_sorted_values}


@pytest.mark.parametrize("method", METHODS)
def test_devices_compute_what_one_device_computes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For balanced routings, and where all tokens have the same experts."""
    monkeypatch.setattr(routed, "_MOST_ELEMENTS", 64)  # devices send several parts of a matrix

    def loss(p: Any, batch: Any) -> Any:
        x = batch[0] @ p["in"]
        return jnp.sum((x + LAYERS.get(method, _plain)(p, x)) * batch[1])

    def step(p: Any, batch: Any) -> Any:
        return minialpa.value_and_grad(loss)(p, batch)

    devices = minialpa.parallelize(step, method=METHODS[method], donate_argnums=(), batch_argnums=1)
    for skew in (0.0, 5.0):
        params = {**_parameters(skew), "in": np.eye(WIDTH, dtype=np.float32)}
        batch = (np.abs(floats((TOKENS, WIDTH), 9)), floats((TOKENS, WIDTH), 10))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
            devices(params, batch),
            jax.jit(step)(params, batch),
        )


def test_nan_stays_in_its_token() -> None:
    x = floats((TOKENS, WIDTH), 9)
    x[5, 1] = np.nan
    step = minialpa.parallelize(_plain, method=METHODS["rows go to their experts"], batch_argnums=1)
    np.testing.assert_array_equal(np.isnan(step(_parameters(), x)).any(axis=1), np.arange(TOKENS) == 5)


def test_experts_stay_and_rows_move_where_weights_are_larger() -> None:
    n_experts, width, inner, tokens = 32, 1024, 2048, 8192
    shapes = {"gate": (n_experts, width, inner), "up": (n_experts, width, inner), "down": (n_experts, inner, width)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    params["router"] = jax.ShapeDtypeStruct((width, n_experts), jnp.bfloat16)

    def loss(p: Any, x: Any) -> Any:
        weights, chosen = lax.top_k(jax.nn.softmax((x @ p["router"]).astype(jnp.float32)), TOP_K)
        order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=n_experts)
        out = _experts(p, x[order // TOP_K], sizes)[jnp.argsort(order)].reshape(-1, TOP_K, width)
        return jnp.sum(jnp.einsum("tkd,tk->td", out.astype(jnp.float32), weights) ** 2)

    def step(p: Any, x: Any) -> Any:
        value, gradients = minialpa.value_and_grad(loss)(p, x)
        return jax.tree.map(jnp.subtract, p, gradients), value

    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    cluster = ClusterSpec.preset("h100", devices_per_host=8)
    plan = minialpa.plan(step, (params, x), cluster=cluster, method=ShardParallel(), batch_argnums=1)
    largest = max(plan.collectives, key=lambda one: one.n_bytes)
    assert largest.kind == "all-to-all"
    assert largest.n_bytes == pytest.approx(1.25 * tokens * TOP_K / 8 * width * 2, rel=0.01)


def test_skew_below_one_is_refused() -> None:
    with pytest.raises(minialpa.ShardingError, match=r"`expert_skew` is 0\.5, but the busiest experts have at least"):
        AutoShardingOption(expert_skew=0.5)
