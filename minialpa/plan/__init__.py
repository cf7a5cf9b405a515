"""Plans: everything that was decided about one step, as values that print, save, load and compare."""

from minialpa.plan.plan import (
    PlacedValue,
    PlacementSpec,
    Plan,
    PlanCost,
    PlannedCollective,
    PlannedOperator,
    StagePlan,
)
from minialpa.plan.verify import verify_plan

__all__ = [
    "PlacedValue",
    "PlacementSpec",
    "Plan",
    "PlanCost",
    "PlannedCollective",
    "PlannedOperator",
    "StagePlan",
    "verify_plan",
]
