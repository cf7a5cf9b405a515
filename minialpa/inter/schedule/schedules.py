"""Pipeline schedules: the order in which each stage runs its passes. Pure data, no times and no devices.

`make_schedule` makes a `Schedule` of a name and a `PipelineSize`. A pass is one micro-batch through one *chunk*, a run
of neighbouring layers. Chunks are counted over the pipeline: of p stages with v chunks each, stage k has the chunks k,
p + k, ..., (v - 1) p + k. Only schedules that interleave allow more than one chunk per stage. Passes of micro-batch b
through chunk c wait for others:
    forward(c, b)   <- forward(c-1, b)                          -> _waits_for
    backward(c, b)  <- forward(c, b) and backward(c+1, b)
To add a schedule, write a function from (stage, size) to the passes of that stage and decorate it with
`@_register(name, max_live=...)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from minialpa.errors import ShardingError, VerifyError

Kind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch through one chunk. Chunks of the pipeline and micro-batches count from 0."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(chunk {self.chunk}, micro-batch {self.micro_batch})"


@dataclass(frozen=True, slots=True)
class PipelineSize:
    """Counts of a pipeline.

    Attributes:
        n_stages: the number of stages.
        n_micro_batches: the number of micro-batches.
        n_chunks: the number of chunks of each stage.
    """

    n_stages: int
    n_micro_batches: int
    n_chunks: int = 1

    def __post_init__(self) -> None:
        if min(self.n_stages, self.n_micro_batches, self.n_chunks) < 1:
            raise ShardingError(
                f"A schedule needs at least one stage, one micro-batch and one chunk; got `n_stages={self.n_stages}`, "
                f"`n_micro_batches={self.n_micro_batches}` and `n_chunks={self.n_chunks}`."
            )


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of passes. `make_schedule` builds it, `verify_schedule` checks it.

    Attributes:
        name: the name that `make_schedule` knows.
        size: the counts of the pipeline.
        passes: for each stage, its passes in order.
    """

    name: str
    size: PipelineSize
    passes: tuple[tuple[Pass, ...], ...]


StageOrder = Callable[[int, PipelineSize], tuple[Pass, ...]]
LiveLimit = Callable[[int, PipelineSize], int]


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a schedule is.

    Attributes:
        order: the passes of a stage.
        max_live: a bound on the live pairs of a micro-batch and a chunk of a stage; see `n_live`.
        trains: whether there are backward passes.
        interleaves: whether stages may have several chunks.
    """

    order: StageOrder
    max_live: LiveLimit
    trains: bool
    interleaves: bool


_RULES: dict[str, _Rule] = {}


def _register(
    name: str, *, max_live: LiveLimit, trains: bool = True, interleaves: bool = False
) -> Callable[[StageOrder], StageOrder]:
    def add(order: StageOrder) -> StageOrder:
        assert name not in _RULES, f"two schedules are called {name}"
        _RULES[name] = _Rule(order, max_live, trains, interleaves)
        return order

    return add


@_register("1f1b", max_live=lambda stage, size: min(size.n_stages - stage, size.n_micro_batches))
def _one_forward_one_backward(stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    """Just enough forwards to fill the stages after this one, then one backward for each forward, then the rest."""
    return _alternate(_in_order("forward", stage, size), _in_order("backward", stage, size), size.n_stages - stage - 1)


@_register("gpipe", max_live=lambda stage, size: size.n_micro_batches)
def _gpipe(stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    """All forwards, then all backwards."""
    return _in_order("forward", stage, size) + _in_order("backward", stage, size)


@_register(
    "inference",
    max_live=lambda stage, size: (size.n_chunks - 1) * max(map(len, _groups(size))) + 1,
    trains=False,
    interleaves=True,
)
def _inference(stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    """Forwards only; nothing is kept once a stage's last chunk has sent its result."""
    return _in_order("forward", stage, size)


@_register(
    "1f1b-interleaved",
    max_live=lambda stage, size: min(_n_warm_up(stage, size) + 1, size.n_chunks * size.n_micro_batches),
    interleaves=True,
)
def _interleaved(stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    """1F1B over chunks (Narayanan et al., 2021, section 2.2): the bubble is 1 / n_chunks of that of 1f1b.

    With one chunk per stage it is 1f1b.
    """
    forward, backward = _in_order("forward", stage, size), _in_order("backward", stage, size)
    return _alternate(forward, backward, _n_warm_up(stage, size))


def _n_warm_up(stage: int, size: PipelineSize) -> int:
    """Forwards before the first backward, if there are so many: (p - k - 1) * 2 + (v - 1) * p for groups of p."""
    behind = size.n_stages - stage - 1
    if size.n_chunks == 1:
        return behind
    return 2 * behind + (size.n_chunks - 1) * max(map(len, _groups(size)))


def _groups(size: PipelineSize) -> list[range]:
    """Micro-batches that pass through the same chunks one after the other before their stages go on to the next chunks.

    Groups have p micro-batches where p divides their number, as in the paper. Else they are a little larger and as
    equal as can be: with a smaller group, the first stage would wait for the last one.
    """
    n = size.n_micro_batches
    if size.n_chunks == 1:
        return [range(n)]
    n_groups = max(1, n // size.n_stages)
    return [range(i * n // n_groups, (i + 1) * n // n_groups) for i in range(n_groups)]


def _in_order(kind: Kind, stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    """All passes of a kind on a stage: group by group, and in each group chunk by chunk, for backward passes from the
    last chunk to the first."""
    chunks = range(stage, size.n_stages * size.n_chunks, size.n_stages)
    turns = chunks if kind == "forward" else chunks[::-1]
    return tuple(Pass(kind, chunk, micro_batch) for group in _groups(size) for chunk in turns for micro_batch in group)


def _alternate(forward: tuple[Pass, ...], backward: tuple[Pass, ...], n_warm_up: int) -> tuple[Pass, ...]:
    """`n_warm_up` forwards, then one backward behind each forward, then the rest of the backwards."""
    n_pairs = max(0, len(forward) - n_warm_up)
    pairs = zip(forward[n_warm_up:], backward[:n_pairs], strict=True)
    return (*forward[:n_warm_up], *(one for pair in pairs for one in pair), *backward[n_pairs:])


def schedule_names() -> tuple[str, ...]:
    """Names that `make_schedule` knows, sorted."""
    return tuple(sorted(_RULES))


def interleaves(name: str) -> bool:
    """Whether stages may have several chunks under `name`."""
    return _rule(name).interleaves


def make_schedule(name: str, size: PipelineSize) -> Schedule:
    """The schedule called `name`. Raises ShardingError on an unknown name, or several chunks where it has one."""
    rule = _rule(name)
    if size.n_chunks > 1 and not rule.interleaves:
        raise ShardingError(
            f"The schedule `{name}` has one chunk per stage, not {size.n_chunks}. Use `1f1b-interleaved`."
        )
    return Schedule(name, size, tuple(rule.order(stage, size) for stage in range(size.n_stages)))


def max_live(name: str, stage: int, size: PipelineSize) -> int:
    """Most pairs of a micro-batch and a chunk whose activations a stage may hold under `name`."""
    return _rule(name).max_live(stage, size)


def n_live(schedule: Schedule, stage: int) -> int:
    """Most pairs of a micro-batch and a chunk that `stage` really holds at once.

    A pair is live from its forward, that included, to its backward; without backward passes, to the forward of the
    stage's last chunk.
    """
    return max((sum(counts) for counts in live_counts(schedule, stage)), default=0)


def live_counts(schedule: Schedule, stage: int) -> tuple[tuple[int, ...], ...]:
    """What `stage` holds at its fullest moments: for each moment the live micro-batches of each of its chunks.

    A moment is left out if another one holds at least as much of every chunk.
    """
    size, trains = schedule.size, _rule(schedule.name).trains
    live = [0] * size.n_chunks
    moments: dict[tuple[int, ...], None] = {}
    for one in schedule.passes[stage]:
        own_chunk = one.chunk // size.n_stages
        if one.kind == "backward":
            live[own_chunk] -= 1
            continue

        live[own_chunk] += 1
        moments[tuple(live)] = None
        # Without backward passes, nothing of a micro-batch is kept behind the last chunk.
        if not trains and own_chunk == size.n_chunks - 1:
            live = [count - 1 for count in live]

    return tuple(
        one for one in moments if not any(one != other and all(map(int.__le__, one, other)) for other in moments)
    )


def ticks(schedule: Schedule) -> tuple[tuple[Pass, ...], ...]:
    """Passes that run at the same time if every pass takes one tick and starts as soon as it can.

    Raises VerifyError if stages wait for each other in a circle, or for a pass that no stage runs.
    """
    waiting = [list(reversed(passes)) for passes in schedule.passes]
    done: set[Pass] = set()
    result: list[tuple[Pass, ...]] = []

    while any(waiting):
        heads = [passes[-1] for passes in waiting if passes]
        ready = tuple(head for head in heads if done.issuperset(_waits_for(head, schedule)))
        if not ready:
            raise VerifyError(_deadlock_message(schedule, heads, done))

        for passes in waiting:
            if passes and passes[-1] in ready:
                passes.pop()
        done.update(ready)
        result.append(ready)
    return tuple(result)


def global_order(schedule: Schedule) -> tuple[Pass, ...]:
    """All passes in one order that respects every stage's order and every dependency: tick by tick, then by stage."""
    return tuple(one for tick in ticks(schedule) for one in tick)


def verify_schedule(schedule: Schedule) -> None:
    """Raises VerifyError unless

    - there is one list of passes for each stage, and it holds passes through that stage's chunks only;
    - every pass runs once: one forward per chunk and micro-batch, and one backward where the schedule trains;
    - a forward runs before its backward;
    - dependencies across stages can be met without deadlock;
    - no stage holds more live chunks than its schedule allows (1f1b: min(n_stages - stage, n_micro_batches)).
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


def _waits_for(one: Pass, schedule: Schedule) -> list[Pass]:
    chunk, micro_batch = one.chunk, one.micro_batch
    if one.kind == "forward":
        return [Pass("forward", chunk - 1, micro_batch)] if chunk > 0 else []
    is_last = chunk + 1 >= schedule.size.n_stages * schedule.size.n_chunks
    later = [] if is_last else [Pass("backward", chunk + 1, micro_batch)]
    return [Pass("forward", chunk, micro_batch), *later]


def _deadlock_message(schedule: Schedule, heads: list[Pass], done: set[Pass]) -> str:
    waits = [
        f"{head} waits for {', '.join(str(one) for one in _waits_for(head, schedule) if one not in done)}"
        for head in heads
    ]
    n_passes = sum(map(len, schedule.passes))
    return f"Schedule `{schedule.name}` deadlocks after {len(done)} of {n_passes} passes: {'; '.join(waits)}."


def _verify_stages(schedule: Schedule) -> None:
    n_stages = schedule.size.n_stages
    if len(schedule.passes) != n_stages:
        raise VerifyError(
            f"Schedule `{schedule.name}` has {len(schedule.passes)} lists of passes for {n_stages} stages."
        )
    for stage, passes in enumerate(schedule.passes):
        for one in passes:
            if one.chunk % n_stages != stage:
                raise VerifyError(f"Schedule `{schedule.name}` lists {one} under stage {stage}.")


def _verify_each_once(schedule: Schedule) -> None:
    kinds: tuple[Kind, ...] = ("forward", "backward") if _rule(schedule.name).trains else ("forward",)
    size = schedule.size
    for stage, passes in enumerate(schedule.passes):
        seen = Counter(passes)
        chunks = range(stage, size.n_stages * size.n_chunks, size.n_stages)
        micro_batches = range(size.n_micro_batches)
        wanted = [Pass(kind, chunk, micro_batch) for kind in kinds for chunk in chunks for micro_batch in micro_batches]
        for one in wanted:
            if seen[one] != 1:
                raise VerifyError(f"Schedule `{schedule.name}` runs {one} {seen[one]} times; expected once.")
        if extra := seen.keys() - set(wanted):
            first = min(extra, key=str)
            raise VerifyError(f"Schedule `{schedule.name}` runs {first}, which is not one of its passes.")


def _verify_forward_first(schedule: Schedule) -> None:
    for passes in schedule.passes:
        seen: set[tuple[int, int]] = set()
        for one in passes:
            if one.kind == "forward":
                seen.add((one.chunk, one.micro_batch))
            elif (one.chunk, one.micro_batch) not in seen:
                raise VerifyError(f"Schedule `{schedule.name}` runs {one} before its forward.")


def _verify_live(schedule: Schedule) -> None:
    for stage in range(schedule.size.n_stages):
        limit = max_live(schedule.name, stage, schedule.size)
        if (live := n_live(schedule, stage)) > limit:
            raise VerifyError(
                f"Stage {stage} of schedule `{schedule.name}` holds {live} live micro-batches; "
                f"at most {limit} are allowed."
            )
