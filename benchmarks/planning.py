"""Planning for benchmarks that time it or plan one step in many ways: a model is traced once, then planned."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import jax

from minialpa import ClusterSpec, Plan
from minialpa.inter.pipeline import plan_step
from minialpa.methods import Method
from minialpa.recognition.step import recognise
from minialpa.support.collection import collection_paused
from minialpa.tracing.trace import TracedStep, trace_step

#: Devices of a host of every cluster here.
PER_HOST = 8


def traced_step(step: Callable[..., Any], state: Any, batch: Any, *, recognises: bool = True) -> TracedStep:
    """`step(state, batch)`, traced as in `parallelize`. Arguments may be shapes.

    recognises: whether attentions become one operation.
    """
    args = (state, batch)
    leaves, tree = jax.tree.flatten(args)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    numbers = [number for number, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    with collection_paused():
        traced = trace_step(
            lambda *leaves: step(*jax.tree.unflatten(tree, leaves)),
            leaves,
            in_paths=paths,
            is_batch=[number == 1 for number in numbers],
            arg_of_leaf=numbers,
            donate="auto",
            state_like=(0,),
        )
        return recognise(traced) if recognises else traced


def planned(traced: TracedStep, cluster: ClusterSpec, method: Method) -> Plan:
    """The plan of `method` for `cluster`. Raises all errors of planning."""
    with collection_paused():
        return plan_step(traced, cluster, method.options())


def cluster_of(preset: Any, n_devices: int) -> ClusterSpec:
    """Whole hosts of `PER_HOST` devices, or a part of one host."""
    return ClusterSpec.preset(
        preset, num_hosts=max(1, n_devices // PER_HOST), devices_per_host=min(PER_HOST, n_devices)
    )


def peak_rss_gb() -> float:
    """The peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB.
