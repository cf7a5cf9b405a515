"""A `ModelCase` is a model to train: functions that make its state, its batches and its training step.

Each model file has a flax module, an optimizer, a function that draws synthetic batches, and a loss. `make_case` makes
the three functions of them. The training step is written for one device:

    (loss, ...), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from minialpa.errors import TraceError

Batch = dict[str, np.ndarray]
Hook = Callable[[], None]
GradFn = Callable[..., Callable[..., Any]]
Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """One model to train.

    Attributes:
        name: name of the model.
        batch_size: number of examples in a batch, unless a caller asks for another.
        init: from a PRNG key to the state before the first step.
        make_batch: from a seed and a number of examples to a batch.
        train_step: from `jax.value_and_grad`, or a function with its signature, to the step.
    """

    name: str
    batch_size: int
    init: Callable[[jax.Array], Any]
    make_batch: Callable[[int, int], Batch]
    train_step: Callable[[GradFn], Step]


class ModelState(TrainState):
    """A flax `TrainState`; BatchNorm models fill `batch_stats`, models with dropout fill `dropout_key`."""

    batch_stats: Any = None
    dropout_key: Any = None


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Pipeline boundaries of a model: `after` calls `hook` in `count` of the gaps between blocks, evenly spread.

    Attributes:
        hook: such as `minialpa.mark_pipeline_boundary`; None for no boundaries.
        count: number of boundaries.
        n_blocks: number of blocks of the model.
    """

    hook: Hook | None = None
    count: int = 1
    n_blocks: int = 1

    def __post_init__(self) -> None:
        if self.hook is not None and not 0 <= self.count < self.n_blocks:
            raise TraceError(
                f"{self.count} boundaries do not fit between {self.n_blocks} blocks. "
                f"`n_boundaries` must be in 0..{self.n_blocks - 1}; add layers or ask for fewer."
            )

    def after(self, block: int) -> None:
        """Call this when the forward pass has left block number `block`, counted from 0."""
        cuts = (j * self.n_blocks // (self.count + 1) for j in range(1, self.count + 1))
        if self.hook is not None and block + 1 in cuts:
            self.hook()


def make_case(
    name: str,
    *,
    model: nn.Module,
    inputs: tuple[str, ...],
    loss: Callable[[Any, Any], tuple[jax.Array, dict[str, jax.Array]]],
    optimizer: optax.GradientTransformation,
    sample: Callable[[np.random.Generator, int], Batch],
    batch_size: int,
    dropout: float = 0.0,
) -> ModelCase:
    """The case of a flax module, a loss, an optimizer and a sampler.

    model: has a field `boundaries`.
    inputs: names of the batch leaves that the model is applied to.
    loss: from outputs and batch to a float32 scalar and further metrics.
    sample: `sample(rng, n)` draws `n` examples.
    dropout: whether it is 0 says if the state has a key for dropout.

    flax and optax run under standard dtype promotion: bfloat16 norms and Adam's step count break the strict one.
    """

    def make_batch(seed: int, n_examples: int) -> Batch:
        return sample(np.random.default_rng(seed), n_examples)

    def init(key: jax.Array) -> ModelState:
        params_key, dropout_key = jax.random.split(key)
        example = make_batch(0, 1)

        # Boundaries belong to the training step: initialisation runs the forward pass without them.
        quiet = model.clone(boundaries=Boundaries())
        with jax.numpy_dtype_promotion("standard"):
            rngs = {"params": params_key, "dropout": dropout_key}
            variables = _variables(quiet, rngs, *(example[leaf] for leaf in inputs))

        state = ModelState.create(
            apply_fn=model.apply,
            params=variables["params"],
            tx=optimizer,
            batch_stats=variables.get("batch_stats"),
            dropout_key=dropout_key if dropout else None,
        )
        # `create` starts from a Python 0, a weakly typed scalar.
        initial: ModelState = state.replace(step=jnp.zeros((), jnp.int32))
        return initial

    def train_step(value_and_grad: GradFn) -> Step:
        def step(state: ModelState, batch: Any) -> tuple[ModelState, dict[str, jax.Array]]:
            rngs = {"dropout": jax.random.fold_in(state.dropout_key, state.step)} if dropout else {}

            def loss_fn(params: Any) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
                variables = {"params": params}
                if state.batch_stats is not None:
                    variables["batch_stats"] = state.batch_stats
                leaves = (batch[leaf] for leaf in inputs)
                with jax.numpy_dtype_promotion("standard"):
                    outputs, updated = model.apply(variables, *leaves, rngs=rngs, mutable=["batch_stats"])
                value, metrics = loss(outputs, batch)
                return value, (metrics, updated.get("batch_stats"))

            (value, (metrics, batch_stats)), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
            with jax.numpy_dtype_promotion("standard"):
                state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
            return state, {"loss": value, **metrics}

        return step

    return ModelCase(name=name, batch_size=batch_size, init=init, make_batch=make_batch, train_step=train_step)


@functools.partial(jax.jit, static_argnums=0)
def _variables(model: nn.Module, rngs: Any, *inputs: Any) -> Any:
    """`model.init`, compiled as one function. Run directly, it compiles each of its operations for each shape."""
    return model.init(rngs, *inputs)
