"""The text of XLA's optimised HLO in; out, its collectives, their bytes and seconds, and operations. See README.md."""

from minialpa.hlo.analysis import HloCollective, bytes_by_kind, collective_of, collectives, seconds

__all__ = ["HloCollective", "bytes_by_kind", "collective_of", "collectives", "seconds"]
