"""Simulation: a plan in, the timeline of one step out. Neither the step nor a device is needed.

Each stage runs its passes in the order of the schedule, each as soon as what it reads has arrived:
    start(pass)     = max(end of the stage's pass before it, arrivals of its transfers)
    start(transfer) = max(end of the pass that makes it, end of the transfer before it between the same two stages)
    end(transfer)   = start + alpha + beta * bytes
with the link inside a host where all devices of both stages share one, else the link between hosts. A transfer takes no
time of its stages. The update of a stage starts when its passes are done and what other stages' passes accumulated has
arrived; what one update waits for in another is not modelled. A step of several loops is one after the other, with
what runs between two of them as the update of the first.

Memory of a stage holds its fixed bytes and, for each live micro-batch of each chunk, what the chunk keeps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from minialpa.cluster import LinkSpec
from minialpa.errors import ShardingError, VerifyError
from minialpa.inter.schedule.chunks import plan_chunks, plan_schedule
from minialpa.inter.schedule.schedules import Pass, Schedule, make_schedule
from minialpa.inter.schedule.timeline import StageTimeline, TimedPass, TimedTransfer, Timeline
from minialpa.plan import PassName, Plan, PlannedPass, PlannedTransfer


def simulate(plan: Plan, schedule: Schedule | None = None) -> Timeline:
    """The timeline of one step of `plan`, or of the same stages in the order of another `schedule`.

    Raises VerifyError if the stages wait for each other in a circle, ShardingError if the schedule is for other counts.
    """
    order = schedule or plan_schedule(plan)
    wanted = plan_chunks(plan).size(plan.n_micro_batches)
    if order.size != wanted:
        raise ShardingError(f"The schedule `{order.name}` is for {order.size} and the plan is for {wanted}.")
    return _Run(plan, order).timeline()


def _loop_schedules(plan: Plan, schedule: Schedule) -> list[Schedule]:
    """The order of each loop: that of `schedule`, or of inference where nothing goes backward."""
    loops = range(1, plan.n_loops + 1)
    trains = [any(p.kind == "backward" and p.loop == loop for s in plan.stages for p in s.passes) for loop in loops]
    if plan.n_loops == 1:
        return [schedule]
    return [schedule if trains[i] else make_schedule("inference", schedule.size) for i in range(len(trains))]


class _Run:
    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.plan, self.schedule, self.loop = plan, schedule, 1
        self.schedules = _loop_schedules(plan, schedule)
        self.stage_of = plan_chunks(plan).stage_of
        self.cost: Mapping[PassName, PlannedPass] = {
            PassName("forward" if one.kind == "step" else one.kind, one.chunk, one.loop): one
            for stage in plan.stages
            for one in stage.passes
        }
        self.sent: dict[PassName, list[PlannedTransfer]] = defaultdict(list)
        self.awaited: dict[PassName, list[PlannedTransfer]] = defaultdict(list)
        for transfer in plan.transfers:
            self.sent[transfer.source].append(transfer)
            self.awaited[transfer.target].append(transfer)
        self.clock = [0.0] * len(plan.stages)
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.arrival: dict[tuple[PlannedTransfer, int], float] = {}
        # When each pass of the loop ran, and what each stage has done and held before.
        self.times: list[dict[Pass, tuple[float, float]]] = [{} for _ in plan.stages]
        self.passes: list[list[TimedPass]] = [[] for _ in plan.stages]
        self.memory: list[list[tuple[float, float]]] = [[] for _ in plan.stages]
        self.peak_live = [0] * len(plan.stages)
        self.transfers: list[TimedTransfer] = []

    def timeline(self) -> Timeline:
        for loop, schedule in enumerate(self.schedules, 1):
            self.loop, self.schedule = loop, schedule
            self.times = [{} for _ in self.plan.stages]
            self._run_passes()
            for k, update in enumerate(self._updates()):
                mine = [self._timed(one, *when) for one, when in self.times[k].items() if self._name(one) in self.cost]
                self.passes[k] += [*mine, update]
                memory, peak_live = self._memory(k)
                self.memory[k] += memory
                self.peak_live[k] = max(self.peak_live[k], peak_live)
                self.clock[k] = update.end_s
        stages = tuple(
            StageTimeline(stage.first_device, stage.n_devices, tuple(passes), tuple(memory), peak_live)
            for stage, passes, memory, peak_live in zip(
                self.plan.stages, self.passes, self.memory, self.peak_live, strict=True
            )
        )
        name = next((s.name for s in self.schedules if s.name != "inference"), self.schedule.name)
        return Timeline(name, self.plan.n_micro_batches, stages, tuple(self.transfers))

    def _name(self, one: Pass) -> PassName:
        return PassName(one.kind, one.chunk, self.loop)

    def _arrived(self, transfer: PlannedTransfer, micro_batch: int) -> float | None:
        """When what a pass awaits has come, if it has been sent; what an update sends, or a loop before, comes once."""
        is_early = transfer.source.kind == "update" or transfer.source.loop < self.loop
        return self.arrival.get((transfer, 0 if is_early else micro_batch))

    # ---- passes ---------------------------------------------------------------------------------------------------

    def _run_passes(self) -> None:
        """Every stage goes on until something has not been sent; then the next one has its turn."""
        done = [0] * len(self.plan.stages)
        moved = True
        while moved:
            moved = False
            for k, passes in enumerate(self.schedule.passes):
                while done[k] < len(passes) and not self._missing(passes[done[k]]):
                    self._run(k, passes[done[k]])
                    done[k] += 1
                    moved = True
        stuck = [passes[n] for n, passes in zip(done, self.schedule.passes, strict=True) if n < len(passes)]
        if stuck:
            raise VerifyError(self._deadlock_message(stuck, sum(done)))

    def _missing(self, one: Pass) -> list[PassName]:
        """Passes of the same micro-batch that `one` reads from and that have not run."""
        sources = [t.source for t in self.awaited[self._name(one)] if self._arrived(t, one.micro_batch) is None]
        own = Pass("forward", one.chunk, one.micro_batch)
        if one.kind == "backward" and own not in self.times[self.stage_of[one.chunk]]:
            sources.append(self._name(own))
        return sources

    def _run(self, stage: int, one: Pass) -> None:
        name = self._name(one)
        arrivals = (self._arrived(t, one.micro_batch) or 0.0 for t in self.awaited[name])
        start = max([self.clock[stage], *arrivals])
        # A chunk may have nothing to do in a direction, such as a backward pass to inputs alone.
        seconds = self.cost[name].seconds if name in self.cost else 0.0
        self.clock[stage] = start + seconds
        self.times[stage][one] = (start, self.clock[stage])
        for transfer in self.sent[name]:
            self._send(transfer, one.micro_batch, self.clock[stage])

    def _send(self, transfer: PlannedTransfer, micro_batch: int | None, ready_s: float) -> None:
        source, target = self._stage(transfer.source), self._stage(transfer.target)
        start = max(ready_s, self.link_free[source, target])
        end = start + self._link(source, target).transfer_s(transfer.n_bytes)
        self.link_free[source, target] = end
        self.arrival[transfer, micro_batch or 0] = end
        kind = transfer.source.kind
        self.transfers.append(TimedTransfer(source, target, kind, micro_batch, transfer.n_bytes, start, end))

    def _stage(self, name: PassName) -> int:
        return name.number if name.kind == "update" else self.stage_of[name.number]

    def _link(self, source: int, target: int) -> LinkSpec:
        per_host = self.plan.cluster.devices_per_host
        ends = [self.plan.stages[k] for k in (source, target)]
        hosts = {d // per_host for s in ends for d in (s.first_device, s.first_device + s.n_devices - 1)}
        return self.plan.cluster.link(same_host=len(hosts) == 1)

    def _timed(self, one: Pass, start_s: float, end_s: float) -> TimedPass:
        return TimedPass(self.cost[self._name(one)].kind, one.chunk, one.micro_batch, start_s, end_s)

    def _deadlock_message(self, stuck: Sequence[Pass], n_done: int) -> str:
        waits = [
            f"{one} on stage {self.stage_of[one.chunk]} waits for "
            + ", ".join(f"{name.kind}(chunk {name.number})" for name in self._missing(one))
            for one in stuck
        ]
        n_passes = sum(map(len, self.schedule.passes))
        return f"Schedule `{self.schedule.name}` deadlocks after {n_done} of {n_passes} passes: {'; '.join(waits)}."

    # ---- update and memory ----------------------------------------------------------------------------------------

    def _updates(self) -> list[TimedPass]:
        for k in range(len(self.plan.stages)):
            for transfer in self.sent[PassName("update", k, self.loop)]:
                self._send(transfer, None, self.clock[k])
        out = []
        for k, stage in enumerate(self.plan.stages):
            awaited = self.awaited[PassName("update", k, self.loop)]
            start = max([self.clock[k], *(self.arrival.get((t, 0), 0.0) for t in awaited)])
            seconds = stage.between_s[self.loop - 1] if self.loop < self.plan.n_loops else stage.update_s
            out.append(TimedPass("update", k, None, start, start + seconds))
        return out

    def _memory(self, stage: int) -> tuple[list[tuple[float, float]], int]:
        """(seconds, bytes per device from then on) in order, and the most live chunks."""
        plan, trains = self.plan.stages[stage], any(n.kind == "backward" and n.loop == self.loop for n in self.cost)
        n_chunks, n_stages = self.schedule.size.n_chunks, self.schedule.size.n_stages
        now, live, most = plan.fixed_bytes, 0, 0
        memory = [(min((start for start, _ in self.times[stage].values()), default=0.0) if self.loop > 1 else 0.0, now)]
        for one, (start_s, end_s) in self.times[stage].items():
            j = one.chunk // n_stages
            if one.kind == "forward":
                now, live = now + plan.kept_bytes[j], live + 1
                memory.append((start_s, now))
                most = max(most, live)
            if one.kind == "backward":
                now, live = now - plan.kept_bytes[j], live - 1
                memory.append((end_s, now))
            elif not trains and j == n_chunks - 1:
                now, live = now - sum(plan.kept_bytes), live - n_chunks
                memory.append((end_s, now))
        return memory, most
