"""Alpa's data loaders: Alpa's arguments go in, batches of minialpa's loaders come out.

Placement specs of an executable may take the place of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

import minialpa
from minialpa.compat.alpa.api import leaves_of_executable
from minialpa.errors import ShardingError


class _Placements:
    """Lays out batches by placement specs of one executable."""

    def __init__(self, specs: Any) -> None:
        self._specs, self._executable = leaves_of_executable(specs)
        self._n_leaves = len(jax.tree.leaves(self._executable.get_input_placement_specs()))

    def place_batch(self, batch: Any) -> Any:
        """The batch on the devices, its leaves in the order of the specs. Unchanged if shapes differ."""
        leaves, tree = jax.tree.flatten(batch)
        if len(leaves) != len(self._specs):
            raise ShardingError(
                f"A batch has {len(leaves)} arrays, and there are {len(self._specs)} placement specs. Pass the specs "
                "of all arguments that a batch has, and of no others."
            )
        if [_type_of(leaf) for leaf in leaves] != [(spec.shape, spec.dtype) for spec in self._specs]:
            return batch

        given: list[Any] = [None] * self._n_leaves
        for spec, leaf in zip(self._specs, leaves, strict=True):
            given[spec.leaf] = leaf
        placed = self._executable.place(given)
        return jax.tree.unflatten(tree, [placed[spec.leaf] for spec in self._specs])


def _type_of(leaf: Any) -> tuple[tuple[int, ...], str]:
    return np.shape(leaf), str(jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf)))


def _step_for(placement_specs: Any) -> Any:
    return placement_specs if hasattr(placement_specs, "place_batch") else _Placements(placement_specs)


class DataLoader(minialpa.DataLoader):
    """`minialpa.DataLoader` with Alpa's arguments."""

    def __init__(self, input_iter: Iterable[Any], placement_specs: Any, prefetch_size: int = 1) -> None:
        super().__init__(input_iter, _step_for(placement_specs), max(1, prefetch_size))


class MeshDriverDataLoader:
    """`minialpa.MeshDriverDataLoader` with Alpa's arguments.

    Each loop over it starts at the first sample, and leaves out last samples that fill no batch.
    """

    def __init__(
        self,
        batch_size: int,
        num_samples: int,
        input_iter_func: Callable[..., Any],
        placement_specs: Any,
        prefetch_size: int = 1,
        repeat: bool = False,
    ) -> None:
        self._open = functools.partial(
            minialpa.MeshDriverDataLoader,
            batch_size,
            num_samples - num_samples % batch_size,
            input_iter_func,
            _step_for(placement_specs),
            max(1, prefetch_size),
            repeat,
        )

    def __iter__(self) -> Iterator[Any]:
        return self._open()
