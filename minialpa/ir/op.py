"""`Op`: an equation of jax with its place in the step; and the name scopes that encode its `Origin`."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from jax.extend.core import JaxprEqn

Direction = Literal["forward", "backward", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The place of an equation in the step.

    Attributes:
        direction: its pass; "other" includes the update.
        group: number of the forward equation that it is, or is a derivative of; None if unknown.
        layer: number of pipeline boundaries before that forward equation.
        call: number of the gradient call in the step, from 0.
        is_second: whether it is a derivative of a backward pass, as in a plain `jax.grad` of `jax.grad`.
    """

    direction: Direction
    group: int | None
    layer: int
    call: int = 0
    is_second: bool = False


#: The origin of equations outside both passes.
OTHER = Origin(direction="other", group=None, layer=0)


@dataclass(frozen=True, slots=True)
class Op:
    """An equation and its place in the step.

    Attributes:
        scope: the name scopes of its trace.
        source: number of the traced operation that it is or is written for, or -1.
        segment: its segment in `SplitStep`; -1 before micro-batches are split.
    """

    eqn: JaxprEqn
    scope: str = ""
    origin: Origin = OTHER
    source: int = -1
    segment: int = -1


# ---- name scopes -----------------------------------------------------------------------------------------------------

_TAG = re.compile(r"minialpa\.(\d+)\.(\d+)\.(\d+)")
#: A recomputed equation has the scope of its forward equation twice.
_REPEATED = re.compile(r"[\w(]*\([^()]*(minialpa\.\d+\.\d+\.\d+)\)+/(?=[\w(]*\([^()]*\1\))")

#: Names that jax adds to scopes: transformations and places in loops.
_OF_JAX = frozenset(("jvp", "transpose", "vmap", "jit", "pjit", "remat", "checkpoint", "while", "body", "cond", ""))


def tag_scope(modules: str, call: int, layer: int, index: int) -> str:
    """The name scope of forward equation `index`."""
    tag = f"minialpa.{call}.{layer}.{index}"
    return f"{modules}/{tag}" if modules else tag


def module_path(scope: str) -> str:
    """The names in a scope from the user or a library of modules, such as `GPT/blocks_3/attn`.

    The subscripts of `jnp.einsum` are left out.
    """
    names = re.split(r"[/()]", _REPEATED.sub("", scope))
    return "/".join(name for name in names if name not in _OF_JAX and not _TAG.fullmatch(name) and "->" not in name)


@functools.lru_cache(maxsize=4096)
def scope_in_profiles(scope: str) -> str:
    """A scope as `jax.jit` of the step writes it, such as `transpose(jvp(GPT))/blocks_3/attn`; without tags."""
    first, slash, rest = module_path(scope).partition("/")
    if "jvp(" in scope:
        first = f"transpose(jvp({first}))" if is_transposed(scope) else f"jvp({first})"
    return f"{first}{slash}{rest}"


def read_tag(scope: str) -> tuple[int, int, int] | None:
    """(call, layer, index) of the innermost tag of a scope. Autodiff keeps scopes, also in backward equations."""
    found = _TAG.findall(scope)
    return (int(found[-1][0]), int(found[-1][1]), int(found[-1][2])) if found else None


def is_transposed(scope: str) -> bool:
    """Whether autodiff made this equation in the backward pass."""
    return "transpose(" in scope


def is_second_derivative(scope: str) -> bool:
    """Whether autodiff made this equation from a backward pass."""
    return "(transpose(" in scope
