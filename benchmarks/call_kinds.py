"""The states and arguments whose calls `call` times: a step, its arguments, and the next state of a loop for each kind.

All steps are tiny and have about the same number of leaves. They need only libraries that the tests install.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import minialpa

WIDTH = 8
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A training step and its loop.

    Attributes:
        step: the step, which `minialpa.parallelize` takes.
        state: the first argument, or a tuple of the first arguments.
        others: the arguments after the batch.
        next_state: maps a state, and the result of a call with this state, to the state of the next call.
        options: options of `minialpa.parallelize`.
        own_jit: how the state's library compiles such a step; None for `jax.jit`.
    """

    step: Callable[..., Any]
    state: tuple[Any, ...]
    others: tuple[Any, ...] = ()
    next_state: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = lambda _, result: (result[0],)
    own_jit: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class State:
    """A training state as a user-defined pytree.

    Attributes:
        step: the number of steps so far.
        params: parameters by layer and name.
        moments: the state of the optimizer.
    """

    step: Any
    params: Any
    moments: Any


class Params(NamedTuple):
    layers: tuple[Any, ...]


def make_batch() -> Any:
    return {"x": np.ones((16, WIDTH), np.float32), "y": np.ones((16, WIDTH), np.float32)}


def _loss(w: Any, b: Any, batch: Any) -> jax.Array:
    # All parameters at once: the step is short, and every leaf has a gradient.
    return jnp.mean((batch["x"] @ sum(w) + sum(b)[None] - batch["y"]) ** 2)


def _layers(n_layers: int) -> list[dict[str, Any]]:
    return [{"w": jnp.ones((WIDTH, WIDTH)) / WIDTH, "b": jnp.zeros(WIDTH)} for _ in range(n_layers)]


def _layers_loss(layers: Any, batch: Any) -> jax.Array:
    return _loss([layer["w"] for layer in layers], [layer["b"] for layer in layers], batch)


def dataclass_state(n_layers: int) -> Kind:
    def step(state: State, batch: Any) -> tuple[State, Any]:
        loss, grads = minialpa.value_and_grad(lambda params: _layers_loss(params.values(), batch))(state.params)
        updates, moments = OPTIMIZER.update(grads, state.moments)
        return State(state.step + 1, optax.apply_updates(state.params, updates), moments), {"loss": loss}

    params = {f"layer {i}": layer for i, layer in enumerate(_layers(n_layers))}
    return Kind(step=step, state=(State(jnp.int32(0), params, OPTIMIZER.init(params)),))


def named_tuples(n_layers: int) -> Kind:
    def step(params: Params, moments: Any, batch: Any) -> Any:
        loss, grads = minialpa.value_and_grad(lambda params: _layers_loss(params.layers, batch))(params)
        updates, moments = OPTIMIZER.update(grads, moments)
        return optax.apply_updates(params, updates), moments, loss

    params = Params(tuple(_layers(n_layers)))
    return Kind(step=step, state=(params, OPTIMIZER.init(params)), next_state=lambda _, result: result[:2])


def train_state(n_layers: int) -> Kind:
    def step(state: TrainState, batch: Any) -> Any:
        loss, grads = minialpa.value_and_grad(lambda params: state.apply_fn(params, batch))(state.params)
        return state.apply_gradients(grads=grads), loss

    return Kind(step=step, state=(TrainState.create(apply_fn=_layers_loss, params=_layers(n_layers), tx=OPTIMIZER),))


def static_arguments(n_layers: int) -> Kind:
    def step(params: Any, moments: Any, batch: Any, mode: str, flag: bool) -> Any:
        loss, grads = minialpa.value_and_grad(_layers_loss)(params, batch)
        updates, moments = OPTIMIZER.update(grads, moments)
        assert mode == "train" and flag
        return optax.apply_updates(params, updates), moments, loss

    params = _layers(n_layers)
    return Kind(
        step=step,
        state=(params, OPTIMIZER.init(params)),
        others=("train", True),
        next_state=lambda _, result: result[:2],
    )


def function_leaves(n_layers: int) -> Kind:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = minialpa.value_and_grad(lambda layers: state["loss"](layers, batch))(state["layers"])
        updates, moments = OPTIMIZER.update(grads, state["moments"])
        return {**state, "layers": optax.apply_updates(state["layers"], updates), "moments": moments}, loss

    layers = _layers(n_layers)
    return Kind(step=step, state=({"layers": layers, "moments": OPTIMIZER.init(layers), "loss": _layers_loss},))


def equinox_modules(n_layers: int) -> Kind:
    def step(model: Any, moments: Any, batch: Any) -> Any:
        def loss_of(model: Any) -> jax.Array:
            return _loss([layer.weight.T for layer in model.layers], [layer.bias for layer in model.layers], batch)

        loss, grads = eqx.filter_value_and_grad(loss_of)(model)
        updates, moments = OPTIMIZER.update(grads, moments)
        return eqx.apply_updates(model, updates), moments, loss

    model = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, n_layers - 1, key=jax.random.key(0))
    return Kind(
        step=step,
        state=(model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))),
        next_state=lambda _, result: result[:2],
        own_jit=lambda step: eqx.filter_jit(step, donate="all-except-first"),
    )


class Net(nnx.Module):
    def __init__(self, n_layers: int) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(n_layers)])


def nnx_modules(n_layers: int) -> Kind:
    def step(model: Net, optimizer: Any, batch: Any) -> Any:
        def loss_of(model: Net) -> jax.Array:
            return _loss(
                [x.kernel[...] for x in model.layers], [x.bias[...] for x in model.layers if x.bias is not None], batch
            )

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    model = Net(n_layers)
    return Kind(
        step=step,
        state=(model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)),
        next_state=lambda state, _: state,
        own_jit=nnx.jit,
    )


#: By name; each takes the number of layers, with four leaves of each.
KINDS: dict[str, Callable[[int], Kind]] = {
    "a dataclass": dataclass_state,
    "named tuples": named_tuples,
    "a TrainState": train_state,
    "static arguments": static_arguments,
    "a function as leaf": function_leaves,
    "equinox modules": equinox_modules,
    "nnx modules": nnx_modules,
}
