"""`compiled` marks loops on numbers and NumPy arrays that run as machine code.

Importing numba takes half a second, and small steps need no such loop: the first call compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

# Imported here, so the digest is of the text that runs.
from minialpa.support import loop_sources  # noqa: F401

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    return cast(_Function, _CompiledLoop(function))


class _CompiledLoop:
    """Calls go to the machine code, other attributes to numba's dispatcher."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.dispatcher(*args)

    @functools.cached_property
    def dispatcher(self) -> Any:
        from minialpa.support.machine_code import dispatcher_of

        return dispatcher_of(self._with_dispatchers())

    def _with_dispatchers(self) -> Callable[..., Any]:
        function = self.function
        assert isinstance(function, FunctionType), function
        used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        loops = {name: value.dispatcher for name, value in used.items() if isinstance(value, _CompiledLoop)}
        if not loops:
            return function
        names = function.__globals__ | loops
        copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
        copy.__qualname__, copy.__module__, copy.__doc__ = function.__qualname__, function.__module__, function.__doc__
        copy.__annotations__ = function.__annotations__
        return copy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dispatcher, name)
