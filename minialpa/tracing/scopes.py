"""Name scopes: which forward equation of which gradient an equation comes from, and whether autodiff made it."""

from __future__ import annotations

import re

_TAG = re.compile(r"minialpa\.(\d+)\.(\d+)\.(\d+)")


def tag_scope(call: int, layer: int, index: int) -> str:
    """Name scope for forward equation `index`, in `layer`, of gradient call number `call` of a step."""
    return f"minialpa.{call}.{layer}.{index}"


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
