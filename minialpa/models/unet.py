"""A diffusion U-Net: predicts the noise in an image. Every down block's output skips over the middle to an up block.

Path for channels (c0, c1): down c0, halve, down c1, middle c1, up c1, double, up c0.
Group norm, mean squared error, Adam.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from minialpa.models.base import Batch, Boundaries, Hook, ModelCase, make_case
from minialpa.models.losses import squared_error


class UNetBlock(nn.Module):
    """Two 3x3 convolutions around a shift by the time embedding, and a residual. [b y x c] -> [b y x channels]."""

    channels: int
    n_groups: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = nn.silu(nn.GroupNorm(self.n_groups, dtype=self.dtype)(x))
        y = nn.Conv(self.channels, (3, 3), dtype=self.dtype)(y)
        y = y + nn.Dense(self.channels, dtype=self.dtype, name="time")(time)[:, None, None]
        y = nn.silu(nn.GroupNorm(self.n_groups, dtype=self.dtype)(y))
        y = nn.Conv(self.channels, (3, 3), dtype=self.dtype)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.channels, (1, 1), dtype=self.dtype, name="project")(x)
        return x + y


def double(x: jax.Array) -> jax.Array:
    """Nearest-neighbour upsampling, [b y x c] -> [b 2y 2x c]."""
    b, height, width, c = x.shape
    tiled = jnp.broadcast_to(x[:, :, None, :, None], (b, height, 2, width, 2, c))
    return tiled.reshape(b, 2 * height, 2 * width, c)


class UNet(nn.Module):
    """Noisy images [b y x c] and times [b] -> noise [b y x c]."""

    channels: tuple[int, ...]
    n_groups: int
    dtype: DTypeLike
    boundaries: Boundaries

    @nn.compact
    def __call__(self, image: jax.Array, time: jax.Array) -> jax.Array:
        n_levels = len(self.channels)
        t = nn.silu(nn.Dense(self.channels[-1], dtype=self.dtype, name="time")(time[:, None]))
        x = nn.Conv(self.channels[0], (3, 3), dtype=self.dtype, name="stem")(image)

        skips = []
        for i, width in enumerate(self.channels):
            if i > 0:
                x = nn.Conv(width, (3, 3), 2, dtype=self.dtype, name=f"halve_{i}")(x)
            x = UNetBlock(width, self.n_groups, self.dtype, name=f"down_{i}")(x, t)
            skips.append(x)
            self.boundaries.after(i)

        x = UNetBlock(self.channels[-1], self.n_groups, self.dtype, name="middle")(x, t)
        self.boundaries.after(n_levels)
        for i, width in reversed(list(enumerate(self.channels))):
            x = jnp.concatenate([x, skips[i]], axis=-1)
            x = UNetBlock(width, self.n_groups, self.dtype, name=f"up_{i}")(x, t)
            x = double(x) if i > 0 else x
            self.boundaries.after(2 * n_levels - i)

        x = nn.silu(nn.GroupNorm(self.n_groups, dtype=self.dtype)(x))
        return nn.Conv(image.shape[-1], (3, 3), dtype=self.dtype, name="head")(x)


def unet_case(
    *,
    batch_size: int = 16,
    image_size: int = 8,
    image_channels: int = 4,
    channels: tuple[int, ...] = (16, 32),
    n_groups: int = 4,
    learning_rate: float = 1e-3,
    dtype: DTypeLike = jnp.float32,
    boundary: Hook | None = None,
    n_boundaries: int = 1,
) -> ModelCase:
    """Batch: `image` and `noise`, float32 [b y x image_channels], and `time`, float32 [b] in 0..1.

    `image_size` divides by 2^(len(channels) - 1); every channel count divides by `n_groups`.
    """

    def sample(rng: np.random.Generator, n: int) -> Batch:
        image, noise = rng.standard_normal((2, n, image_size, image_size, image_channels), np.float32)
        return {"image": image, "noise": noise, "time": rng.random(n, np.float32)}

    return make_case(
        "unet",
        model=UNet(tuple(channels), n_groups, dtype, Boundaries(boundary, n_boundaries, 2 * len(channels) + 1)),
        inputs=("image", "time"),
        loss=lambda outputs, batch: (squared_error(outputs, batch["noise"]), {}),
        optimizer=optax.adam(learning_rate),
        sample=sample,
        batch_size=batch_size,
    )
