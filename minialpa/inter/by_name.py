"""Methods by name as candidates of a search: a step and the options of the search in, the best of all plans out.

A search adds up costs of sublayers. The sum can exceed the memory of the whole stage, or fall below its time, so a
search may refuse a step that fits, or miss the fastest plan. So the planner also plans `ShardParallel`, `DataParallel`,
`Zero2Parallel` and `Zero3Parallel` on all devices. It gives up a method only if a bound shows that the method is not
faster; the bound holds for shardings that treat repeated layers alike. In large steps, where each method takes minutes,
the planner tries methods only if the search finds no plan.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from minialpa.errors import InfeasibleError, ShardingError, TraceError
from minialpa.inter.build_plan import StageTooLargeError
from minialpa.inter.context import PlanningContext
from minialpa.inter.staging.cast_weights import casts_weights
from minialpa.inter.staging.stack_matrices import stacks_matrices
from minialpa.inter.staging.staged_step import row_sharing, stage_step
from minialpa.options import (
    DATA_PARALLEL_METHODS,
    AutoShardingOption,
    AutoStageOption,
    FixedLayerOption,
    PlanOptions,
    RematChoice,
)
from minialpa.plan import Plan
from minialpa.routing.rows import with_rows_in_slots

#: In steps of more equations, methods rematerialise all layers or no layer: a choice for each layer takes minutes.
_FEW_EQUATIONS = 10_000
#: In steps of more equations, methods by name are planned only if the search finds no plan: each takes minutes.
_LARGE_EQUATIONS = 30_000


def best_with_methods_by_name(
    context: PlanningContext,
    auto: AutoStageOption,
    planned: Callable[[PlanningContext], Plan],
    best_variant: Callable[[Plan], Plan],
) -> Plan:
    """The plan of the search that the options ask for, or of a cheaper method by name.

    planned: the plan of the options of a context.
    best_variant: the plan itself, or a faster plan with the same stages.
    Raises the InfeasibleError of the search if no candidate fits in memory.
    """
    plans: list[Plan] = []
    failure: InfeasibleError | None = None
    try:
        plans.append(best_variant(planned(context)))
    except InfeasibleError as error:
        failure = error

    if not plans or len(context.traced.flat.eqns) <= _LARGE_EQUATIONS:
        plans += _plans_by_name(context, auto, planned, best_variant, plans)
    if not plans:
        assert failure is not None
        raise failure
    best = min(plans, key=lambda plan: plan.cost.total_s)
    certificate = plans[0].certificate
    if certificate is None:
        return best
    return replace(best, certificate=replace(certificate, bound_s=min(certificate.bound_s, best.cost.total_s)))


def _least_s(plans: Sequence[Plan]) -> float:
    return min((plan.cost.total_s for plan in plans), default=math.inf)


def _plans_by_name(
    context: PlanningContext,
    auto: AutoStageOption,
    planned: Callable[[PlanningContext], Plan],
    best_variant: Callable[[Plan], Plan],
    found: Sequence[Plan],
) -> list[Plan]:
    """Plans of methods by name, without methods that cannot be faster than an earlier plan or than `found`.

    The options or `found` give the number of micro-batches.
    """
    # Methods use all devices, which the user may exclude from the submeshes.
    space, cluster = auto.submesh_physical_shape_space, context.cluster
    if not isinstance(space, str) and (cluster.num_hosts, cluster.devices_per_host) not in space:
        return []

    tries = _MethodTries(context.reporting("other methods"), planned, best_variant, _least_s(found))
    numbers = context.options.micro_batch_choices(context.traced.batch_size)
    # Without a plan, start with one example at a time on each device.
    first = found[0].n_micro_batches if found else max(1, numbers[-1] // cluster.n_devices)
    first = max(n for n in numbers if n <= first or n == numbers[0])
    by_name = list(_options_by_name(context, auto, first))
    for options in by_name:
        tries.add(options)
    if len(numbers) > 1:
        _with_other_numbers(tries, by_name, numbers, lambda n: _options_by_name(context, auto, n))
    return tries.plans


def _with_other_numbers(
    tries: _MethodTries,
    by_name: Sequence[PlanOptions],
    numbers: Sequence[int],
    with_number: Callable[[int], Iterator[PlanOptions]],
) -> None:
    """Plan methods with other numbers of micro-batches.

    Fewer micro-batches take more memory and usually less time, as a single stage has no bubble. `ShardParallel` is
    planned with fewer until it does not fit; the best method with fewer and with more while it gets faster; then the
    other methods with its number.

    by_name: the options that were planned so far, all with one number.
    with_number: the options of each method with another number.
    """
    first = by_name[0].n_micro_batches if by_name else 1
    for options in by_name:
        if not options.sharding.data_parallel:
            for n in _halves(numbers, first):
                if tries.add(replace(options, n_micro_batches=n)) == "too large":
                    break

    for others in (_halves, _doubles):
        best = tries.best
        if best is not None:
            for n in others(numbers, best.n_micro_batches):
                if tries.add(replace(best, n_micro_batches=n)) != "faster":
                    break
    if tries.best is not None:
        for options in with_number(tries.best.n_micro_batches):
            tries.add(options)


#: `bounded`: the compute alone takes too long with this rematerialisation and number of micro-batches.
_Outcome = Literal["faster", "slower", "bounded", "too large"]


class _MethodTries:
    """Plans methods one after the other. Each has to be faster than all before.

    Attributes:
        plans: all plans.
        best: the options of the fastest plan; None without plans.
    """

    def __init__(
        self,
        context: PlanningContext,
        planned: Callable[[PlanningContext], Plan],
        best_variant: Callable[[Plan], Plan],
        least_s: float,
    ) -> None:
        self._context, self._planned, self._best_variant, self._least_s = context, planned, best_variant, least_s
        self.plans: list[Plan] = []
        self.best: PlanOptions | None = None
        self._outcomes: dict[PlanOptions, _Outcome] = {}
        self._variants_of: dict[int, tuple[bool, ...]] = {}  # by number of micro-batches, see `_open_variants`

    def add(self, options: PlanOptions) -> _Outcome:
        """Plan with these options, unless that was done before, and compare with all earlier plans."""
        if options not in self._outcomes:
            # Methods restrict shardings, so a bound on free shardings holds for each method.
            free = replace(options, sharding=self._context.options.sharding)
            is_bounded = self._outcomes.get(free) == "bounded"
            self._outcomes[options] = "bounded" if is_bounded else self._outcome(options)
        return self._outcomes[options]

    def _outcome(self, options: PlanOptions) -> _Outcome:
        """Plans the options, or variants if the plan is too slow."""
        try:
            made = [self._best_variant(self._plan(options))]
        except StageTooLargeError as error:
            if not error.is_too_slow:
                return "too large"
            made, are_bounded = self._variants(options)
            if error.by_compute and are_bounded:
                return "bounded"
        except TraceError:  # this number may not split the step
            return "slower"
        except InfeasibleError:
            return "too large"

        if _least_s(made) < _least_s(self.plans):
            self.best = options
        self.plans += made
        is_faster = _least_s(made) < self._least_s
        self._least_s = min(self._least_s, _least_s(made))
        return "faster" if is_faster else "slower"

    def _plan(self, options: PlanOptions) -> Plan:
        self._context.solver.begin()  # as much work of the solver as for the method alone
        return self._planned(replace(self._context, options=options, below_s=self._least_s))

    def _variants(self, options: PlanOptions) -> tuple[list[Plan], bool]:
        """Plans of variants that may be faster, and whether the compute alone excludes all of them."""
        n = options.n_micro_batches
        if n not in self._variants_of:
            self._variants_of[n] = _open_variants(self._context, n)

        plans, are_bounded = [], True
        choices = [(False, True) if is_open else (False,) for is_open in self._variants_of[n]]
        for keeps, casts, stacks in itertools.product(*choices):
            variant = replace(
                options,
                keep_activations=keeps or options.keep_activations,
                cast_once=casts or options.cast_once,
                stack_matrices=self._context.cluster.n_devices if stacks else options.stack_matrices,
            )
            if variant == options:
                continue
            try:
                plans.append(self._plan(variant))
            except InfeasibleError as error:
                are_bounded &= isinstance(error, StageTooLargeError) and error.by_compute
        return plans, are_bounded and not plans


def _open_variants(context: PlanningContext, n: int) -> tuple[bool, bool, bool]:
    """Whether keeping values for later loops, casting weights once, and stacks of matrices are open and have effect."""
    options = context.options
    sharing = row_sharing(n, [(context.cluster.n_devices, options.sharding)])
    staged = stage_step(with_rows_in_slots(context.traced, sharing, context.proofs), n, (), (0,))
    stacks = options.stack_matrices is None and stacks_matrices(staged)
    if n == 1:
        return False, False, stacks
    keeps_activations = options.keep_activations is None and staged.split.recomputes_values
    return keeps_activations, options.cast_once is None and casts_weights(staged.split), stacks


def _halves(numbers: Sequence[int], n: int) -> Iterator[int]:
    """The largest of `numbers` up to n / 2, then up to half of the last, and so on."""
    for m in sorted(numbers, reverse=True):
        if 2 * m <= n:
            yield m
            n = m


def _doubles(numbers: Sequence[int], n: int) -> Iterator[int]:
    """The smallest of `numbers` from 2 n on, then from twice the last on, and so on."""
    for m in sorted(numbers):
        if m >= 2 * n:
            yield m
            n = m


def shardings_by_name(option: AutoShardingOption, auto: AutoStageOption) -> Iterator[AutoShardingOption]:
    """`option`, then `option` under each data parallel method that it does not contradict.

    Empty if `auto` excludes logical meshes of one axis, which these methods use.
    """
    if auto.submesh_logical_shape_space != "all":
        return
    yield option
    if not option.enable_auto_sharding or option.data_parallel or option.force_batch_dim_to_mesh_dim is not None:
        return
    for name in DATA_PARALLEL_METHODS:
        with contextlib.suppress(ShardingError):
            yield option.of_method(name)


def _options_by_name(context: PlanningContext, auto: AutoStageOption, n: int) -> Iterator[PlanOptions]:
    """Each method, in one stage with n micro-batches."""
    options, layers = context.options, context.options.layers
    one_stage = replace(options, n_micro_batches=n, choose_micro_batches=False, layers=None, stages=None)
    shardings = list(shardings_by_name(options.sharding, auto))
    remat: RematChoice = "none" if layers is None or isinstance(layers, FixedLayerOption) else layers.remat
    if remat != "auto" or len(context.traced.flat.eqns) <= _FEW_EQUATIONS:
        for sharding in shardings:
            yield replace(one_stage, sharding=sharding, remat=remat)
        return

    # Free shardings that save memory take the solver longest, and the search has tried them.
    for sharding in shardings[1:]:
        yield replace(one_stage, sharding=sharding, remat="none")
    for sharding in shardings:
        yield replace(one_stage, sharding=sharding, remat="full")
