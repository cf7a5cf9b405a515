"""Refs of a step, as from `jax.new_ref`: a program that reads and writes them goes in; one on their values comes out.

    count[...] += 1.0, returns x          ->   (x, count) -> (x, count + 1.0)

The value of a Ref is an argument, and its new value is a result that replaces the argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.ref import AbstractRef, Ref

from minialpa.errors import TraceError
from minialpa.ir.block import Block
from minialpa.ir.equations import is_call, is_control_flow, is_literal, source_line, sub_jaxprs
from minialpa.support.private_jax import is_ref, without_refs

#: The number of the argument, in `arg_of_leaf`, of each leaf that is a Ref.
OF_REF = -2


@dataclass(frozen=True, slots=True)
class StepRefs:
    """The Refs of a step.

    Attributes:
        arguments: numbers of the argument leaves that are Refs.
        captured: Refs that the step reads from elsewhere, as from a closure. Their values are the last arguments.
        updated: numbers of the arguments whose new values are the last results.
    """

    arguments: tuple[int, ...] = ()
    captured: tuple[Any, ...] = ()
    updated: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.arguments or self.captured)

    def owners(self, arg_of_leaf: Sequence[int]) -> list[int]:
        """`arg_of_leaf` with `OF_REF` for each Ref, also for captured Refs."""
        owners = [OF_REF if i in self.arguments else number for i, number in enumerate(arg_of_leaf)]
        return owners + [OF_REF] * len(self.captured)


NO_REFS = StepRefs()


def is_ref_leaf(leaf: Any) -> bool:
    """Whether an argument leaf is a Ref or the type of a Ref."""
    return type(leaf) in (Ref, AbstractRef)


def ref_type(struct: jax.ShapeDtypeStruct) -> Any:
    """The type of a Ref of this array."""
    aval = jax.core.ShapedArray(struct.shape, struct.dtype, weak_type=struct.weak_type, sharding=struct.sharding)
    return AbstractRef(aval)


def type_in_ref(ref: Any, path: str) -> Any:
    """The type of the array in a Ref, or in a type of a Ref. Raises TraceError for a Ref in host memory."""
    aval = ref if type(ref) is AbstractRef else ref.aval
    spaces = (aval.memory_space, getattr(aval.inner_aval, "memory_space", None))
    if jax.memory.Space.Host in spaces:
        raise TraceError(
            f"`{path}` is a Ref in host memory. Pass an array in host memory instead, and return its new value."
        )
    return aval.inner_aval


def captured_path(number: int) -> str:
    return f"captured_refs[{number}]"


def in_batch(leaves: Sequence[Any], paths: Sequence[str], is_batch: Sequence[bool]) -> list[bool]:
    """`is_batch` without Refs. Raises TraceError for a Ref with examples."""
    out = []
    for leaf, path, batch in zip(leaves, paths, is_batch, strict=True):
        if batch and is_ref_leaf(leaf) and leaf.shape:
            raise TraceError(
                f"`{path}` is a Ref, and its argument is a batch. A batch is cut into micro-batches, and a Ref is not: "
                "pass `ref[...]`, or pass the Ref in an argument that is not in `batch_argnums`."
            )
        out.append(batch and not is_ref_leaf(leaf))
    return out


def check_distinct(refs: Sequence[Any], paths: Sequence[str]) -> None:
    """Raise TraceError if a Ref is among `refs` twice."""
    known: dict[int, str] = {}
    for ref, path in zip(refs, paths, strict=True):
        if type(ref) is Ref and known.setdefault(id(ref), path) != path:
            raise TraceError(
                f"`{known[id(ref)]}` and `{path}` are the same Ref. A step takes each Ref once, as in `jax.jit`: pass "
                "it in one argument, or copy it with `jax.new_ref(ref[...])`."
            )


def on_values(closed: ClosedJaxpr, n_args: int) -> tuple[ClosedJaxpr, StepRefs]:
    """The program on values of Refs, see `StepRefs`; the same object without Refs.

    Raises TraceError for a frozen argument, a Ref in host memory, and uses of Refs that jax cannot compile.
    """
    if not any(_uses_refs(closed)):
        return closed, NO_REFS
    _check_uses(closed.jaxpr)
    try:
        program, captured, updated = without_refs(closed)
    except NotImplementedError as error:
        raise TraceError(
            f"jax cannot compile a use of a Ref in the step: {error}. Pass `ref[...]` there instead of the Ref."
        ) from error
    return program, StepRefs(tuple(i for i in updated if i < n_args), tuple(captured), tuple(updated))


def without_unchanged(flat: Block, refs: StepRefs) -> tuple[Block, StepRefs]:
    """The program without new values of Refs that it only reads."""
    if not refs:
        return flat, refs
    n_results = len(flat.outvars) - len(refs.updated)
    changed = [
        (number, value)
        for number, value in zip(refs.updated, flat.outvars[n_results:], strict=True)
        if value is not flat.invars[number]
    ]
    outvars = (*flat.outvars[:n_results], *(value for _, value in changed))
    return replace(flat, outvars=outvars), replace(refs, updated=tuple(number for number, _ in changed))


def _uses_refs(closed: ClosedJaxpr) -> Iterator[bool]:
    yield any(is_ref(var.aval) for var in (*closed.jaxpr.constvars, *closed.jaxpr.invars))
    for eqn in _equations(closed.jaxpr):
        yield any(is_ref(atom.aval) for atom in (*eqn.invars, *eqn.outvars))


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations outside of kernels."""
    for eqn in jaxpr.eqns:
        yield eqn
        if is_call(eqn) or is_control_flow(eqn):
            for body in sub_jaxprs(eqn):
                yield from _equations(body)


def _check_uses(jaxpr: Jaxpr) -> None:
    made: set[Var] = set()
    frozen: set[Var] = set()
    for eqn in jaxpr.eqns:
        refs = {atom for atom in (*eqn.invars, *eqn.outvars) if not is_literal(atom) and is_ref(atom.aval)}
        _check_use(eqn, refs, is_frozen=not frozen.isdisjoint(refs), is_own=refs <= made)
        if eqn.primitive.name in _ENDS:
            frozen.update(refs)
        made.update(eqn.outvars)
        if is_call(eqn) or is_control_flow(eqn):
            for body in sub_jaxprs(eqn):
                _check_uses(body)


#: They end the life of a Ref.
_ENDS = ("freeze", "free_ref")


def _check_use(eqn: JaxprEqn, refs: set[Var], *, is_frozen: bool, is_own: bool) -> None:
    """is_frozen: whether one of `refs` has ended. is_own: whether this function has created them all."""
    use = f"{eqn.primitive.name}`{_place(eqn)}"
    if is_frozen:
        raise TraceError(
            f"`{use} uses a Ref after `jax.freeze`. Use the array that `jax.freeze` returns, or read `ref[...]` "
            "instead of `jax.freeze(ref)`."
        )
    if any(getattr(ref.aval, "memory_space", None) not in (None, jax.memory.Space.Device) for ref in refs):
        raise TraceError(f"`{use} uses a Ref with a memory space. Keep the value in an array, and pass and return it.")
    if eqn.primitive.name in _ENDS and not is_own:
        raise TraceError(
            f"`jax.{use} ends a Ref that the step, or an inner function, did not create. Read `ref[...]` instead."
        )


def _place(eqn: JaxprEqn) -> str:
    line = source_line(eqn)
    return f" at {line}" if line else ""
