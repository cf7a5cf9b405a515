"""Importing this module fills the rule table: each family of primitives registers the rules of its file."""

from minialpa.rules import (  # noqa: F401
    attention,
    contraction,
    control,
    custom_partitioning,
    elementwise,
    grouped,
    index,
    layout,
    pallas,
    random,
    reduction,
    registered,
)
