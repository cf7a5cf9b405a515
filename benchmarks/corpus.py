"""The models for judging plans: name, builder and sizes of each. Steps are compiled for these and never run.

There are two regimes. `wide` models have few examples and large layers, where it pays to split operators. The others
have many examples and small layers, where it pays to split examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.registry import Size
from minialpa import models


@dataclass(frozen=True, slots=True)
class Case:
    """One model at one size. `sizes`: arguments of its builder."""

    name: str
    model: str
    sizes: tuple[tuple[str, Any], ...]

    def build(self) -> models.ModelCase:
        return models.build(self.model, **dict(self.sizes))

    def size(self, name: str, default: int) -> int:
        return int(dict(self.sizes).get(name, default))


def arguments(case: models.ModelCase) -> tuple[Any, Any]:
    """State and batch of a step, as shapes."""
    state = jax.eval_shape(case.init, jax.ShapeDtypeStruct((), jax.random.key(0).dtype))
    batch = case.make_batch(0, case.batch_size)
    return state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def _case(name: str, model: str, **sizes: Any) -> Case:
    return Case(name, model, tuple(sorted(sizes.items())))


_LLAMA = {
    "batch_size": 16,
    "seq_len": 128,
    "hidden": 512,
    "n_heads": 8,
    "n_kv_heads": 4,
    "ffn": 1024,
    "vocab_size": 1024,
}
_FULL = (
    _case("mlp", "mlp", batch_size=8192, hidden=512, n_layers=4),
    _case("mlp, wide", "mlp", batch_size=64, hidden=4096, n_layers=4),
    _case("gpt", "gpt", batch_size=64, seq_len=128, hidden=256, n_heads=8, vocab_size=1024),
    _case("gpt, wide", "gpt", batch_size=8, seq_len=64, hidden=1024, n_heads=16, vocab_size=2048),
    _case("gpt, vocabulary", "gpt", batch_size=16, seq_len=64, hidden=256, n_heads=8, n_layers=1, vocab_size=32768),
    _case("llama", "llama", **_LLAMA),
    _case("llama, scan", "llama", **_LLAMA, n_layers=4, scan_layers=True),
    _case("bert", "bert", batch_size=32, seq_len=64, hidden=512, n_heads=8, vocab_size=1024),
    _case("moe", "moe", batch_size=16, seq_len=128, hidden=256, n_heads=8, vocab_size=1024),
    _case("vit", "vit", batch_size=64, image_size=64, patch=8, hidden=256, n_heads=8),
    _case("resnet", "resnet", batch_size=64, filters=32),
)
_TINY = (_case("mlp", "mlp", batch_size=16, hidden=64, n_layers=2),)


def cases(size: Size) -> tuple[Case, ...]:
    return _FULL if size == "full" else _TINY
