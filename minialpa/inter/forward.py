"""The forward graph of a step, and the layer of each forward group."""

from __future__ import annotations

import networkx as nx

from minialpa.errors import TraceError, VerifyError
from minialpa.inter.layers import cluster_layers
from minialpa.inter.staging import n_groups
from minialpa.intra.factors import factors_of
from minialpa.jaxprs import bytes_of, is_literal
from minialpa.options import AutoLayerOption, FixedLayerOption, LayerOption, ManualLayerOption
from minialpa.trace import TracedStep


def forward_graph(traced: TracedStep) -> nx.MultiDiGraph:
    """Forward groups as nodes with `flops`; edges carry `bytes` and `value`, the number of the variable."""
    graph = nx.MultiDiGraph()
    graph.add_nodes_from((g, {"flops": 0.0}) for g in range(n_groups(traced)))
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
    groups = n_groups(traced)
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
    if not 1 <= option.layer_num <= groups:
        raise TraceError(f"`layer_num={option.layer_num}` layers cannot be made of {groups} forward equations.")
    return cluster_layers(forward_graph(traced), option.layer_num, tolerance=option.eps)
