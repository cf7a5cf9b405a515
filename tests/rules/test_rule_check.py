"""Rules that users register are tried on small arrays before a step is planned: right ones pass, wrong ones do not.

Each wrong rule is one that plans would use without an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import ShardingError
from minialpa.rules import rule_check
from minialpa.rules.factors import Factors
from minialpa.rules.rule_check import check_registered_rules, wholes
from minialpa.tracing.flattening import trace_flat
from tests.rules.rule_programs import floats

pytestmark = pytest.mark.usefixtures("own_rules")

Function = Callable[..., Any]


@jax.custom_vjp
def _clipped_by_all(x: Any) -> Any:
    return jnp.tanh(x)


_clipped_by_all.defvjp(lambda x: (jnp.tanh(x), None), lambda _, bar: (bar / jnp.sqrt(jnp.sum(bar * bar)),))


def _dropout(x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0)


def _smoothed(x: Any) -> Any:
    return x + jnp.concatenate([x[1:], jnp.zeros_like(x[:1])])


def _cumsum_of_blocks(x: Any) -> Any:
    return jnp.cumsum(x.reshape(x.shape[0], -1, 8), 2).reshape(x.shape)


WRONG = {
    "a running sum": (lambda x: jnp.cumsum(x, 0), "b d -> b d", {}),
    "a halo": (_smoothed, "b d -> b d", {}),
    "a mean": (lambda x: jnp.mean(x, 1), "b d -> b", {"reductions": "d"}),
    "a maximum of sums": (lambda x: jnp.sum(x, 1), "b d -> b", {"reductions": {"d": "max"}}),
    "a term that is added once": (lambda x: jnp.sum(x, 1) + 1, "b d -> b", {"reductions": "d"}),
    "sums that are rounded": (lambda x: jnp.sum(x, 1).astype(np.int32), "b d -> b", {"reductions": "d"}),
    "the position of a maximum": (lambda x: jnp.argmax(x, 1), "b d -> b", {"reductions": {"d": "max"}}),
    "a transposed result": (lambda x: jnp.tanh(x).T, "b d -> b d", {}),
    "random numbers": (_dropout, "b d -> b d", {}),
    "a gradient of all examples": (_clipped_by_all, "b d -> b d", {}),
}  # fmt: skip
RIGHT = {
    "elementwise": (jnp.tanh, "b d -> b d", {}),
    "only positive numbers": (jnp.log, "b d -> b d", {}),
    "a softmax of rows": (lambda x: jax.nn.softmax(x, 1), "b d -> b d", {"need_replication": "d"}),
    "a sum": (lambda x: jnp.sum(x, 1), "b d -> b", {"reductions": "d"}),
    "blocks of a fixed length": (_cumsum_of_blocks, "b d -> b d", {}),
    "a table of a fixed length": (lambda x: x * np.ones((1, 16), np.float32), "b d -> b d", {"need_replication": "d"}),
}  # fmt: skip


def _named(fun: Function) -> Function:
    def kernel(x: Any) -> Any:
        return fun(x)

    return kernel


def _check(fun: Function, *args: Any) -> None:
    check_registered_rules(trace_flat(fun, *args)[0].eqns, on_default_device=False)


def _loss(kernel: Function) -> Function:
    """A function with the kernel's derivative in it, if it has one."""
    return jax.grad(lambda x: jnp.sum(kernel(x).astype(x.dtype) ** 2))


@pytest.mark.parametrize(("fun", "rule", "options"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_rule_is_refused(fun: Function, rule: str, options: dict[str, Any]) -> None:
    kernel = minialpa.register_sharding_rule(_named(fun), rule, **options)
    with pytest.raises(ShardingError, match=r"`(derivative of )?kernel`.* allows splitting `[bd]`"):
        _check(_loss(kernel), floats((16, 16), 0))


@pytest.mark.parametrize(("fun", "rule", "options"), RIGHT.values(), ids=list(RIGHT))
def test_a_right_rule_passes(fun: Function, rule: str, options: dict[str, Any]) -> None:
    kernel = minialpa.register_sharding_rule(_named(fun), rule, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check(_loss(kernel), floats((16, 16), 0))


def test_each_part_that_claims_to_be_the_whole_is_compared() -> None:
    """[2, 6] -> [6], a sum over the first dimension that, by the rule, all parts have in full."""
    both = {"sizes": (2, 6), "operands": (((0,), (1,)),), "results": (((1,),),), "reductions": {0: "sum"}}
    factors, x = Factors(**both, unaffected=frozenset({(0, 0)})), np.arange(12).reshape(2, 6)
    for parts in ([x.sum(0), x[0]], [x[0], x.sum(0)]):
        assert not all(np.array_equal(whole, x.sum(0)) for whole in wholes(parts, factors, 0, 0))


def test_arrays_that_are_too_large_are_shrunk() -> None:
    large = jax.ShapeDtypeStruct((1 << 20, 1 << 20), np.float32)
    _check(minialpa.register_sharding_rule(_named(jnp.tanh), "b d -> b d"), large)
    wrong = minialpa.register_sharding_rule(_named(lambda x: jnp.cumsum(x, 0)), "b d -> b d")
    with pytest.raises(ShardingError, match="allows splitting `b`"):
        _check(wrong, large)


def test_keys_and_positions_are_drawn() -> None:
    keys, x = jax.random.split(jax.random.key(0), 4), floats((4, 6), 0)
    mask = lambda keys, x: jax.vmap(lambda key, row: row + jax.random.normal(key, row.shape))(keys, x)  # noqa: E731
    _check(minialpa.register_sharding_rule(mask, "b, b d -> b d", need_replication="d"), keys, x)
    lookup = minialpa.register_sharding_rule(lambda table, i: table[i], "v d, b -> b d")
    _check(lookup, floats((4, 6), 0), np.arange(4))


def test_rules_in_loops_and_branches_are_tried() -> None:
    wrong = minialpa.register_sharding_rule(_named(lambda x: jnp.cumsum(x, 0)), "b d -> b d")
    for fun in (
        lambda x: jax.lax.scan(lambda c, _: (wrong(c), None), x, None, length=2)[0],
        lambda x: jax.lax.cond(x[0, 0] > 0, wrong, lambda x: x, x),
    ):
        with pytest.raises(ShardingError, match="`kernel`"):
            _check(fun, floats((4, 6), 0))


def test_a_kernel_is_tried_once_for_each_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = minialpa.register_sharding_rule(_named(jnp.tanh), "b d -> b d")
    tried: list[Any] = []
    monkeypatch.setattr(rule_check, "check_parts", lambda eqn, *_: tried.append(eqn) or ())
    for _ in range(2):
        _check(lambda x: kernel(kernel(x)), floats((4, 6), 0))
    assert len(tried) == 1


def test_what_does_not_run_here_is_named_in_a_warning() -> None:
    call = lambda x: jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)  # noqa: E731
    kernel = minialpa.register_sharding_rule(_named(call), "b d -> b d")
    with pytest.warns(UserWarning, match=r"rule of `kernel`, `b d -> b d`, is not tested.*No FFI handler"):
        _check(kernel, floats((4, 6), 0))
    minialpa.register_sharding_rule("ffi:nowhere", "b d -> b d", check=False)
    _check(call, floats((4, 6), 0))
