"""The rule table: importing this module registers the rules of all families, one file each."""

from minialpa.rules import (  # noqa: F401
    attention,
    contraction,
    control,
    custom_partitioning,
    elementwise,
    index,
    layout,
    pallas,
    random,
    reduction,
    registered,
)
