"""Tracing: `trace_step` turns a Python step and the shapes of its arguments into a `TracedStep`.

A `TracedStep` is the one description of the step that planning works on: the full-batch program, where each equation
came from, which inputs are split over micro-batches, which are donated. Tracing needs no device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.arrays import RemoteArray
from minialpa.errors import TraceError
from minialpa.tracing.fingerprint import Fingerprint, fingerprint_of
from minialpa.tracing.gradients import boundary_p, gradient_p, tracing_step
from minialpa.tracing.jaxprs import (
    FlatJaxpr,
    is_extended,
    is_inexact,
    is_literal,
    is_second_derivative,
    is_transposed,
    live_equations,
    operand_vars,
    read_tag,
    shape_of,
    trace_flat,
)

Direction = Literal["forward", "backward", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an equation came from.

    Attributes:
        direction: the part of the step that the equation belongs to; "other" includes the update.
        group: number of the forward equation that it is, or whose derivative it is; None if that is not known.
        layer: number of pipeline boundaries before that forward equation.
        call: number of the gradient call of the step that it belongs to, from 0.
        is_second: whether it is a derivative of a backward pass, as in a plain `jax.grad` of `jax.grad`.
    """

    direction: Direction
    group: int | None
    layer: int
    call: int = 0
    is_second: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """An argument or result leaf, by number: its rows (start, stop) of dimension 0, or None for all of it."""

    leaf: int
    rows: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A training step as a flat program on full-batch shapes.

    Attributes:
        flat: the program; its invars are the dynamic argument leaves in order.
        origins: for each equation, where it came from.
        in_paths: names of the argument leaves for messages, such as `state.params['w']`.
        out_paths: names of the result leaves.
        batch_dims: for each invar, the dimension that holds the examples, or None.
        batch_size: number of examples, or None if no argument is a batch.
        aliases: for each outvar, the number of the invar that it replaces if that argument is donated, or None.
        layouts: for each outvar, the number of the invar whose sharding it takes, donated or not, or None.
        gradients: the marked gradients, as variables of the program.
        n_boundaries: number of pipeline boundaries, by marks and by origins.
        out_tree: pytree of the results.
        in_parts: for each invar, the argument leaf or rows of it that it stands for; empty if invars are the leaves.
        out_parts: the same for outvars and result leaves.
    """

    flat: FlatJaxpr
    origins: tuple[Origin, ...]
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    batch_dims: tuple[int | None, ...]
    batch_size: int | None
    aliases: tuple[int | None, ...]
    layouts: tuple[int | None, ...]
    gradients: tuple[Var, ...]
    n_boundaries: int
    out_tree: Any
    in_parts: tuple[Part, ...] = ()
    out_parts: tuple[Part, ...] = ()

    def argument(self, i: int) -> Part:
        """The argument leaf, or rows of it, that invar `i` stands for."""
        return self.in_parts[i] if self.in_parts else Part(i, None)

    def result(self, i: int) -> Part:
        """The result leaf, or rows of it, that outvar `i` stands for."""
        return self.out_parts[i] if self.out_parts else Part(i, None)

    @property
    def n_groups(self) -> int:
        """Number of forward groups."""
        return max((origin.group for origin in self.origins if origin.group is not None), default=-1) + 1

    @property
    def fingerprint(self) -> Fingerprint:
        """Equal steps have equal fingerprints, in every process."""
        flat = self.flat
        about = f"{self.batch_dims} {self.aliases} {self.layouts}"
        return fingerprint_of((*flat.constvars, *flat.invars), flat.eqns, flat.outvars, about)


def trace_step(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    in_paths: Sequence[str],
    is_batch: Sequence[bool],
    arg_of_leaf: Sequence[int],
    donate: Sequence[int] | Literal["auto"],
    state_like: Sequence[int] = (),
) -> TracedStep:
    """Trace `fun(*leaves)`, a function of flat leaves that returns a pytree.

    in_paths: name of each leaf, for messages.
    is_batch: for each leaf, whether its argument is a batch.
    arg_of_leaf: for each leaf, the number of its argument.
    donate: numbers of donated arguments, or "auto": those that the step updates.
    state_like: arguments that "auto" donates whenever the step returns a replacement of the same shapes.

    Raises TraceError if an argument leaf is not an array, or if the step's Python code needs the value of one.
    """
    structs = [_abstract(leaf, path) for leaf, path in zip(leaves, in_paths, strict=True)]
    batch_dims, batch_size = _batch_dims(structs, in_paths, is_batch)

    try:
        with tracing_step():
            flat, out_shape = trace_flat(fun, *structs)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise TraceError(
            f"The step's Python code uses the value of a traced argument: {error}\n"
            "Make that argument static with `static_argnums`, or use `jax.lax.cond`."
        ) from error

    program = _without_dead_equations(_without_marks(flat))
    origins = _origins(program.flat.eqns, program.flat.scopes, program.boundaries_before)
    named_results = jax.tree_util.tree_leaves_with_path(out_shape)
    none = (None,) * len(program.flat.outvars)
    step = TracedStep(
        flat=program.flat,
        origins=origins,
        in_paths=tuple(in_paths),
        out_paths=tuple("result" + jax.tree_util.keystr(path) for path, _ in named_results),
        batch_dims=batch_dims,
        batch_size=batch_size,
        aliases=none,
        layouts=none,
        gradients=program.gradients,
        n_boundaries=max([program.n_boundaries, *(origin.layer for origin in origins)]),
        out_tree=jax.tree.structure(out_shape),
    )

    # What results replace is read off the program itself.
    aliases = _aliases(step, arg_of_leaf, donate, state_like)
    return replace(step, aliases=aliases, layouts=_layouts(step, arg_of_leaf, aliases))


def _abstract(leaf: Any, path: str) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of a leaf, without a sharding: the plan decides how arguments are sharded."""
    found = leaf
    if not isinstance(leaf, jax.ShapeDtypeStruct | jax.core.ShapedArray | RemoteArray):
        try:
            found = jax.typeof(leaf)
        except TypeError as error:
            raise TraceError(_why_no_array(leaf, path)) from error
        if not isinstance(found, jax.core.ShapedArray):  # a Ref has a shape, too
            raise TraceError(_why_no_array(leaf, path))

    if not is_extended(found.dtype) and np.dtype(found.dtype).kind in "OSTUMm":
        # jax has arrays of strings, and no functions that take them.
        raise TraceError(_why_no_array(np.empty((), found.dtype), path))
    if not all(isinstance(n, int | np.integer) and n >= 0 for n in found.shape):
        raise TraceError(
            f"Argument leaf `{path}` has shape {found.shape} and dtype {found.dtype}. Steps are planned for arrays of "
            "numbers whose dimensions are known."
        )

    return jax.ShapeDtypeStruct(found.shape, found.dtype, weak_type=bool(getattr(found, "weak_type", False)))


def _why_no_array(leaf: Any, path: str) -> str:
    """The message for an argument leaf that jax does not accept as an array: what is wrong, and what to pass."""
    otherwise = "other values as whole arguments listed in `static_argnums`"
    if not isinstance(leaf, np.ndarray | np.generic):
        kind = type(leaf).__name__
        return f"Argument leaf `{path}` is a {kind}, not an array. Pass arrays and numbers in pytrees, and {otherwise}."

    dtype = leaf.dtype
    given = f"Argument leaf `{path}` is a NumPy array of {dtype}"
    if dtype.names is not None:
        first = dtype.names[0] if dtype.names else "name"
        return f"{given}, a structured dtype, and jax has none. Pass its fields as arrays of their own: `x[{first!r}]`."
    if dtype.kind in "SUT":
        return f"{given}, which are strings, and jax has none. Pass numbers that stand for them, and {otherwise}."
    if dtype.kind in "mM":
        return f"{given}, which are times, and jax has none. Pass numbers, as `x.astype('int64')` gives them."
    if not dtype.isnative:
        return f"{given}, whose bytes are in another order than jax has them. Pass `x.astype({dtype.name!r})`."
    if dtype.kind in "fc":
        narrower = "complex128" if dtype.kind == "c" else "float64"
        return f"{given}, which is wider than the numbers of jax. Pass `x.astype({narrower!r})`."
    return f"{given}, and jax has no such arrays. Pass numbers in arrays, and {otherwise}."


def _batch_dims(
    structs: Sequence[jax.ShapeDtypeStruct], paths: Sequence[str], is_batch: Sequence[bool]
) -> tuple[tuple[int | None, ...], int | None]:
    """The batch dimension of each leaf, and the number of examples.

    It is dimension 0 of every array in a batch argument; scalars and raw PRNG keys have none.
    """
    dims: list[int | None] = []
    sizes: dict[str, int] = {}
    for struct, path, batch in zip(structs, paths, is_batch, strict=True):
        is_raw_key = struct.dtype == np.uint32 and struct.shape == (2,)
        if not batch or struct.ndim == 0 or is_raw_key:
            dims.append(None)
        else:
            dims.append(0)
            sizes[path] = struct.shape[0]

    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"`{path}` {size}" for path, size in list(sizes.items())[:4])
        raise TraceError(
            f"The leading dimensions of the batch differ: {listed}. Pass per-batch values of other shapes in an "
            "argument that is not in `batch_argnums`."
        )
    if 0 in sizes.values():
        raise TraceError(f"The batch has no examples: `{next(iter(sizes))}` has shape {structs[dims.index(0)].shape}.")
    return tuple(dims), next(iter(sizes.values()), None)


@dataclass(frozen=True, slots=True)
class _Unmarked:
    """A program without its marks, and what the marks said.

    Attributes:
        flat: the program.
        boundaries_before: for each equation, the number of pipeline boundaries that were marked before it.
        gradients: values that were marked as gradients.
        n_boundaries: number of pipeline boundaries that were marked.
    """

    flat: FlatJaxpr
    boundaries_before: tuple[int, ...]
    gradients: tuple[Var, ...]
    n_boundaries: int


def _without_marks(flat: FlatJaxpr) -> _Unmarked:
    """Take the marks out of a program; readers of a marked gradient read the gradient itself."""
    unmarked: dict[Var, Any] = {}
    eqns: list[JaxprEqn] = []
    scopes: list[str] = []
    gradients: list[Var] = []
    boundaries_before: list[int] = []
    n_boundaries = 0

    def read(atom: Any) -> Any:
        return atom if is_literal(atom) else unmarked.get(atom, atom)

    for eqn, scope in zip(flat.eqns, flat.scopes, strict=True):
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive is boundary_p:
            n_boundaries += 1
        elif eqn.primitive is gradient_p:
            unmarked.update(zip(eqn.outvars, operands, strict=True))
            gradients.extend(atom for atom in operands if not is_literal(atom))
        else:
            eqns.append(eqn.replace(invars=operands))
            scopes.append(scope)
            boundaries_before.append(n_boundaries)

    outvars = tuple(read(atom) for atom in flat.outvars)
    stripped = replace(flat, eqns=tuple(eqns), scopes=tuple(scopes), outvars=outvars)
    return _Unmarked(stripped, tuple(boundaries_before), tuple(gradients), n_boundaries)


def _without_dead_equations(program: _Unmarked) -> _Unmarked:
    """Drop the equations that no result depends on."""
    flat = program.flat
    live = [i for i, is_live in enumerate(live_equations(flat.eqns, flat.outvars)) if is_live]
    return replace(
        program,
        flat=replace(flat, eqns=tuple(flat.eqns[i] for i in live), scopes=tuple(flat.scopes[i] for i in live)),
        boundaries_before=tuple(program.boundaries_before[i] for i in live),
    )


def _origins(eqns: Sequence[JaxprEqn], scopes: Sequence[str], boundaries_before: Sequence[int]) -> tuple[Origin, ...]:
    """Origin of each equation.

    Without tags (plain `jax.grad`, or no gradient at all) each equation outside the backward pass is its own forward
    group, unless it belongs to the update.
    """
    groups: dict[tuple[int, int, int] | int, int] = {}
    tags = [read_tag(scope) for scope in scopes]
    has_tags = any(tag is not None for tag in tags)
    is_backward = [is_transposed(scope) for scope in scopes]
    in_update = _in_update(eqns, is_backward)

    def origin(i: int) -> Origin:
        tag, boundaries = tags[i], boundaries_before[i]
        if tag is not None:
            call, layer, _ = tag
            direction: Direction = "backward" if is_backward[i] else "forward"
            return Origin(direction=direction, group=groups.setdefault(tag, len(groups)), layer=layer, call=call)
        if is_backward[i]:
            is_second = is_second_derivative(scopes[i])
            return Origin(direction="backward", group=None, layer=boundaries, is_second=is_second)
        if has_tags or in_update[i]:
            return Origin(direction="other", group=None, layer=boundaries)
        return Origin(direction="forward", group=groups.setdefault(i, len(groups)), layer=boundaries)

    return tuple(origin(i) for i in range(len(eqns)))


def _in_update(eqns: Sequence[JaxprEqn], is_backward: Sequence[bool]) -> list[bool]:
    """Which equations depend on the backward pass, or are read by such equations only."""
    in_update = _after_backward(eqns, is_backward)
    readers: dict[Var, list[int]] = defaultdict(list)

    # Backwards: the readers of an equation are decided before it.
    for i in range(len(eqns) - 1, -1, -1):
        reading = [reader for var in eqns[i].outvars for reader in readers[var]]
        if reading and not is_backward[i]:
            in_update[i] = in_update[i] or all(in_update[reader] for reader in reading)
        for var in operand_vars(eqns[i]):
            readers[var].append(i)
    return in_update


def _after_backward(eqns: Sequence[JaxprEqn], is_backward: Sequence[bool]) -> list[bool]:
    """Which equations depend on the backward pass without being part of it."""
    dependent: set[Var] = set()
    is_after = []
    for eqn, backward in zip(eqns, is_backward, strict=True):
        depends = any(var in dependent for var in operand_vars(eqn))
        is_after.append(depends and not backward)
        if backward or depends:
            dependent.update(eqn.outvars)
    return is_after


def _layouts(step: TracedStep, arg_of_leaf: Sequence[int], aliases: Sequence[int | None]) -> tuple[int | None, ...]:
    """`aliases`, completed by results with the structure of some other argument, such as gradients or a kept state."""
    layouts = list(aliases)
    aliased = {arg_of_leaf[i] for i in aliases if i is not None}
    for arg in sorted(set(arg_of_leaf) - aliased):
        leaves = _leaves_of(arg, arg_of_leaf)
        if _has_batch(step, leaves) or not any(shape_of(step.flat.invars[i]) for i in leaves):
            continue
        start = _find_replacement(step, leaves, layouts)
        if start is not None:
            layouts[start : start + len(leaves)] = leaves
    return tuple(layouts)


def _aliases(
    step: TracedStep,
    arg_of_leaf: Sequence[int],
    donate: Sequence[int] | Literal["auto"],
    state_like: Sequence[int],
) -> tuple[int | None, ...]:
    """For each result leaf, the donated argument leaf that it replaces."""
    args = sorted(set(arg_of_leaf)) if donate == "auto" else sorted(donate)
    aliases: list[int | None] = [None] * len(step.flat.outvars)
    for arg in args:
        leaves = _leaves_of(arg, arg_of_leaf)
        if not leaves or _has_batch(step, leaves):
            continue
        start = _find_replacement(step, leaves, aliases)
        if start is None:
            continue

        # Results of the right shapes need not be new values of an argument that the user did not name.
        new_values = step.flat.outvars[start : start + len(leaves)]
        must_update = donate == "auto" and arg not in state_like
        if must_update and not _is_updated(step, [step.flat.invars[i] for i in leaves], new_values):
            continue
        aliases[start : start + len(leaves)] = leaves
    return tuple(aliases)


def _leaves_of(arg: int, arg_of_leaf: Sequence[int]) -> list[int]:
    """Numbers of the leaves of an argument."""
    return [i for i, owner in enumerate(arg_of_leaf) if owner == arg]


def _has_batch(step: TracedStep, leaves: Sequence[int]) -> bool:
    return any(step.batch_dims[i] is not None for i in leaves)


def _find_replacement(step: TracedStep, leaves: Sequence[int], taken: Sequence[int | None]) -> int | None:
    """First position of consecutive results that have the shapes and dtypes of `leaves` and are not `taken`."""
    wanted = [_signature(step.flat.invars[i]) for i in leaves]
    results = [_signature(atom) for atom in step.flat.outvars]
    n_leaves = len(leaves)
    for start in range(len(results) - n_leaves + 1):
        stop = start + n_leaves
        if results[start:stop] == wanted and all(replaced is None for replaced in taken[start:stop]):
            return start
    return None


def _signature(atom: Any) -> tuple[Any, ...]:
    return (shape_of(atom), str(getattr(atom.aval, "dtype", "")))


def _is_updated(step: TracedStep, inputs: Sequence[Var], outputs: Sequence[Any]) -> bool:
    """Whether `outputs` are new values of `inputs`, and not, for example, gradients with respect to them.

    True if gradients are marked, no output is a marked gradient, and each float input contributes to its own
    replacement by operations after the gradients.
    """
    marked = set(step.gradients)
    if not marked or any(not is_literal(atom) and atom in marked for atom in outputs):
        return False

    producers = {var: eqn for eqn in step.flat.eqns for var in eqn.outvars}
    for source, target in zip(inputs, outputs, strict=True):
        if not is_inexact(source):
            continue
        if is_literal(target) or not _reaches(target, source, producers, marked):
            return False
    return True


def _reaches(target: Var, source: Var, producers: dict[Var, JaxprEqn], stop: set[Var]) -> bool:
    """Whether `target` is computed from `source` without the values in `stop`."""
    seen: set[Var] = set()
    stack = [target]
    while stack:
        var = stack.pop()
        if var is source:
            return True
        if var in seen or var in stop or var not in producers:
            continue
        seen.add(var)
        stack.extend(operand_vars(producers[var]))
    return False
