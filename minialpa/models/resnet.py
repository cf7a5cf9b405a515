"""Wide-ResNet with BatchNorm (Zagoruyko and Komodakis, 2016): classification, momentum SGD, running statistics.

Block kinds, for `filters` f and width factor w:
    basic       3x3 to f w, 3x3 to f w
    bottleneck  1x1 to f, 3x3 to f w, 1x1 to 4 f
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from minialpa.models.base import Batch, Boundaries, Hook, ModelCase, make_case
from minialpa.models.losses import cross_entropies, n_correct

BlockKind = Literal["basic", "bottleneck"]


class ResNetBlock(nn.Module):
    """relu(x + convolutions(x)); `stride` applies to the first 3x3. [b y x c] -> [b y/stride x/stride c']."""

    kind: BlockKind
    filters: int
    width_factor: int
    stride: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        wide = self.filters * self.width_factor
        if self.kind == "basic":
            y = nn.relu(norm()(conv(wide, (3, 3), self.stride)(x)))
            y = norm()(conv(wide, (3, 3))(y))
        else:
            y = nn.relu(norm()(conv(self.filters, (1, 1))(x)))
            y = nn.relu(norm()(conv(wide, (3, 3), self.stride)(y)))
            y = norm()(conv(4 * self.filters, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="project_norm")(conv(y.shape[-1], (1, 1), self.stride, name="project")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images [b y x 3] -> logits [b n_classes]. Stage number i has `stage_sizes[i]` blocks and filters * 2^i."""

    kind: BlockKind
    stage_sizes: tuple[int, ...]
    filters: int
    width_factor: int
    n_classes: int
    imagenet_stem: bool
    dtype: DTypeLike
    boundaries: Boundaries

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        size, stride = ((7, 7), 2) if self.imagenet_stem else ((3, 3), 1)
        x = nn.Conv(self.filters, size, stride, use_bias=False, dtype=self.dtype, name="stem")(image)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x))
        if self.imagenet_stem:
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        blocks = [(i, j) for i, n_blocks in enumerate(self.stage_sizes) for j in range(n_blocks)]
        for k, (i, j) in enumerate(blocks):
            stride = 2 if i > 0 and j == 0 else 1
            x = ResNetBlock(self.kind, self.filters * 2**i, self.width_factor, stride, self.dtype)(x)
            self.boundaries.after(k)
        return nn.Dense(self.n_classes, dtype=self.dtype, name="head")(jnp.mean(x, axis=(1, 2)))


def labelled_images(rng: np.random.Generator, n: int, image_size: int, n_classes: int) -> Batch:
    """`image` [n image_size image_size 3] in float32 and int32 `label` [n]."""
    image = rng.standard_normal((n, image_size, image_size, 3), np.float32)
    return {"image": image, "label": rng.integers(n_classes, size=n, dtype=np.int32)}


def resnet_case(
    *,
    batch_size: int = 16,
    image_size: int = 32,
    kind: BlockKind = "basic",
    stage_sizes: tuple[int, ...] = (1, 1, 1),
    filters: int = 8,
    width_factor: int = 2,
    n_classes: int = 16,
    imagenet_stem: bool = False,
    learning_rate: float = 0.1,
    dtype: DTypeLike = jnp.float32,
    boundary: Hook | None = None,
    n_boundaries: int = 1,
) -> ModelCase:
    """Batch: `image`, float32 [b y x 3], and `label`, int32 [b]. Metric `correct` counts the right predictions."""

    def loss(logits: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        value = jnp.mean(cross_entropies(logits, batch["label"]))
        return value, {"correct": n_correct(logits, batch["label"])}

    cuts = Boundaries(boundary, n_boundaries, sum(stage_sizes))
    return make_case(
        "resnet",
        model=ResNet(
            kind=kind,
            stage_sizes=tuple(stage_sizes),
            filters=filters,
            width_factor=width_factor,
            n_classes=n_classes,
            imagenet_stem=imagenet_stem,
            dtype=dtype,
            boundaries=cuts,
        ),
        inputs=("image",),
        loss=loss,
        optimizer=optax.sgd(learning_rate, momentum=0.9),
        sample=lambda rng, n: labelled_images(rng, n, image_size, n_classes),
        batch_size=batch_size,
    )
