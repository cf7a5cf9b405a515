"""Plans as users see them: the fields of `PlanRecord`, and methods that print, compare, export, save and load them.

The top of this package. Each method calls a function of a module below, which takes a `PlanRecord`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minialpa.plan.check import PlanCheck
from minialpa.plan.codec import decode
from minialpa.plan.difference import difference
from minialpa.plan.export import export_specs, to_python
from minialpa.plan.file_format import MOST_CHARACTERS, fields_in, file_text
from minialpa.plan.record import ExportedSpecs, PlanRecord
from minialpa.plan.text import explain, summary
from minialpa.plan.verify import verify_plan
from minialpa.support.collection import collection_paused
from minialpa.support.files import write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanRecord):
    """The plan of one step on one cluster. Equal inputs give equal plans and equal JSON. Its fields: `PlanRecord`."""

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """The plan as a text of a few lines for each stage."""
        return summary(self)

    def explain(self, what: str) -> str:
        """Placement of the arguments and results whose path contains `what`, and the operators of that name."""
        return explain(self, what)

    def diff(self, other: Plan) -> str:
        """What `other` decides and predicts otherwise, each line with both sides: this plan -> the other."""
        return difference(self, other)

    def export_specs(self, mesh: int = 0) -> ExportedSpecs:
        """PartitionSpecs of the arguments and results on one mesh, by path, for `jax.jit`. See `ParallelizedFunc` for
        the same as pytrees."""
        return export_specs(self, mesh)

    def to_python(self, mesh: int = 0) -> str:
        """Python source of one mesh and of `export_specs`, to paste into a training loop without minialpa."""
        return to_python(self, mesh)

    def check(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        *,
        target: str | None = None,
        cache: str | Path | None = None,
    ) -> PlanCheck:
        """The plan beside what XLA for GPUs makes of it, on any machine: `minialpa.check`, which says more."""
        # The one import that points up: a plan is what users have in hand, and the check needs all of the package.
        import minialpa

        return minialpa.check(self, fun, args, target=target, cache=cache)

    def to_json(self) -> str:
        """The plan as JSON, which `from_json` reads."""
        return file_text(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote. Raises VerifyError, which names the field, where it is none that can run."""
        with collection_paused():
            plan = decode(Plan, fields_in(text), "plan")
            verify_plan(plan)
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, which holds all of it or what it held before."""
        write_text(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan that `save` wrote. Raises VerifyError like `from_json`."""
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return Plan.from_json(file.read(MOST_CHARACTERS + 1))
