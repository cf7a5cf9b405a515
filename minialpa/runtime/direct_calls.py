"""Calls that jax dispatches by itself: leaves in, results out, if the leaves are like those of a call that has run.

A step is often one function, and a training loop calls it with arrays that are already where the function reads them.
jax then compares types and shardings of the leaves with those that it knows, and runs the function, all in C++.

A call is *learned* if it needs no more than that. Leaves of other types or shardings, deleted arrays and an array that
is passed twice are not known, and such a call goes the long way: it is checked, laid out and copied by
`LocalArguments`, and an error says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from minialpa.arrays import own_copy
from minialpa.programs.program import Free, Program, Run
from minialpa.runtime.local_arguments import LocalArguments
from minialpa.runtime.steps.compiled import PacedCall
from minialpa.support.private_jax import ArrayImpl, Dispatch, dispatch_of, dispatcher

#: What jax's call returns if it does not know the leaves.
_UNKNOWN: Any = object()


class DirectCalls:
    """Calls of a program that is one function, in one process. One at a time: the caller holds the turn."""

    def __init__(
        self,
        program: Program,
        compiled: Sequence[Any],
        arguments: LocalArguments,
        constants: Mapping[int, jax.Array],
    ) -> None:
        """compiled: the functions of the program, of which `is_direct` is true. constants: by buffer."""
        run = program.instructions[0]
        assert isinstance(run, Run), run
        self._arguments = arguments
        self._constants = [constants[slot.buffer] for slot in program.constants]
        # What the function takes: the numbers of leaves, and -1 - i for constant i.
        numbers = {slot.buffer: slot.leaf for slot in program.inputs}
        numbers.update((slot.buffer, -1 - i) for i, slot in enumerate(program.constants))
        self._taken = [numbers[buffer] for buffer in run.inputs]
        self._order: list[int] | None = None
        self._donates = bool(program.functions[run.function].donated)
        function = compiled[run.function]
        is_paced = isinstance(function, PacedCall)
        self._compiled: Any = function.unpaced if is_paced else function
        self._pace: Callable[[Sequence[Any]], None] | None = function.note if is_paced else None

        # Where each result is: among the results of the function, or a leaf that the step returns as it was.
        made = {buffer: i for i, buffer in enumerate(run.outputs)}
        buffers = [slot.buffers[0] for slot in program.outputs]
        self._results = [(b in made, made[b] if b in made else numbers[b]) for b in buffers]
        self._returns_all = self._results == [(True, i) for i in range(len(run.outputs))]

        #: The leaves of the call that is being learned, laid out.
        self._learning: list[Any] | None = None
        #: Leaves that were no arrays, or arrays of keys, in a call that was learned.
        self._others: list[int] = []
        self._call = dispatcher(program.functions[run.function].name, self._new)

    def __call__(self, leaves: list[Any]) -> list[Any] | None:
        """Run the function; None, and nothing has happened, if these leaves are not known."""
        if self._call is None or self._takes_twice(leaves) or not _are_usable(leaves, self._others):
            return None
        owned = self._owned(leaves) if self._others else leaves
        made = self._call(self._ordered(owned))
        return None if made is _UNKNOWN else self._finished(made, leaves)

    def can_learn(self, leaves: Sequence[Any]) -> bool:
        """Whether all that a call with such leaves needs is to run the function."""
        return (
            self._call is not None
            and not self._takes_twice(leaves)
            and all(map(_is_array_or_number, leaves))
            and self._arguments.are_direct(leaves)
        )

    def learn(self, leaves: list[Any], inputs: Sequence[Any]) -> list[Any]:
        """Run the function on leaves of which `can_learn` is true; later calls with such leaves are known.

        inputs: what `LocalArguments.of_step` makes of them.
        """
        assert self._call is not None
        others = {i for i, leaf in enumerate(leaves) if not isinstance(leaf, ArrayImpl)}
        self._others = sorted(others.union(self._others))
        self._note_order(len(leaves))
        placed = list(leaves)
        for number, array in zip(self._arguments.leaves, inputs, strict=True):
            placed[number] = array
        self._learning = placed
        try:
            made = self._call(self._ordered(self._owned(leaves)))
        finally:
            self._learning = None
        return self._finished(made, leaves)

    def _new(self, leaves: list[Any]) -> tuple[Any, Dispatch | None]:
        """Leaves that jax does not know: run the function if they are to be learned."""
        if self._learning is None:
            return _UNKNOWN, None
        made = list(self._compiled(*self._ordered(self._learning)[: len(self._taken)]))
        dispatch = dispatch_of(self._compiled, made, [i < len(self._taken) for i in range(len(leaves))])
        if dispatch is None:
            self._call = None
        return made, dispatch

    def _ordered(self, leaves: list[Any]) -> list[Any]:
        """What jax gets: first what the function takes, in its order, then the leaves that it does not take."""
        return leaves if self._order is None else [*map([*leaves, *self._constants].__getitem__, self._order)]

    def _note_order(self, n_leaves: int) -> None:
        taken = [i if i >= 0 else n_leaves - 1 - i for i in self._taken]
        order = [*taken, *(i for i in range(n_leaves) if i not in set(taken))]
        self._order = None if order == list(range(n_leaves)) else order

    def _finished(self, made: list[Any], leaves: Sequence[Any]) -> list[Any]:
        """The results of a call, of what the function has made of the leaves."""
        if self._pace is not None:
            self._pace(made)
        return made if self._returns_all else [made[i] if is_made else leaves[i] for is_made, i in self._results]

    def _takes_twice(self, leaves: Sequence[Any]) -> bool:
        # XLA breaks off a call that takes over a buffer which it reads in another place, too: on several devices it
        # may do so at any point.
        return self._donates and len(set(map(id, leaves))) < len(leaves)

    def _owned(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves, with a copy of each NumPy array: the caller may write to its memory before jax has read it."""
        owned = list(leaves)
        for i in self._others:
            if isinstance(owned[i], np.ndarray):
                owned[i] = own_copy(owned[i])
        return owned


def _are_usable(leaves: list[Any], others: Sequence[int]) -> bool:
    """Whether all leaves but `others` are plain arrays, these are what jax reads, and none was deleted.

    XLA may crash on a deleted array, and on several devices it does.
    """
    plain = list(leaves) if others else leaves
    for i in reversed(others):
        leaf = plain.pop(i)
        if not _is_array_or_number(leaf) or (isinstance(leaf, jax.Array) and leaf.is_deleted()):
            return False
    try:
        return not any(map(ArrayImpl.is_deleted, plain))
    except TypeError:
        return False


def _is_array_or_number(leaf: Any) -> bool:
    """Whether jax's dispatch tells a leaf from others that are treated otherwise.

    It takes a bool of NumPy, which is static as a whole argument, for an array without dimensions, and does not see in
    which order an array has its bytes.
    """
    if isinstance(leaf, np.ndarray):
        return type(leaf) is np.ndarray and leaf.dtype.isnative and not (leaf.ndim == 0 and leaf.dtype == np.bool_)
    is_array = isinstance(leaf, jax.Array | np.number) and not isinstance(leaf, jax.core.Tracer)
    return is_array or type(leaf) in (int, float, complex)


def is_direct(program: Program, compiled: Sequence[Any]) -> bool:
    """Whether jax can dispatch the calls of a program: it is one function of leaves and constants."""
    if not program.instructions:  # the step returns no arrays
        return False
    run, *others = program.instructions
    if program.blocks or not isinstance(run, Run) or not all(isinstance(other, Free) for other in others):
        return False
    # Rows of micro-batches are cut from leaves, and NarrowCalls have no function of jax to call.
    is_whole = all(slot.rows is None for slot in program.inputs)
    return is_whole and isinstance(compiled[run.function], jax.stages.Compiled | PacedCall)
