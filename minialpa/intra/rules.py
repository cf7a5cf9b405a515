"""The rule table: importing this module registers the rules of all families.

Each family has its file; a primitive without a rule is replicated (factors.replicated_factors).
"""

from minialpa.intra import (
    rules_contraction,
    rules_control,
    rules_elementwise,
    rules_index,
    rules_layout,
    rules_random,
    rules_reduction,
    rules_reshape,
    rules_slice,
    rules_window,
)

__all__ = [
    "rules_contraction",
    "rules_control",
    "rules_elementwise",
    "rules_index",
    "rules_layout",
    "rules_random",
    "rules_reduction",
    "rules_reshape",
    "rules_slice",
    "rules_window",
]
