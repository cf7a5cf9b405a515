"""Bytes and seconds of reshardings between two meshes: each strategy, the chosen one, and a naive one.

Seconds are predicted, on hosts of eight devices with one link each. In the naive strategy, every device fetches its
parts separately, from the first device that has them.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from jax.sharding import PartitionSpec as P

from benchmarks.registry import Rows, Size, benchmark
from minialpa import ClusterSpec
from minialpa.inter.lower.cross_mesh import Crossing, plan_resharding, resharding_candidates, resharding_s
from minialpa.programs.program import MeshShape
from minialpa.programs.resharding import Move, Resharding, n_elements

#: Name, logical shape and spec on either side.
PAIRS: tuple[tuple[str, tuple[int, ...], P, tuple[int, ...], P], ...] = (
    ("tp 8 -> tp 4", (8,), P(None, None, "x"), (4,), P(None, None, "x")),
    ("dp 4 -> dp 8", (4,), P("x"), (8,), P("x")),
    ("dp 8 -> replicated 16", (8,), P("x"), (2, 8), P()),
    ("dp 8 -> tp 8", (8,), P("x"), (8,), P(None, None, "x")),
    ("replicated 8 -> 8", (8,), P(), (8,), P()),
    ("replicated 8 -> 16", (8,), P(), (2, 8), P()),
    ("replicated 8 -> 24", (8,), P(), (3, 8), P()),
    ("replicated 8 -> 64", (8,), P(), (8, 8), P()),
    ("replicated 16 -> 16", (2, 8), P(), (2, 8), P()),
    ("dp 2 tp 8 -> dp 8 tp 2", (2, 8), P("x", None, "y"), (8, 2), P("x", None, "y")),
    ("dp 2 (of 16) -> dp 4 (of 16)", (2, 8), P("x"), (4, 4), P("x")),
    ("tp 8 (of 16) -> tp 8 (of 32)", (2, 8), P(None, None, "y"), (4, 8), P(None, None, "y")),
    ("dp 64 -> tp 64", (64,), P("x"), (64,), P(None, None, "x")),
)


@benchmark("xmesh")
def xmesh(size: Size) -> Rows:
    """Predicted bytes and time of an activation between meshes: direct, broadcast, gather, the chosen, and naive."""
    shape = (64, 2048, 8192) if size == "full" else (64, 8, 64)
    return [_row(shape, *pair) for pair in (PAIRS if size == "full" else PAIRS[:3])]


def _row(
    shape: tuple[int, ...], name: str, lengths: tuple[int, ...], spec: P, target_lengths: tuple[int, ...], wanted: P
) -> dict[str, Any]:
    cluster = ClusterSpec.preset("a100-80gb", num_hosts=16)
    crossing = Crossing(
        shape=shape,
        item_bytes=2,
        source=MeshShape(0, lengths),
        source_spec=spec,
        target=MeshShape(64, target_lengths),
        target_spec=wanted,
        cluster=cluster,
    )
    start = time.perf_counter()
    plan = plan_resharding(crossing)
    plan_s = time.perf_counter() - start

    candidates = list(resharding_candidates(crossing))
    chosen = next(candidate.way for candidate in candidates if candidate.resharding == plan)
    ways = {"naive": _naive(candidates[0].resharding)}
    for way in ("direct", "broadcast", "gather"):
        of_way = [candidate for candidate in candidates if candidate.way == way]
        if of_way:
            ways[way] = min(of_way, key=lambda candidate: candidate.seconds).resharding
    return {
        "case": name,
        **{f"{way}_gb": _crossing_bytes(r, cluster) / 1e9 for way, r in ways.items()},
        **{f"{way}_ms": resharding_s(r, crossing) * 1e3 for way, r in ways.items()},
        "chosen": chosen,
        "chosen_ms": resharding_s(plan, crossing) * 1e3,
        "moves": len(plan.moves),
        "planning_ms": plan_s * 1e3,
    }


def _crossing_bytes(resharding: Resharding, cluster: ClusterSpec) -> int:
    """Bytes of all moves from host to host, without the gathers on the target mesh."""
    per_host = cluster.devices_per_host
    crossing = [move for move in resharding.moves if move.source // per_host != move.targets[0] // per_host]
    return sum(n_elements(move.box) for move in crossing) * resharding.item_bytes


def _naive(direct: Resharding) -> Resharding:
    moves = []
    for move in direct.moves:
        holder = min(
            device
            for device, outer in direct.source_boxes
            if all(a <= start and stop <= b for (start, stop), (a, b) in zip(move.box, outer, strict=True))
        )
        moves += [Move(move.box, holder, (device,)) for device in move.targets]
    return dataclasses.replace(direct, moves=tuple(moves))
