"""The name of a model in, a training step and the shapes of its arguments out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax

import minialpa
from minialpa.errors import MinialpaError


def load(model: str, batch: int | None, sequence: int | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step for one device, and its arguments. Raises MinialpaError."""
    if ":" in model:
        from minialpa.cli.model import load_step

        found = load_step(argparse.Namespace(model=model, args=None, batch=batch, sequence=sequence))
        return found.step, found.args

    from minialpa import models

    case = models.build(model, **({} if sequence is None else {"seq_len": sequence}))
    state = jax.eval_shape(case.init, jax.eval_shape(jax.random.key, 0))  # a real key would start a device
    n = batch or case.batch_size
    # A full batch of images needs gigabytes.
    examples = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape[1:]), leaf.dtype), case.make_batch(0, 1))
    return case.train_step(minialpa.value_and_grad), (state, examples)


def default_batch(model: str) -> int | None:
    """None for code of the user. Raises MinialpaError for unknown names."""
    if ":" in model:
        return None
    from minialpa import models

    return models.build(model).batch_size


def check(model: str, batches: Sequence[int | None], sequences: Sequence[int | None]) -> None:
    """Raise MinialpaError if the model, or such a batch or sequence, does not exist."""
    if ":" in model:
        load(model, batches[0], sequences[0])
        return
    default_batch(model)
    if not any(sequences):
        return
    from minialpa import models

    try:
        models.build(model, seq_len=sequences[0])
    except TypeError as error:
        raise MinialpaError(
            f"`{model}` has no sequences. Leave out their lengths (`--sequence`, `sequences` in Python), or plan this "
            "model by itself."
        ) from error
