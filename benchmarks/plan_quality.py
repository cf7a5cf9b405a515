"""The planner's plans against what experts write by hand: seconds of communication, and bytes per device.

Both are compiled, and the collectives of both are read from the compiled programs and priced on the same mesh:

    uniform     all links alike
    two-level   two halves; links between them have a tenth of the bandwidth of links inside

Compute is not priced: plan and recipe should both split every large matrix product over all devices. `flops_ratio`
shows whether they do: floating point operations of each device in products and convolutions, plan over recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import minialpa
from benchmarks.corpus import Case, arguments, cases
from benchmarks.recipes import Measured, measure, recipes_for
from benchmarks.registry import Rows, Size, benchmark
from minialpa import LogicalMesh, hlo

#: A recipe may need this many times the memory of the plan.
MEMORY_FACTOR = 1.2


@dataclass(frozen=True, slots=True)
class Links:
    """The same devices as logical meshes: `price` to price compiled programs on, `plan` to plan for."""

    name: str
    price: LogicalMesh
    plan: tuple[LogicalMesh, ...]


def links_of(n_devices: int) -> tuple[Links, Links]:
    """Uniform and two-level links. One axis over two levels crosses the slow link, so it has its price."""
    halves = (2, n_devices // 2)
    line, two = LogicalMesh((n_devices,)), LogicalMesh(halves)  # by default, inner links are ten times as fast
    (fast_s, fast), (slow_s, slow) = ((mesh.alpha[0], mesh.beta[0]) for mesh in (line, two))
    uniform = Links("uniform", line, (line, LogicalMesh(halves, (fast_s,) * 2, (fast,) * 2)))
    return uniform, Links("two-level", two, (LogicalMesh((n_devices,), (slow_s,), (slow,)), two))


@benchmark("plan_quality")
def plan_quality(size: Size) -> Rows:
    """Communication and memory of the plan, next to the best hand-written recipe, with and without its memory limit."""
    counts = (4, 8) if size == "full" else (4,)
    return [
        _row(case, links)
        for case in cases(size)
        for n_devices in counts
        for links in (links_of(n_devices) if size == "full" else links_of(n_devices)[:1])
    ]


def _row(case: Case, links: Links) -> dict[str, Any]:
    ours, optimal = _measure_plan(case, links)
    recipes = _measured(case, links.price.n_devices)
    seconds = {recipe.name: recipe.communication_s(links.price) for recipe in recipes}
    ours_s = ours.communication_s(links.price)
    fitting = [r for r in recipes if r.memory_bytes <= MEMORY_FACTOR * ours.memory_bytes]
    row: dict[str, Any] = {
        "model": case.name,
        "devices": links.price.n_devices,
        "links": links.name,
        "shape": ours.name,
        "optimal": optimal,
        "ours_us": ours_s * 1e6,
        "ours_mb": ours.memory_bytes / 1e6,
    }
    for label, candidates in (("fits", fitting), ("any", recipes)):
        if candidates:
            best = min(candidates, key=lambda recipe: seconds[recipe.name])
            row |= {
                f"{label}": best.name,
                f"{label}_us": seconds[best.name] * 1e6,
                f"{label}_mb": best.memory_bytes / 1e6,
                f"{label}_ratio": ours_s / seconds[best.name] if seconds[best.name] else float(ours_s > 0),
                f"{label}_flops_ratio": ours.flops / best.flops,
            }
    return row


@cache
def _measured(case: Case, n_devices: int) -> tuple[Measured, ...]:
    """The recipes, compiled once for all links."""
    return tuple(measure(case, recipe) for recipe in recipes_for(case, n_devices))


def _measure_plan(case: Case, links: Links) -> tuple[Measured, bool]:
    """The plan of the logical mesh for which the planner predicts the least, compiled, and whether it is proven."""
    built = case.build()
    args = arguments(built)
    step = built.train_step(minialpa.value_and_grad)
    plans = {
        mesh: minialpa.parallelize(step, method=minialpa.ShardParallel(devices=mesh)).plan(*args) for mesh in links.plan
    }
    mesh = min(plans, key=lambda mesh: plans[mesh].cost.total_s)
    executable = minialpa.parallelize(step, method=plans[mesh]).get_executable(*args)
    texts = executable.get_hlo_text()
    found = tuple(one for text in texts for one in hlo.collectives(text, scatter=True))
    name = "x".join(map(str, mesh.shape))
    measured = Measured(name, found, executable.get_total_allocation_size(), sum(map(hlo.flops, texts)))
    return measured, all(stage.optimal for stage in plans[mesh].stages)
