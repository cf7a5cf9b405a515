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
from minialpa.inter.schedule.schedules import PipelineSize, Schedule, interleaves, make_schedule, parsed_schedule
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

    @property
    def per_stage(self) -> int:
        return len(self.stage_of) // self.n_stages

    def size(self, n_micro_batches: int) -> PipelineSize:
        return PipelineSize(self.n_stages, n_micro_batches, self.per_stage)

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
    """Raise ShardingError unless chunk c is on stage c mod n_stages, and `schedule` allows the number of chunks."""
    n_chunks, n_stages = len(chunks.stage_of), chunks.n_stages
    if n_chunks > n_stages and not interleaves(schedule):
        raise ShardingError(
            f"The schedule `{schedule}` needs consecutive layers on each stage, but {_stages_text(chunks)}. Use the "
            "schedule `1f1b-interleaved`, or give each stage consecutive layers."
        )

    if n_chunks % n_stages or any(stage != chunk % n_stages for chunk, stage in enumerate(chunks.stage_of)):
        raise ShardingError(
            f"Give the layers to the stages 0 to {n_stages - 1} in turn and equally often, such as [[0, 2], [1, 3]] "
            f"for two stages; now {_stages_text(chunks)}."
        )

    if n_chunks == n_stages > 1 and schedule == "1f1b-interleaved":
        raise ShardingError(
            "The schedule `1f1b-interleaved` needs stages of layers that are not consecutive, but "
            f"{_stages_text(chunks)}. Set `stage_option=UniformStageOption(num_chunks=2)`, give `ManualStageOption` "
            "layers such as [[0, 2], [1, 3]], or use the schedule `1f1b`."
        )


def _stages_text(chunks: Chunks) -> str:
    """The layers of the first stages: `stage 0 has the layers 0, 2, stage 1 has the layers 1, 3`."""
    layers: dict[int, list[int]] = {}
    for run, stage in zip(chunks.layers, chunks.stage_of, strict=True):
        layers.setdefault(stage, []).extend(run)
    listed = [f"stage {stage} has the layers {', '.join(map(str, layers[stage]))}" for stage in sorted(layers)]
    return ", ".join(listed[:_MOST_LISTED]) + (", ..." if listed[_MOST_LISTED:] else "")
