"""The forward graph of a step, the layer of each forward group, and the pieces by which layers are costed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from jax.extend.core import Var

from minialpa.errors import TraceError, VerifyError
from minialpa.inter.layers.clustering import cluster_layers
from minialpa.intra.strategies.strategies import has_contraction
from minialpa.options import AutoLayerOption, FixedLayerOption, LayerOption, ManualLayerOption
from minialpa.rules.factors import factors_of
from minialpa.tracing.jaxprs import bytes_of, is_literal, operand_vars, shape_of
from minialpa.tracing.trace import TracedStep

#: Layers of a model whose blocks repeat less than `_FEW` times, and most layers of any.
_USUAL, _FEW, _MOST = 16, 8, 64
#: Part of the flops in kinds of equations that occur more than once, which blocks have to cover.
_INSIDE = 0.8
#: Of the flops of an equal share, by how much blocks may have more or less.
_TOLERANCE = 0.5


def forward_graph(traced: TracedStep) -> nx.MultiDiGraph:
    """Forward groups as nodes with `flops`; edges carry `bytes` and `value`, the number of the variable."""
    graph = nx.MultiDiGraph()
    graph.add_nodes_from((g, {"flops": 0.0}) for g in range(traced.n_groups))
    producer: dict[object, int] = {}
    number: dict[object, int] = {}
    for eqn, origin in zip(traced.flat.eqns, traced.origins, strict=True):
        if origin.group is None or origin.direction != "forward":
            continue
        graph.nodes[origin.group]["flops"] += factors_of(eqn).flops
        for v in eqn.invars:
            source = None if is_literal(v) else producer.get(v)
            if source is not None and source != origin.group:
                low, high = min(source, origin.group), max(source, origin.group)
                graph.add_edge(low, high, bytes=float(bytes_of(v)), value=number.setdefault(v, len(number)))
        producer.update((v, origin.group) for v in eqn.outvars)
    return graph


def assign_layers(traced: TracedStep, option: LayerOption) -> tuple[int, ...]:
    """Layer of each forward group.

    Raises TraceError when there are fewer equations than layers, VerifyError when the layers of a plan are for another
    number of equations.
    """
    groups = traced.n_groups
    if isinstance(option, FixedLayerOption):
        if len(option.layer_of_group) != groups:
            raise VerifyError(
                f"The plan has layers for {len(option.layer_of_group)} forward equations and the model has {groups}: "
                "it is another model. Plan it anew, with the method that made the plan."
            )
        return option.layer_of_group
    if isinstance(option, ManualLayerOption):
        layers = [0] * groups
        for origin in traced.origins:
            if origin.group is not None and origin.direction == "forward":
                layers[origin.group] = origin.layer
        used = sorted(set(layers))
        return tuple(used.index(layer) for layer in layers)
    assert isinstance(option, AutoLayerOption)
    n_layers = natural_layers(traced) if option.layer_num == "auto" else option.layer_num
    if not 1 <= n_layers <= groups:
        raise TraceError(f"`layer_num={n_layers}` layers cannot be made of {groups} forward equations.")
    return _clustered(traced, n_layers, option.eps)


def _clustered(traced: TracedStep, n_layers: int, tolerance: float) -> tuple[int, ...]:
    """Layers of each gradient of a step: those of the one with the most work, and for the others the same where they
    do the same, or else layers that have the same parameters."""
    graph = forward_graph(traced)
    calls = _calls(traced)
    if len(calls) == 1:
        return cluster_layers(graph, n_layers, tolerance=tolerance)
    main = max(calls, key=lambda groups: (len(groups) >= n_layers, sum(graph.nodes[g]["flops"] for g in groups)))
    layers: dict[int, int] = _clustered_call(graph, main, n_layers, tolerance)
    kinds = _kinds(traced)
    of_parameter = _layers_of_parameters(traced, layers)
    for groups in calls:
        if groups is main:
            continue
        if [kinds[g] for g in groups] == [kinds[g] for g in main]:
            layers.update((g, layers[m]) for g, m in zip(groups, main, strict=True))
        else:
            layers.update(_like_parameters(traced, groups, of_parameter))
    return tuple(layers[g] for g in range(len(graph)))


def _calls(traced: TracedStep) -> list[list[int]]:
    """The forward groups of each gradient of a step, in order."""
    call_of = {o.group: o.call for o in traced.origins if o.group is not None}
    calls: dict[int, list[int]] = {}
    for group in sorted(call_of):
        calls.setdefault(call_of[group], []).append(group)
    return [calls[call] for call in sorted(calls)]


def _clustered_call(graph: nx.MultiDiGraph, groups: list[int], n_layers: int, tolerance: float) -> dict[int, int]:
    part = nx.convert_node_labels_to_integers(graph.subgraph(sorted(groups)), ordering="sorted")
    found = cluster_layers(part, min(n_layers, len(groups)), tolerance=tolerance)
    return dict(zip(sorted(groups), found, strict=True))


def _kinds(traced: TracedStep) -> dict[int, tuple[object, ...]]:
    """What the forward equations of each group are, up to names."""
    kinds: dict[int, tuple[object, ...]] = {}
    for eqn, origin in zip(traced.flat.eqns, traced.origins, strict=True):
        if origin.group is not None and origin.direction == "forward":
            kind = (eqn.primitive.name, *(shape_of(v) for v in (*eqn.invars, *eqn.outvars)))
            kinds[origin.group] = (*kinds.get(origin.group, ()), kind)
    return {g: kinds.get(g, ()) for groups in _calls(traced) for g in groups}


def _layers_of_parameters(traced: TracedStep, layers: Mapping[int, int]) -> dict[Var, int]:
    """The first layer that reads each argument of the step that has no examples."""
    source = _parameters(traced)
    out: dict[Var, int] = {}
    for eqn, origin in zip(traced.flat.eqns, traced.origins, strict=True):
        if origin.group is not None and origin.group in layers and origin.direction == "forward":
            for v in eqn.invars:
                if not is_literal(v) and v in source:
                    out.setdefault(source[v], layers[origin.group])
    return out


def _parameters(traced: TracedStep) -> dict[Var, Var]:
    """The argument that each variable is, or is a cast, a transpose or an update of: that of its own shape, or size."""
    dims = zip(traced.flat.invars, traced.batch_dims, strict=True)
    source = {v: v for v, dim in dims if dim is None and shape_of(v)}
    for eqn in traced.flat.eqns:
        found = [source[v] for v in operand_vars(eqn) if v in source]
        for out in eqn.outvars:
            same = [p for p in found if math.prod(shape_of(p)) == math.prod(shape_of(out))]
            if same:
                source[out] = same[0]
    return source


def _like_parameters(traced: TracedStep, groups: Sequence[int], of_parameter: Mapping[Var, int]) -> dict[int, int]:
    """Layers of groups that never fall in program order, by the parameters that they read."""
    source = _parameters(traced)
    wanted: dict[int, int] = {}
    for eqn, origin in zip(traced.flat.eqns, traced.origins, strict=True):
        if origin.group is not None and origin.direction == "forward":
            for v in eqn.invars:
                if not is_literal(v) and source.get(v) in of_parameter:
                    wanted[origin.group] = max(wanted.get(origin.group, 0), of_parameter[source[v]])
    out, layer = dict[int, int](), 0
    for group in groups:
        layer = max(layer, wanted.get(group, 0))
        out[group] = layer
    return out


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks that repeat `n` times; flops of one of them, of each heavy equation outside, and how many are heavy."""

    n: int
    flops: float
    outside: tuple[float, ...]
    n_heavy: int


def _blocks(traced: TracedStep) -> _Blocks:
    """The largest number that divides the counts of most kinds of heavy equations: matrix products and convolutions."""
    kinds: dict[object, list[float]] = {}
    for eqn, origin in zip(traced.flat.eqns, traced.origins, strict=True):
        if origin.group is not None and origin.direction == "forward" and has_contraction(eqn):
            kind = (eqn.primitive.name, *(shape_of(v) for v in (*eqn.invars, *eqn.outvars)))
            kinds.setdefault(kind, []).append(factors_of(eqn).flops)
    n_heavy = sum(map(len, kinds.values()))
    repeated = sum(sum(flops) for flops in kinds.values() if len(flops) > 1)

    def inside(n: int) -> float:
        return sum(sum(flops) for flops in kinds.values() if len(flops) % n == 0)

    n = max((n for n in {len(flops) for flops in kinds.values()} if inside(n) >= _INSIDE * repeated), default=1)
    outside = tuple(f for flops in kinds.values() if len(flops) % n for f in flops)
    return _Blocks(n, inside(n) / n, outside, n_heavy)


def natural_layers(traced: TracedStep) -> int:
    """A number of layers that cuts a model between its blocks, where they repeat, and leaves room for its head.

    Where they hardly do, layers of three to six heavy equations: what is smaller costs mostly what happens at borders.
    """
    blocks = _blocks(traced)
    if blocks.n >= _FEW:
        n = max(d for d in range(1, blocks.n + 1) if blocks.n % d == 0 and d <= _MOST)
        n *= math.ceil(_USUAL / n)
        n += round(sum(min(1.0, flops * n / (blocks.n * blocks.flops)) for flops in blocks.outside))
    elif blocks.n > 1:
        n = blocks.n * max(math.ceil(4 / blocks.n), blocks.n_heavy // (6 * blocks.n))
    else:
        n = math.ceil(blocks.n_heavy / 3)
    if blocks.n < _FEW:
        n = min(_USUAL, n)
    return max(1, min(traced.n_groups, n))


def pieces_of(traced: TracedStep, layer_of_group: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers cut between the blocks of a model that repeat: the piece of each group, and the layer of each piece.

    A layer costs the sum of its pieces, of which few are distinct where a model repeats.
    """
    if _blocks(traced).n < _FEW:
        return tuple(layer_of_group), tuple(range(max(layer_of_group, default=-1) + 1))
    blocks = _clustered(traced, natural_layers(traced), _TOLERANCE)
    pairs = list(zip(layer_of_group, blocks, strict=True))
    pieces = {pair: i for i, pair in enumerate(dict.fromkeys(sorted(pairs)))}
    return tuple(pieces[pair] for pair in pairs), tuple(layer for layer, _ in pieces)


def layer_flops(traced: TracedStep, layer_of_group: Sequence[int]) -> list[float]:
    """Forward floating point operations of each layer."""
    flops = [0.0] * (max(layer_of_group, default=-1) + 1)
    for eqn, origin in zip(traced.flat.eqns, traced.origins, strict=True):
        if origin.group is not None and origin.direction == "forward":
            flops[layer_of_group[origin.group]] += factors_of(eqn).flops
    return flops


def balanced_runs(weights: Sequence[float], n_runs: int) -> list[tuple[int, ...]]:
    """Neighbouring numbers in `n_runs` runs, the heaviest of which is as light as can be; each has one at least."""
    n = len(weights)
    total = np.concatenate(([0.0], np.cumsum(weights)))
    best = np.full((n_runs + 1, n + 1), np.inf)
    start = np.zeros(best.shape, np.int64)
    best[0, 0] = 0.0
    for r in range(1, n_runs + 1):
        for end in range(r, n + 1):
            worst = np.maximum(best[r - 1, :end], total[end] - total[:end])
            start[r, end] = worst.argmin()
            best[r, end] = worst[start[r, end]]
    runs, end = list[tuple[int, ...]](), n
    for r in range(n_runs, 0, -1):
        runs.append(tuple(range(int(start[r, end]), end)))
        end = int(start[r, end])
    return runs[::-1]
