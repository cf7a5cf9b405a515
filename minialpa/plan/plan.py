"""Plans as users see them: `PlanRecord` with methods, each of which calls a function of another module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minialpa.plan.check import PlanCheck
from minialpa.plan.codec import MOST_CHARACTERS, decode, fields_in, file_text
from minialpa.plan.difference import difference
from minialpa.plan.export import export_specs, to_python
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
        """A few lines for each stage."""
        return summary(self)

    def explain(self, what: str) -> str:
        """Placement of the arguments and results whose path contains `what`, and the operators of that name."""
        return explain(self, what)

    def diff(self, other: Plan) -> str:
        """The different decisions and predictions of `other`; a line reads this plan -> the other."""
        return difference(self, other)

    def export_specs(self, mesh: int = 0) -> ExportedSpecs:
        """PartitionSpecs of the arguments and results on one mesh, by path, for `jax.jit`.

        `ParallelizedFunc.export_specs` returns them as pytrees.
        """
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
        """The plan beside its programs as XLA for GPUs compiles them, on any machine; see `minialpa.check`."""
        # The one import that points up: users have a plan in hand, and the check needs all of the package.
        import minialpa

        return minialpa.check(self, fun, args, target=target, cache=cache)

    def to_json(self) -> str:
        """The plan as JSON, which `from_json` reads."""
        return file_text(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote. Raises VerifyError with the wrong field if the plan cannot run."""
        with collection_paused():
            plan = decode(Plan, fields_in(text), "plan")
            verify_plan(plan)
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to a file. A failure leaves the old file."""
        write_text(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan that `save` wrote. Raises VerifyError like `from_json`."""
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return Plan.from_json(file.read(MOST_CHARACTERS + 1))
