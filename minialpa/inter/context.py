"""What a planner is given, as one value that every pass of planning reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.inter.search.stage_solve import StageSolver
from minialpa.options import PlanOptions
from minialpa.tracing.trace import TracedStep

#: Told what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext:
    """One step to plan, the cluster that runs it, and what the user asks for.

    Attributes:
        traced: the step.
        cluster: its devices, host by host.
        solver: solves stages for all attempts at a plan, each distinct stage once.
        options: what the method asks for.
        logical_mesh: the view of all devices that the user gave in place of a cluster; None for the planner's choice.
        report: told of long work.
        below_s: seconds of a step that the caller has a plan for already. What cannot be faster may be given up.
    """

    traced: TracedStep
    cluster: ClusterSpec
    solver: StageSolver
    options: PlanOptions
    logical_mesh: LogicalMesh | None
    report: Progress
    below_s: float = math.inf

    def asking(self, **options: Any) -> PlanningContext:
        """The same step on the same cluster with some of the options replaced."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **options))
