"""Every phase of planned steps passes its verifier, and the verifier refuses broken programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from minialpa.errors import MinialpaError, VerifyError
from minialpa.ir.block import Block, block_of, verify_block
from tests.equivalence.drawing import example_of
from tests.equivalence.steps import batch_argnums, make_args, make_step
from tests.equivalence.ways import make_method

#: Numbers of drawn examples: several loops, a pipeline with rematerialisation.
SHORT = (2, 4)


@pytest.mark.parametrize("number", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.slow]) for n in range(80)])
def test_each_phase_of_a_drawn_step_passes_its_verifier(number: int) -> None:
    example = example_of(number)
    step, args = make_step(example.training), make_args(example.training)
    batch = batch_argnums(example.training)
    try:
        method = make_method(example.way, ())
        function = minialpa.parallelize(step, method=method, batch_argnums=batch, on_ragged="error")
        plan = function.plan(*args)
    except MinialpaError:
        return  # the equivalence tests check refusals
    found = minialpa.phases(plan, step, args, batch_argnums=batch)
    assert all(text.count("\n") > 3 for text in found.values())


def block() -> Block:
    def fun(x: Any, y: Any) -> Any:
        z = jnp.sin(x) * y
        return z + x, jnp.cos(z).sum()

    return block_of(jax.make_jaxpr(fun)(jnp.ones(3), jnp.ones(3)))


def test_a_program_passes() -> None:
    verify_block(block())


@pytest.mark.parametrize("first, second", [(0, 1), (1, 2), (3, 4)])
def test_operations_in_another_order_are_refused(first: int, second: int) -> None:
    good = block()
    ops = list(good.ops)
    ops[first], ops[second] = ops[second], ops[first]
    with pytest.raises(VerifyError, match=f"Operation %{first}, .* reads a value of type .* not defined before it"):
        verify_block(dataclasses.replace(good, ops=tuple(ops)))


@pytest.mark.parametrize("left_out", range(5))
def test_a_program_without_an_operation_is_refused(left_out: int) -> None:
    good = block()
    ops = good.ops[:left_out] + good.ops[left_out + 1 :]
    with pytest.raises(VerifyError, match="not defined before it"):
        verify_block(dataclasses.replace(good, ops=ops))


def test_values_made_twice_and_results_of_another_type_are_refused() -> None:
    good = block()
    with pytest.raises(VerifyError, match="`sin`, defines a value that is already defined"):
        verify_block(dataclasses.replace(good, ops=(*good.ops, good.ops[0])))

    wide = jax.make_jaxpr(jnp.sin)(jnp.ones(4)).jaxpr.eqns[0].outvars[0]
    eqns = [eqn.replace(outvars=[wide]) if eqn.primitive.name == "sin" else eqn for eqn in good.eqns]
    with pytest.raises(VerifyError, match=r"`sin`, computes float32\[3\], but its result has the type float32\[4\]"):
        verify_block(good.with_eqns(eqns))
