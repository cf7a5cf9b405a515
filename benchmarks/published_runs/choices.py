"""The best run of a sweep in, the designs that its trainer could have run out, each with minialpa's predictions.

A design is the degrees of data, tensor and pipeline parallelism and the examples of a micro-batch. All else equals the
run: model, machines, batch, kernels and recomputed values. Each device has whole accumulators of gradients, as under
ZeRO-1. Plans that save memory with sharded accumulators are not designs of such trainers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.published_runs.predict import Prediction, least_plan_of, predict, spared_bytes
from benchmarks.published_runs.record import Run
from minialpa import Plan

#: Candidate numbers of examples of a micro-batch.
_MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Choice:
    """A sweep's best run, and the best design by minialpa's prices. Both may be the same.

    Attributes:
        theirs: the prediction for the run.
        ours: the prediction for the best design that fits.
        n_designs: number of compared designs.
    """

    theirs: Prediction
    ours: Prediction
    n_designs: int

    @property
    def ratio(self) -> float | None:
        """Predicted seconds of the run / of the best design; None if the run cannot be planned."""
        if self.theirs.step_s is None or self.ours.step_s is None:
            return None
        return self.theirs.step_s / self.ours.step_s


def choose(run: Run) -> Choice:
    """Price all designs of a run's trainer. If the run does not fit by our prices, `ours` is the best that fits."""
    theirs = predict(run)
    found = [theirs, *map(predict, designs(run))]
    found.sort(key=lambda one: (not one.fits, one.step_s if one.step_s is not None else math.inf))
    ours = next((one for one in found if one is theirs or (one.fits and _fits_with_whole_totals(one))), theirs)
    return Choice(theirs, ours, len(found))


def _fits_with_whole_totals(one: Prediction) -> bool:
    plan = least_plan_of(one.run)
    needed = [peak_bytes + split_totals_bytes(one.run, plan, k) for k, peak_bytes in enumerate(plan.cost.peak_bytes)]
    return max(needed) - spared_bytes(one.run) <= plan.cluster.device.memory_bytes


def split_totals_bytes(run: Run, plan: Plan, stage: int) -> float:
    """Additional bytes of a device if its accumulators of gradients were whole.

    A whole accumulator is scattered once per step, with 32 bits. If an accumulator is split between the devices that
    split the examples, its gradients are scattered in each micro-batch, with 16 bits. So the scattered bytes give the
    number of split accumulators. With two micro-batches both cases have the same bytes, and the result is 0.
    """
    # With tensor parallelism, the second axis splits the positions between operators.
    axes = {0} if run.tp > 1 else {0, 1}
    scattered = sum(
        one.n_bytes * one.times_per_step
        for one in plan.collectives
        if one.stage == stage and one.kind == "reduce-scatter" and set(one.axes) <= axes
    )
    if run.n_micro_batches <= 2:
        return 0.0
    once = 4 * run.model.n_weights / (run.tp * run.pp)
    n_split = max(0.0, scattered - once) / (2 * run.n_micro_batches - 4)
    return 4 * n_split * (1 - 1 / run.dp)


def designs(run: Run) -> Iterator[Run]:
    """The other designs that divide the run's devices, layers, heads and batch.

    Tensor parallelism stays in a host. A pipeline has at least as many micro-batches as stages.
    """
    model = run.model
    for tp, pp in itertools.product(_powers(run.per_host), _powers(model.n_layers)):
        dp, rest = divmod(run.n_gpus, tp * pp)
        if rest or not dp or model.n_heads % tp or model.n_layers % pp or run.batch % dp:
            continue
        for micro_batch in _MICRO_BATCHES:
            n_micro_batches, rest = divmod(run.batch // dp, micro_batch)
            if rest or n_micro_batches < pp:
                continue
            design = _with_degrees(run, dp, tp, pp, n_micro_batches)
            if design.degrees != run.degrees:
                yield design


def _with_degrees(run: Run, dp: int, tp: int, pp: int, n_micro_batches: int) -> Run:
    model = dataclasses.replace(run.model, tensor_parallel=(dp, tp) if tp > 1 else None)
    return dataclasses.replace(
        run, model=model, dp=dp, fsdp=1, tp=tp, pp=pp, n_micro_batches=n_micro_batches, n_chunks=1
    )


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]
