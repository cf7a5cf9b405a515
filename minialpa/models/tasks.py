"""What models are trained for: synthetic batches, losses and metrics. Means are over all examples, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from minialpa.models.base import Batch, Metrics


def cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """One float32 loss per label; `logits` has the classes on its last axis."""
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return losses


def squared_error(outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, Metrics]:
    """Mean of the squared difference over every element. No metrics."""
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - targets)), {}


def classification(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, Metrics]:
    """Mean cross-entropy. Metric `correct`: how many labels are the arg max of their logits, as int32."""
    value = jnp.mean(cross_entropies(logits, labels))
    return value, {"correct": jnp.sum(jnp.argmax(logits, axis=-1) == labels, dtype=jnp.int32)}


def labelled_images(rng: np.random.Generator, n: int, image_size: int, n_classes: int) -> Batch:
    """`image` [n image_size image_size 3] in float32 and int32 `label` [n]."""
    image = rng.standard_normal((n, image_size, image_size, 3), np.float32)
    return {"image": image, "label": rng.integers(n_classes, size=n, dtype=np.int32)}


def next_tokens(rng: np.random.Generator, n: int, seq_len: int, vocab_size: int) -> Batch:
    """`tokens` and `labels`, both int32 [n seq_len]; a label is the token that follows."""
    text = rng.integers(vocab_size, size=(n, seq_len + 1), dtype=np.int32)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def masked_tokens(rng: np.random.Generator, n: int, seq_len: int, vocab_size: int) -> Batch:
    """`tokens` and `labels`, int32 [n seq_len]; `mask`, float32 [n seq_len], 1 where the token is hidden as 0."""
    labels = rng.integers(1, vocab_size, size=(n, seq_len), dtype=np.int32)
    hidden = rng.random((n, seq_len)) < 0.25
    hidden[:, 0] = True  # Every example counts, so that no micro-batch divides by zero.
    return {"tokens": np.where(hidden, np.int32(0), labels), "labels": labels, "mask": hidden.astype(np.float32)}
