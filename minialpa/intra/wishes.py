"""What the options ask of a mesh: its equations and options in, the specs that inputs may have out, and what equations
must split."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.intra.constraints import Constraint, constraint_of_path
from minialpa.intra.factors import Factors
from minialpa.intra.folding import Folding, fold
from minialpa.intra.menu import Menus
from minialpa.intra.problem import MeshEquations, Role
from minialpa.jaxprs import aval_of, dtype_name, is_extended, is_literal, shape_of
from minialpa.options import AutoShardingOption
from minialpa.sharding import Spec, specs_of


@dataclass(frozen=True, slots=True)
class Wishes:
    """`option` for `problem` on `mesh`."""

    problem: MeshEquations
    mesh: LogicalMesh
    option: AutoShardingOption

    def fixed(self, var: Var, path: str | None) -> Constraint | None:
        """What `fixed_specs` says of an argument or result."""
        fixed = self.option.fixed_specs
        assert isinstance(fixed, tuple)
        return constraint_of_path(path, shape_of(var), fixed, self.mesh.shape) if path and fixed else None

    def input_specs(self, var: Var, role: Role) -> tuple[Spec, ...]:
        """The specs that an input may have."""
        shape, option = shape_of(var), self.option
        replicated = Spec.replicated(len(shape))
        if not option.enable_auto_sharding or is_extended(aval_of(var).dtype):
            return (replicated,)
        specs = tuple(specs_of(shape, self.mesh.shape))
        fixed = self.fixed(var, self.problem.paths.get(var))
        if fixed is not None:
            return tuple(s for s in specs if fixed.allows(s))
        if role in ("batch", "received"):
            return self._batch_specs(var, specs)
        sharded = tuple(s for s in specs if s.n_shards(self.mesh.shape) == self.mesh.n_devices)
        if role == "state" and option.prefer_reduce_scatter and sharded:
            return sharded
        if option.force_data_parallel:
            return sharded if option.force_zero_stage_3 and sharded else (replicated,)
        if role == "parameter" and not option.allow_replicated_parameters and len(specs) > 1:
            return specs[1:]
        return specs

    def _batch_specs(self, var: Var, specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        dim = self.problem.batch_dims.get(var)
        axes = self.batch_axes()
        if dim is None or not axes:
            return specs
        wanted = [s for s in specs if s.dims[dim] == axes]
        if self.option.force_data_parallel:
            wanted = [s for s in wanted if s.axes == axes]
        return tuple(wanted) or specs[:1]

    def batch_axes(self) -> tuple[int, ...]:
        """Mesh axes that must split the examples."""
        if self.option.force_data_parallel:
            return tuple(axis for axis, n in enumerate(self.mesh.shape) if n > 1)
        axis = self.option.force_batch_dim_to_mesh_dim
        return () if axis is None or self.mesh.shape[axis] == 1 else (axis,)

    def required(self, eqn: JaxprEqn, factors: Factors, in_update: bool, reads_arrays: bool) -> dict[int, int | None]:
        """Factors that the options fix for mesh axes in this equation.

        reads_arrays: whether an operand may be split at all.
        """
        axes = self.batch_axes()
        if not axes:
            return {}
        for k, v in enumerate(eqn.invars):
            dim = None if is_literal(v) else self.problem.batch_dims.get(v)
            if dim is not None:
                factor = factors.leading_factor(k, dim)
                if factor is not None and factors.may_split(factor, math.prod(self.mesh.shape[a] for a in axes)):
                    return dict.fromkeys(axes, factor)
                return dict.fromkeys(axes, None)
        free = not self.option.force_data_parallel or (in_update and self.option.prefer_reduce_scatter)
        return dict.fromkeys(axes, None) if reads_arrays and not free else {}


def fold_problem(problem: MeshEquations, wishes: Wishes, n_together: Mapping[Var, int], menus: Menus) -> Folding | None:
    """Repeated layers of a problem, where the options want the same of them."""

    def kind(i: int) -> Hashable:
        eqn = problem.eqns[i]
        flags = tuple((v in problem.whole, v in problem.equal, n_together.get(v)) for v in eqn.outvars)
        dims = tuple(None if is_literal(v) else problem.batch_dims.get(v) for v in eqn.invars)
        return menus.kind_of(eqn), problem.times[i], problem.in_update[i], flags, dims

    def kind_of_input(v: Var) -> Hashable:
        constraint = wishes.fixed(v, problem.paths.get(v))
        return roles[v], shape_of(v), dtype_name(v), problem.batch_dims.get(v), constraint

    roles = dict(problem.inputs)
    return fold(problem.eqns, list(roles), kind, kind_of_input)
