"""A traced step and a `LayerOption` in, the layer of each forward group out (`assign_layers`).

`sublayers_of` cuts layers further, at the blocks of the model, into the sublayers whose cost the search computes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.errors import TraceError, VerifyError
from minialpa.inter.layers.clustering import cluster_layers
from minialpa.ir.equations import bytes_of, operand_vars, shape_of
from minialpa.options import AutoLayerOption, FixedLayerOption, LayerOption, ManualLayerOption
from minialpa.rules.expensive import has_contraction
from minialpa.rules.known_rules import factors_of
from minialpa.tracing.trace import TracedStep

#: Layers of a model: at most this number with less than `_FEW_BLOCKS` blocks, else at least this number; by choice.
_USUAL_LAYERS = 16
#: A model with at least this number of blocks is cut by its blocks alone; by choice.
_FEW_BLOCKS = 8
#: Most layers of a model, without layers of its head; by choice, for the time of the search.
_MOST_LAYERS = 64
#: Share of the flops of repeated kinds of equations that lie inside blocks; by choice.
_SHARE_INSIDE = 0.8
#: Relative deviation of sublayers from equal flops; by choice, as in `cluster_layers`.
_TOLERANCE = 0.5


def _forward_equations(traced: TracedStep) -> Iterator[tuple[JaxprEqn, int]]:
    for eqn, origin in zip(traced.flat.eqns, traced.origins, strict=True):
        if origin.group is not None and origin.direction == "forward":
            yield eqn, origin.group


def assign_layers(traced: TracedStep, option: LayerOption) -> tuple[int, ...]:
    """Layer of each forward group.

    Raises TraceError if the step has no operations or fewer forward groups than layers, and VerifyError if the layers
    of a plan are for another number of groups.
    """
    if not traced.flat.eqns:
        raise TraceError(
            "The step has no layers for a pipeline, because each of its results is an argument or a constant. Return "
            "the values that the step computes, such as the new state, or use a method without a pipeline, such as "
            "`ShardParallel`."
        )
    match option:
        case FixedLayerOption():
            return _planned_layers(traced, option)
        case ManualLayerOption():
            return _marked_layers(traced)
        case AutoLayerOption():
            return _clustered_layers(traced, option)


def _planned_layers(traced: TracedStep, option: FixedLayerOption) -> tuple[int, ...]:
    if len(option.layer_of_group) != traced.n_groups:
        raise VerifyError(
            f"The plan was made for another model: it has {len(option.layer_of_group)} forward operations, and "
            f"this step has {traced.n_groups}. Plan this step with `minialpa.plan` and the same method, or load "
            "another plan."
        )
    return option.layer_of_group


def _marked_layers(traced: TracedStep) -> tuple[int, ...]:
    layers = [0] * traced.n_groups
    for origin in traced.origins:
        if origin.group is not None and origin.direction == "forward":
            layers[origin.group] = origin.layer
    used = sorted(set(layers))
    return tuple(used.index(layer) for layer in layers)


def _clustered_layers(traced: TracedStep, option: AutoLayerOption) -> tuple[int, ...]:
    n_groups = traced.n_groups
    n_layers = natural_layers(traced) if option.layer_num == "auto" else option.layer_num
    if not 1 <= n_layers <= n_groups:
        raise TraceError(
            f"The model cannot be cut into {n_layers} layers, because it has only {n_groups} forward operations. Set "
            f"`layer_option=AutoLayerOption(layer_num=...)` to at most {n_groups}."
        )
    return _cluster_groups(traced, n_layers, option.eps)


# ---- layers of each gradient of a step -------------------------------------------------------------------------------


def _cluster_groups(traced: TracedStep, n_layers: int, tolerance: float) -> tuple[int, ...]:
    """Layers by the flops and the borders of the forward equations.

    The gradient of the step with the most flops gets its layers first. Another gradient with the same equations has the
    same layers; groups of any other gradient join the layers of their parameters.
    """
    calls = _groups_of_calls(traced)
    if len(calls) == 1:
        return _cluster_call(traced, range(traced.n_groups), n_layers, tolerance)

    flops = layer_flops(traced, range(traced.n_groups))
    main = max(calls, key=lambda groups: (len(groups) >= n_layers, sum(flops[g] for g in groups)))
    of_main = _cluster_call(traced, main, min(n_layers, len(main)), tolerance)
    layers = dict(zip(main, of_main, strict=True))
    kinds = _kinds_of_groups(traced)
    kinds_of_main = [kinds[group] for group in main]
    of_parameter = _layers_of_parameters(traced, layers)

    for groups in calls:
        if groups is main:
            continue
        if [kinds[group] for group in groups] == kinds_of_main:
            layers.update((group, layers[like]) for group, like in zip(groups, main, strict=True))
        else:
            layers.update(_layers_like_parameters(traced, groups, of_parameter))
    return tuple(layers[group] for group in range(traced.n_groups))


def _groups_of_calls(traced: TracedStep) -> list[list[int]]:
    """The forward groups of each gradient."""
    call_of = {origin.group: origin.call for origin in traced.origins if origin.group is not None}
    calls: dict[int, list[int]] = {}
    for group in sorted(call_of):
        calls.setdefault(call_of[group], []).append(group)
    return [calls[call] for call in sorted(calls)]


def _cluster_call(traced: TracedStep, groups: Sequence[int], n_layers: int, tolerance: float) -> tuple[int, ...]:
    """Layers of the groups of one gradient."""
    place = {group: i for i, group in enumerate(groups)}
    flops = [0.0] * len(groups)
    producer: dict[Var, int] = {}
    last_user: dict[tuple[Var, int], int] = {}
    for eqn, group in _forward_equations(traced):
        if group not in place:
            continue
        flops[place[group]] += factors_of(eqn).flops
        for operand in operand_vars(eqn):
            source = producer.get(operand, group)
            if source != group:
                # The first equation of a group may come after a reader in another group.
                first, last = sorted((place[source], place[group]))
                last_user[operand, first] = max(last, last_user.get((operand, first), last))
        producer.update((result, group) for result in eqn.outvars)

    values = [(first, last, float(bytes_of(v))) for (v, first), last in last_user.items()]
    return cluster_layers(flops, values, n_layers, tolerance=tolerance)


def _kinds_of_groups(traced: TracedStep) -> dict[int, tuple[object, ...]]:
    kinds: dict[int, tuple[object, ...]] = {}
    for eqn, group in _forward_equations(traced):
        kinds[group] = (*kinds.get(group, ()), _equation_kind(eqn))
    return {group: kinds.get(group, ()) for groups in _groups_of_calls(traced) for group in groups}


def _equation_kind(eqn: JaxprEqn) -> tuple[object, ...]:
    return (eqn.primitive.name, *map(shape_of, (*eqn.invars, *eqn.outvars)))


def _layers_of_parameters(traced: TracedStep, layers: Mapping[int, int]) -> dict[Var, int]:
    """The first layer that reads each parameter."""
    parameter_of = _parameters(traced)
    first_layer: dict[Var, int] = {}
    for eqn, group in _forward_equations(traced):
        if group in layers:
            for operand in operand_vars(eqn):
                if operand in parameter_of:
                    first_layer.setdefault(parameter_of[operand], layers[group])
    return first_layer


def _parameters(traced: TracedStep) -> dict[Var, Var]:
    """The argument from which each variable is made, if it has the same size: a cast, a transpose or an update."""
    arguments = zip(traced.flat.invars, traced.batch_dims, strict=True)
    parameter_of = {argument: argument for argument, dim in arguments if dim is None and shape_of(argument)}
    for eqn in traced.flat.eqns:
        found = [parameter_of[operand] for operand in operand_vars(eqn) if operand in parameter_of]
        for result in eqn.outvars:
            size = math.prod(shape_of(result))
            same = [parameter for parameter in found if math.prod(shape_of(parameter)) == size]
            if same:
                parameter_of[result] = same[0]
    return parameter_of


def _layers_like_parameters(
    traced: TracedStep, groups: Sequence[int], of_parameter: Mapping[Var, int]
) -> dict[int, int]:
    """Layers of `groups` that never fall, from the layers of their parameters."""
    parameter_of = _parameters(traced)
    lowest: dict[int, int] = {}
    for eqn, group in _forward_equations(traced):
        for operand in operand_vars(eqn):
            if parameter_of.get(operand) in of_parameter:
                lowest[group] = max(lowest.get(group, 0), of_parameter[parameter_of[operand]])

    layer = 0
    layers: dict[int, int] = {}
    for group in groups:
        layer = max(layer, lowest.get(group, 0))
        layers[group] = layer
    return layers


# ---- blocks that repeat ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a model that repeats.

    Attributes:
        n_blocks: 1 for a model without blocks.
        block_flops: forward flops of one block.
        outside: flops of each expensive equation outside of blocks.
        n_expensive: the number of expensive equations: matrix products and convolutions.
    """

    n_blocks: int
    block_flops: float
    outside: tuple[float, ...]
    n_expensive: int


def _repeated_blocks(traced: TracedStep) -> _Blocks:
    """Counts blocks by expensive equations of one kind: a primitive with its shapes.

    n_blocks is the largest count of a kind such that kinds with a multiple of this count have `_SHARE_INSIDE` of the
    flops of all repeated kinds. With 24 transformer blocks, each kind of product in a block occurs 24 times.
    """
    flops_of_kind: dict[object, list[float]] = {}
    for eqn, _ in _forward_equations(traced):
        if has_contraction(eqn):
            flops_of_kind.setdefault(_equation_kind(eqn), []).append(factors_of(eqn).flops)
    kinds = list(flops_of_kind.values())

    def inside(n_blocks: int) -> float:
        return sum(sum(flops) for flops in kinds if len(flops) % n_blocks == 0)

    repeated = sum(sum(flops) for flops in kinds if len(flops) > 1)
    counts = {len(flops) for flops in kinds}
    n_blocks = max((count for count in counts if inside(count) >= _SHARE_INSIDE * repeated), default=1)
    return _Blocks(
        n_blocks=n_blocks,
        block_flops=inside(n_blocks) / n_blocks,
        outside=tuple(itertools.chain.from_iterable(flops for flops in kinds if len(flops) % n_blocks)),
        n_expensive=sum(map(len, kinds)),
    )


def natural_layers(traced: TracedStep) -> int:
    """The number of layers for `layer_num="auto"`: a model is cut between its blocks, with further layers for its head.

    If a model has fewer than `_FEW_BLOCKS` blocks, layers have three to six expensive equations: smaller layers mostly
    cost transfers at borders.
    """
    blocks = _repeated_blocks(traced)
    n_blocks = blocks.n_blocks
    if n_blocks >= _FEW_BLOCKS:
        n_layers = _layers_of_blocks(blocks)
    elif n_blocks > 1:
        n_layers = min(_USUAL_LAYERS, n_blocks * max(math.ceil(4 / n_blocks), blocks.n_expensive // (6 * n_blocks)))
    else:
        n_layers = min(_USUAL_LAYERS, math.ceil(blocks.n_expensive / 3))
    return max(1, min(traced.n_groups, n_layers))


def _layers_of_blocks(blocks: _Blocks) -> int:
    """Layers of equal numbers or parts of blocks, and further layers for equations outside of blocks."""
    n_blocks = blocks.n_blocks
    n_layers = max(n for n in range(1, n_blocks + 1) if n_blocks % n == 0 and n <= _MOST_LAYERS)
    n_layers *= math.ceil(_USUAL_LAYERS / n_layers)
    shares = (flops * n_layers / (n_blocks * blocks.block_flops) for flops in blocks.outside)
    return n_layers + round(sum(min(1.0, share) for share in shares))


def sublayers_of(traced: TracedStep, layer_of_group: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sublayer of each group, and the layer of each sublayer.

    Sublayers are layers that are also cut at the layers of `natural_layers`. A model that repeats has few distinct
    sublayers.
    """
    if _repeated_blocks(traced).n_blocks < _FEW_BLOCKS:
        return tuple(layer_of_group), tuple(range(max(layer_of_group, default=-1) + 1))

    natural = _cluster_groups(traced, natural_layers(traced), _TOLERANCE)
    pairs = list(zip(layer_of_group, natural, strict=True))
    sublayers = {pair: i for i, pair in enumerate(dict.fromkeys(sorted(pairs)))}
    return tuple(sublayers[pair] for pair in pairs), tuple(layer for layer, _ in sublayers)


def layer_flops(traced: TracedStep, layer_of_group: Sequence[int]) -> list[float]:
    flops = [0.0] * (max(layer_of_group, default=-1) + 1)
    for eqn, group in _forward_equations(traced):
        flops[layer_of_group[group]] += factors_of(eqn).flops
    return flops


def balanced_runs(weights: Sequence[float], n_runs: int) -> list[tuple[int, ...]]:
    """`range(len(weights))` as `n_runs` non-empty runs of neighbours, with the least weight of the heaviest run.

    heaviest[r, end], for the first `end` weights in r runs, is the minimum over start < end of
        max(heaviest[r - 1, start], sum of weights[start:end])
    """
    n_weights = len(weights)
    total = np.concatenate(([0.0], np.cumsum(weights)))
    heaviest = np.full((n_runs + 1, n_weights + 1), np.inf)
    best_start = np.zeros(heaviest.shape, np.int64)
    heaviest[0, 0] = 0.0
    for r in range(1, n_runs + 1):
        for end in range(r, n_weights + 1):
            candidates = np.maximum(heaviest[r - 1, :end], total[end] - total[:end])
            best_start[r, end] = candidates.argmin()
            heaviest[r, end] = candidates[best_start[r, end]]

    runs: list[tuple[int, ...]] = []
    end = n_weights
    for r in range(n_runs, 0, -1):
        start = int(best_start[r, end])
        runs.append(tuple(range(start, end)))
        end = start
    return runs[::-1]
