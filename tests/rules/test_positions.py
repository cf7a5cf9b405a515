"""Positional factors: shards that know their start make together the results of the whole equation, to the bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa import LogicalMesh, ShardParallel, models, parallelize, value_and_grad
from minialpa.intra.shard_arrays import shard_program
from minialpa.intra.spmd import EquationSpecs
from minialpa.rules.known_rules import factors_of
from tests.helpers import program_of, strategies_of
from tests.rules.rule_laws import Case, cases_of, check_all, check_positions, notation, only, vjp
from tests.rules.rule_programs import PROGRAMS, equations

_MODES = ["clip", "fill", "promise_in_bounds"]
_UPDATES = ["add", "max", "min", "multiply", "set"]


def _table(*shape: int, dtype: Any = np.float32) -> Any:
    """Whole numbers, which add up exactly in any order."""
    return jnp.asarray(np.round(np.random.default_rng(0).normal(size=shape) * 9), dtype)


def _checked(found: tuple[Case, ...], *primitives: str) -> None:
    """Checks all laws, and the law of positions for the `primitives`."""
    split = {case.eqn.primitive.name for case in found if factors_of(case.eqn).positional}
    assert split >= set(primitives)
    check_all(found)


def test_programs_have_positional_factors() -> None:
    found = [eqn for program in PROGRAMS for eqn in equations(program)]
    split = {eqn.primitive.name for eqn in found if factors_of(eqn).positional}
    scatters = {f"scatter{suffix}" for suffix in ("", "-add", "-max", "-min", "-mul", "-sub")}
    assert split == {"gather", "iota", "random_bits", *scatters}


def _look_up(table: Any, indices: Any, mode: Any) -> list[Any]:
    at = table.at[indices]
    fills = [None, 5.0] if mode == "fill" else [None]
    return [at.get(mode=mode, fill_value=fill, wrap_negative_indices=False) for fill in fills]


@pytest.mark.parametrize("mode", _MODES)
def test_indices_out_of_bounds(mode: Any) -> None:
    """In lookups and updates of rows, also by several indices, in several dtypes."""
    indices = np.array([0, 5, 6, -1, 3, 100, -7, 2, 3, 0], np.int32)
    i, j = np.array([0, 5, 6, -1], np.int32), np.array([7, -9, 3, 8], np.int32)

    def by_two(x: Any) -> Any:
        return x.at[i, j].get(mode=mode), x.at[i, :, j % 2].get(mode=mode)

    def fun(t: Any, u: Any, others: Any, x: Any) -> list[Any]:
        at = t.at[indices]
        changed = [getattr(at, update)(u, mode=mode, wrap_negative_indices=False) for update in _UPDATES]
        for other in others:
            ones = jnp.ones((10, 4), other.dtype)
            changed += [other.at[indices].get(mode=mode), other.at[indices].add(ones), other.at[indices].set(ones)]
        found = [_look_up(t, indices.astype(dtype), mode) for dtype in ("int32", "uint8")]
        return [changed, found, vjp(by_two)(x) if mode != "promise_in_bounds" else None]

    leaves, tree = jax.tree.flatten(
        (
            _table(6, 4),
            _table(10, 4),
            [_table(6, 4, dtype=dtype) for dtype in ("bfloat16", "complex64")],
            _table(6, 8, 2),
        )
    )
    found = cases_of(lambda *leaves: fun(*tree.unflatten(leaves)), *leaves)
    _checked(found, "gather", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter")


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_long_indices_out_of_bounds(mode: Any) -> None:
    with jax.enable_x64(True):
        indices = jnp.asarray(np.array([[0, 5, 6, -1], [3, 2**40, -7, 2]]))
        _checked(cases_of(lambda t, i: _look_up(t, i, mode), _table(6, 4), indices), "gather")


def test_flags_can_be_set_but_not_summed() -> None:
    found = cases_of(lambda t, i: (t[i], t.at[i].set(True)), np.zeros((6, 4), bool), np.array([0, 5], np.int32))
    gather, scatter = (case for case in found if case.eqn.primitive.name in ("gather", "scatter"))
    assert check_positions([gather]) == 0
    assert check_positions([scatter]) > 0


def _rows(table: Any, indices: Any, mode: str) -> list[Any]:
    """Rows of a table [n w], and the table with them added; unchanged indices, which jnp would convert or drop."""
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    window = (1, table.shape[1])
    rows = lax.gather(table, indices[:, None], numbers, window, mode=mode)
    scatter_numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return [rows, lax.scatter_add(table, indices[:, None], jnp.ones_like(rows), scatter_numbers, mode=mode)]


@pytest.mark.parametrize(("mode", "dtype"), [("fill", "int8"), ("clip", "uint8")])
def test_narrow_indices_of_a_long_table(mode: str, dtype: Any) -> None:
    indices = np.arange(256).astype(dtype)
    found = cases_of(lambda t: _rows(t, indices, mode), _table(264, 4))
    _checked(found, "gather", "scatter-add")


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_counts(dtype: Any) -> None:
    # Counts that 8 and 16 bits do not hold.
    _checked(cases_of(lambda: lax.broadcasted_iota(dtype, (2, 600), 1)), "iota")


@pytest.mark.parametrize(("width", "n_keys"), [(8, None), (64, 4)])
def test_bits(width: int, n_keys: int | None) -> None:
    with jax.enable_x64(width == 64):
        draw = lambda key: jax.random.bits(key, (4, 6, 2), f"uint{width}")  # noqa: E731
        keys = jax.random.key(3) if n_keys is None else jax.random.split(jax.random.key(3), n_keys)
        _checked(cases_of(draw if n_keys is None else jax.vmap(draw), keys), "random_bits")


def test_bits_that_are_not_counted_are_drawn_whole() -> None:
    def notation_of_bits(shape: tuple[int, ...], impl: str = "threefry2x32") -> str:
        eqn = jax.make_jaxpr(lambda key: jax.random.bits(key, shape))(jax.random.key(0, impl=impl)).eqns[-1]
        while "jaxpr" in eqn.params:
            eqn = eqn.params["jaxpr"].eqns[-1]
        return notation(eqn)

    assert notation_of_bits((4, 6)) == "[] -> [A' B']"
    assert notation_of_bits((4, 6), "rbg").replace("[1]", "[]") == "[] -> [A B]"
    assert notation_of_bits((2**16, 2**15)) == "[] -> [A' B']"
    assert notation_of_bits((2**16, 2**16)) == "[] -> [A B]"
    with jax.threefry_partitionable(False):
        assert notation_of_bits((4, 6)) == "[] -> [A B]"
        eqn = only(lambda key: jax.random.bits(key, (4, 6)), jax.random.key(0))
    assert notation(eqn) == "[] -> [A B]", "the settings of the trace count"


_DROPPED = np.arange(32, dtype=np.float32).reshape(8, 4)


def _dropped(h: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0) + jnp.arange(8, dtype=h.dtype)[:, None]


def _scanned(h: Any, key: Any) -> Any:
    def body(h: Any, i: Any) -> Any:
        inner = lambda k, h: _dropped(h, jax.random.fold_in(key, 3 * i + k))  # noqa: E731
        return lax.fori_loop(0, 2, inner, h), h + _DROPPED

    return lax.scan(body, h, jnp.arange(3))


def _chosen(h: Any, key: Any) -> Any:
    return lax.cond(h[0, 0] < 9, _dropped, lambda h, key: h * 2, h, key)


def _until(h: Any, key: Any) -> Any:
    body = lambda carry: (carry[0] + 1, _dropped(carry[1], jax.random.fold_in(key, carry[0])))  # noqa: E731
    return lax.while_loop(lambda carry: carry[0] < key.ndim + 2, body, (jnp.int32(key.ndim), h))


@pytest.mark.parametrize(("fun", "impl"), [(_scanned, "rbg"), (_chosen, "threefry2x32"), (_until, "threefry2x32")])
def test_loops_and_branches_that_make_arrays_by_position(fun: Any, impl: Any) -> None:
    """Bits that are not counted, and captured arrays, are computed in full, and a shard takes its part."""
    found = cases_of(fun, _DROPPED, jax.random.key(3, impl=impl))
    found = tuple(case for case in found if case.eqn.primitive.name in ("cond", "scan", "while"))
    (last,) = found[-1:]
    assert {factors_of(last.eqn).sizes[f] for f in factors_of(last.eqn).positional} >= {8}
    check_all((last,))


def test_a_loop_that_mixes_what_it_makes_by_position_is_not_split() -> None:
    def body(h: Any, key: Any) -> Any:
        return h + jnp.sort(jax.random.uniform(key, h.shape), 0), None

    eqn = only(lambda h, keys: lax.scan(body, h, keys), _DROPPED, jax.random.split(jax.random.key(0), 2))
    factors = factors_of(eqn)
    assert 8 not in {factors.sizes[f] for f in factors.positional}
    assert factors.in_time(eqn).leading_factor(0, 0) in factors.blocked


def test_loops_and_micro_batches_do_not_split_by_position() -> None:
    factors = factors_of(only(lambda t: t[np.array([1, 2], np.int32)], _table(6, 4)))
    (rows,) = factors.positional
    assert rows not in factors.splittable
    assert not factors.may_split(rows, 2)
    assert rows in factors.on_mesh().splittable
    assert factors.on_mesh().may_split(rows, 2)
    assert not factors.on_mesh().may_split(rows, 4)


@pytest.mark.parametrize("primitive", ["gather", "scatter-add", "random_bits"])
def test_every_strategy_of_an_equation_gives_its_results(primitive: str) -> None:
    """On two mesh axes, which may both split one positional factor."""
    mesh, indices = LogicalMesh((2, 4)), np.array([0, 15, 16, -1, 3, 100, -17, 2], np.int32)

    def fun(t: Any, key: Any) -> Any:
        drawn = jax.random.bits(key, (8, 16))
        return t.at[indices].get(mode="fill"), t.at[indices].add(_table(8, 8), mode="drop"), drawn

    (case,) = (c for c in cases_of(fun, _table(16, 8), jax.random.key(0)) if c.eqn.primitive.name == primitive)
    strategies = strategies_of(case.eqn, mesh)
    n = len(strategies.seconds)
    columns = [[tuple(c[s] for c in kind) for s in range(n)]
               for kind in (strategies.operands, strategies.made, strategies.results)]  # fmt: skip
    chosen = [EquationSpecs(*specs) for specs in zip(*columns, strict=True)]
    assert any((0, 1) in spec.dims for one in chosen for spec in (*one.operands, *one.results))
    programs = [shard_program(program_of(case.eqn, specs, mesh)) for specs in chosen]
    devices = np.array(jax.devices()).reshape(mesh.shape)
    replicated = NamedSharding(Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2), P())
    run = jax.jit(lambda *xs: [program(*xs) for program in programs], in_shardings=replicated, out_shardings=replicated)
    for specs, results in zip(chosen, run(*case.operands), strict=True):
        np.testing.assert_array_equal(results[0], case.results[0], err_msg=str(specs))


def test_a_large_vocabulary_is_split_and_never_gathered(key: jax.Array) -> None:
    """Megatron's embedding, head and cross entropy: no collective carries as much as a shard of the table."""
    n_rows, hidden, n_examples, seq_len = 32768, 64, 8, 16
    sizes = {"batch_size": n_examples, "seq_len": seq_len, "hidden": hidden, "n_layers": 1, "vocab_size": n_rows}
    case = models.build("gpt", n_heads=8, **sizes)
    state, batch = jax.eval_shape(case.init, key), case.make_batch(0, n_examples)
    step = parallelize(case.train_step(value_and_grad), method=ShardParallel(devices=LogicalMesh((8,))))
    plan = step.plan(state, batch)
    (table,) = (value for value in plan.inputs if "'tokens'" in value.path and "params" in value.path)
    assert table.specs[0].dims[0], table
    activations, shard = n_examples * seq_len * hidden * 4, n_rows * hidden * 4 // 8
    assert max(one.n_bytes for one in plan.collectives if one.kind != "all-reduce") < 2 * activations < shard
    assert max(one.n_bytes for one in plan.collectives) < shard / 4  # small gradients together
