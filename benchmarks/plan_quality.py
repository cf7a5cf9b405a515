"""The planner's plans against hand-written recipes of experts: seconds of communication, and bytes per device.

Both are compiled, and the collectives of both are read from the compiled programs and priced on the same mesh:

    uniform     all links alike
    two-level   two halves; links between them have a tenth of the bandwidth of links inside

Each has three memory limits, which also hold for the recipes:

    loose       no limit
    middle      halfway between the recipe that needs least memory and the plan without a limit
    tight       3 % more than the recipe that needs least memory

Compute has no price, because plan and recipe should both split every large matrix product over all devices.
`flops_ratio` shows whether they do: floating point operations of each device in products and convolutions, plan over
recipe.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import minialpa
from benchmarks import compiled_figures
from benchmarks.corpus import Case, arguments, cases
from benchmarks.recipes import Measured, measure, recipes_for
from benchmarks.registry import Rows, Size, benchmark
from minialpa import AutoShardingOption, LogicalMesh, ShardParallel
from minialpa.errors import InfeasibleError

#: A tight limit, as a multiple of the memory of the recipe with the least memory.
_TIGHT = 1.03
#: In the middle limit, the memory of the plan without a limit counts as at least this multiple.
_MIDDLE = 1.1


@dataclass(frozen=True, slots=True)
class Links:
    """The same devices as logical meshes: `price` to price compiled programs on, `plan` to plan for."""

    name: str
    price: LogicalMesh
    plan: tuple[LogicalMesh, ...]


def links_of(n_devices: int) -> tuple[Links, Links]:
    """Uniform and two-level links. One axis over two levels crosses the slow link and has its price."""
    halves = (2, n_devices // 2)
    line, two = LogicalMesh((n_devices,)), LogicalMesh(halves)  # by default, inner links are ten times as fast
    (fast_s, fast), (slow_s, slow) = ((mesh.alpha[0], mesh.beta[0]) for mesh in (line, two))
    uniform = Links("uniform", line, (line, LogicalMesh(halves, (fast_s,) * 2, (fast,) * 2)))
    return uniform, Links("two-level", two, (LogicalMesh((n_devices,), (slow_s,), (slow,)), two))


@benchmark("plan_quality")
def plan_quality(size: Size) -> Rows:
    """Communication and memory of the plan, next to the best hand-written recipe, with and without memory limits."""
    n_devices = 8 if size == "full" else 4
    return [
        row
        for case in cases(size)
        for links in (links_of(n_devices) if size == "full" else links_of(n_devices)[:1])
        for row in _rows(case, links)
    ]


def _rows(case: Case, links: Links) -> Rows:
    """A row for each limit of memory."""
    recipes = _measured(case, links.price.n_devices)
    least = min(recipe.memory_bytes for recipe in recipes)
    loose = _measure_plan(case, links, None)
    assert loose is not None, case
    middle = (least + max(loose[0].memory_bytes, _MIDDLE * least)) / 2
    limits = {"middle": middle, "tight": _TIGHT * least}
    plans = {"loose": (None, loose)} | {name: (n, _measure_plan(case, links, n)) for name, n in limits.items()}
    return [
        {"model": case.name, "devices": links.price.n_devices, "links": links.name, "memory": name}
        | _compared(found, recipes, limit, links)
        for name, (limit, found) in plans.items()
    ]


def _compared(
    found: tuple[Measured, bool] | None, recipes: tuple[Measured, ...], limit: float | None, links: Links
) -> dict[str, Any]:
    """The plan beside the fitting recipe with the least communication."""
    fitting = [recipe for recipe in recipes if limit is None or recipe.memory_bytes <= limit]
    best = min(fitting, key=lambda recipe: recipe.communication_s(links.price))
    best_s = best.communication_s(links.price)
    row: dict[str, Any] = {"limit_mb": limit / 1e6 if limit else ""}
    if found is None:
        row |= {"shape": "no plan"}
    else:
        ours, optimal = found
        ours_s = ours.communication_s(links.price)
        row |= {
            "shape": ours.name,
            "optimal": optimal,
            "ours_us": ours_s * 1e6,
            "ours_mb": ours.memory_bytes / 1e6,
            "ratio": ours_s / best_s if best_s else float(ours_s > 0),
            "flops_ratio": ours.flops / best.flops,
        }
    return row | {"recipe": best.name, "recipe_us": best_s * 1e6, "recipe_mb": best.memory_bytes / 1e6}


@cache
def _measured(case: Case, n_devices: int) -> tuple[Measured, ...]:
    """The recipes, compiled once for all links."""
    return tuple(measure(case, recipe) for recipe in recipes_for(case, n_devices))


def _measure_plan(case: Case, links: Links, limit: float | None) -> tuple[Measured, bool] | None:
    """The compiled plan of the logical mesh with the least predicted seconds, and whether the plan is proven.

    None if no plan fits the limit.
    """
    built = case.build()
    args = arguments(built)
    step = built.train_step(minialpa.value_and_grad)
    plans = {}
    for mesh in links.plan:
        method = ShardParallel(devices=mesh, auto_sharding_option=AutoShardingOption(memory_limit_bytes=limit))
        with contextlib.suppress(InfeasibleError):
            plans[mesh] = minialpa.parallelize(step, method=method, plan_cache=None).plan(*args)
    if not plans:
        return None

    mesh = min(plans, key=lambda mesh: plans[mesh].cost.total_s)
    executable = minialpa.parallelize(step, method=plans[mesh]).get_executable(*args)
    texts = executable.get_hlo_text()
    found = tuple(one for text in texts for one in compiled_figures.collectives(text))
    name = "x".join(map(str, mesh.shape))
    measured = Measured(name, found, executable.get_total_allocation_size(), sum(map(compiled_figures.flops, texts)))
    return measured, all(stage.optimal for stage in plans[mesh].stages)
