"""A plan on one screen: at most 40 lines of 100 columns, or, in full, all operators, collectives and placements."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from minialpa.inter.schedule.simulate import simulate
from minialpa.inter.schedule.timeline import TimedPass
from minialpa.plan import Plan
from minialpa.plan.record import PlannedOperator, StagePlan
from minialpa.plan.text import (
    certificate_text,
    count,
    header,
    layers_text,
    no_search_text,
    seconds_text,
    user_shardings_text,
)
from minialpa.report.figures import other_share, stage_memory, throughput, time_parts
from minialpa.report.findings import Finding, findings
from minialpa.report.groups import common_root, equal_layers
from minialpa.report.rows import collective_rows, operator_rows
from minialpa.report.tables import collective_table, operator_table, table
from minialpa.report.words import LEGEND, number_text, percent_text, placement_words
from minialpa.support.sizes import bytes_text

_WIDTH, _HEIGHT = 100, 40
_MOST_STAGES = 4
#: Most collectives, alternatives and findings: the first numbers that leave room for operators.
_SIZES = ((4, 3, 4), (3, 2, 2), (2, 1, 2), (1, 1, 1))
_LEAST_OPERATORS, _MOST_LEGEND = 7, 3
#: Topics of findings that `_step_lines` shows.
_IN_STEP_LINES = ("statistics",)
_LARGEST = {
    "compute": "Compute holds",
    "communication": "Waiting for communication holds",
    "bubble": "Waiting for other stages holds",
    "update": "The update holds",
    "idle": "Devices without a stage hold",
}
#: Letters of the passes in the picture of a pipeline.
_LETTERS = {"forward": "▒", "backward": "█", "weights": "▓", "step": "█", "update": "░"}


def screen(plan: Plan, *, full: bool = False) -> str:
    """full: everything, in place of the most important lines."""
    before = [*_step_lines(plan, full=full), *_stage_lines(plan, full=full), *_memory_lines(plan, full=full)]
    ops = operator_rows(plan, lambda k, op: full or _is_forward(op, plan.stages[k]))
    if full:
        later = _later_lines(plan, None, None, None)
        return _with_legend([*before, *operator_table(ops, other_share(plan)), *later, *_placement_lines(plan)])

    for sizes in _SIZES:
        after = [*_later_lines(plan, *sizes), "More: --full, `minialpa explain`, and --html for a page with pictures."]
        room = _HEIGHT - _MOST_LEGEND - len(before) - len(after)
        if room >= _LEAST_OPERATORS:
            break
    text = _with_legend([*before, *operator_table(ops, other_share(plan), max(4, room)), *after])
    return "\n".join(text.splitlines()[:_HEIGHT])


def _with_legend(lines: Iterable[str]) -> str:
    text = "\n".join(line.rstrip() for line in lines)
    return "\n".join([text, *_legend_lines(text)])


def _later_lines(
    plan: Plan, n_collectives: int | None, n_alternatives: int | None, n_findings: int | None
) -> Iterator[str]:
    """After the operators. Numbers: most lines of a kind, or None for all."""
    yield from collective_table(collective_rows(plan), n_collectives)
    yield from _pipeline_lines(plan, full=n_findings is None)
    yield from _alternative_lines(plan, n_alternatives)
    yield from _finding_lines(plan, n_findings)


def _is_forward(op: PlannedOperator, stage: StagePlan) -> bool:
    """Also if the stage has no forward operator."""
    return op.part == "forward" or all(one.part != "forward" for one in stage.operators)


def _bar(parts: Sequence[float], letters: str, width: int) -> str:
    """parts: of 1."""
    ends = [round(width * sum(parts[: i + 1])) for i in range(len(parts))]
    starts = [0, *ends[:-1]]
    bar = "".join(letter * (end - start) for letter, start, end in zip(letters, starts, ends, strict=False))
    return bar.ljust(width, "·")[:width]


# ---- the step --------------------------------------------------------------------------------------------------------


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=" " * 10)


def _step_lines(plan: Plan, *, full: bool) -> Iterator[str]:
    model = common_root([op.module for stage in plan.stages for op in stage.operators])
    yield from _wrapped(f"Plan of {model} for {header(plan)}" if model else f"Plan for {header(plan)}")
    yield from _wrapped(_rates_text(plan))
    yield from _time_lines(plan)
    yield from _choice_lines(plan, full=full)

    statistics = [f"Each micro-batch has its own {one}" for one in plan.per_micro_batch]
    more = f" ({count(len(statistics) - 1, 'more statistic')})" if len(statistics) > 1 and not full else ""
    for text in statistics if full else statistics[:1]:
        yield from _wrapped(f"{text}{more}")


def _choice_lines(plan: Plan, *, full: bool) -> Iterator[str]:
    """The batch that was found, the search, and the shardings in the step."""
    if plan.batch:
        listed = ", ".join(f"`{name}`" for name in plan.batch)
        what = "argument" if len(plan.batch) == 1 else "arguments"
        yield f"Batch: {what} {listed} ({plan.n_examples} examples)"
    if plan.certificate is not None:
        yield from _wrapped(certificate_text(plan.certificate))
    if plan.search_not_made is not None:
        yield from _wrapped(no_search_text(plan.search_not_made))
    if plan.user_shardings:
        most = len(plan.user_shardings) if full else 2
        yield from _wrapped(user_shardings_text(plan.user_shardings, most=most))


def _rates_text(plan: Plan) -> str:
    rates = throughput(plan)
    found = [f"{number_text(n)} {what}/s" for n, what in ((rates.tokens, "tokens"), (rates.examples, "examples")) if n]
    if rates.utilisation:
        found.append(f"{percent_text(rates.utilisation)} model FLOP utilisation ({rates.dtype})")
    return f"Step      {seconds_text(plan.cost.total_s)} predicted: {', '.join(found)}".removesuffix(": ")


def _time_lines(plan: Plan) -> Iterator[str]:
    parts = time_parts(plan)
    texts = [f"{name} {percent_text(part)}" for name, part in parts.items() if part >= 5e-4]
    yield f"Time      {_bar(list(parts.values()), '█▓ ░·', 20)} {', '.join(texts)}"
    if not plan.cost.total_s:
        return

    hidden_s = plan.n_micro_batches * max(sum(one.hidden_s for one in stage.passes) for stage in plan.stages)
    also = f"; {seconds_text(hidden_s)} of communication is hidden beside compute" if hidden_s else ""
    largest = max(parts, key=lambda name: parts[name])
    yield from _wrapped(f"{' ' * 9} {_LARGEST[largest]} the step back most{also}.")


# ---- stages ----------------------------------------------------------------------------------------------------------


def _stage_lines(plan: Plan, *, full: bool) -> list[str]:
    rows = [["", "devices", "layers", "micro-batch", "waiting", "update", "memory of a device"]]
    for k, stage in enumerate(plan.stages):
        memory = stage_memory(plan, k)
        bar = _bar([min(1.0, memory.used)], "█", 10)
        last = stage.first_device + stage.n_devices - 1
        devices = f"{stage.first_device}" if stage.n_devices == 1 else f"{stage.first_device}-{last}"
        rows.append([
            f"Stage {k}",
            f"{devices} as {' x '.join(map(str, stage.logical_shape))}",
            layers_text(stage.layers),
            seconds_text(stage.compute_s),
            seconds_text(stage.communication_s),
            seconds_text(stage.update_s),
            f"{bytes_text(memory.peak_bytes)} of {bytes_text(memory.limit_bytes)} {bar}",
        ])  # fmt: skip
    lines = table(rows)
    hidden = 0 if full else max(0, len(plan.stages) - _MOST_STAGES)
    if hidden == 0:
        return lines
    return [*lines[: _MOST_STAGES + 1], f"          and {hidden} more, of {len(plan.stages)}"]


def _memory_lines(plan: Plan, *, full: bool) -> Iterator[str]:
    fullest = max(range(len(plan.stages)), key=lambda k: stage_memory(plan, k).used)
    for k in range(len(plan.stages)) if full else [fullest]:
        texts = stage_memory(plan, k).texts
        name = f" of stage {k}" if len(plan.stages) > 1 else ""
        yield from _wrapped(f"Memory{name}: {', '.join(texts)}")


# ---- the pipeline ----------------------------------------------------------------------------------------------------


def _pipeline_lines(plan: Plan, *, full: bool) -> Iterator[str]:
    """A lane for each stage, from the start of the step to its end."""
    if len(plan.stages) == 1:
        return
    timeline = simulate(plan)
    splits = any(one.kind == "weights" for stage in plan.stages for one in stage.passes)
    kinds = ("forward", "backward", *(["weights"] if splits else []), "update")
    yield f"Pipeline  {'  '.join(f'{_LETTERS[kind]} {kind}' for kind in kinds)}"
    for k, stage in enumerate(timeline.stages[: len(timeline.stages) if full else _MOST_STAGES]):
        yield f"  stage {k:<2} {_lane(stage.passes, timeline.total_s, _WIDTH - 12)}"


def _lane(passes: Sequence[TimedPass], total_s: float, width: int) -> str:
    """In each column the pass with most of the time; a space where the stage waits."""
    columns: list[dict[str, float]] = [{} for _ in range(width)]
    scale = width / total_s if total_s else 0.0
    for one in passes:
        start, end = one.start_s * scale, one.end_s * scale
        for column in range(int(start), min(width, int(end) + 1)):
            overlap = min(end, column + 1) - max(start, column)
            columns[column][one.kind] = columns[column].get(one.kind, 0.0) + max(0.0, overlap)
    return "".join(
        _LETTERS[max(column, key=lambda kind: column[kind])] if sum(column.values()) >= 0.5 else " "
        for column in columns
    )


# ---- alternatives, findings, placements ------------------------------------------------------------------------------


def _alternative_lines(plan: Plan, most: int | None) -> list[str]:
    others = plan.alternatives[:most]
    total = plan.cost.total_s
    rows = [
        [
            other.name,
            seconds_text(other.total_s),
            f"{100 * (other.total_s / total - 1):+.1f} %" if total else "",
            bytes_text(other.peak_bytes),
        ]
        for other in others
    ]
    return [f"{'' if i else 'Instead':<9} {line}" for i, line in enumerate(table(rows, (60,)) if rows else ())]


def _finding_lines(plan: Plan, most: int | None) -> Iterator[str]:
    """Not all: one for each topic, and notes only without a warning."""
    found = [one for one in findings(plan) if one.topic not in _IN_STEP_LINES]
    if most is not None:
        found = [one for one in found if one.level == "warning"] or found
    by_topic: dict[str, list[Finding]] = {}
    for one in found:
        by_topic.setdefault(one.topic, []).append(one)
    for same in list(by_topic.values())[:most]:
        title = "Warning:" if same[0].level == "warning" else "Note:"
        shown, hidden = (same, 0) if most is None else (same[:1], len(same) - 1)
        more = f" ({hidden} more like this)" if hidden else ""
        for one in shown:
            yield from _wrapped(f"{title:<9} {one.text}{more}")


def _placement_lines(plan: Plan) -> Iterator[str]:
    """Equal layers once."""
    shapes = [stage.logical_shape for stage in plan.stages]
    roles = plan.roles or ("other",) * len(plan.inputs)
    values = list(zip(plan.inputs, roles, strict=True))
    groups = equal_layers(
        values,
        lambda item: item[0].path,
        lambda item: (item[1], item[0].shape, item[0].dtype, placement_words(item[0], shapes)),
    )
    rows = [["Argument", "", "array", "held", "stages"]]
    for group in groups:
        value, role = group.members[0]
        meshes = sorted({mesh for member, _ in group.members for mesh in member.mesh_ids})
        rows.append([
            group.name,
            role,
            f"{value.dtype}[{', '.join(map(str, value.shape))}]",
            placement_words(value, shapes),
            layers_text(meshes).removeprefix("layers ").removeprefix("layer ") if meshes else "",
        ])  # fmt: skip
    yield from table(rows)


def _legend_lines(shown: str) -> Iterator[str]:
    """The words that `shown` uses."""
    used = [f"{word}: {meaning}" for word, meaning in LEGEND.items() if word.removesuffix(" n") in shown]
    if used:
        yield from _wrapped(f"Words: {'; '.join(used)}.")
