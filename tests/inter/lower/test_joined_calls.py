"""Joined calls compute the same with few functions, and calls are joined only if that compiles less."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import minialpa
from minialpa import ShardParallel
from minialpa.inter.lower.emit import emit_program
from minialpa.inter.lower.instruction_passes import joined_calls
from minialpa.programs.program import Accumulate, Function, Instruction, Run, Transfer
from minialpa.testing import assert_allclose

AVAL, SPEC = jax.ShapeDtypeStruct((2,), jnp.float32), PartitionSpec()


def function(name: str, fun: Any, n_inputs: int) -> Function:
    return Function(
        name=name, mesh=0, fun=fun, in_avals=(AVAL,) * n_inputs, in_specs=(SPEC,) * n_inputs, out_avals=(AVAL,),
        out_specs=(SPEC,),
    )  # fmt: skip


#: Doubles each of two micro-batches, adds them up and takes the root.
FUNCTIONS = [
    function("step0", lambda x: (2 * x,), 1),
    function("widen0", lambda x: (x + 0,), 1),
    function("accumulate0", lambda a, b: (a + b,), 2),
    function("update0", lambda x: (jnp.sqrt(x),), 1),
]
CALLS: list[Instruction] = [
    Run(0, (0,), (2,)), Run(1, (2,), (3,)), Run(0, (1,), (4,)), Accumulate(2, (3,), (4,)), Run(3, (3,), (5,)),
]  # fmt: skip


def test_calls_are_joined_if_they_compile_sooner() -> None:
    """Apart: 20 equations for each of 4 functions, plus calls. Joined: 20, and the equations of a step twice."""
    (joined,), (call,) = joined_calls(FUNCTIONS, CALLS, {5, 3}, {0: 59})
    assert call == Run(0, (0, 1), (3, 5))
    total, root = joined.fun(jnp.array([1.0, 2.0]), jnp.array([3.0, 6.0]))
    np.testing.assert_allclose((total, root), ([8.0, 16.0], [8**0.5, 4.0]), rtol=1e-6)

    assert joined_calls(FUNCTIONS, CALLS, {5}, {0: 60}) == (FUNCTIONS, CALLS)
    moved = [*CALLS, Transfer(5, 6, 0, SPEC)]
    assert joined_calls(FUNCTIONS, moved, {6}, {0: 3}) == (FUNCTIONS, moved)


def normalised(width: int) -> Any:
    """A step of two layers that are normalised over all examples, which needs several loops."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for w in params:
                y = y @ w
                y = y / jnp.max(jnp.abs(y))
            return jnp.mean(y**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    keys = jax.random.split(jax.random.key(0), 3)
    params = [jax.random.normal(key, (width, width)) for key in keys[:2]]
    return step, (params, jax.random.normal(keys[2], (8, width)))


def test_a_small_step_of_several_loops_is_one_function() -> None:
    step, args = normalised(8)
    parallel = minialpa.parallelize(
        step, method=ShardParallel(jax.devices()[:2], num_micro_batches=2), donate_argnums=()
    )
    plan = parallel.plan(*args)
    assert plan.n_loops > 1
    program = emit_program(parallel._trace(parallel._parameters.bind(args, {})), plan)
    assert len(program.functions) == 1
    assert_allclose(parallel(*args), step(*args), rtol=1e-4, atol=1e-5)
