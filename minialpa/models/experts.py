"""A mixture of experts with top-2 gating (GShard, arXiv:2006.16668).

A group is one row of the batch, so examples do not mix. Letters: g groups, s tokens of a group, e experts,
c slots of an expert in a group, m features, f features inside an expert.

    dispatch [g s e c] is 1 where a token has a slot;  combine [g s e c] is its gate there
    experts see  einsum("gsec,gsm->egcm", dispatch, x);  a token gets  einsum("gsec,egcm->gsm", combine, y)

Tokens beyond an expert's slots pass by on the residual.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike


@dataclass(frozen=True, slots=True)
class Gating:
    """`combine` [g s e c]; `imbalance` is a scalar, 1 when the experts are used evenly."""

    combine: jax.Array
    imbalance: jax.Array


def top2_gating(logits: jax.Array, n_slots: int) -> Gating:
    """Each token goes to its two best experts; first choices take slots before second ones. `logits` is [g s e]."""
    n_experts = logits.shape[-1]
    gates = jax.nn.softmax(logits.astype(jnp.float32))
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), n_experts)
    second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), axis=-1), n_experts)

    # imbalance = e * sum_e mean_s(gates) * mean_s(first), GShard's l_aux; mean over groups.
    share = jnp.mean(gates, axis=1) * jnp.mean(first, axis=1)
    imbalance = n_experts * jnp.mean(jnp.sum(share, axis=-1))

    rank_first = jnp.cumsum(first, axis=1) - first
    rank_second = jnp.cumsum(second, axis=1) - second + jnp.sum(first, axis=1, keepdims=True)
    total = jnp.sum(gates * (first + second), axis=-1, keepdims=True)
    combine = jnp.zeros((*gates.shape, n_slots), jnp.float32)
    for chosen, rank in ((first, rank_first), (second, rank_second)):
        slot = jax.nn.one_hot(jnp.sum(rank * chosen, axis=-1).astype(jnp.int32), n_slots)  # All 0 beyond the last slot.
        combine = combine + (gates / total * chosen)[..., None] * slot[:, :, None]
    return Gating(combine, imbalance)


class Experts(nn.Module):
    """`n_experts` feed-forward layers; returns the new [g s m] and the imbalance of the gating."""

    n_experts: int
    factor: int
    capacity: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, s, m = x.shape
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=1, out_axis=2, batch_axis=0)
        up = self.param("up", init, (self.n_experts, m, self.factor * m)).astype(self.dtype)
        down = self.param("down", init, (self.n_experts, self.factor * m, m)).astype(self.dtype)

        n_slots = max(1, math.ceil(2 * s * self.capacity / self.n_experts))
        gating = top2_gating(nn.Dense(self.n_experts, use_bias=False, name="gate")(x), n_slots)
        combine = gating.combine.astype(self.dtype)
        dispatch = (gating.combine > 0).astype(self.dtype)

        y = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        y = nn.gelu(jnp.einsum("egcm,emf->egcf", y, up))
        y = jnp.einsum("egcf,efm->egcm", y, down)
        return jnp.einsum("gsec,egcm->gsm", combine, y), gating.imbalance
