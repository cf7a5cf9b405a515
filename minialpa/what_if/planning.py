"""Cases in, an outcome for each of them out, planned by several processes.

Cases that differ in memory alone share plans. Cases that differ in the cluster alone share a trace. Each process holds
one end of a pipe, and ends with this process.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import minialpa
from minialpa.api.parallelized import ParallelizedFunc
from minialpa.api.plan_folder import PlanCache, folder_of
from minialpa.api.step_planner import StepPlanner
from minialpa.errors import InfeasibleError, MinialpaError
from minialpa.ir.equations import bytes_of
from minialpa.methods import resolve_devices
from minialpa.options import PlanningEffort
from minialpa.plan import Plan
from minialpa.support.private_jax import api_boundary
from minialpa.support.progress import disable_progress, phase
from minialpa.support.sizes import bytes_text
from minialpa.tracing.trace import TracedStep
from minialpa.what_if.grid import Case
from minialpa.what_if.outcomes import CaseOutcome, outcome_of, reason_of
from minialpa.what_if.steps import load

#: The methods by name, the default first.
METHODS = ("AutoParallel", "ShardParallel", "DataParallel", "Zero2Parallel", "Zero3Parallel", "PipeshardParallel")


@dataclass(frozen=True, slots=True)
class Request:
    """Options of all cases."""

    method: str
    effort: PlanningEffort
    plan_cache: PlanCache
    prices: Mapping[str, float]


@api_boundary
def run(
    grid: Sequence[Case],
    *,
    processes: int | None = None,
    method: str = METHODS[0],
    planning_effort: PlanningEffort = "fast",
    plan_cache: PlanCache = "auto",
    prices: Mapping[str, float] | None = None,
) -> tuple[CaseOutcome, ...]:
    """Plan all cases in processes.

    Args:
        processes: None for one per core.
        method: one of `METHODS`.
        planning_effort, plan_cache: as in `minialpa.parallelize`.
        prices: dollars per GPU-hour, by cluster.

    The processes import the main module: a script calls `run` under `if __name__ == "__main__":`. Raises MinialpaError
    if a process ends early.
    """
    if method not in METHODS:
        raise MinialpaError(f"There is no method `{method}` for `what_if`. Choose one of {', '.join(METHODS)}.")
    request = Request(method, planning_effort, plan_cache, dict(prices or {}))
    tasks = _tasks(grid)
    n_processes = min(processes or os.cpu_count() or 1, len(tasks))

    found: dict[Case, CaseOutcome] = {}
    with phase("planning") as report, _processes(n_processes) as executor:
        report("cases", 0, len(grid))
        with _interrupts_blocked():
            futures = [executor.submit(plan_cases, task, request) for task in tasks]
        for outcomes in _results(futures):
            found.update((one.case, one) for one in outcomes)
            report("cases", len(found), len(grid))
    return tuple(found[case] for case in grid)


def _results(futures: Sequence[Future[list[CaseOutcome]]]) -> Iterator[list[CaseOutcome]]:
    try:
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise MinialpaError(
            "A process of `what_if` ended early. If memory ran out, pass fewer `processes`; the plan cache has the "
            'plans of finished cases. A script must call `what_if` under `if __name__ == "__main__":`.'
        ) from error


def _tasks(grid: Sequence[Case]) -> list[tuple[Case, ...]]:
    """Cases that differ in memory alone, the largest memory first."""

    def trace(case: Case) -> tuple[object, ...]:
        return case.model, case.batch or 0, case.sequence or 0

    def order(case: Case) -> tuple[object, ...]:
        return *trace(case), case.cluster, case.hosts, case.devices, case.link_speed

    ordered = sorted(dict.fromkeys(grid), key=lambda case: (*order(case), -case.memory_bytes))
    return [tuple(task) for _, task in itertools.groupby(ordered, key=order)]


# ---- processes -------------------------------------------------------------------------------------------------------


@contextmanager
def _processes(n: int) -> Iterator[ProcessPoolExecutor]:
    context = get_context("spawn")
    lives, life = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(n, context, initializer=_begin_process, initargs=(lives,))
    try:
        yield executor
    finally:
        life.close()
        executor.shutdown(cancel_futures=True)
        lives.close()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes that start here get no Ctrl-C of a terminal: this process ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _begin_process(lives: Connection) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")  # planning needs no device, and GPUs may be busy or absent
    disable_progress()
    threading.Thread(target=_end_with, args=(lives,), daemon=True).start()


def _end_with(lives: Connection) -> None:
    """When the other end of the pipe closes."""
    try:
        lives.recv()
    finally:
        os._exit(1)


# ---- one task --------------------------------------------------------------------------------------------------------


def plan_cases(task: Sequence[Case], request: Request) -> list[CaseOutcome]:
    plans: list[Plan] = []
    failed: tuple[Case, Exception] | None = None
    for case in task:
        if failed is None and not any(_fits(plan, case) for plan in plans):
            try:
                plans.append(_plan(case, request))
            except Exception as error:  # other cases may work
                failed = case, error

    def outcome(case: Case) -> CaseOutcome:
        fitting = [plan for plan in plans if _fits(plan, case)]
        if fitting:
            return outcome_of(case, min(fitting, key=lambda plan: plan.cost.total_s), request.prices.get(case.cluster))
        assert failed is not None
        largest, error = failed
        also = "" if largest == case else f"As with {bytes_text(largest.memory_bytes)}: "
        return CaseOutcome(
            case=case,
            reason=also + reason_of(error),
            is_error=not isinstance(error, InfeasibleError),
            binds="memory" if isinstance(error, InfeasibleError) else "",
            price=request.prices.get(case.cluster),
        )

    return [outcome(case) for case in task]


def _fits(plan: Plan, case: Case) -> bool:
    return max(plan.cost.peak_bytes) <= case.memory_bytes


def _plan(case: Case, request: Request) -> Plan:
    method = getattr(minialpa, request.method)(devices=case.spec())
    planner = StepPlanner(method, "refuse", "error", folder_of(request.plan_cache), request.effort)
    traced = traced_step(case.model, case.batch, case.sequence)
    _check_arguments(traced, case)
    return planner.plan(traced, resolve_devices(method.devices), is_first=True)


def _check_arguments(traced: TracedStep, case: Case) -> None:
    """Raise InfeasibleError, before a search, if arguments do not fit even split over all devices."""
    n_bytes = sum(bytes_of(v) for v in traced.flat.invars) / case.gpus
    if n_bytes > case.memory_bytes:
        raise InfeasibleError(
            f"The arguments of the step need at least {bytes_text(n_bytes)} per device, and the devices have "
            f"{bytes_text(case.memory_bytes)}."
        )


@functools.lru_cache(maxsize=1)
def traced_step(model: str, batch: int | None, sequence: int | None) -> TracedStep:
    step, args = load(model, batch, sequence)
    parallel: ParallelizedFunc = minialpa.parallelize(step)
    return parallel._trace(parallel._bind(args, {}))
