"""Pipeline schedules: a name and a pipeline size in, the order of passes of each stage out.

A pass is one micro-batch through one *chunk*, a run of neighbouring layers. Of p stages with v chunks each, stage k has
the chunks k, p + k, ..., (v - 1) p + k. In a V, stage k has the chunks k and 2 p - 2 - k, and the last stage has one
chunk. Pass (c, b) of micro-batch b through chunk c waits for other passes:

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
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from minialpa.errors import ShardingError, VerifyError, meant
from minialpa.inter.schedule.list_scheduler import Arrays, Ints, list_order

Kind = Literal["forward", "backward", "weights"]
KINDS: tuple[Kind, ...] = ("forward", "backward", "weights")
#: The chunks of a stage: one, several in turn, or two in a V.
Layout = Literal["one", "in turn", "v"]


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
    """Counts of a pipeline; `n_chunks` per stage. In a V, which has two, the last stage has both in one."""

    n_stages: int
    n_micro_batches: int
    n_chunks: int = 1
    is_v: bool = False

    def __post_init__(self) -> None:
        if min(self.n_stages, self.n_micro_batches, self.n_chunks) < 1:
            raise ShardingError(
                f"Set `n_stages`, `n_micro_batches` and `n_chunks` to at least 1; got `n_stages={self.n_stages}`, "
                f"`n_micro_batches={self.n_micro_batches}` and `n_chunks={self.n_chunks}`."
            )

    @property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each chunk."""
        stages = tuple(range(self.n_stages))
        return stages + stages[-2::-1] if self.is_v else stages * self.n_chunks

    @property
    def layout(self) -> Layout:
        return "v" if self.is_v else "in turn" if self.n_chunks > 1 else "one"

    def chunks_of(self, stage: int) -> list[int]:
        return [chunk for chunk, home in enumerate(self.stage_of) if home == stage]


#: For each stage, its passes in order.
Passes = tuple[tuple[Pass, ...], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    name: str
    size: PipelineSize
    passes: Passes


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScheduleRule:
    order: Callable[[PipelineSize], Passes]
    max_live: Callable[[int, PipelineSize], int]
    layouts: tuple[Layout, ...] = ("one",)
    trains: bool = True
    splits_backward: bool = False


def _each_stage(order: Callable[[int, PipelineSize], tuple[Pass, ...]]) -> Callable[[PipelineSize], Passes]:
    return lambda size: tuple(order(stage, size) for stage in range(size.n_stages))


def _one_forward_one_backward(stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    """Forwards fill the later stages. Then each forward has a backward after it.

    Over chunks (Narayanan et al., 2021, section 2.2), the bubble is 1/n_chunks of the bubble with one chunk.
    """
    forward, backward = _in_order("forward", stage, size), _in_order("backward", stage, size)
    n_warm_up = _n_warm_up(stage, size)
    n_pairs = max(0, len(forward) - n_warm_up)
    pairs = zip(forward[n_warm_up:], backward[:n_pairs], strict=True)
    return (*forward[:n_warm_up], *(one for pair in pairs for one in pair), *backward[n_pairs:])


def _gpipe(stage: int, size: PipelineSize) -> tuple[Pass, ...]:
    return _in_order("forward", stage, size) + _in_order("backward", stage, size)


def _n_warm_up(stage: int, size: PipelineSize) -> int:
    """Forwards before the first backward: p - k - 1; with v chunks, (p - k - 1) * 2 + (v - 1) * p for groups of p."""
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
    chunks = size.chunks_of(stage)
    turns = chunks if kind == "forward" else chunks[::-1]
    return tuple(Pass(kind, chunk, micro_batch) for group in _groups(size) for chunk in turns for micro_batch in group)


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


def _zero_bubble_v(size: PipelineSize) -> Passes:
    """ZB-V (Qi et al., 2024), by the list scheduler, for passes of equal length and the memory of `1f1b`."""
    p, n = size.n_stages, size.n_micro_batches
    work = np.array([2.0 if size.stage_of.count(k) == 1 else 1.0 for k in size.stage_of])
    none = np.zeros_like(work)
    arrays = Arrays(
        np.array(size.stage_of), np.stack([work] * 3), np.stack([none, work, none]), np.stack([none] * 2),
        np.full(p, 2.0 * p),
    )  # fmt: skip
    order = np.empty(3 * n * len(work), np.int64)
    list_order(arrays, n, np.full(p, n), 0.0, True, True, order)
    return passes_of(order, size)


def passes_of(order: Ints, size: PipelineSize) -> Passes:
    """order: passes of all stages, by the numbers of `list_scheduler`."""
    passes: list[list[Pass]] = [[] for _ in range(size.n_stages)]
    n_run = [0] * (3 * len(size.stage_of))
    for number in order.tolist():
        kind, chunk = divmod(number, len(size.stage_of))
        passes[size.stage_of[chunk]].append(Pass(KINDS[kind], chunk, n_run[number]))
        n_run[number] += 1
    return tuple(map(tuple, passes))


def _soon_weights(size: PipelineSize) -> Passes:
    """The order with least memory: each weights pass after its backward pass."""
    if size.is_v:
        return _zero_bubble_v(size)
    whole = _each_stage(_one_forward_one_backward)(size)
    return tuple(
        tuple(
            each
            for one in passes
            for each in ([one, replace(one, kind="weights")] if one.kind == "backward" else [one])
        )
        for passes in whole
    )


def _max_live_1f1b(stage: int, size: PipelineSize) -> int:
    return min(_n_warm_up(stage, size) + 1, size.n_chunks * size.n_micro_batches)


def _max_live_zero_bubble(stage: int, size: PipelineSize) -> int:
    return size.n_chunks * min(size.n_stages, size.n_micro_batches)


_RULES: dict[str, _ScheduleRule] = {
    "1f1b": _ScheduleRule(order=_each_stage(_one_forward_one_backward), max_live=_max_live_1f1b),
    "gpipe": _ScheduleRule(order=_each_stage(_gpipe), max_live=lambda stage, size: size.n_micro_batches),
    # A stage drops the activations of a micro-batch after the forward of its last chunk.
    "inference": _ScheduleRule(
        order=_each_stage(partial(_in_order, "forward")),
        max_live=lambda stage, size: (size.n_chunks - 1) * max(map(len, _groups(size))) + 1,
        layouts=("one", "in turn", "v"),
        trains=False,
    ),
    "1f1b-interleaved": _ScheduleRule(
        order=_each_stage(_one_forward_one_backward),
        max_live=_max_live_1f1b,
        layouts=("one", "in turn"),
    ),
    "zb-h1": _ScheduleRule(order=_each_stage(_zero_bubble), max_live=_max_live_zero_bubble, splits_backward=True),
    "zb-v": _ScheduleRule(order=_zero_bubble_v, max_live=_max_live_zero_bubble, layouts=("v",), splits_backward=True),
    # Until a plan has `orders`.
    "zb": _ScheduleRule(
        order=_soon_weights,
        max_live=lambda stage, size: (_max_live_zero_bubble if size.is_v else _max_live_1f1b)(stage, size),
        layouts=("one", "in turn", "v"),
        splits_backward=True,
    ),
}


_LAYOUT_TEXT: dict[Layout, str] = {
    "one": "consecutive layers on each stage (`n_chunks=1`)",
    "in turn": "chunks that go to the stages in turn",
    "v": "two chunks of each stage in a V (`n_chunks=2, is_v=True`)",
}


def schedule_names() -> tuple[str, ...]:
    return tuple(sorted(_RULES))


def layouts(name: str) -> tuple[Layout, ...]:
    return _rule(name).layouts


def splits_backward(name: str) -> bool:
    return _rule(name).splits_backward


def make_schedule(name: str, size: PipelineSize) -> Schedule:
    """Raises ShardingError for an unknown name, or for chunks that the schedule cannot have."""
    rule = _rule(name)
    if size.layout not in rule.layouts:
        needed = " or ".join(_LAYOUT_TEXT[layout] for layout in rule.layouts)
        raise ShardingError(f"The schedule `{name}` needs {needed}; got {size}.")
    return Schedule(name, size, rule.order(size))


def order_texts(schedule: Schedule) -> tuple[str, ...]:
    """The passes of each stage: `f0 f1 b0 w0 b1 w1`, or `f0.1` in chunk 1 if stages have several chunks."""
    one_chunk = schedule.size.layout == "one"
    return tuple(
        " ".join(f"{one.kind[0]}{one.micro_batch}" + ("" if one_chunk else f".{one.chunk}") for one in passes)
        for passes in schedule.passes
    )


def parsed_schedule(name: str, size: PipelineSize, orders: Sequence[str]) -> Schedule:
    """A schedule with the `orders` of its stages, as `order_texts` writes them.

    Raises ShardingError unless each stage has each of its passes once, with the micro-batches of each kind and chunk
    in order, VerifyError if stages wait for each other in a circle.
    """
    passes: list[tuple[Pass, ...]] = []
    for stage, text in enumerate(orders):
        chunks = size.chunks_of(stage)
        words = {
            f"{kind[0]}{b}" + ("" if size.layout == "one" else f".{chunk}"): Pass(kind, chunk, b)
            for kind in KINDS
            for chunk in chunks
            for b in range(size.n_micro_batches)
        }
        given = [words[word] for word in text.split() if word in words]
        in_order = sorted(given, key=lambda one: (KINDS.index(one.kind), one.chunk))
        if len(given) < len(text.split()) or in_order != list(words.values()):
            raise ShardingError(
                f"The order of stage {stage} needs the passes {next(iter(words))} to "
                f"{list(words)[len(chunks) * size.n_micro_batches - 1]}, and so for b and w, each once and with the "
                f"micro-batches of each kind and chunk in order; got {text!r}."
            )
        passes.append(tuple(given))
    schedule = Schedule(name, size, tuple(passes))
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
    rule, chunks = _rule(schedule.name), schedule.size.chunks_of(stage)
    n_chunks = len(chunks)
    live = [0] * (3 * n_chunks if rule.splits_backward else n_chunks)
    moments: dict[tuple[int, ...], None] = {}
    for one in schedule.passes[stage]:
        own = chunks.index(one.chunk)
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
    is_last = chunk + 1 >= len(schedule.size.stage_of)
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
