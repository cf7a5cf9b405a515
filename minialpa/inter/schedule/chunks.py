"""The layers of each stage in, the chunks of the pipeline out: runs of neighbouring layers, in order.

A micro-batch visits a stage once per chunk. Stages with the layers (0, 1, 4) and (2, 3, 5) have four chunks:

    chunk    0     1     2   3
    layers   0 1   2 3   4   5
    stage    0     1     0   1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minialpa.errors import ShardingError
from minialpa.inter.schedule.schedules import PipelineSize, Schedule, layouts, make_schedule, parsed_schedule
from minialpa.plan import Plan

#: Stages that a message lists.
_MOST_LISTED = 8


@dataclass(frozen=True, slots=True)
class Chunks:
    """The layers and the stage of each chunk. A step without a pipeline has one chunk, without layers."""

    layers: tuple[tuple[int, ...], ...]
    stage_of: tuple[int, ...]

    @property
    def n_stages(self) -> int:
        return max(self.stage_of) + 1

    def size(self, n_micro_batches: int) -> PipelineSize:
        v = PipelineSize(self.n_stages, n_micro_batches, 2, is_v=True)
        if self.n_stages > 1 and self.stage_of == v.stage_of:
            return v
        return PipelineSize(self.n_stages, n_micro_batches, len(self.stage_of) // self.n_stages)

    def of_group(self, layer_of_group: Sequence[int]) -> tuple[int, ...]:
        """The chunk of each forward group."""
        chunk_of_layer = {layer: chunk for chunk, layers in enumerate(self.layers) for layer in layers}
        return tuple(chunk_of_layer[layer] for layer in layer_of_group)


def chunks_of(stages: Sequence[Sequence[int]]) -> Chunks:
    """The chunks of a pipeline. stages: the layers of each stage, ascending."""
    runs: list[tuple[list[int], int]] = []
    for stage, layers in enumerate(stages):
        for i, layer in enumerate(layers):
            if i == 0 or layer != layers[i - 1] + 1:
                runs.append(([], stage))
            runs[-1][0].append(layer)

    runs.sort()
    return Chunks(tuple(tuple(run) for run, _ in runs) or ((),), tuple(stage for _, stage in runs) or (0,))


def plan_chunks(plan: Plan) -> Chunks:
    return chunks_of([stage.layers for stage in plan.stages])


def plan_schedule(plan: Plan, loop: int | None = None) -> Schedule:
    """The schedule of one loop of a plan; without `loop`, of its training loops.

    A loop without backward passes has the schedule `inference`.
    """
    passes = (one for stage in plan.stages for one in stage.passes)
    trains = any(one.kind == "backward" and loop in (None, one.loop) for one in passes)
    size = plan_chunks(plan).size(plan.n_micro_batches)
    if trains and plan.orders:
        return parsed_schedule(plan.schedule, size, plan.orders)
    return make_schedule(plan.schedule if trains else "inference", size)


def check_chunks(chunks: Chunks, schedule: str) -> None:
    """Raise ShardingError unless the chunks go to the stages in turn or in a V, as `schedule` needs them."""
    size, allowed = chunks.size(1), layouts(schedule)
    if len(chunks.stage_of) > chunks.n_stages and allowed == ("one",):
        raise ShardingError(
            f"The schedule `{schedule}` needs consecutive layers on each stage, but {_stages_text(chunks)}. Use the "
            f"schedule `{'zb-v' if size.is_v else '1f1b-interleaved'}`, or give each stage consecutive layers, as "
            "`num_chunks=1` does."
        )

    if size.stage_of != chunks.stage_of or (size.is_v and "v" not in allowed):
        raise ShardingError(
            f"Give the layers to the stages 0 to {chunks.n_stages - 1} in turn and equally often, such as "
            f"[[0, 2], [1, 3]] for two stages; now {_stages_text(chunks)}."
        )

    if chunks.n_stages > 1 and (size.layout not in allowed or (schedule, size.layout) == ("1f1b-interleaved", "one")):
        example, plain = ("[[0, 3], [1, 2]]", "zb-h1") if "v" in allowed else ("[[0, 2], [1, 3]]", "1f1b")
        kind = "two runs of layers in a V" if "v" in allowed else "layers that are not consecutive"
        raise ShardingError(
            f"The schedule `{schedule}` needs stages of {kind}, but {_stages_text(chunks)}. Set "
            f"`stage_option=UniformStageOption(num_chunks=2)`, give `ManualStageOption` layers such as {example}, or "
            f"use the schedule `{plain}`."
        )


def _stages_text(chunks: Chunks) -> str:
    """The layers of the first stages: `stage 0 has the layers 0, 2, stage 1 has the layers 1, 3`."""
    layers: dict[int, list[int]] = {}
    for run, stage in zip(chunks.layers, chunks.stage_of, strict=True):
        layers.setdefault(stage, []).extend(run)
    listed = [f"stage {stage} has the layers {', '.join(map(str, layers[stage]))}" for stage in sorted(layers)]
    return ", ".join(listed[:_MOST_LISTED]) + (", ..." if listed[_MOST_LISTED:] else "")
