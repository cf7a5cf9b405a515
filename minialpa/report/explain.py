"""A plan and a name in; the arguments, operators and collectives with that name out.

A name is a part of a path, a source line such as `model.py:41`, an operation, or one of `TOPICS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from minialpa.errors import meant
from minialpa.plan import Plan
from minialpa.plan.record import PlacedValue
from minialpa.plan.text import seconds_text, stage_text
from minialpa.report.figures import bytes_of_value, bytes_on_mesh, other_share, stage_memory
from minialpa.report.findings import findings
from minialpa.report.groups import equal_layers
from minialpa.report.rows import collective_rows, operator_rows
from minialpa.report.tables import collective_table, operator_table
from minialpa.report.words import operator_name, percent_text, placement_words
from minialpa.support.sizes import bytes_text


def explain(plan: Plan, what: str) -> str:
    """An unknown name gives near names."""
    if what in TOPICS:
        return "\n".join(TOPICS[what](plan))
    if is_topic(plan, what):
        return "\n".join(_stage_lines(plan, int(what.removeprefix("stage "))))
    found = [*argument_lines(plan, what), *operation_lines(plan, what)]
    return "\n".join(found) or unknown_text(plan, what)


def is_topic(plan: Plan, what: str) -> bool:
    """One of `TOPICS`, or a stage of the plan such as `stage 0`."""
    return what in TOPICS or what in [f"stage {k}" for k in range(len(plan.stages))]


def argument_lines(plan: Plan, what: str) -> Iterator[str]:
    """Equal layers once."""
    shapes = [stage.logical_shape for stage in plan.stages]
    roles = plan.roles or ("other",) * len(plan.inputs)
    values = [(value, role) for value, role in zip(plan.inputs, roles, strict=True) if what in value.path]
    values += [(value, "result") for value in plan.outputs if what in value.path]

    def kind(item: tuple[PlacedValue, str]) -> tuple[object, ...]:
        value, role = item
        return role, value.shape, value.dtype, placement_words(value, shapes)

    for group in equal_layers(values, lambda item: item[0].path, kind):
        value, role = group.members[0]
        meshes = sorted({mesh for member, _ in group.members for mesh in member.mesh_ids})
        where = f" on stage {', '.join(map(str, meshes))}" if len(plan.stages) > 1 else ""
        most = max((bytes_on_mesh(value, k, shapes[k]) for k in value.mesh_ids), default=0.0)
        yield (
            f"{group.name} ({role}) {value.dtype}[{', '.join(map(str, value.shape))}]: "
            f"{placement_words(value, shapes)}{where}; {bytes_text(most)} of {bytes_text(bytes_of_value(value))} on "
            "each device"
        )


def operation_lines(plan: Plan, what: str) -> list[str]:
    text = what.removesuffix("/")
    ops = operator_rows(plan, lambda k, op: text in f"{op.module} {op.line} {op.name} {operator_name(op.name)}")
    moves = collective_rows(plan, lambda one: text in f"{one.module} {one.line} {one.kind} {one.array}")
    lines = ["Operators", *operator_table(ops, other_share(plan))] if ops else []
    return [*lines, "Communication", *collective_table(moves)] if moves else lines


def unknown_text(plan: Plan, what: str, topics: Sequence[str] = ()) -> str:
    names = {value.path for value in plan.inputs}
    for stage in plan.stages:
        names.update(name for op in stage.operators for name in (op.module, op.line, operator_name(op.name)))
    parts = {part for name in names for part in name.split("/")}
    known = sorted((names | parts | {*TOPICS, *topics}) - {""})
    listed = ", ".join(f"`{name}`" for name in (*topics, *TOPICS, "stage 0"))
    return (
        f"No part of the plan is called `{what}`.{meant(what, known)} Give a part of the path of a module or an "
        f"argument, a source line such as `model.py:41`, the name of an operation, or one of {listed}."
    )


# ---- topics ----------------------------------------------------------------------------------------------------------


def _communication_lines(plan: Plan) -> list[str]:
    return collective_table(collective_rows(plan)) or ["The plan has no communication between devices of a stage."]


def _memory_lines(plan: Plan) -> Iterator[str]:
    for k in range(len(plan.stages)):
        memory = stage_memory(plan, k)
        of_limit = f"{bytes_text(memory.peak_bytes)} of {bytes_text(memory.limit_bytes)}"
        yield f"Stage {k}: {of_limit} on each device ({percent_text(memory.used)}): {', '.join(memory.texts)}"


def _operator_lines(plan: Plan) -> list[str]:
    return operator_table(operator_rows(plan), other_share(plan))


def _finding_lines(plan: Plan) -> list[str]:
    return [f"{one.level.capitalize()}: {one.text}" for one in findings(plan)] or ["The plan has no known fault."]


def _stage_lines(plan: Plan, k: int) -> Iterator[str]:
    stage = plan.stages[k]
    n, pass_s = plan.n_micro_batches, [sum(one.seconds for one in other.passes) for other in plan.stages]
    yield f"Stage {k}: {stage_text(plan, k)}"
    yield (
        f"{n} x ({seconds_text(stage.compute_s)} compute + {seconds_text(stage.communication_s)} waiting for "
        f"communication) + {seconds_text(stage.update_s)} update"
    )
    if len(pass_s) > 1:
        mean = (sum(pass_s) - pass_s[k]) / (len(pass_s) - 1)
        yield f"A micro-batch takes {seconds_text(pass_s[k])} here, and {seconds_text(mean)} in the mean of the others."
    longest = sorted(operator_rows(plan, lambda number, op: number == k), key=lambda row: -row.seconds)
    yield from operator_table(longest, other_share(plan))
    yield from collective_table(collective_rows(plan, lambda one: one.stage == k))


#: Names with a meaning of their own.
TOPICS: dict[str, Callable[[Plan], Sequence[str] | Iterator[str]]] = {
    "communication": _communication_lines,
    "findings": _finding_lines,
    "memory": _memory_lines,
    "operators": _operator_lines,
}
