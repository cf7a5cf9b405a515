"""The rule table: importing this module registers the rules of all families.

Each family has its file; a primitive without a rule is replicated (factors.replicated_factors).
"""

from minialpa.rules import (
    attention,
    contraction,
    control,
    elementwise,
    index,
    layout,
    random,
    reduction,
    reshape,
    slice,
    window,
)

__all__ = [
    "attention",
    "contraction",
    "control",
    "elementwise",
    "index",
    "layout",
    "random",
    "reduction",
    "reshape",
    "slice",
    "window",
]
