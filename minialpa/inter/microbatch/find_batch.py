"""Finds the batch: a step traced without a batch in, the numbers of the arguments that hold examples out.

In `step(state, batch)` the second argument is the batch. In other signatures, a batch argument obeys four rules:

  1. All of its arrays share their leading dimension, the number of examples; random keys do not count.
  2. The step does not return a new value of it, as a step does for its state.
  3. Its leading dimension stays apart through the model, up to reductions. The leading dimension of a weight is
     contracted with values without examples, in the first product that reads it.
  4. Most of the model works on examples, and only a few equations on a table of weights for classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.errors import TraceError
from minialpa.inter.microbatch.batching import Kinds, batch_factors, batch_kinds, is_barrier
from minialpa.ir.equations import aval_of, is_extended, is_literal, shape_of
from minialpa.rules.known_rules import factors_of
from minialpa.support.divisors import divisors
from minialpa.tracing.arguments import argument_name, why_sizes_differ
from minialpa.tracing.trace import NoBatch, TracedStep

#: A group in at least this many times more equations than any other is the batch.
_CLEAR_LEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """An argument that is not static.

    Attributes:
        names: its name, or the names of all keywords outside of the signature, which share a number.
        leaves: the numbers of its leaves.
        sizes: the leading dimension of each of its arrays, apart from random keys, by path.
    """

    number: int
    names: tuple[str, ...]
    leaves: tuple[int, ...]
    sizes: Mapping[str, int]

    @property
    def size(self) -> int | None:
        """The common leading dimension, None without one."""
        found = {*self.sizes.values()}
        return found.pop() if len(found) == 1 else None

    def __str__(self) -> str:
        return f"{' and '.join(f'`{name}`' for name in self.names)} ({self.size} examples)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Arguments with the same number of examples.

    Attributes:
        stays_apart: whether rule 3 holds.
        n_equations: the number of equations whose results have a dimension of examples.
    """

    arguments: tuple[_Argument, ...]
    stays_apart: bool
    n_equations: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(argument.number for argument in self.arguments)


def find_batch(
    step: TracedStep, arg_of_leaf: Sequence[int], donated: Collection[int] = ()
) -> tuple[int, ...] | NoBatch:
    """The numbers of the arguments that hold examples, or the reason why the step has no such argument.

    step: traced without a batch, so that `step.aliases` and `step.layouts` may name every argument.
    arg_of_leaf: for each leaf, the number of its argument.
    donated: the numbers of the arguments that the user donates. A donated argument that the step also returns, such as
    the cache of a decoder, is no batch.
    """
    # An argument of Refs only is a state.
    arguments, owners = _arguments(step, arg_of_leaf), step.refs.owners(arg_of_leaf)
    updated = {owners[i] for i in step.aliases if i is not None} | ({*arg_of_leaf} - {*owners})
    returned = {owners[i] for i in step.layouts if i is not None}
    updated |= returned.intersection(donated)
    if _is_state_and_batch(arguments, updated):
        # Nodes and edges of a graph, for example, are no rows of examples.
        reason = why_sizes_differ(arguments[1].sizes)
        return (1,) if reason is None else NoBatch(reason, ambiguous=False)
    free = [argument for argument in arguments if argument.size is not None and argument.number not in updated]
    if len(arguments) == 1:
        return _no_batch(free)

    # Results may have the structure of an argument by chance, as predictions look like inputs. So arguments that look
    # like results are the second choice.
    founders = [argument for argument in free if argument.number not in returned]
    if len(founders) == len(free) == 1 and free[0].number != 0:
        return (free[0].number,)
    for known in (founders, free):
        found = _contenders(_groups(step, known, free, returned))
        if found:
            return found[0].numbers if len(found) == 1 else _several_batches(found)
    return _no_batch(free)


def _arguments(step: TracedStep, arg_of_leaf: Sequence[int]) -> list[_Argument]:
    arguments = []
    for number in sorted(set(arg_of_leaf)):
        leaves = tuple(i for i, owner in enumerate(arg_of_leaf) if owner == number and i not in step.refs.arguments)
        shapes = {step.in_paths[i]: shape_of(step.flat.invars[i]) for i in leaves if not _is_key(step, i)}
        sizes = {path: shape[0] for path, shape in shapes.items() if shape}
        names = dict.fromkeys(argument_name(step.in_paths[i]) for i in leaves)
        arguments.append(_Argument(number=number, names=tuple(names), leaves=leaves, sizes=sizes))
    return arguments


def _is_key(step: TracedStep, leaf: int) -> bool:
    """Whether a leaf may hold random keys: an extended dtype, or uint32 with a last dimension of 2."""
    aval = aval_of(step.flat.invars[leaf])
    return is_extended(aval.dtype) or (aval.dtype == np.uint32 and aval.shape[-1:] == (2,))


def _is_state_and_batch(arguments: Sequence[_Argument], updated: Collection[int]) -> bool:
    if [argument.number for argument in arguments] != [0, 1]:
        return False
    return 1 not in updated or (0 in updated and arguments[1].size is not None)


def _groups(
    step: TracedStep, known: Sequence[_Argument], free: Sequence[_Argument], returned: Collection[int]
) -> list[_Group]:
    """A group of `free` arguments for each size in `known`."""
    sizes = dict.fromkeys(argument.size for argument in known)
    return [_group(step, [a for a in free if a.size == size], returned) for size in sizes]


def _group(step: TracedStep, arguments: Sequence[_Argument], returned: Collection[int]) -> _Group:
    """The group of `arguments`, without one suspect if the others then stay apart."""
    whole_group = _follow_examples(step, arguments)
    if whole_group.stays_apart or len(arguments) == 1:
        return whole_group

    # Returned arguments and the first argument are states more often than batches.
    suspects = sorted(arguments, key=lambda a: (a.number not in returned, a.number != 0, -a.number))
    for suspect in suspects:
        others = _follow_examples(step, [argument for argument in arguments if argument is not suspect])
        if others.stays_apart:
            return others
    return whole_group


def _follow_examples(step: TracedStep, arguments: Sequence[_Argument]) -> _Group:
    """The group of `arguments`, if dimension 0 holds the examples."""
    rows = {i for argument in arguments for i in argument.leaves if shape_of(step.flat.invars[i])}
    dims = tuple(0 if i in rows and not _is_key(step, i) else None for i in range(len(step.flat.invars)))
    n = min(divisors(arguments[0].size or 1)[1:], default=1)
    kinds = batch_kinds(replace(step, batch_dims=dims), n)
    return _Group(
        arguments=tuple(arguments),
        stays_apart=not any(_mixes_examples(eqn, kinds, n) for eqn in step.flat.eqns),
        n_equations=sum(any(isinstance(kinds.get(out), int) for out in eqn.outvars) for eqn in step.flat.eqns),
    )


def _mixes_examples(eqn: JaxprEqn, kinds: Kinds, n: int) -> bool:
    """Whether an equation breaks rule 3."""
    has_rows = [not is_literal(atom) and isinstance(kinds.get(atom), int) for atom in eqn.invars]
    if not any(has_rows) or is_barrier(eqn):
        return False
    factors = factors_of(eqn).in_time(eqn)
    try:
        split = batch_factors(eqn, factors, kinds, n)
    except TraceError:
        return True
    if eqn.primitive.name != "dot_general" or all(has_rows):
        return False
    kept = {factor for dims in factors.results for dim in dims for factor in dim}
    return any(factor not in kept for factor in split)


def _contenders(groups: Sequence[_Group]) -> list[_Group]:
    """The group in clearly the most equations, else the group of the second argument, else all possible groups."""
    apart = [group for group in groups if group.stays_apart]
    if not apart:
        # Contrastive losses and attention between examples mix them; only the signature remains as evidence.
        later = [group for group in groups if 0 not in group.numbers]
        return [group for group in later if 1 in group.numbers] or later

    first, *rest = sorted(apart, key=lambda group: -group.n_equations)
    if all(first.n_equations >= _CLEAR_LEAD * group.n_equations for group in rest):
        return [first]
    return [group for group in apart if 1 in group.numbers] or apart


def _no_batch(free: Iterable[_Argument]) -> NoBatch:
    could = " or ".join(f"`batch_argnums=({argument.number},)` for {argument}" for argument in free)
    return NoBatch(
        "minialpa found no argument whose arrays hold the examples of a batch in their first dimension. "
        + (f"Set {could}." if could else "Set `batch_argnums=(...)` to the numbers of these arguments."),
        ambiguous=False,
    )


def _several_batches(groups: Sequence[_Group]) -> NoBatch:
    could = " or ".join(
        f"`batch_argnums=({', '.join(map(str, group.numbers))},)` for {', '.join(map(str, group.arguments))}"
        for group in groups
    )
    return NoBatch(f"Several arguments may hold the examples of the batch. Set {could}.", ambiguous=True)
