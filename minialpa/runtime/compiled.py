"""Functions compiled for a mesh: what `jax.jit` has lowered in, something that is called with arrays out."""

from __future__ import annotations

import functools
from typing import Any

import jax

#: Elements of less than a byte. The function that `lower(...).compile()` gives takes no arrays of these on CPU: it asks
#: for a packed layout, which such arrays never have there. Calls of the jitted function pack and unpack them.
_NARROW = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")


def compiled_call(jitted: Any, lowered: Any) -> Any:
    """The function that `lowered` is of, compiled. lowered: what `jitted` has lowered to."""
    avals = jax.tree.leaves(lowered.in_avals)
    return NarrowCall(jitted, lowered) if any(str(aval.dtype) in _NARROW for aval in avals) else lowered.compile()


class NarrowCall:
    """A compiled function that takes arrays of narrow elements. It is compiled when it is first called, and for those
    who look into it by the methods of `jax.stages.Compiled` once more."""

    def __init__(self, jitted: Any, lowered: Any) -> None:
        self._jitted, self._lowered = jitted, lowered

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*args)

    @functools.cached_property
    def _compiled(self) -> Any:
        return self._lowered.compile()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)
