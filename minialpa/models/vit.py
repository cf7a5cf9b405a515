"""A vision transformer: patches by a strided convolution, pre-norm blocks, mean pooling, classification, AdamW."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from minialpa.models.base import Boundaries, Hook, ModelCase, make_case
from minialpa.models.layers import FeedForward
from minialpa.models.losses import cross_entropies, n_correct
from minialpa.models.resnet import labelled_images


class VitBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). [b s hidden] -> [b s hidden]."""

    n_heads: int
    dropout: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        drop = nn.Dropout(self.dropout, deterministic=self.dropout == 0)
        attention = nn.MultiHeadDotProductAttention(self.n_heads, use_bias=False, dtype=self.dtype, name="attention")
        x = x + drop(attention(nn.LayerNorm(dtype=self.dtype)(x)))
        x = x + drop(FeedForward(self.dtype, name="feed_forward")(nn.LayerNorm(dtype=self.dtype)(x)))
        return x


class Vit(nn.Module):
    """Images [b y x 3] -> logits [b n_classes]."""

    patch: int
    hidden: int
    n_layers: int
    n_heads: int
    n_classes: int
    dropout: float
    dtype: DTypeLike
    boundaries: Boundaries

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        window = (self.patch, self.patch)
        x = nn.Conv(self.hidden, window, window, padding="VALID", dtype=self.dtype, name="patches")(image)
        x = x.reshape(x.shape[0], -1, self.hidden)
        position = self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        x = x + position.astype(self.dtype)[None]
        for i in range(self.n_layers):
            x = VitBlock(self.n_heads, self.dropout, self.dtype, name=f"block_{i}")(x)
            self.boundaries.after(i)
        x = nn.LayerNorm(dtype=self.dtype)(jnp.mean(x, axis=1))
        return nn.Dense(self.n_classes, dtype=self.dtype, name="head")(x)


def vit_case(
    *,
    batch_size: int = 16,
    image_size: int = 16,
    patch: int = 4,
    hidden: int = 32,
    n_layers: int = 2,
    n_heads: int = 4,
    n_classes: int = 16,
    dropout: float = 0.0,
    learning_rate: float = 1e-3,
    dtype: DTypeLike = jnp.float32,
    boundary: Hook | None = None,
    n_boundaries: int = 1,
) -> ModelCase:
    """Batch: `image`, float32 [b y x 3], and `label`, int32 [b]. Metric `correct` counts the right predictions."""

    def loss(logits: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        value = jnp.mean(cross_entropies(logits, batch["label"]))
        return value, {"correct": n_correct(logits, batch["label"])}

    cuts = Boundaries(boundary, n_boundaries, n_layers)
    return make_case(
        "vit",
        model=Vit(
            patch=patch,
            hidden=hidden,
            n_layers=n_layers,
            n_heads=n_heads,
            n_classes=n_classes,
            dropout=dropout,
            dtype=dtype,
            boundaries=cuts,
        ),
        inputs=("image",),
        loss=loss,
        optimizer=optax.adamw(learning_rate),
        sample=lambda rng, n: labelled_images(rng, n, image_size, n_classes),
        batch_size=batch_size,
        dropout=dropout,
    )
