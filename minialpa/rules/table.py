"""The rule table: importing this module registers the rules of all families.

Each family has its file; a primitive without a rule is replicated (known_rules.replicated_factors).
"""

from minialpa.rules import (
    attention,
    contraction,
    control,
    cudnn_attention,
    custom_partitioning,
    elementwise,
    index,
    layout,
    pallas,
    random,
    reduction,
    registered,
    reshape,
    slice,
    window,
)

__all__ = [
    "attention",
    "contraction",
    "control",
    "cudnn_attention",
    "custom_partitioning",
    "elementwise",
    "index",
    "layout",
    "pallas",
    "random",
    "reduction",
    "registered",
    "reshape",
    "slice",
    "window",
]
