"""The decisions of the planner in, one `Plan` out: a value that prints, saves, loads and compares."""

from minialpa.plan.plan import Plan
from minialpa.plan.record import (
    Certificate,
    ExportedSpecs,
    PassName,
    PlacedValue,
    PlacementSpec,
    PlanCost,
    PlannedAlternative,
    PlannedCollective,
    PlannedOperator,
    PlannedPass,
    PlannedTransfer,
    SearchNotMade,
    StagePlan,
    UserSharding,
)
from minialpa.plan.text import seconds_text
from minialpa.plan.verify import verify_plan
from minialpa.support.sizes import bytes_text

__all__ = [
    "Certificate",
    "ExportedSpecs",
    "PassName",
    "PlacedValue",
    "PlacementSpec",
    "Plan",
    "PlanCost",
    "PlannedAlternative",
    "PlannedCollective",
    "PlannedOperator",
    "PlannedPass",
    "PlannedTransfer",
    "SearchNotMade",
    "StagePlan",
    "UserSharding",
    "bytes_text",
    "seconds_text",
    "verify_plan",
]
