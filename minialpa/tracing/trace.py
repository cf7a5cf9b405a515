"""`trace_step` turns a Python step and the shapes of its arguments into a `TracedStep`, without a device.

A `TracedStep` holds one flat program for the full batch, the origin of each equation, the batch dimension of each
argument leaf, and the argument leaf that each result replaces. All of planning works on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import jax
from jax.extend.core import Var
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from minialpa.errors import TraceError
from minialpa.ir.block import Block
from minialpa.ir.equations import aval_of
from minialpa.ir.op import Origin
from minialpa.tracing.arguments import argument_name, find_batch_dims, leaf_type
from minialpa.tracing.batched_lookups import with_batched_lookups
from minialpa.tracing.fingerprint import Fingerprint, fingerprint_of
from minialpa.tracing.flags import with_flags_as_tests
from minialpa.tracing.flattening import trace_with_refs
from minialpa.tracing.gradients import tracing_step
from minialpa.tracing.manual_regions import Border
from minialpa.tracing.origins import with_origins, without_marks
from minialpa.tracing.refs import NO_REFS, StepRefs, captured_path, check_distinct, in_batch, is_ref_leaf, ref_type
from minialpa.tracing.replacements import StepValues, find_aliases, find_layouts
from minialpa.tracing.user_meshes import explicit_sharding, is_unreduced

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeafPart:
    """Rows (start, stop) of dimension 0 of the argument or result leaf with this number; None for the whole leaf."""

    leaf: int
    rows: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class NoBatch:
    """The reason why no argument was recognised as a batch; `ambiguous`: several arguments are candidates."""

    reason: str
    ambiguous: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A training step as a flat program on full-batch shapes.

    Attributes:
        flat: the program. Its invars are the leaves of the non-static arguments, in order.
        in_paths: names of the argument leaves, such as `state.params['w']`.
        out_paths: names of the result leaves.
        batch_dims: for each invar, the dimension that holds the examples, or None.
        batch_size: number of examples; None without a batch.
        aliases: for each outvar, the number of the invar that it replaces if that argument is donated, or None.
        layouts: for each outvar, the number of the invar whose sharding it takes, donated or not, or None.
        gradients: the gradients that `value_and_grad` marked, as variables of `flat`.
        n_boundaries: number of pipeline boundaries.
        out_tree: pytree of the results.
        border: the shardings of a `shard_map` or `pmap` around the step.
        in_parts: for each invar, its argument leaf or rows of it; empty if invars are whole leaves.
        out_parts: the same for outvars and result leaves.
        in_tree: pytree of the arguments, as a tuple without the static ones; None if unknown.
        no_batch: why no batch was recognised; None if there is one, or if the user named the batch arguments.
        out_shardings: for each leaf of `out_tree`, the sharding of its type on Explicit axes of the user, or None.
        refs: Refs among and beside the arguments. Their new values are results after the leaves of `out_tree`.
    """

    flat: Block
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    batch_dims: tuple[int | None, ...]
    batch_size: int | None
    aliases: tuple[int | None, ...]
    layouts: tuple[int | None, ...]
    gradients: tuple[Var, ...]
    n_boundaries: int
    out_tree: Any
    border: Border
    in_parts: tuple[LeafPart, ...] = ()
    out_parts: tuple[LeafPart, ...] = ()
    in_tree: PyTreeDef | None = None
    no_batch: NoBatch | None = None
    out_shardings: tuple[NamedSharding | None, ...] = ()
    refs: StepRefs = NO_REFS
    _known: list[Fingerprint] = field(default_factory=list, init=False, repr=False, compare=False)

    def argument(self, i: int) -> LeafPart:
        """The argument leaf, or rows of it, that invar `i` holds."""
        return self.in_parts[i] if self.in_parts else LeafPart(i, None)

    def result(self, i: int) -> LeafPart:
        """The result leaf, or rows of it, that outvar `i` holds."""
        return self.out_parts[i] if self.out_parts else LeafPart(i, None)

    @property
    def batch_arguments(self) -> tuple[str, ...]:
        leaves = zip(self.in_paths, self.batch_dims, strict=True)
        return tuple(dict.fromkeys(argument_name(path) for path, dim in leaves if dim is not None))

    @property
    def examples(self) -> frozenset[Var]:
        """The invars with a batch dimension."""
        leaves = zip(self.flat.invars, self.batch_dims, strict=True)
        return frozenset(v for v, dim in leaves if dim is not None)

    @property
    def origins(self) -> tuple[Origin, ...]:
        return self.flat.origins

    @property
    def n_groups(self) -> int:
        return max((origin.group for origin in self.origins if origin.group is not None), default=-1) + 1

    @property
    def fingerprint(self) -> Fingerprint:
        """Equal for equal steps, in every process."""
        if not self._known:
            flat = self.flat
            about = f"{self.batch_dims} {self.aliases} {self.layouts}"
            self._known.append(fingerprint_of((*flat.constvars, *flat.invars), flat.eqns, flat.outvars, about))
        return self._known[0]


def trace_step(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    *,
    in_paths: Sequence[str],
    is_batch: Sequence[bool],
    arg_of_leaf: Sequence[int],
    donate: Sequence[int] | Literal["auto"],
    state_like: Sequence[int] = (),
    in_tree: PyTreeDef | None = None,
) -> TracedStep:
    """Trace `fun(*leaves)`, a function of flat leaves that returns a pytree.

    in_paths: name of each leaf, for messages.
    is_batch: for each leaf, whether its argument holds examples.
    arg_of_leaf: for each leaf, the number of its argument.
    donate: numbers of donated arguments, or "auto" for arguments that the step updates.
    state_like: numbers of arguments that "auto" donates once results have their shapes and dtypes.
    in_tree: the pytree of the arguments, if known.

    Raises TraceError if a leaf is neither an array nor a Ref, or if the step's Python code needs the value of one.
    """
    check_distinct(leaves, in_paths)
    types = [leaf_type(leaf, path) for leaf, path in zip(leaves, in_paths, strict=True)]
    batch_dims, batch_size = find_batch_dims(types, in_paths, in_batch(leaves, in_paths, is_batch))

    try:
        with tracing_step():
            pairs = zip(leaves, types, strict=True)
            args = [ref_type(found) if is_ref_leaf(leaf) else found for leaf, found in pairs]
            flat, results, refs, border = trace_with_refs(fun, *args)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise TraceError(
            f"The step uses a mesh axis ({str(error).split('. ')[0]}). Write the step for one device, without "
            "collectives such as `jax.lax.pmean`: minialpa adds them where devices share the examples."
        ) from error
    except jax.errors.UnexpectedTracerError:  # names the line of the value
        raise
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError, ValueError) as error:
        if isinstance(error, ValueError) and _NOT_HASHABLE not in str(error):
            raise
        scalars = {
            path: number
            for path, struct, number in zip(in_paths, types, arg_of_leaf, strict=True)
            if not struct.shape and path.isidentifier()
        }
        raise TraceError(_trace_message(error, scalars)) from error

    _check_reduced(results)
    # Dead operations go last: batched lookups no longer read the equations of the positions.
    program = without_marks(with_flags_as_tests(with_batched_lookups(flat)))
    flat = with_origins(program.flat.without_dead_operations())

    paths = (*in_paths, *map(captured_path, range(len(refs.captured))))
    check_distinct((*leaves, *refs.captured), paths)
    batch_dims += (None,) * len(refs.captured)
    values = StepValues(
        flat=flat, arg_of_leaf=refs.owners(arg_of_leaf), batch_dims=batch_dims, gradients=program.gradients, refs=refs
    )
    aliases = find_aliases(values, donate, state_like)
    named_results = jax.tree_util.tree_leaves_with_path(results)
    return TracedStep(
        flat=flat,
        in_paths=paths,
        out_paths=(
            *("result" + jax.tree_util.keystr(path) for path, _ in named_results),
            *(f"{paths[i]}[...]" for i in refs.updated),
        ),
        batch_dims=batch_dims,
        batch_size=batch_size,
        aliases=aliases,
        layouts=find_layouts(values, aliases),
        gradients=program.gradients,
        n_boundaries=max([program.n_boundaries, *(op.origin.layer for op in flat.ops)]),
        out_tree=jax.tree.structure(results),
        in_tree=in_tree,
        out_shardings=tuple(map(explicit_sharding, jax.tree.leaves(results))),
        border=border,
        refs=refs,
    )


def _check_reduced(results: Any) -> None:
    for path, result in jax.tree_util.tree_leaves_with_path(results):
        sharding = explicit_sharding(result)
        if sharding is not None and is_unreduced(sharding):
            raise TraceError(
                f"`result{jax.tree_util.keystr(path)}` is unreduced over axes of the mesh ({sharding.spec}). Return "
                "`jax.sharding.reshard(x, spec)` with a spec without unreduced axes."
            )


#: In the text of a ValueError of an inner `jax.jit`.
_NOT_HASHABLE = "Non-hashable static arguments"
#: The first class of an error has the advice.
_ADVICE: tuple[tuple[type[Exception], str], ...] = (
    (jax.errors.TracerBoolConversionError, "Choose with `jnp.where` or `jax.lax.cond`."),
    (jax.errors.TracerArrayConversionError, "Use `jax.numpy` instead of NumPy."),
    (
        jax.errors.TracerIntegerConversionError,
        "Index an array of `jax.numpy` in place of a list, and loop with `jax.lax.fori_loop`.",
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        "The shape of a result must not depend on values: choose with `jnp.where(mask, x, 0)`, which keeps the shape.",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "Return the value and use it outside the step, or compute with `jax.numpy`.",
    ),
    (
        ValueError,
        "The value is a static argument of an inner `jax.jit`. Pass it as another argument there, or make the "
        "argument of the step static, with `static_argnums`.",
    ),
)


def _trace_message(error: Exception, scalars: Mapping[str, int]) -> str:
    """scalars: the arguments that are single numbers, and so may be static, with their numbers."""
    text = str(error).strip()
    advice = next((advice for kind, advice in _ADVICE if isinstance(error, kind)), "")
    _, _, names = text.partition("argument")
    for name, number in scalars.items():
        if re.search(rf"\b{name}\b(?!\[)", names):
            advice += f" If the program depends on `{name}`, make it static, with `static_argnums=({number},)`."
    return f"The step's Python code uses the value of a traced argument: {text}\n{advice.strip()}"


def with_batch(
    step: TracedStep,
    batch: Sequence[int],
    *,
    arg_of_leaf: Sequence[int],
    donate: Sequence[int] | Literal["auto"],
    state_like: Sequence[int] = (),
) -> TracedStep:
    """A step that was traced without a batch and with `donate="auto"`, as if traced with `batch` and `donate`.

    batch: numbers of the arguments that hold examples. Other parameters and errors: see `trace_step`.
    """
    arg_of_leaf = step.refs.owners(arg_of_leaf)
    types = [jax.ShapeDtypeStruct(aval_of(var).shape, aval_of(var).dtype) for var in step.flat.invars]
    batch_dims, batch_size = find_batch_dims(types, step.in_paths, [number in batch for number in arg_of_leaf])
    values = StepValues(
        flat=step.flat, arg_of_leaf=arg_of_leaf, batch_dims=batch_dims, gradients=step.gradients, refs=step.refs
    )

    # No result replaces a batch argument. If no alias named one, the aliases of "auto" stay.
    is_new = donate != "auto" or any(i is not None and batch_dims[i] is not None for i in step.aliases)
    aliases = find_aliases(values, donate, state_like) if is_new else step.aliases
    return replace(
        step,
        batch_dims=batch_dims,
        batch_size=batch_size,
        aliases=aliases,
        layouts=find_layouts(values, aliases),
    )


def with_leaves(step: TracedStep, gone_inputs: AbstractSet[Var], results: Sequence[int]) -> TracedStep:
    """The step without the inputs `gone_inputs`, and with the results that `results` numbers.

    gone_inputs: arguments and constants that no equation reads, and whose memory or sharding no result takes.
    """
    flat = step.flat
    consts = [i for i, v in enumerate(flat.constvars) if v not in gone_inputs]
    arguments = [i for i, v in enumerate(flat.invars) if v not in gone_inputs]
    new_number: dict[int | None, int | None] = {None: None, **{old: new for new, old in enumerate(arguments)}}
    return replace(
        step,
        flat=replace(
            flat,
            constvars=_selected(flat.constvars, consts),
            consts=_selected(flat.consts, consts),
            invars=_selected(flat.invars, arguments),
            outvars=_selected(flat.outvars, results),
        ),
        in_paths=_selected(step.in_paths, arguments),
        out_paths=_selected(step.out_paths, results),
        batch_dims=_selected(step.batch_dims, arguments),
        aliases=tuple(new_number[i] for i in _selected(step.aliases, results)),
        layouts=tuple(new_number[i] for i in _selected(step.layouts, results)),
        in_parts=tuple(map(step.argument, arguments)),
        out_parts=tuple(map(step.result, results)),
    )


def _selected(values: Sequence[T], numbers: Sequence[int]) -> tuple[T, ...]:
    return tuple(values[i] for i in numbers)
