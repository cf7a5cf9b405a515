"""Tracing: a Python step and the shapes of its arguments in, a flat program with its marks read out.

Nothing here needs a device. The result, `TracedStep`, is the one description of the step that planning works on: the
full-batch program, where each equation came from, which inputs are split over micro-batches, which are donated.
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


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an equation came from.

    group: number of the forward equation that it is, or whose derivative it is; None where autodiff left no trace.
    layer: number of pipeline boundaries passed before that forward equation.
    call: of the gradients of the step, counted from 0, the one that it belongs to.
    is_second: whether it is a derivative of a backward pass, as plain `jax.grad` of `jax.grad` leaves it.
    """

    direction: Direction
    group: int | None
    layer: int
    call: int = 0
    is_second: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Rows (start, stop) of dimension 0 of an argument or result leaf; None for all of it."""

    leaf: int
    rows: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A training step as a flat program on full-batch shapes.

    flat: the program; its invars are the dynamic argument leaves in order.
    origins: for each equation, where it came from.
    in_paths, out_paths: names of the argument and result leaves for messages, such as `state.params['w']`.
    batch_dims: for each invar, the dimension that holds the examples, or None.
    batch_size: number of examples, or None when no argument is a batch.
    aliases: for each outvar the invar that it replaces when that argument is donated, or None.
    layouts: for each outvar the invar whose sharding it takes, donated or not: that of an argument like it.
    gradients: the marked gradients, as variables of the program.
    out_tree: pytree of the results.
    in_parts, out_parts: what of which leaf each invar and outvar is; empty where they are the leaves.
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
        """What invar `i` is of an argument leaf."""
        return self.in_parts[i] if self.in_parts else Part(i, None)

    def result(self, i: int) -> Part:
        """What outvar `i` is of a result leaf."""
        return self.out_parts[i] if self.out_parts else Part(i, None)

    @property
    def n_groups(self) -> int:
        """Number of forward groups."""
        return max((o.group for o in self.origins if o.group is not None), default=-1) + 1

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

    is_batch, arg_of_leaf: for each leaf, whether its argument is a batch, and the number of its argument.
    donate: numbers of donated arguments, or "auto": those that the step updates; state_like: arguments that "auto"
        donates whenever the step returns a replacement of the same shapes.
    Raises TraceError where a value is not an array or the step's Python code needs a traced value.
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
    flat, origins, gradients, n_boundaries = _read_marks(flat)
    out_paths = tuple(
        "result" + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(out_shape)
    )
    none = (None,) * len(flat.outvars)
    step = TracedStep(
        flat, origins, tuple(in_paths), out_paths, batch_dims, batch_size,
        none, none, gradients, n_boundaries, jax.tree.structure(out_shape),
    )  # fmt: skip
    aliases = _aliases(step, arg_of_leaf, donate, state_like)
    return replace(step, aliases=aliases, layouts=_layouts(step, arg_of_leaf, aliases))


def _abstract(leaf: Any, path: str) -> jax.ShapeDtypeStruct:
    """Shape, dtype and whether it is weak, without a sharding: how arguments lie is for the plan to say."""
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
    """What is wrong with an argument leaf that jax takes for no array, and what to do."""
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
    """Dimension 0 of every array in a batch argument, except scalars and PRNG keys."""
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
        raise TraceError(f"The leading dimensions of the batch differ: {listed}. Pass per-batch values of other shapes in an argument that is not in `batch_argnums`.")  # fmt: skip  # noqa: E501
    if 0 in sizes.values():
        raise TraceError(f"The batch has no examples: `{next(iter(sizes))}` has shape {structs[dims.index(0)].shape}.")
    return tuple(dims), next(iter(sizes.values()), None)


def _read_marks(flat: FlatJaxpr) -> tuple[FlatJaxpr, tuple[Origin, ...], tuple[Var, ...], int]:
    """Take the marks out of a program: returns it without them, origins, gradients, number of boundaries."""
    env: dict[Var, Any] = {}
    eqns: list[JaxprEqn] = []
    scopes: list[str] = []
    gradients: list[Var] = []
    boundaries_before: list[int] = []
    n_boundaries = 0
    for eqn, scope in zip(flat.eqns, flat.scopes, strict=True):
        args = [v if is_literal(v) else env.get(v, v) for v in eqn.invars]
        if eqn.primitive is boundary_p:
            n_boundaries += 1
        elif eqn.primitive is gradient_p:
            env.update(zip(eqn.outvars, args, strict=True))
            gradients.extend(v for v in args if not is_literal(v))
        else:
            eqns.append(eqn.replace(invars=args))
            scopes.append(scope)
            boundaries_before.append(n_boundaries)
    outvars = tuple(v if is_literal(v) else env.get(v, v) for v in flat.outvars)
    keep = live_equations(eqns, outvars)
    kept = [i for i, k in enumerate(keep) if k]
    origins = _origins([eqns[i] for i in kept], [scopes[i] for i in kept], [boundaries_before[i] for i in kept])
    stripped = replace(flat, eqns=tuple(eqns[i] for i in kept), scopes=tuple(scopes[i] for i in kept), outvars=outvars)
    n_layers = max([n_boundaries, *(o.layer for o in origins)])
    return stripped, origins, tuple(gradients), n_layers


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
    out = []
    for i, tag in enumerate(tags):
        if tag is not None:
            group = groups.setdefault(tag, len(groups))
            out.append(Origin("backward" if is_backward[i] else "forward", group, tag[1], tag[0]))
        elif is_backward[i]:
            is_second = is_second_derivative(scopes[i])
            out.append(Origin("backward", None, boundaries_before[i], is_second=is_second))
        elif has_tags or in_update[i]:
            out.append(Origin("other", None, boundaries_before[i]))
        else:
            out.append(Origin("forward", groups.setdefault(i, len(groups)), boundaries_before[i]))
    return tuple(out)


def _in_update(eqns: Sequence[JaxprEqn], is_backward: Sequence[bool]) -> list[bool]:
    """Which equations depend on the backward pass, or are read by such equations only."""
    behind: set[Var] = set()
    out = []
    for eqn, backward in zip(eqns, is_backward, strict=True):
        depends = any(v in behind for v in operand_vars(eqn))
        out.append(depends and not backward)
        if backward or depends:
            behind.update(eqn.outvars)
    readers: dict[Var, list[int]] = defaultdict(list)
    for i in range(len(eqns) - 1, -1, -1):
        numbers = [r for v in eqns[i].outvars for r in readers[v]]
        if numbers and not is_backward[i]:
            out[i] = out[i] or all(out[r] for r in numbers)
        for v in eqns[i].invars:
            if not is_literal(v):
                readers[v].append(i)
    return out


def _layouts(step: TracedStep, arg_of_leaf: Sequence[int], aliases: Sequence[int | None]) -> tuple[int | None, ...]:
    """`aliases`, and then results that have the structure of some argument: gradients, or a state that is kept."""
    invars, outvars = step.flat.invars, step.flat.outvars
    layouts, given = list(aliases), {arg_of_leaf[i] for i in aliases if i is not None}
    for arg in sorted(set(arg_of_leaf) - given):
        mine = [i for i, a in enumerate(arg_of_leaf) if a == arg]
        if any(step.batch_dims[i] is not None for i in mine) or not any(shape_of(invars[i]) for i in mine):
            continue
        start = _find_run([_signature(invars[i]) for i in mine], [_signature(v) for v in outvars], layouts)
        if start is not None:
            layouts[start : start + len(mine)] = mine
    return tuple(layouts)


def _aliases(
    step: TracedStep,
    arg_of_leaf: Sequence[int],
    donate: Sequence[int] | Literal["auto"],
    state_like: Sequence[int],
) -> tuple[int | None, ...]:
    """For each result leaf, the donated argument leaf that it replaces."""
    invars, outvars = step.flat.invars, step.flat.outvars
    args = sorted(set(arg_of_leaf)) if donate == "auto" else sorted(donate)
    aliases: list[int | None] = [None] * len(outvars)
    for arg in args:
        mine = [i for i, a in enumerate(arg_of_leaf) if a == arg]
        if not mine or any(step.batch_dims[i] is not None for i in mine):
            continue
        start = _find_run([_signature(invars[i]) for i in mine], [_signature(v) for v in outvars], aliases)
        if start is None:
            continue
        matched = [outvars[start + k] for k in range(len(mine))]
        if donate == "auto" and arg not in state_like and not _is_updated(step, [invars[i] for i in mine], matched):
            continue
        for k, i in enumerate(mine):
            aliases[start + k] = i
    return tuple(aliases)


def _signature(var: Any) -> tuple[Any, ...]:
    return (shape_of(var), str(getattr(var.aval, "dtype", "")))


def _find_run(wanted: list[Any], outputs: list[Any], taken: Sequence[int | None]) -> int | None:
    """First position where `wanted` occurs as a run of outputs that replace nothing yet."""
    n = len(wanted)
    for start in range(len(outputs) - n + 1):
        if outputs[start : start + n] == wanted and all(t is None for t in taken[start : start + n]):
            return start
    return None


def _is_updated(step: TracedStep, inputs: Sequence[Var], outputs: Sequence[Any]) -> bool:
    """Whether `outputs` are new values of `inputs`, and not, say, gradients with respect to them.

    True when gradients are marked, no output is a marked gradient, and each float input takes part in its own
    replacement by operations behind the gradients.
    """
    marked = set(step.gradients)
    if not marked or any(not is_literal(v) and v in marked for v in outputs):
        return False
    producers = {v: eqn for eqn in step.flat.eqns for v in eqn.outvars}
    for source, target in zip(inputs, outputs, strict=True):
        if not is_inexact(source):
            continue
        if is_literal(target) or not _reaches(target, source, producers, marked):
            return False
    return True


def _reaches(target: Var, source: Var, producers: dict[Var, JaxprEqn], stop: set[Var]) -> bool:
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
