"""Compiled programs: the text of XLA's optimised HLO in, its collectives and floating point operations out.

Imports: `cluster` and `cost`.
"""

from minialpa.hlo.analysis import HloCollective, bytes_by_kind, collectives, flops, mesh_axes, seconds

__all__ = ["HloCollective", "bytes_by_kind", "collectives", "flops", "mesh_axes", "seconds"]
