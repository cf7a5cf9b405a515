"""minialpa's data loaders with Alpa's arguments; placement specs of an executable may stand for the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import jax

import minialpa
from minialpa.compat.alpa.api import PlacementSpec, type_of
from minialpa.errors import ShardingError


class Placements:
    """Lays out batches by some placement specs of an executable."""

    def __init__(self, specs: Any) -> None:
        self._specs = jax.tree.leaves(specs)
        made_here = [isinstance(spec, PlacementSpec) and spec.source is not None for spec in self._specs]
        if not made_here or not all(made_here):
            raise ShardingError(
                "A loader needs to know the devices of its placement specs. Pass a part of "
                f"`executable.get_input_placement_specs()`, or the parallelized function; got {specs!r}."
            )
        self._runtime = self._specs[0].source.runtime

    def place_batch(self, batch: Any) -> Any:
        """The batch on the devices, with leaves in the order of the specs; the same batch if its shapes differ."""
        leaves, tree = jax.tree.flatten(batch)
        if len(leaves) != len(self._specs):
            raise ShardingError(
                f"A batch has {len(leaves)} arrays, and there are {len(self._specs)} placement specs. Pass the specs "
                "of all arguments that a batch has, and of no others."
            )
        if list(map(type_of, leaves)) != [(spec.shape, spec.dtype) for spec in self._specs]:
            return batch
        numbers = [spec.source.number for spec in self._specs]
        given: list[Any] = [None] * self._specs[0].source.n_leaves
        for number, leaf in zip(numbers, leaves, strict=True):
            given[number] = leaf
        placed = self._runtime.place(given)
        return jax.tree.unflatten(tree, [placed[number] for number in numbers])


def _step_for(placement_specs: Any) -> Any:
    return placement_specs if hasattr(placement_specs, "place_batch") else Placements(placement_specs)


class DataLoader(minialpa.DataLoader):
    """`minialpa.DataLoader` with Alpa's arguments."""

    def __init__(self, input_iter: Iterable[Any], placement_specs: Any, prefetch_size: int = 1, **others: Any) -> None:
        """`others` are arguments that only minialpa's loader has."""
        super().__init__(input_iter, _step_for(placement_specs), max(1, prefetch_size), **others)


class MeshDriverDataLoader(minialpa.MeshDriverDataLoader):
    """`minialpa.MeshDriverDataLoader` with Alpa's arguments.

    Each loop over it begins with the first sample, and leaves out the last ones if they fill no batch.
    """

    def __init__(
        self,
        batch_size: int,
        num_samples: int,
        input_iter_func: Callable[..., Any],
        placement_specs: Any,
        prefetch_size: int = 1,
        repeat: bool = False,
        **others: Any,
    ) -> None:
        """`others` are arguments that only minialpa's loader has."""
        step = _step_for(placement_specs)
        self._again: Callable[[], Any] = lambda: type(self)(
            batch_size, num_samples, input_iter_func, step, prefetch_size, repeat, **others
        )
        self._is_new = True
        in_batches = num_samples - num_samples % batch_size
        super().__init__(batch_size, in_batches, input_iter_func, step, max(1, prefetch_size), repeat, **others)

    def __iter__(self) -> Self:
        loader = self if self._is_new else self._again()
        loader._is_new = False
        return loader
