"""The parts of a model to train: a `Model` (sizes, forward pass, loss, batches) goes in, a `ModelCase` comes out.

The training step is for one device:

    (loss, ...), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.typing import DTypeLike

from minialpa.errors import TraceError, meant

Batch = dict[str, np.ndarray]
Metrics = dict[str, jax.Array]
Hook = Callable[[], None]
GradFn = Callable[..., Callable[..., Any]]
Step = Callable[[Any, Any], tuple[Any, Metrics]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """One model to train.

    Attributes:
        batch_size: default number of examples in a batch.
        init: from a PRNG key to the initial state.
        make_batch: from a seed and a number of examples to a batch.
        train_step: from `jax.value_and_grad`, or a function like it, to `step(state, batch)`.
    """

    name: str
    batch_size: int
    init: Callable[[jax.Array], Any]
    make_batch: Callable[[int, int], Batch]
    train_step: Callable[[GradFn], Step]


class ModelState(TrainState):
    """A flax `TrainState`. Models with BatchNorm fill `batch_stats`, models with dropout `dropout_key`."""

    batch_stats: Any = None
    dropout_key: Any = None


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Pipeline boundaries: `after` calls `hook`, if any, in `count` evenly spread gaps between `n_blocks` blocks."""

    hook: Hook | None = None
    count: int = 1
    n_blocks: int = 1

    def __post_init__(self) -> None:
        if self.hook is not None and not 0 <= self.count < self.n_blocks:
            raise TraceError(
                f"{self.count} boundaries do not fit between {self.n_blocks} blocks. Pass `n_boundaries` from 0 to "
                f"{self.n_blocks - 1}, or more layers; layers in a scan are one block."
            )

    def after(self, block: int) -> None:
        """Call this after each block. `block` counts from 0."""
        cuts = (j * self.n_blocks // (self.count + 1) for j in range(1, self.count + 1))
        if self.hook is not None and block + 1 in cuts:
            self.hook()


OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "adafactor": optax.adafactor,
    "adam": optax.adam,
    "adamw": optax.adamw,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Base of all models. The fields are arguments of `minialpa.models.build`.

    Attributes:
        inputs: the leaves of a batch that `forward` reads.
        optimizer: a key of `OPTIMIZERS`.
    """

    inputs: ClassVar[tuple[str, ...]]

    batch_size: int = 16
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    dtype: DTypeLike = jnp.float32

    @property
    def n_blocks(self) -> int:
        """Number of blocks, with a possible pipeline boundary between two blocks."""
        raise NotImplementedError

    @property
    def has_dropout(self) -> bool:
        return False

    def forward(self, network: Network, *inputs: Any) -> Any:
        """The outputs. `network` holds the parameters; call its `boundaries` after each block."""
        raise NotImplementedError

    def loss(self, outputs: Any, batch: Any) -> tuple[jax.Array, Metrics]:
        """A float32 scalar and further metrics."""
        raise NotImplementedError

    def sample(self, rng: np.random.Generator, n: int) -> Batch:
        """A batch of `n` examples."""
        raise NotImplementedError


class Network(nn.Module):
    model: Model
    boundaries: Boundaries

    @nn.compact
    def __call__(self, *inputs: Any) -> Any:
        return self.model.forward(self, *inputs)


def make_case(
    name: str, kind: type[Model], /, *, boundary: Hook | None = None, n_boundaries: int = 1, **arguments: Any
) -> ModelCase:
    """The case of `kind(**arguments)`, with `n_boundaries` calls of `boundary` between its blocks.

    flax and optax run under standard dtype promotion: bfloat16 norms and Adam's step count need it.
    """
    # Flax modules are keys of caches, which lists cannot be.
    hashable: Any = {field: tuple(value) if isinstance(value, list) else value for field, value in arguments.items()}
    model = kind(**hashable)
    if model.optimizer not in OPTIMIZERS:
        near = meant(model.optimizer, OPTIMIZERS)
        raise TraceError(f"There is no optimizer `{model.optimizer}`.{near} Pass one of {', '.join(OPTIMIZERS)}.")
    network = Network(model, Boundaries(boundary, n_boundaries, model.n_blocks), name=kind.__name__)
    # One object for all states: it is part of the structure that a step is compiled for.
    optimizer = OPTIMIZERS[model.optimizer](model.learning_rate)

    def make_batch(seed: int, n_examples: int) -> Batch:
        return model.sample(np.random.default_rng(seed), n_examples)

    def init(key: jax.Array) -> ModelState:
        params_key, dropout_key = jax.random.split(key)
        example = make_batch(0, 1)

        without_hook = network.clone(boundaries=Boundaries())
        with jax.numpy_dtype_promotion("standard"):
            rngs = {"params": params_key, "dropout": dropout_key}
            variables = _variables(without_hook, rngs, *(example[leaf] for leaf in model.inputs))

        state = ModelState.create(
            apply_fn=network.apply,
            params=variables["params"],
            tx=optimizer,
            batch_stats=variables.get("batch_stats"),
            dropout_key=dropout_key if model.has_dropout else None,
        )
        # `create` starts from a Python 0, a weakly typed scalar.
        initial: ModelState = state.replace(step=jnp.zeros((), jnp.int32))
        return initial

    def train_step(value_and_grad: GradFn) -> Step:
        def step(state: ModelState, batch: Any) -> tuple[ModelState, Metrics]:
            rngs = {"dropout": jax.random.fold_in(state.dropout_key, state.step)} if model.has_dropout else {}

            def loss_fn(params: Any) -> tuple[jax.Array, tuple[Metrics, Any]]:
                variables = {"params": params}
                if state.batch_stats is not None:
                    variables["batch_stats"] = state.batch_stats
                leaves = (batch[leaf] for leaf in model.inputs)
                with jax.numpy_dtype_promotion("standard"):
                    outputs, updated = network.apply(variables, *leaves, rngs=rngs, mutable=["batch_stats"])
                value, metrics = model.loss(outputs, batch)
                return value, (metrics, updated.get("batch_stats"))

            (value, (metrics, batch_stats)), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
            with jax.numpy_dtype_promotion("standard"):
                state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
            return state, {"loss": value, **metrics}

        return step

    return ModelCase(name=name, batch_size=model.batch_size, init=init, make_batch=make_batch, train_step=train_step)


@functools.partial(jax.jit, static_argnums=0)
def _variables(model: nn.Module, rngs: Any, *inputs: Any) -> Any:
    """`model.init`, jitted: eagerly, jax would compile each operation for each shape."""
    return model.init(rngs, *inputs)


# ---- losses (means over all examples, in float32) and batches --------------------------------------------------------


def cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """One float32 loss per label. The last axis of `logits` has the classes."""
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return losses


def squared_error(outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, Metrics]:
    """The mean squared difference over all elements. No metrics."""
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - targets)), {}


def classification(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, Metrics]:
    """Mean cross-entropy. The int32 metric `correct` counts labels that are the arg max of their logits."""
    value = jnp.mean(cross_entropies(logits, labels))
    return value, {"correct": jnp.sum(jnp.argmax(logits, axis=-1) == labels, dtype=jnp.int32)}


def labelled_images(rng: np.random.Generator, n: int, image_size: int, n_classes: int) -> Batch:
    """`image`, float32 [n image_size image_size 3], and `label`, int32 [n]."""
    image = rng.standard_normal((n, image_size, image_size, 3), np.float32)
    return {"image": image, "label": rng.integers(n_classes, size=n, dtype=np.int32)}


def next_tokens(rng: np.random.Generator, n: int, seq_len: int, vocab_size: int) -> Batch:
    """`tokens` and `labels`, int32 [n seq_len]; each label is the next token."""
    text = rng.integers(vocab_size, size=(n, seq_len + 1), dtype=np.int32)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def masked_tokens(rng: np.random.Generator, n: int, seq_len: int, vocab_size: int) -> Batch:
    """`tokens` and `labels`, int32 [n seq_len]; `mask`, float32 [n seq_len], is 1 where the token is hidden as 0."""
    labels = rng.integers(1, vocab_size, size=(n, seq_len), dtype=np.int32)
    hidden = rng.random((n, seq_len)) < 0.25
    hidden[:, 0] = True  # no micro-batch divides by zero
    return {"tokens": np.where(hidden, np.int32(0), labels), "labels": labels, "mask": hidden.astype(np.float32)}
