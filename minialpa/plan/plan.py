"""The class `Plan`: a `PlanRecord` in, texts, JSON, differences and PartitionSpecs out."""

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
    """All decisions about one step on one cluster. Equal inputs give equal plans and equal JSON.

    `PlanRecord` describes the fields.
    """

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Cost of a step, and a few lines for each stage: devices, seconds, bytes, shardings, collectives."""
        return summary(self)

    def explain(self, what: str) -> str:
        """Placements of the arguments and results whose path contains `what`, and operators whose line contains it."""
        return explain(self, what)

    def diff(self, other: Plan) -> str:
        """Different decisions and predictions, one line each: `what: this plan -> other`."""
        return difference(self, other)

    def export_specs(self, mesh: int = 0) -> ExportedSpecs:
        """PartitionSpecs of the arguments and results on one mesh, by path, for `jax.jit`.

        `ParallelizedFunc.export_specs` returns them as pytrees. Raises ShardingError for an unknown mesh.
        """
        return export_specs(self, mesh)

    def to_python(self, mesh: int = 0) -> str:
        """Python source that defines the mesh and `export_specs` of it, for a training loop without minialpa."""
        return to_python(self, mesh)

    def check(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        *,
        target: str | None = None,
        cache: str | Path | None = None,
    ) -> PlanCheck:
        """Compiles the programs of the plan with XLA for GPUs, on any machine, and compares. See `minialpa.check`."""
        # The only import from a higher package: the check needs all of minialpa.
        import minialpa

        return minialpa.check(self, fun, args, target=target, cache=cache)

    def to_json(self) -> str:
        return file_text(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of `to_json`. Raises VerifyError, with the name of the wrong field, if the plan cannot run."""
        with collection_paused():
            plan = decode(Plan, fields_in(text), "plan")
            verify_plan(plan)
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, atomically: a failure leaves the old file."""
        write_text(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The inverse of `save`. Raises VerifyError like `from_json`."""
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return Plan.from_json(file.read(MOST_CHARACTERS + 1))
