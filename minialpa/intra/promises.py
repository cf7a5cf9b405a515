"""Whether a solution keeps what ZeRO promises: a sharded problem in, the optimizer state that is gathered out.

A mesh axis splits one factor of an equation. An update inside `lax.cond`, as that of `optax.apply_if_finite`, is one
equation that reads the state of all parameters, of which it leaves most whole.
"""

from __future__ import annotations

from typing import NamedTuple

from jax.extend.core import JaxprEqn

from minialpa.cluster import LogicalMesh
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.tracing.jaxprs import is_literal, source_line


class GatheredState(NamedTuple):
    """An equation of the update, and the paths of the optimizer state that it gathers."""

    eqn: JaxprEqn
    paths: tuple[str, ...]

    def __str__(self) -> str:
        most = 3
        listed = ", ".join(f"`{path}`" for path in self.paths[:most]) + (", ..." if len(self.paths) > most else "")
        return (
            f"`{self.eqn.primitive.name}` at {source_line(self.eqn)} gathers optimizer state that is stored in parts "
            f"({listed}), since a mesh axis splits one dimension of the arrays of an operation. The numbers are right; "
            "to keep the state in parts, take the update out of it (`jnp.where` on the results in place of `lax.cond`)."
        )


def gathered_state(problem: MeshEquations, sharding: MeshSharding, mesh: LogicalMesh) -> list[GatheredState]:
    """The equations that read state in fewer parts than it is stored in."""
    state = {v for v, role in problem.inputs if role == "state"}
    out = []
    for eqn, specs in zip(problem.eqns, sharding.equations, strict=True):
        read = [(v, s) for v, s in zip(eqn.invars, specs.operands, strict=True) if not is_literal(v) and v in state]
        gathered = [v for v, s in read if s.n_shards(mesh.shape) < sharding.specs[v].n_shards(mesh.shape)]
        if gathered:
            out.append(GatheredState(eqn, tuple(problem.paths.get(v, "") for v in gathered)))
    return out
