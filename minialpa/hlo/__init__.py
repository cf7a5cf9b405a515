"""Compiled programs: reads the collectives and floating point operations from the text of XLA's optimised HLO.

Imports: `cluster` and `cost`.
"""

from minialpa.hlo.analysis import HloCollective, bytes_by_kind, collective_of, collectives, seconds

__all__ = ["HloCollective", "bytes_by_kind", "collective_of", "collectives", "seconds"]
