"""Name scopes: which forward equation of which gradient an equation comes from, and whether autodiff made it."""

from __future__ import annotations

import re

_TAG = re.compile(r"minialpa\.(\d+)\.(\d+)\.(\d+)")


#: What jax adds to the names that users and their libraries give: transformations, and places in loops.
_OF_JAX = frozenset(("jvp", "transpose", "vmap", "jit", "pjit", "remat", "checkpoint", "while", "body", "cond", ""))


def tag_scope(modules: str, call: int, layer: int, index: int) -> str:
    """Name scope for forward equation `index` of these modules, in `layer`, of gradient call `call` of a step."""
    tag = f"minialpa.{call}.{layer}.{index}"
    return f"{modules}/{tag}" if modules else tag


def module_path(scope: str) -> str:
    """The names in a scope that the user, or a library of modules, gave, such as `GPT/blocks_3/attn`."""
    names = re.split(r"[/()]", scope)
    return "/".join(name for name in names if name not in _OF_JAX and not _TAG.fullmatch(name))


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
