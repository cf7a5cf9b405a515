"""Compiled operations have the names of the user's modules, as under `jax.jit`; profilers show them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import minialpa
from tests.runtime.cluster.in_process_session import in_process_session


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attn")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(16, name="down")(nn.gelu(nn.Dense(32, name="up")(x)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return Block(name="block")(x), None


class Gpt(nn.Module):
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(32, 16, name="embed")(tokens)
        if self.scanned:
            layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = layers(name="layers")(x, None)
        else:
            for i in range(2):
                x = Block(name=f"block_{i}")(x)
        logits: jax.Array = nn.Dense(32, name="head")(x)
        return logits


def step_of(model: nn.Module) -> tuple[Any, tuple[Any, jax.Array]]:
    tokens = jnp.zeros((32, 4), jnp.int32)
    params = model.init(jax.random.key(0), tokens)

    def train_step(params: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = model.apply(params, tokens)
            with jax.named_scope("cross_entropy"):
                return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

        value, grads = minialpa.value_and_grad(loss)(params)
        with jax.named_scope("descent"):
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train_step, (params, tokens)


def names_in(texts: Iterable[str], pattern: str = r" dot\(") -> set[str]:
    """The scopes of operations, without the functions around the step and without the subscripts of einsum."""
    lines = (line for text in texts for line in text.splitlines() if re.search(pattern, line))
    found = (re.search(r'op_name="([^"]*)"', line) for line in lines)
    names = (re.sub(r"^.*?(?=jvp\(|transpose\(jvp|descent)", "", one[1]) for one in found if one is not None)
    return {re.sub(r"[^/]*->[^/]*/", "", name) for name in names}


@functools.cache
def _names_of_jit() -> set[str]:
    step, args = step_of(Gpt())
    return names_in([jax.jit(step).lower(*args).compile().as_text()])


PIPELINE = minialpa.PipeshardParallel(
    num_micro_batches=2, layer_option=minialpa.AutoLayerOption(2), stage_option=minialpa.UniformStageOption(2)
)


@pytest.mark.parametrize("method", [minialpa.ShardParallel(), PIPELINE], ids=["shard", "pipeline"])
@pytest.mark.parametrize("on_workers", [False, True], ids=["local", "workers"])
def test_products_have_the_names_that_jit_gives_them(method: Any, on_workers: bool) -> None:
    step, args = step_of(Gpt())
    minialpa.shutdown()
    with in_process_session(1, 4) if on_workers else nullcontext():
        parallel = minialpa.parallelize(step, method=method, donate_argnums=())
        texts = parallel.get_executable(*args).get_hlo_text()

    products = ("attn/query", "attn/out", "up", "down")
    modules = [*(f"block_{i}/{name}" for i in range(2) for name in products), "head"]
    found = names_in(texts)
    assert found <= _names_of_jit(), found - _names_of_jit()
    for scope in ("jvp(Gpt)", "transpose(jvp(Gpt))"):
        assert {f"{scope}/{module}/dot_general" for module in modules} <= found
    everything = names_in(texts, "op_name")
    assert any("jvp(cross_entropy)" in name for name in everything) and any("descent/" in name for name in everything)
    assert not any("minialpa." in name for name in everything)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_layers_of_a_scan_and_layers_taken_out_of_it_have_the_names_of_the_loop(remat: Any) -> None:
    step, args = step_of(Gpt(scanned=True))
    method = minialpa.ShardParallel(remat=remat, num_micro_batches=2)
    texts = minialpa.parallelize(step, method=method, donate_argnums=()).get_executable(*args).get_hlo_text()
    names = {re.sub(r"while/body/(closed_call|eval_jaxpr)/", "", name) for name in names_in(texts)}
    for scope in ("jvp(Gpt)", "transpose(jvp(Gpt))", "transpose(jvp(Gpt))/rematted_computation"):
        assert f"{scope}/layers/block/attn/query/dot_general" in names


def test_collectives_have_the_name_of_an_operation_beside_them() -> None:
    step, args = step_of(Gpt())
    (text,) = minialpa.parallelize(step, method=minialpa.Zero3Parallel()).get_executable(*args).get_hlo_text()
    assert any("block_0/up" in name for name in names_in([text], r" all-gather(-start)?\("))
