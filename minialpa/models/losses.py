"""Losses and metrics of model outputs and labels, as float32 scalars or integer counts. Means are over all examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean of the squared difference over every element."""
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - targets))


def cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """One loss per label; `logits` has the classes on its last axis."""
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return losses


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """sum(values * weights) / sum(weights)."""
    return jnp.sum(values * weights) / jnp.sum(weights)


def n_correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """How many labels are the arg max of their logits, as int32."""
    return jnp.sum(jnp.argmax(logits, axis=-1) == labels, dtype=jnp.int32)
