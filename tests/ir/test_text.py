"""Printed blocks: each operation once, or counted; names, types and modules of the user's step."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import minialpa
from benchmarks.planning import traced_step
from minialpa.ir.block import Block, block_of
from minialpa.ir.text import direction, modules, where
from tests.phases_doc import PATH, page, planned
from tests.skips import skip


def program(fun: Any, *args: Any) -> Block:
    return block_of(jax.make_jaxpr(fun)(*args))


def lines_of(fun: Any, *args: Any) -> list[str]:
    return program(fun, *args).text({}).lines(())


@pytest.mark.parametrize("n_layers", [1, 2, 40])
def test_layers_are_printed_once_and_counted(n_layers: int) -> None:
    def model(x: Any, weights: Any) -> Any:
        for w in weights:
            x = jnp.sin(jnp.tanh(x @ w) + x) * 2.0
        return x.sum()

    lines = lines_of(model, jnp.ones((2, 4)), [jnp.ones((4, 4))] * n_layers)
    assert len(lines) <= 8
    counted = [line for line in lines if line.startswith("| %")]
    if n_layers == 1:
        assert not counted and sum(line.startswith("%") for line in lines) == 6
    else:
        assert f"{n_layers} times alike" in "\n".join(lines) and len(counted) == 5


def test_what_differs_is_not_counted() -> None:
    """Another constant, another shape, another operand at another distance, another body of a loop."""

    def programs(x: Any) -> dict[str, Any]:
        first = jnp.tanh(x)
        return {
            "constants": lambda: [jnp.cos(jnp.sin(jnp.exp(x + c)) * c) for c in (1.0, 2.0)],
            "operands": lambda: [jnp.cos(jnp.sin(jnp.exp(y + 1.0)) * z) for y, z in ((x, first), (first, x))],
            "loops": lambda: [
                jax.lax.fori_loop(0, 3, lambda _, c, k=k: jnp.exp(jnp.sin(c * k)) + c, x) for k in (1.0, 2.0)
            ],
        }

    for name in programs(jnp.ones(3)):
        text = "\n".join(lines_of(lambda x, name=name: programs(x)[name](), jnp.ones(3)))
        assert "alike" not in text, text


def test_results_operands_and_programs_inside() -> None:
    def fun(x: Any) -> Any:
        left, right = jnp.split(x, 2)
        return jax.lax.scan(lambda c, y: (c + y, c * y), left[0] * right[1], x)

    block = program(fun, jnp.ones(4))
    text = block.text({block.invars[0]: "state['x']"})
    lines = text.lines(())
    assert lines[0].split() == ["%0", "f32[2]", "f32[2]", "split[sizes=(2,2)", "axis=0]", "state['x']"]
    assert any("%0.1" in line for line in lines)
    inside = [line for line in lines if line.startswith("    ")]
    assert any("mul input0, input1" in line for line in inside)
    assert text.name_of(block.outvars[1]).endswith(".1")


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for i in range(2):
            x = nn.relu(nn.Dense(8, name=f"blocks_{i}")(x))
        return nn.Dense(1, name="head")(x)


def test_modules_of_forward_and_backward_operations() -> None:
    model, x = Model(), jnp.ones((4, 8))
    params = model.init(jax.random.key(0), x)

    def step(params: Any, x: Any) -> Any:
        loss, grads = minialpa.value_and_grad(lambda p: model.apply(p, x).mean())(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    block = traced_step(step, params, x).flat
    parts = {(direction(i, op).split(" ")[0], modules(i, op)) for i, op in enumerate(block.ops)}
    names = ("Model/blocks_0", "Model/blocks_1", "Model/head")
    assert parts >= {(part, name) for part in ("forward", "backward") for name in names}
    assert ("", "") in parts  # the update
    assert {where(i, op).split(":")[0] for i, op in enumerate(block.ops)} == {"test_text.py"}


def test_own_gradients_in_a_loss_leave_forward_operations_forward() -> None:
    """A name stack with `transpose` in it, inside the loss, does not make its operations backward ones."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            with jax.named_scope("penalty"):
                return (jax.grad(lambda v: jnp.sin(v * x).sum())(w) ** 2).sum()

        value, grad = minialpa.value_and_grad(loss)(w)
        return w - grad, value

    block = traced_step(step, jnp.ones(3), jnp.ones(3)).flat
    forward = [op for op in block.ops if op.origin.direction == "forward"]
    assert {modules(0, op) for op in forward} == {"penalty"}


def test_every_phase_has_every_operation_and_is_stable() -> None:
    found = planned()
    assert found == planned()
    assert list(found) == ["trace", "layers", "rematerialise", "microbatch", "stages", "shardings", "instructions"]
    numbers = {name: set(re.findall(r"^ *(%\d+) ", text, re.M)) for name, text in found.items()}
    assert numbers["trace"] == numbers["layers"] < numbers["rematerialise"]
    assert numbers["microbatch"] == numbers["stages"] == numbers["shardings"]


def test_the_page_is_up_to_date() -> None:
    if f"(jax {jax.__version__})" not in PATH.read_text():
        skip(f"docs/a-step-in-phases.md was made with another jax than {jax.__version__}: python -m tests.phases_doc")
    assert PATH.read_text() == page()
