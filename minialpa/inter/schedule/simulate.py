"""Simulation: a plan in, the timeline of one step out, without the step or a device.

Each stage runs its passes in the order of the schedule, each when its transfers have arrived:

    start(pass)     = max(end of the previous pass of the stage, arrivals of its transfers)
    start(transfer) = max(end of the pass that makes it, end of the previous transfer between the same two stages)
    end(transfer)   = start + alpha + beta * bytes
    bytes(stage)    = fixed_bytes + sum over counts of `live_counts` (count * its kept_bytes)

Two stages on one host use the link inside the host, all others the link between hosts. Stages compute while transfers
run. The update of a stage starts after its passes and the arrival of the sums of other stages; it does not wait for
other updates. Loops follow each other, and the work between two loops counts as the update of the first loop.
"""

from __future__ import annotations

from collections import defaultdict

from minialpa.cluster import LinkSpec
from minialpa.errors import ShardingError, VerifyError
from minialpa.field_types import check_value
from minialpa.inter.schedule.chunks import plan_chunks, plan_schedule
from minialpa.inter.schedule.schedules import Pass, Schedule, global_order, lifetimes, make_schedule
from minialpa.inter.schedule.timeline import StageTimeline, TimedPass, TimedTransfer, Timeline
from minialpa.plan import PassName, Plan, PlannedTransfer
from minialpa.support.private_jax import api_boundary


@api_boundary
def simulate(plan: Plan, schedule: Schedule | None = None) -> Timeline:
    """The timeline of one step of `plan`, with its schedule or another `schedule` of the same size.

    Raises VerifyError if the stages wait for each other in a circle, ShardingError if the schedule has another size.
    """
    check_value("plan", plan, Plan)
    check_value("schedule", schedule, Schedule | None)
    order = schedule or plan_schedule(plan)
    required = plan_chunks(plan).size(plan.n_micro_batches)
    if order.size != required:
        raise ShardingError(
            f"The schedule `{order.name}` has {order.size}, but the plan has {required}. Make the schedule with "
            f"`make_schedule({order.name!r}, {required})`."
        )
    return _Simulation(plan, order).timeline()


def _loop_schedules(plan: Plan, schedule: Schedule) -> list[Schedule]:
    """For each loop `schedule`, or `inference` if the loop has no backward passes."""
    if plan.n_loops == 1:
        return [schedule]
    training = {one.loop for stage in plan.stages for one in stage.passes if one.kind == "backward"}
    inference = make_schedule("inference", schedule.size)
    return [schedule if loop in training else inference for loop in range(1, plan.n_loops + 1)]


def link_between(plan: Plan, source: int, target: int) -> LinkSpec:
    """The link of transfers between two stages."""
    per_host = plan.cluster.devices_per_host
    hosts: set[int] = set()
    for stage in (plan.stages[source], plan.stages[target]):
        last_device = stage.first_device + stage.n_devices - 1
        hosts |= {stage.first_device // per_host, last_device // per_host}
    return plan.cluster.link(same_host=len(hosts) == 1)


class _Simulation:
    """The state of a simulation. `loop` is the current loop, and `schedule` its schedule."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.plan, self.schedule, self.loop = plan, schedule, 1
        self.schedules = _loop_schedules(plan, schedule)
        self.stage_of = plan_chunks(plan).stage_of
        # In the schedule of a plan without a pipeline, passes of kind `step` are forward passes.
        self.costs = {
            PassName("forward" if one.kind == "step" else one.kind, one.chunk, one.loop): one
            for stage in plan.stages
            for one in stage.passes
        }

        self.sent: dict[PassName, list[PlannedTransfer]] = defaultdict(list)
        self.arriving: dict[PassName, list[PlannedTransfer]] = defaultdict(list)
        for transfer in plan.transfers:
            self.sent[transfer.source].append(transfer)
            self.arriving[transfer.target].append(transfer)

        # Seconds at which each stage (`clock`) and link is free, and each transfer of a micro-batch arrives.
        self.clock = [0.0] * len(plan.stages)
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.arrival: dict[tuple[PlannedTransfer, int], float] = {}

        # By stage: start and end of each pass of the current loop; then the timeline of all loops.
        self.times: list[dict[Pass, tuple[float, float]]] = [{} for _ in plan.stages]
        self.passes: list[list[TimedPass]] = [[] for _ in plan.stages]
        self.memory: list[list[tuple[float, float]]] = [[] for _ in plan.stages]
        self.peak_live = [0] * len(plan.stages)
        self.transfers: list[TimedTransfer] = []

    def timeline(self) -> Timeline:
        for loop, schedule in enumerate(self.schedules, 1):
            self.loop, self.schedule = loop, schedule
            self.times = [{} for _ in self.plan.stages]
            # A link queues the transfers of one stage, so the order of passes of different stages changes no time.
            for one in global_order(schedule):
                self._run_pass(self.stage_of[one.chunk], one)
            for stage, update in enumerate(self._timed_updates()):
                self._end_loop(stage, update)

        # Loops that only infer do not name the schedule of a training step.
        name = next((one.name for one in self.schedules if one.name != "inference"), self.schedule.name)
        stages = tuple(map(self._stage_timeline, range(len(self.plan.stages))))
        return Timeline(name, self.plan.n_micro_batches, stages, tuple(self.transfers))

    def _end_loop(self, stage: int, update: TimedPass) -> None:
        """Move passes of the current loop, and `update`, to the timeline."""
        for one, (start_s, end_s) in self.times[stage].items():
            cost = self.costs.get(self._pass_name(one))
            if cost is not None:  # a pass without work has no cost
                timed = TimedPass(
                    kind=cost.kind, number=one.chunk, micro_batch=one.micro_batch, start_s=start_s, end_s=end_s
                )
                self.passes[stage].append(timed)
        self.passes[stage].append(update)
        memory, peak_live = self._memory_curve(stage)
        self.memory[stage] += memory
        self.peak_live[stage] = max(self.peak_live[stage], peak_live)
        self.clock[stage] = update.end_s

    def _stage_timeline(self, stage: int) -> StageTimeline:
        return StageTimeline(
            first_device=self.plan.stages[stage].first_device,
            n_devices=self.plan.stages[stage].n_devices,
            passes=tuple(self.passes[stage]),
            memory=tuple(self.memory[stage]),
            peak_live=self.peak_live[stage],
        )

    def _pass_name(self, one: Pass) -> PassName:
        return PassName(one.kind, one.chunk, self.loop)

    def _arrival_s(self, transfer: PlannedTransfer, micro_batch: int) -> float:
        # Updates and earlier loops send once for all micro-batches.
        is_early = transfer.source.kind == "update" or transfer.source.loop < self.loop
        key = transfer, 0 if is_early else micro_batch
        if key not in self.arrival:
            raise VerifyError(
                f"In the plan, the transfer from {transfer.source} comes after its reader {transfer.target}. This is a "
                "bug in minialpa: report it with this message."
            )
        return self.arrival[key]

    def _run_pass(self, stage: int, one: Pass) -> None:
        name = self._pass_name(one)
        arrivals = (self._arrival_s(transfer, one.micro_batch) for transfer in self.arriving[name])
        start_s = max([self.clock[stage], *arrivals])

        # A chunk may have no work in one direction: a first chunk without parameters has no backward pass.
        seconds = self.costs[name].seconds if name in self.costs else 0.0
        self.clock[stage] = start_s + seconds
        self.times[stage][one] = (start_s, self.clock[stage])
        for transfer in self.sent[name]:
            self._send(transfer, one.micro_batch, self.clock[stage])

    def _send(self, transfer: PlannedTransfer, micro_batch: int | None, ready_s: float) -> None:
        """Queue a transfer on its link. micro_batch: None for an update."""
        source, target = self._stage_of_pass(transfer.source), self._stage_of_pass(transfer.target)
        start_s = max(ready_s, self.link_free[source, target])
        end_s = start_s + link_between(self.plan, source, target).transfer_s(transfer.n_bytes)
        self.link_free[source, target] = end_s
        self.arrival[transfer, micro_batch or 0] = end_s

        self.transfers.append(
            TimedTransfer(
                source_stage=source,
                target_stage=target,
                kind=transfer.source.kind,
                micro_batch=micro_batch,
                n_bytes=transfer.n_bytes,
                start_s=start_s,
                end_s=end_s,
            )
        )

    def _stage_of_pass(self, name: PassName) -> int:
        return name.number if name.kind == "update" else self.stage_of[name.number]

    # ---- update and memory ----------------------------------------------------------------------------------------

    def _timed_updates(self) -> list[TimedPass]:
        """For each stage, its update, or its work between the current and the next loop."""
        # Each stage sends its sums when its passes are done, before any update starts.
        for k in range(len(self.plan.stages)):
            for transfer in self.sent[PassName("update", k, self.loop)]:
                self._send(transfer, None, self.clock[k])

        updates = []
        for k, stage in enumerate(self.plan.stages):
            arriving = self.arriving[PassName("update", k, self.loop)]
            start_s = max([self.clock[k], *(self.arrival.get((transfer, 0), 0.0) for transfer in arriving)])
            seconds = stage.between_s[self.loop - 1] if self.loop < self.plan.n_loops else stage.update_s
            end_s = start_s + seconds
            updates.append(TimedPass(kind="update", number=k, micro_batch=None, start_s=start_s, end_s=end_s))
        return updates

    def _memory_curve(self, stage: int) -> tuple[list[tuple[float, float]], int]:
        """(seconds, bytes per device from then on) in order, and the most live pairs (micro-batch, chunk)."""
        trains = any(name.kind == "backward" and name.loop == self.loop for name in self.costs)
        chunks = self.schedule.size.chunks_of(stage)
        n_chunks = len(chunks)
        kept_bytes, n_bytes = self.plan.stages[stage].kept_bytes, self.plan.stages[stage].fixed_bytes
        first_s = min((start_s for start_s, _ in self.times[stage].values()), default=0.0) if self.loop > 1 else 0.0
        splits = len(kept_bytes) > n_chunks

        live, peak_live = 0, 0
        memory = [(first_s, n_bytes)]
        for one, (start_s, end_s) in self.times[stage].items():
            own_chunk = chunks.index(one.chunk)
            begin, end = lifetimes(one.kind, own_chunk, n_chunks, splits=splits)
            live += one.kind == "forward"
            peak_live = max(peak_live, live)
            if begin:
                n_bytes += sum(kept_bytes[i] for i in begin)
                memory.append((start_s, n_bytes))
            if end:
                live -= one.kind == ("weights" if splits else "backward")
                n_bytes -= sum(kept_bytes[i] for i in end)
                memory.append((end_s, n_bytes))
            # Without backward passes, the last chunk frees all bytes.
            elif not trains and own_chunk == n_chunks - 1:
                n_bytes, live = n_bytes - sum(kept_bytes), live - n_chunks
                memory.append((end_s, n_bytes))
        return memory, peak_live
