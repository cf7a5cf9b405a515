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
from minialpa.inter.schedule.schedules import PipelineSize, Schedule, interleaves, make_schedule
from minialpa.plan import Plan


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
        chunk_of_layer = {layer: chunk for chunk, layers in enumerate(self.layers) for layer in layers}
        return tuple(chunk_of_layer[layer] for layer in layer_of_group)


def chunks_of(stages: Sequence[Sequence[int]]) -> Chunks:
    """stages: the layers of each stage, ascending."""
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
    return make_schedule(plan.schedule if trains else "inference", plan_chunks(plan).size(plan.n_micro_batches))


def check_chunks(chunks: Chunks, schedule: str) -> None:
    """Raise ShardingError unless chunk c is on stage c mod n_stages, and `schedule` allows the number of chunks."""
    n_chunks, n_stages = len(chunks.stage_of), chunks.n_stages
    if n_chunks > n_stages and not interleaves(schedule):
        raise ShardingError(
            f"Stages of layers that are not neighbours need the schedule `1f1b-interleaved`; `{schedule}` has one run "
            f"of neighbouring layers per stage. The runs are {_listed(chunks)}."
        )

    if n_chunks % n_stages or any(stage != chunk % n_stages for chunk, stage in enumerate(chunks.stage_of)):
        raise ShardingError(
            f"Runs of layers must go round the stages 0 to {n_stages - 1} in order, equally often; got "
            f"{_listed(chunks)}."
        )

    if n_chunks == n_stages > 1 and schedule == "1f1b-interleaved":
        raise ShardingError(
            "The schedule `1f1b-interleaved` needs stages of several runs of layers: `num_chunks` of "
            "`UniformStageOption`, or layers of `ManualStageOption` such as [[0, 2], [1, 3]]. Else use `1f1b`."
        )


def _listed(chunks: Chunks) -> str:
    pairs = zip(chunks.layers, chunks.stage_of, strict=True)
    return ", ".join(f"{list(layers)} on stage {stage}" for layers, stage in pairs)
