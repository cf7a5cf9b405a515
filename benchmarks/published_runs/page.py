"""Predictions in, Markdown out: a page of scores, and a table of all runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.published_runs import score
from benchmarks.published_runs.fit import Planned, Split, leave_out_scales, leave_out_systems
from benchmarks.published_runs.predict import Prediction
from benchmarks.published_runs.record import Run


def page(found: Sequence[Prediction], left_out: Sequence[str], planned: Planned) -> str:
    lines = [
        "# Plans beside published runs",
        "",
        "`python -m benchmarks.published_runs --runs FILE` writes this page for a record of published runs, which is",
        "not part of the project. Each run's model is built in its dimensions and planned with its degrees. Errors are",
        "(predicted - measured) / measured seconds of a step.",
        "",
        "| system, GPU | runs | median error | 90th percentile | bias |",
        "|---|---|---|---|---|",
    ]
    for name, group in (*score.by_system(found).items(), *score.halves(found).items(), ("all", list(found))):
        errors = score.errors(group)
        if errors is not None:
            lines.append(f"| {name} | {errors.n} | {errors.median:.1%} | {errors.p90:.1%} | {errors.bias:+.1%} |")

    tests = [Split("none", planned, planned), *leave_out_systems(planned), *leave_out_scales(planned)]
    lines += [
        "",
        "The constants of `KernelRates`, fitted without some runs and tested on them. The baseline is one fraction of",
        "the peak rate for each kind of GPU, fitted to the same runs.",
        "",
        splits(tests),
    ]

    order, memory = score.kendall(found), score.memory(found)
    if order is not None:
        lines += [
            "",
            f"Kendall's tau of runs that were compared with each other: {order[0]:.2f} over {order[1]} pairs.",
        ]
    lines += [
        "",
        f"Out of memory: predicted for {memory.n_out_predicted} of the {memory.n_out} runs that ran out. Fits: "
        f"predicted for {memory.n_ran_predicted} of the {memory.n_ran} runs that ran. Peak memory is published for "
        f"{memory.n}: median error {memory.error:.1%}.",
    ]
    if left_out:
        lines += ["", "Not built: " + ", ".join(f"{what} ({n})" for what, n in Counter(left_out).items()) + "."]
    return "\n".join(lines) + "\n"


def splits(tests: Sequence[Split]) -> str:
    """A table of errors; the last line has all left-out runs of several splits."""
    lines = [
        "| left out | runs | median error | 90th percentile | bias | baseline: median | 90th percentile |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ours, theirs in score.tested(tests):
        lines.append(
            f"| {name} | {ours.n} | {ours.median:.1%} | {ours.p90:.1%} | {ours.bias:+.1%} | {theirs.median:.1%} | "
            f"{theirs.p90:.1%} |"
        )
    return "\n".join(lines)


def rows(found: Sequence[Prediction]) -> str:
    lines = [
        "| run | GPUs | dp x fsdp x tp x pp | micro-batches | measured, s | predicted, s | error | GiB, predicted |",
        "|---|---|---|---|---|---|---|---|",
        *map(_row, found),
    ]
    return "\n".join(lines) + "\n"


def _row(one: Prediction) -> str:
    run = one.run
    measured = "out of memory" if run.step_s is None else f"{run.step_s:.3f}"
    predicted = one.failure[:60] if one.step_s is None else f"{one.step_s:.3f}"
    error = "" if one.error is None else f"{one.error:+.1%}"
    memory = f"{one.peak_bytes / 2**30:.0f}" + ("" if one.fits else ", does not fit")
    return (
        f"| {run.system}: {_name(run)} | {run.n_gpus} {run.gpu[:4]} | {run.dp} x {run.fsdp} x {run.tp} x {run.pp} | "
        f"{run.n_micro_batches} | {measured} | {predicted} | {error} | {memory} |"
    )


def _name(run: Run) -> str:
    remat = ", remat" if run.model.recomputes else ""
    return f"{run.name}, {run.model.seq}{remat}{', float8' if run.model.in_float8 else ''}"
