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
from minialpa.plan.text import header, seconds_text
from minialpa.plan.verify import verify_plan
from minialpa.support.collection import collection_paused
from minialpa.support.files import write_text
from minialpa.support.private_jax import api_boundaries


@api_boundaries
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanRecord):
    """All decisions about one step on one cluster. Equal inputs give equal plans and equal JSON.

    `PlanRecord` describes the fields.
    """

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return f"<Plan of {header(self)}: {seconds_text(self.cost.total_s)} per step>"

    def summary(self, *, full: bool = False) -> str:
        """One screen: the cost of a step, stages, memory, operators, communication, alternatives and warnings.

        full: all operators, collectives and placements.
        """
        from minialpa.report.screen import screen

        return screen(self, full=full)

    def explain(self, what: str) -> str:
        """The arguments, operators and collectives whose path, source line or name contains `what`.

        what: also "communication", "findings", "memory", "operators", or "stage 0".
        """
        from minialpa.report.explain import explain

        return explain(self, what)

    def diff(self, other: Plan) -> str:
        """Differences, one line each: `what: this plan -> other`."""
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
        """Compare the plan with XLA's programs for GPUs, on any machine. See `minialpa.check`."""
        # The only import from a higher package: the check needs all of minialpa.
        import minialpa

        return minialpa.check(self, fun, args, target=target, cache=cache)

    def to_trace(self, path: str | Path, *, check: PlanCheck | None = None, measured: Sequence[Any] = ()) -> None:
        """Write the predicted step as a trace for ui.perfetto.dev, with a process for each stage.

        check: the result of `check`, for a lane with the seconds of compiled programs.
        measured: of `Executable.stage_timeline`, for lanes of a measured step.
        """
        from minialpa.report.trace import write_lanes

        write_lanes(self, path, check=check, measured=measured)

    def to_html(
        self,
        path: str | Path,
        *,
        title: str = "",
        check: PlanCheck | None = None,
        measured: Sequence[Any] = (),
    ) -> None:
        """Write a report for a browser: one file with findings, modules, shardings, timeline, memory and operators.

        title: by default the name and size of the model.
        check, measured: as in `to_trace`, for more lanes of the timeline.
        """
        from minialpa.report.page import page

        write_text(path, page(self, title=title, check=check, measured=measured))

    def _repr_html_(self) -> str:
        from minialpa.report.page import card

        return card(self)

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
