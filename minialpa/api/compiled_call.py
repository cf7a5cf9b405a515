"""Calls of a compiled step: arguments go in and are checked, the result comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from minialpa.api.invalid_values import call_checked, checks_values
from minialpa.calls import Call, Parameters, Shape, are_alive
from minialpa.errors import DeletedArrayError, TraceError
from minialpa.pytrees import update_modules

if TYPE_CHECKING:
    from minialpa.runtime.executable import Executable


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCall:
    """Calls an executable. It does not keep the parallelized function alive.

    Attributes:
        bound: the object of a bound method; empty for functions.
        key: `Call.key` of the calls that the executable was compiled for.
        result_of: from the leaves that the program returns to the result.
    """

    name: str
    parameters: Parameters
    bound: tuple[Any, ...]
    key: Any
    result_of: Callable[[Sequence[Any]], Any]

    def __call__(self, executable: Executable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raises TraceError for arguments that the executable was not compiled for."""
        if checks_values():
            return call_checked(self.name, lambda *args, **kwargs: self(executable, args, kwargs), args, kwargs)
        call = self.parameters.bind((*self.bound, *args), kwargs)
        check_alive(call, self.parameters)
        if call.key() != self.key:
            raise TraceError(
                f"The executable of {self.name} is called with other arguments than it was compiled for: "
                f"{self._difference(call)}. Compile for these with `lower(...).compile()`, or call {self.name}."
            )
        return result_of_call(call, self.result_of(executable.run(call.leaves)))

    def _difference(self, call: Call) -> str:
        (tree, *_, types), called = self.key, call.key()
        called_tree, called_types = called[0], called[-1]  # type: ignore[index]
        if called_tree[0] != tree[0]:
            return f"their structure is {called_tree[0]} instead of {tree[0]}"
        for i, (found, requested) in enumerate(zip(called_types, types, strict=True)):
            if found != requested:
                path = self.parameters.paths(call)[0][i]
                return f"`{path}` is {_type_text(found)} instead of {_type_text(requested)}"
        return "static arguments, their number or settings of jax differ"


def result_of_call(call: Call, made: Any) -> Any:
    """The result of a call. Modules of flax.nnx among its arguments get their new values.

    made: the result of the program; with such modules, the pair of their new values and the result.
    """
    if call.graph is None:
        return made
    values, returned = made
    update_modules(call.modules, values)
    return returned


def check_alive(call: Call, parameters: Parameters) -> None:
    """Raise DeletedArrayError for a donated leaf, and TraceError for a shape or a traced value.

    A compiled program may crash on an array without memory, so this comes first.
    """
    if are_alive(call.leaves):
        return
    for i, leaf in enumerate(call.leaves):
        is_deleted = getattr(leaf, "is_deleted", None)
        if is_deleted is None:
            # Numbers, NumPy arrays and shapes cannot be deleted.
            if isinstance(leaf, Shape):
                raise TraceError(
                    f"`{parameters.paths(call)[0][i]}` is a `{type(leaf).__name__}`, a shape without values. Pass an "
                    "array; only `plan`, `lower` and `get_executable` take shapes."
                )
            continue

        if isinstance(leaf, jax.core.Tracer):
            raise TraceError(
                f"`{parameters.paths(call)[0][i]}` is a traced value. A parallelized function runs on devices and "
                "cannot be called inside `jax.jit`, `jax.grad` or `jax.vmap`; call it outside, or call the plain "
                "function."
            )
        if is_deleted():
            raise DeletedArrayError(
                f"`{parameters.paths(call)[0][i]}` has been deleted: it was donated to an earlier call, whose "
                "result took over its memory. Pass that result, or keep arguments alive with `donate_argnums=()`."
            )


def _type_text(leaf_key: Any) -> str:
    """The type of a leaf from its key: (class,), or (shape, dtype, is_weak, ...) for an array."""
    if len(leaf_key) == 1:
        return f"a {leaf_key[0].__name__}"
    shape, dtype, is_weak, *memory = leaf_key
    return " ".join([f"{dtype}{list(shape)}", *(["of a Python number"] if is_weak else []), *map(str, memory)])
