"""Models without attention: a batch goes in; outputs of an MLP, two towers, a Wide-ResNet or a diffusion U-Net come
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

from minialpa.models.base import Batch, Metrics, Model, Network, classification, labelled_images, squared_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(Model):
    """Dense layers with relu between them, [b hidden] -> [b hidden]. Batch: `x` and `y`, both [b hidden]."""

    inputs: ClassVar = ("x",)

    hidden: int = 32
    n_layers: int = 4
    use_bias: bool = True
    learning_rate: float = 1e-2

    @property
    def n_blocks(self) -> int:
        return self.n_layers

    def forward(self, network: Network, x: jax.Array) -> jax.Array:
        for i in range(self.n_layers):
            x = nn.Dense(self.hidden, use_bias=self.use_bias, dtype=self.dtype)(x if i == 0 else nn.relu(x))
            network.boundaries.after(i)
        return x

    def loss(self, outputs: jax.Array, batch: Any) -> tuple[jax.Array, Metrics]:
        return squared_error(outputs, batch["y"])

    def sample(self, rng: np.random.Generator, n: int) -> Batch:
        x, y = rng.standard_normal((2, n, self.hidden), np.float32)
        return {"x": x, "y": y}


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTower(Model):
    """Tokens [b s] of query and item -> scores [b], the dot products of two projections.

    The towers share embedding and projection, but no layers. Examples do not mix. Batch: `query` and `item`, int32 [b
    seq_len], and `target`, float32 [b].
    """

    inputs: ClassVar = ("query", "item")

    seq_len: int = 8
    hidden: int = 32
    n_layers: int = 2
    vocab_size: int = 64
    learning_rate: float = 1e-2

    @property
    def n_blocks(self) -> int:
        return 2 * self.n_layers

    def forward(self, network: Network, query: jax.Array, item: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab_size, self.hidden, dtype=self.dtype, name="embedding")
        project = nn.Dense(self.hidden, dtype=self.dtype, name="projection")
        ends = []
        for tower, (name, tokens) in enumerate((("query", query), ("item", item))):
            x = jnp.mean(embed(tokens), axis=1)
            for i in range(self.n_layers):
                x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, name=f"{name}_{i}")(x))
                network.boundaries.after(tower * self.n_layers + i)
            ends.append(project(x))
        return jnp.sum(ends[0] * ends[1], axis=-1)

    def loss(self, outputs: jax.Array, batch: Any) -> tuple[jax.Array, Metrics]:
        return squared_error(outputs, batch["target"])

    def sample(self, rng: np.random.Generator, n: int) -> Batch:
        query, item = rng.integers(self.vocab_size, size=(2, n, self.seq_len), dtype=np.int32)
        return {"query": query, "item": item, "target": rng.random(n, np.float32)}


BlockKind = Literal["basic", "bottleneck"]


class ResNetBlock(nn.Module):
    """relu(x + convolutions(x)), [b y x c] -> [b y/stride x/stride c']. The first 3x3 has the `stride`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNet(Model):
    """Wide-ResNet (Zagoruyko and Komodakis, 2016). Images [b y x 3] -> logits [b n_classes].

    Stage i has `stage_sizes[i]` blocks, with f = filters * 2^i and w = width_factor:
        basic       3x3 to f w, 3x3 to f w
        bottleneck  1x1 to f, 3x3 to f w, 1x1 to 4 f
    Batch: see `labelled_images`. Metric: see `classification`.
    """

    inputs: ClassVar = ("image",)

    image_size: int = 32
    kind: BlockKind = "basic"
    stage_sizes: tuple[int, ...] = (1, 1, 1)
    filters: int = 8
    width_factor: int = 2
    n_classes: int = 16
    imagenet_stem: bool = False
    optimizer: str = "momentum"
    learning_rate: float = 0.1

    @property
    def n_blocks(self) -> int:
        return sum(self.stage_sizes)

    def forward(self, network: Network, image: jax.Array) -> jax.Array:
        size, stride = ((7, 7), 2) if self.imagenet_stem else ((3, 3), 1)
        x = nn.Conv(self.filters, size, stride, use_bias=False, dtype=self.dtype, name="stem")(image)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x))
        if self.imagenet_stem:
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        blocks = [(i, j) for i, n_blocks in enumerate(self.stage_sizes) for j in range(n_blocks)]
        for k, (i, j) in enumerate(blocks):
            stride = 2 if i > 0 and j == 0 else 1
            x = ResNetBlock(self.kind, self.filters * 2**i, self.width_factor, stride, self.dtype)(x)
            network.boundaries.after(k)
        return nn.Dense(self.n_classes, dtype=self.dtype, name="head")(jnp.mean(x, axis=(1, 2)))

    def loss(self, outputs: jax.Array, batch: Any) -> tuple[jax.Array, Metrics]:
        return classification(outputs, batch["label"])

    def sample(self, rng: np.random.Generator, n: int) -> Batch:
        return labelled_images(rng, n, self.image_size, self.n_classes)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class UNet(Model):
    """Noisy images [b y x c] and times [b] -> noise [b y x c]. Squared error.

    For channels (c0, c1): down c0, halve, down c1, middle c1, up c1, double, up c0. Down blocks also feed the up block
    of their size. Batch: `image` and `noise`, float32 [b y x image_channels], and `time`, float32 [b] in 0..1.
    2^(len(channels) - 1) must divide `image_size`, and `n_groups` every channel count.
    """

    inputs: ClassVar = ("image", "time")

    image_size: int = 8
    image_channels: int = 4
    channels: tuple[int, ...] = (16, 32)
    n_groups: int = 4

    @property
    def n_blocks(self) -> int:
        return 2 * len(self.channels) + 1

    def forward(self, network: Network, image: jax.Array, time: jax.Array) -> jax.Array:
        n_levels = len(self.channels)
        t = nn.silu(nn.Dense(self.channels[-1], dtype=self.dtype, name="time")(time[:, None]))
        x = nn.Conv(self.channels[0], (3, 3), dtype=self.dtype, name="stem")(image)

        skips = []
        for i, width in enumerate(self.channels):
            if i > 0:
                x = nn.Conv(width, (3, 3), 2, dtype=self.dtype, name=f"halve_{i}")(x)
            x = UNetBlock(width, self.n_groups, self.dtype, name=f"down_{i}")(x, t)
            skips.append(x)
            network.boundaries.after(i)

        x = UNetBlock(self.channels[-1], self.n_groups, self.dtype, name="middle")(x, t)
        network.boundaries.after(n_levels)
        for i, width in reversed(list(enumerate(self.channels))):
            x = jnp.concatenate([x, skips[i]], axis=-1)
            x = UNetBlock(width, self.n_groups, self.dtype, name=f"up_{i}")(x, t)
            x = double(x) if i > 0 else x
            network.boundaries.after(2 * n_levels - i)

        x = nn.silu(nn.GroupNorm(self.n_groups, dtype=self.dtype)(x))
        return nn.Conv(image.shape[-1], (3, 3), dtype=self.dtype, name="head")(x)

    def loss(self, outputs: jax.Array, batch: Any) -> tuple[jax.Array, Metrics]:
        return squared_error(outputs, batch["noise"])

    def sample(self, rng: np.random.Generator, n: int) -> Batch:
        image, noise = rng.standard_normal((2, n, self.image_size, self.image_size, self.image_channels), np.float32)
        return {"image": image, "noise": noise, "time": rng.random(n, np.float32)}
