"""Pipeline schedules: a name and a pipeline size in, the order of passes of each stage out.

A pass is one micro-batch through one *chunk*, a run of neighbouring layers. Of p stages with v chunks each, stage k has
the chunks k, p + k, ..., (v - 1) p + k. Pass (c, b) of micro-batch b through chunk c waits for other passes:

    forward(c, b)   <- forward(c - 1, b)
    backward(c, b)  <- forward(c, b) and backward(c + 1, b)
    weights(c, b)   <- backward(c, b)

A schedule may split backward passes: `backward` then makes the gradients that the earlier chunk reads, and `weights`
the gradients of the chunk's parameters, for which no other stage waits.

For example, `1f1b` with 2 stages and 3 micro-batches (f0: forward of micro-batch 0, b0: its backward):

    stage 0   f0 f1 b0 f2 b1 b2
    stage 1   f0 b0 f1 b1 f2 b2

`_RULES` has the schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from minialpa.errors import ShardingError, VerifyError, meant

Kind = Literal["forward", "backward", "weights"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch through one chunk of the pipeline, both counted from 0."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(chunk {self.chunk}, micro-batch {self.micro_batch})"


@dataclass(frozen=True, slots=True)
class PipelineSize:
    """Counts of a pipeline; `n_chunks` per stage."""

    n_stages: int
    n_micro_batches: int
    n_chunks: int = 1

    def __post_init__(self) -> None:
        if min(self.n_stages, self.n_micro_batches, self.n_chunks) < 1:
            raise ShardingError(
                f"Set `n_stages`, `n_micro_batches` and `n_chunks` to at least 1; got `n_stages={self.n_stages}`, "
                f"`n_micro_batches={self.n_micro_batches}` and `n_chunks={self.n_chunks}`."
            )


@dataclass(frozen=True, slots=True)
class Schedule:
    """For each stage, its passes in order."""

    name: str
    size: PipelineSize
    passes: tuple[tuple[Pass, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScheduleRule:
    order: Callable[[int, PipelineSize], tuple[Pass, ...]]
    max_live: Callable[[int, PipelineSize], int]
    trains: bool = True
    interleaves: bool = False
    splits_backward: bool = False


def _one_forward_one_backward(stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    """p - k - 1 forwards on stage k of p fill the later stages. Then each forward has a backward after it."""
    return _alternate(_in_order("forward", stage, size), _in_order("backward", stage, size), size.n_stages - stage - 1)


def _gpipe(stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    return _in_order("forward", stage, size) + _in_order("backward", stage, size)


def _inference(stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    """Forwards alone. A stage drops the activations of a micro-batch after the forward of its last chunk."""
    return _in_order("forward", stage, size)


def _interleaved(stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    """1F1B over chunks (Narayanan et al., 2021, section 2.2). Its bubble is 1/n_chunks of the bubble of `1f1b`."""
    forward, backward = _in_order("forward", stage, size), _in_order("backward", stage, size)
    return _alternate(forward, backward, _n_warm_up(stage, size))


def _n_warm_up(stage: int, size: PipelineSize) -> int:
    """Forwards before the first backward: (p - k - 1) * 2 + (v - 1) * p for groups of p micro-batches."""
    n_later = size.n_stages - stage - 1
    if size.n_chunks == 1:
        return n_later
    return 2 * n_later + (size.n_chunks - 1) * max(map(len, _groups(size)))


def _groups(size: PipelineSize) -> list[range]:
    """A group of micro-batches passes through one chunk of each stage before it enters the next chunks.

    A group has p micro-batches if p divides their number, as in the paper. Otherwise groups are larger and nearly
    equal: in a smaller group the first stage would wait for the last stage.
    """
    n = size.n_micro_batches
    if size.n_chunks == 1:
        return [range(n)]
    n_groups = max(1, n // size.n_stages)
    return [range(i * n // n_groups, (i + 1) * n // n_groups) for i in range(n_groups)]


def _in_order(kind: Kind, stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    chunks = range(stage, size.n_stages * size.n_chunks, size.n_stages)
    turns = chunks if kind == "forward" else chunks[::-1]
    return tuple(Pass(kind, chunk, micro_batch) for group in _groups(size) for chunk in turns for micro_batch in group)


def _alternate(forward: tuple[Pass, ...], backward: tuple[Pass, ...], n_warm_up: int) -> tuple[Pass, ...]:
    n_pairs = max(0, len(forward) - n_warm_up)
    pairs = zip(forward[n_warm_up:], backward[:n_pairs], strict=True)
    return (*forward[:n_warm_up], *(one for pair in pairs for one in pair), *backward[n_pairs:])


def _zero_bubble(stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    """ZB-H1 (Qi et al., 2024): as `1f1b`, with the `weights` pass of stage k delayed by k micro-batches.

    The passes for which other stages wait come first, and delayed passes fill the bubble at the end. Each stage keeps
    as many micro-batches as the first stage of `1f1b`.
    """
    passes: list[Pass] = []
    for one in _one_forward_one_backward(stage, size):
        passes.append(one)
        if one.kind == "backward" and one.micro_batch >= stage:
            passes.append(Pass("weights", one.chunk, one.micro_batch - stage))
    first_left = max(0, size.n_micro_batches - stage)
    return (*passes, *(Pass("weights", stage, left) for left in range(first_left, size.n_micro_batches)))


_ZERO_BUBBLE = _ScheduleRule(
    order=_zero_bubble,
    max_live=lambda stage, size: min(size.n_stages, size.n_micro_batches),
    splits_backward=True,
)
_RULES: dict[str, _ScheduleRule] = {
    "1f1b": _ScheduleRule(
        order=_one_forward_one_backward,
        max_live=lambda stage, size: min(size.n_stages - stage, size.n_micro_batches),
    ),
    "gpipe": _ScheduleRule(order=_gpipe, max_live=lambda stage, size: size.n_micro_batches),
    "inference": _ScheduleRule(
        order=_inference,
        max_live=lambda stage, size: (size.n_chunks - 1) * max(map(len, _groups(size))) + 1,
        trains=False,
        interleaves=True,
    ),
    "1f1b-interleaved": _ScheduleRule(
        order=_interleaved,
        max_live=lambda stage, size: min(_n_warm_up(stage, size) + 1, size.n_chunks * size.n_micro_batches),
        interleaves=True,
    ),
    "zb-h1": _ZERO_BUBBLE,
    # Of a plan, whose `orders` replace this order.
    "zb": _ZERO_BUBBLE,
}


def schedule_names() -> tuple[str, ...]:
    return tuple(sorted(_RULES))


def interleaves(name: str) -> bool:
    return _rule(name).interleaves


def splits_backward(name: str) -> bool:
    return _rule(name).splits_backward


def make_schedule(name: str, size: PipelineSize) -> Schedule:
    """Raises ShardingError for an unknown name, or for several chunks if the schedule does not interleave."""
    rule = _rule(name)
    if size.n_chunks > 1 and not rule.interleaves:
        raise ShardingError(
            f"The schedule `{name}` needs consecutive layers on each stage, but `n_chunks={size.n_chunks}` gives each "
            f"stage {size.n_chunks} runs of layers. Use `1f1b-interleaved`, or `n_chunks=1`."
        )
    return Schedule(name, size, tuple(rule.order(stage, size) for stage in range(size.n_stages)))


def order_text(passes: Sequence[Pass]) -> str:
    """The passes of a stage with one chunk: `f0 f1 b0 w0 b1 w1`."""
    return " ".join(f"{one.kind[0]}{one.micro_batch}" for one in passes)


def parsed_schedule(name: str, size: PipelineSize, orders: Sequence[str]) -> Schedule:
    """A schedule with the `orders` of its stages, as `order_text` writes them.

    Raises ShardingError unless each stage has each of its passes once, with the micro-batches of each kind in order,
    VerifyError if stages wait for each other in a circle.
    """
    kinds: dict[str, Kind] = {"f": "forward", "b": "backward", "w": "weights"}
    expected = [f"{kind}{b}" for kind in kinds for b in range(size.n_micro_batches)]
    for stage, text in enumerate(orders):
        if sorted(text.split(), key=lambda word: "fbw".find(word[:1])) != expected:
            raise ShardingError(
                f"The order of stage {stage} needs the passes f0 to f{size.n_micro_batches - 1}, and so for b and w, "
                f"each once and each kind in order; got {text!r}."
            )
    passes = tuple(
        tuple(Pass(kinds[word[0]], stage, int(word[1:])) for word in text.split()) for stage, text in enumerate(orders)
    )
    schedule = Schedule(name, size, passes)
    ticks(schedule)
    return schedule


def max_live(name: str, stage: int, size: PipelineSize) -> int:
    """The most live pairs (micro-batch, chunk) of a stage; see `live_counts`."""
    return _rule(name).max_live(stage, size)


def live_counts(schedule: Schedule, stage: int) -> tuple[tuple[int, ...], ...]:
    """For each of the fullest moments of `stage`, the number of live micro-batches of each of its chunks.

    A micro-batch is live in a chunk from its forward to its backward; without backward passes, until the forward of
    the stage's last chunk. Of the moments (2, 0), (2, 1) and (1, 2), the result leaves out (2, 0): (2, 1) covers it.

    With split backward passes, each moment has three counts per chunk: all chunks from forward to backward, then from
    forward to weights, and then from backward to weights.
    """
    size, rule = schedule.size, _rule(schedule.name)
    n_chunks = size.n_chunks
    live = [0] * (3 * n_chunks if rule.splits_backward else n_chunks)
    moments: dict[tuple[int, ...], None] = {}
    for one in schedule.passes[stage]:
        own = one.chunk // size.n_stages
        begin, end = lifetimes(one.kind, own, n_chunks, splits=rule.splits_backward)
        for i in begin:
            live[i] += 1
        if begin:
            moments[tuple(live)] = None
        for i in end:
            live[i] -= 1
        if not rule.trains and own == n_chunks - 1:
            live = [count - 1 for count in live]

    return tuple(
        one for one in moments if not any(one != other and all(map(int.__le__, one, other)) for other in moments)
    )


def lifetimes(kind: Kind, chunk: int, n_chunks: int, *, splits: bool) -> tuple[list[int], list[int]]:
    """The counts of `live_counts` that begin with a pass, and the counts that end with it."""
    until_backward, until_weights, after_backward = chunk, n_chunks + chunk, 2 * n_chunks + chunk
    match kind:
        case "forward":
            return [until_backward, *([until_weights] if splits else [])], []
        case "backward":
            return [after_backward] if splits else [], [until_backward]
        case "weights":
            return [], [until_weights, after_backward]


def ticks(schedule: Schedule) -> tuple[tuple[Pass, ...], ...]:
    """The passes of each tick, if each pass takes one tick and starts as early as possible.

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
    """All passes, by tick and then by stage: an order that respects all dependencies."""
    return tuple(one for tick in ticks(schedule) for one in tick)


def _rule(name: str) -> _ScheduleRule:
    if name not in _RULES:
        raise ShardingError(
            f"There is no schedule `{name}`.{meant(name, schedule_names())} Choose one of "
            f"{', '.join(f'`{known}`' for known in schedule_names())}."
        )
    return _RULES[name]


def _waits_for(one: Pass, schedule: Schedule) -> list[Pass]:
    chunk, micro_batch = one.chunk, one.micro_batch
    if one.kind == "forward":
        return [Pass("forward", chunk - 1, micro_batch)] if chunk > 0 else []
    if one.kind == "weights":
        return [Pass("backward", chunk, micro_batch)]
    is_last = chunk + 1 >= schedule.size.n_stages * schedule.size.n_chunks
    later = [] if is_last else [Pass("backward", chunk + 1, micro_batch)]
    return [Pass("forward", chunk, micro_batch), *later]


def _deadlock_message(schedule: Schedule, heads: list[Pass], done: set[Pass]) -> str:
    waits = [
        f"{head} waits for {', '.join(str(one) for one in _waits_for(head, schedule) if one not in done)}"
        for head in heads
    ]
    n_passes = sum(map(len, schedule.passes))
    return (
        f"The schedule `{schedule.name}` stops after {len(done)} of {n_passes} passes, because {'; '.join(waits)}. If "
        "you did not write this schedule, this is a bug in minialpa: report it with this message."
    )
