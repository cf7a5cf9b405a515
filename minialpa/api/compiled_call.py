"""What every call of a compiled step does around its program: checks of its arguments before, and its result after."""

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
    """Calls of an executable with the arguments of its step. It does not keep the parallelized function alive.

    Attributes:
        name: of the step.
        parameters: of the step.
        bound: what a method of a class is called on; empty for functions.
        key: `Call.key` of the calls that it was compiled for.
        result_of: makes the result of a call of the leaves that the program returns.
    """

    name: str
    parameters: Parameters
    bound: tuple[Any, ...]
    key: Any
    result_of: Callable[[Sequence[Any]], Any]

    def __call__(self, executable: Executable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call. Raises TraceError for arguments that it was not compiled for."""
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
        (tree, *_, types), own = self.key, call.key()
        own_tree, own_types = own[0], own[-1]  # type: ignore[index]
        if own_tree[0] != tree[0]:
            return f"their structure is {own_tree[0]} instead of {tree[0]}"
        for i, (found, requested) in enumerate(zip(own_types, types, strict=True)):
            if found != requested:
                path = self.parameters.paths(call)[0][i]
                return f"`{path}` is {_type_text(found)} instead of {_type_text(requested)}"
        return "static arguments, their number or settings of jax differ"


def result_of_call(call: Call, made: Any) -> Any:
    """What a call returns. Modules of flax.nnx among its arguments get their new values.

    made: the result with these values before it, if there are such modules.
    """
    if call.graph is None:
        return made
    values, returned = made
    update_modules(call.modules, values)
    return returned


def check_alive(call: Call, parameters: Parameters) -> None:
    """Raise before anything runs: a compiled program may crash on an array that has no memory any more."""
    if are_alive(call.leaves):
        return
    for i, leaf in enumerate(call.leaves):
        is_deleted = getattr(leaf, "is_deleted", None)
        if is_deleted is None:
            # Numbers and NumPy arrays cannot be deleted, and neither can what only has a shape.
            if isinstance(leaf, Shape):
                raise TraceError(
                    f"`{parameters.paths(call)[0][i]}` is a shape, and a call needs arrays. Only `plan` and "
                    f"`get_executable` take a `{type(leaf).__name__}`."
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
                f"`{parameters.paths(call)[0][i]}` has been deleted: it was donated to an earlier call, whose result "
                "took over its memory. Pass that result, or keep arguments alive with `donate_argnums=()`."
            )


def _type_text(leaf_key: Any) -> str:
    """The type of a leaf by its part in `Call.key`."""
    if len(leaf_key) == 1:
        return f"a {leaf_key[0].__name__}"
    shape, dtype, is_weak, *memory = leaf_key
    return " ".join([f"{dtype}{list(shape)}", *(["of a Python number"] if is_weak else []), *map(str, memory)])
