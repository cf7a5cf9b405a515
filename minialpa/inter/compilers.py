"""The compiler that a plan counts on: a function of its cluster, and not of the jax that is installed here.

Only the caller that plans for the devices of a session, or of this process, names the version of jax that they have.
"""

from __future__ import annotations

from minialpa.cluster import ClusterSpec
from minialpa.cost import is_gpu
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.memory.xla.model import XLA_CPU, XLA_CPU_WITH_BARRIERS, XLA_GPU

JaxVersion = tuple[int, ...]

#: Counted on where no version is named: the oldest that minialpa runs with. Its XLA for CPUs drops barriers, so that
#: rematerialisation saves nothing inside one program; with a newer one, programs should need no more memory.
ASSUMED_JAX: JaxVersion = (0, 10)
#: The first jax whose XLA for CPUs orders kernels by optimization barriers.
_JAX_WITH_BARRIERS: JaxVersion = (0, 11)

#: XLA for GPUs runs collectives beside kernels only if its scheduler is asked to hide them.
_HIDING = (("xla_gpu_enable_latency_hiding_scheduler", True),)


def compiler_options_of(cluster: ClusterSpec) -> tuple[tuple[str, bool], ...]:
    """The options of XLA that make it do what plans for the devices of `cluster` count on: to hide collectives."""
    return _HIDING if is_gpu(cluster.device) else ()


def compiler_of(cluster: ClusterSpec, jax_version: JaxVersion | None = None) -> Compiler:
    """The compiler for the devices of `cluster` in a version of jax; None for `ASSUMED_JAX`."""
    if is_gpu(cluster.device):
        return XLA_GPU
    has_barriers = (jax_version or ASSUMED_JAX) >= _JAX_WITH_BARRIERS
    return XLA_CPU_WITH_BARRIERS if has_barriers else XLA_CPU
