"""Pipeline schedules: the order in which each stage runs its tasks. Pure data, no times and no devices.

In: a name, a number of stages and a number of micro-batches. Out: `Schedule`, one ordered tuple of tasks per stage.
A task waits for
    forward(k, b)   <- forward(k-1, b)
    backward(k, b)  <- forward(k, b) and backward(k+1, b)
To add a schedule, write a function from (stage, n_stages, n_micro_batches) to the tasks of that stage and decorate it
with `@_register(name, max_live=...)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from minialpa.errors import ShardingError, VerifyError

Kind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Task:
    """One pass of one micro-batch through one stage; stages and micro-batches count from 0."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro_batch})"


@dataclass(frozen=True, slots=True)
class Schedule:
    """`tasks[k]` is what stage `k` runs, in order. `make_schedule` builds it, `verify_schedule` checks it."""

    name: str
    n_stages: int
    n_micro_batches: int
    tasks: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        if self.n_stages < 1 or self.n_micro_batches < 1:
            raise ShardingError(
                f"A schedule needs at least one stage and one micro-batch; got `n_stages={self.n_stages}` "
                f"and `n_micro_batches={self.n_micro_batches}`."
            )


StageOrder = Callable[[int, int, int], tuple[Task, ...]]
LiveLimit = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class _Rule:
    """`max_live(stages_left, n_micro_batches)` bounds the live micro-batches; `stages_left` counts the stage itself."""

    order: StageOrder
    max_live: LiveLimit
    trains: bool


_RULES: dict[str, _Rule] = {}


def _register(name: str, *, max_live: LiveLimit, trains: bool = True) -> Callable[[StageOrder], StageOrder]:
    def add(order: StageOrder) -> StageOrder:
        assert name not in _RULES, f"two schedules are called {name}"
        _RULES[name] = _Rule(order, max_live, trains)
        return order

    return add


@_register("1f1b", max_live=lambda stages_left, n_micro_batches: min(stages_left, n_micro_batches))
def _one_forward_one_backward(stage: int, n_stages: int, n_micro_batches: int) -> tuple[Task, ...]:
    """Just enough forwards to fill the stages after this one, then one backward for each forward, then the rest."""
    n_warm_up = min(n_stages - stage - 1, n_micro_batches)
    tasks = [Task("forward", stage, b) for b in range(n_warm_up)]
    for b in range(n_micro_batches - n_warm_up):
        tasks += [Task("forward", stage, n_warm_up + b), Task("backward", stage, b)]
    tasks += [Task("backward", stage, b) for b in range(n_micro_batches - n_warm_up, n_micro_batches)]
    return tuple(tasks)


@_register("gpipe", max_live=lambda stages_left, n_micro_batches: n_micro_batches)
def _gpipe(stage: int, n_stages: int, n_micro_batches: int) -> tuple[Task, ...]:
    """All forwards, then all backwards."""
    kinds: tuple[Kind, Kind] = ("forward", "backward")
    return tuple(Task(kind, stage, b) for kind in kinds for b in range(n_micro_batches))


@_register("inference", max_live=lambda stages_left, n_micro_batches: 1, trains=False)
def _inference(stage: int, n_stages: int, n_micro_batches: int) -> tuple[Task, ...]:
    """Forwards only; nothing is kept once the next stage has the result."""
    return tuple(Task("forward", stage, b) for b in range(n_micro_batches))


def schedule_names() -> tuple[str, ...]:
    """Names that `make_schedule` knows, sorted."""
    return tuple(sorted(_RULES))


def make_schedule(name: str, n_stages: int, n_micro_batches: int) -> Schedule:
    """The schedule called `name`. Raises ShardingError on an unknown name or a count below one."""
    order = _rule(name).order
    tasks = tuple(order(stage, n_stages, n_micro_batches) for stage in range(n_stages))
    return Schedule(name, n_stages, n_micro_batches, tasks)


def max_live(name: str, stages_left: int, n_micro_batches: int) -> int:
    """Most micro-batches whose activations a stage may hold under `name`.

    `stages_left` counts the stages from this one to the last, this one included.
    """
    return _rule(name).max_live(stages_left, n_micro_batches)


def n_live(schedule: Schedule, stage: int) -> int:
    """Most micro-batches that `stage` really holds at once: forward done or running, backward not yet done."""
    if not _rule(schedule.name).trains:
        return min(1, len(schedule.tasks[stage]))
    now = most = 0
    for task in schedule.tasks[stage]:
        now += 1 if task.kind == "forward" else -1
        most = max(most, now)
    return most


def ticks(schedule: Schedule) -> tuple[tuple[Task, ...], ...]:
    """Tasks that run side by side when every task takes one tick and starts as soon as it can.

    Raises VerifyError when the stages' orders wait for each other in a circle, or for a task that nobody runs.
    """
    waiting = [list(reversed(tasks)) for tasks in schedule.tasks]
    done: set[Task] = set()
    result: list[tuple[Task, ...]] = []
    while any(waiting):
        heads = [tasks[-1] for tasks in waiting if tasks]
        ready = tuple(task for task in heads if done.issuperset(_waits_for(task, schedule)))
        if not ready:
            raise VerifyError(_deadlock_message(schedule, heads, done))
        for tasks in waiting:
            if tasks and tasks[-1] in ready:
                tasks.pop()
        done.update(ready)
        result.append(ready)
    return tuple(result)


def global_order(schedule: Schedule) -> tuple[Task, ...]:
    """All tasks in one order that respects every stage's order and every dependency: tick by tick, then by stage."""
    return tuple(task for tick in ticks(schedule) for task in tick)


def verify_schedule(schedule: Schedule) -> None:
    """Raises VerifyError unless

    - there is one list of tasks for each stage, and it holds that stage's tasks only;
    - every task runs once: one forward per stage and micro-batch, and one backward where the schedule trains;
    - a forward runs before its backward;
    - dependencies across stages can be met without deadlock;
    - no stage holds more live micro-batches than its schedule allows (1f1b: min(n_stages - stage, n_micro_batches)).
    """
    _verify_stages(schedule)
    _verify_each_once(schedule)
    _verify_forward_first(schedule)
    ticks(schedule)
    _verify_live(schedule)


def _rule(name: str) -> _Rule:
    if name not in _RULES:
        raise ShardingError(f"No schedule `{name}`. Known: {', '.join(f'`{known}`' for known in schedule_names())}.")
    return _RULES[name]


def _waits_for(task: Task, schedule: Schedule) -> list[Task]:
    k, b = task.stage, task.micro_batch
    if task.kind == "forward":
        return [Task("forward", k - 1, b)] if k > 0 else []
    later = [Task("backward", k + 1, b)] if k + 1 < schedule.n_stages else []
    return [Task("forward", k, b), *later]


def _deadlock_message(schedule: Schedule, heads: list[Task], done: set[Task]) -> str:
    waits = [
        f"{head} waits for {', '.join(str(t) for t in _waits_for(head, schedule) if t not in done)}" for head in heads
    ]
    n_tasks = sum(map(len, schedule.tasks))
    return f"Schedule `{schedule.name}` deadlocks after {len(done)} of {n_tasks} tasks: {'; '.join(waits)}."


def _verify_stages(schedule: Schedule) -> None:
    if len(schedule.tasks) != schedule.n_stages:
        raise VerifyError(
            f"Schedule `{schedule.name}` has {len(schedule.tasks)} lists of tasks for {schedule.n_stages} stages."
        )
    for stage, tasks in enumerate(schedule.tasks):
        for task in tasks:
            if task.stage != stage:
                raise VerifyError(f"Schedule `{schedule.name}` lists {task} under stage {stage}.")


def _verify_each_once(schedule: Schedule) -> None:
    kinds: tuple[Kind, ...] = ("forward", "backward") if _rule(schedule.name).trains else ("forward",)
    for stage, tasks in enumerate(schedule.tasks):
        seen = Counter(tasks)
        wanted = [Task(kind, stage, b) for kind in kinds for b in range(schedule.n_micro_batches)]
        for task in wanted:
            if seen[task] != 1:
                raise VerifyError(f"Schedule `{schedule.name}` runs {task} {seen[task]} times; expected once.")
        if extra := seen.keys() - set(wanted):
            first = min(extra, key=str)
            raise VerifyError(f"Schedule `{schedule.name}` runs {first}, which is not one of its tasks.")


def _verify_forward_first(schedule: Schedule) -> None:
    for tasks in schedule.tasks:
        seen: set[int] = set()
        for task in tasks:
            if task.kind == "forward":
                seen.add(task.micro_batch)
            elif task.micro_batch not in seen:
                raise VerifyError(f"Schedule `{schedule.name}` runs {task} before its forward.")


def _verify_live(schedule: Schedule) -> None:
    for stage in range(schedule.n_stages):
        limit = max_live(schedule.name, schedule.n_stages - stage, schedule.n_micro_batches)
        if (live := n_live(schedule, stage)) > limit:
            raise VerifyError(
                f"Stage {stage} of schedule `{schedule.name}` holds {live} live micro-batches; "
                f"at most {limit} are allowed."
            )
