"""What the options ask of a mesh: its equations and options in, the specs that inputs may have out, and what equations
must split."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.intra.graph.constraints import Constraint, constraint_of_path
from minialpa.intra.graph.folding import Folding, fold
from minialpa.intra.graph.problem import MeshEquations, Role
from minialpa.intra.strategies.strategy_cache import Menus
from minialpa.options import AutoShardingOption
from minialpa.rules.factors import Factors
from minialpa.sharding import Spec, specs_of
from minialpa.tracing.jaxprs import aval_of, dtype_name, is_extended, is_literal, shape_of


@dataclass(frozen=True, slots=True)
class Required:
    """What the options fix in one equation.

    axes: the factor that each of these mesh axes splits, or None where it splits none. kept: factors that no other axis
    may split.
    """

    axes: Mapping[int, int | None] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()


class UnevenBatchError(InfeasibleError):
    """The devices that have to split the examples do not divide them."""


class Wishes:
    """`option` for `problem` on `mesh`. dims: the dimension of the examples, for variables that have one."""

    def __init__(self, problem: MeshEquations, mesh: LogicalMesh, option: AutoShardingOption) -> None:
        """Raises InfeasibleError where an option has no meaning on `mesh`."""
        self.problem, self.mesh, self.option = problem, mesh, option
        self.dims: dict[Var, int] = dict(problem.batch_dims)
        self.batch_axes = _batch_axes(option, mesh.shape)

    def fixed(self, var: Var, path: str | None) -> Constraint | None:
        """What `fixed_specs` says of an argument or result."""
        fixed = self.option.fixed_specs
        assert isinstance(fixed, tuple)
        return constraint_of_path(path, shape_of(var), fixed, self.mesh.shape) if path and fixed else None

    def input_specs(self, var: Var, role: Role) -> tuple[Spec, ...]:
        """The specs that an input may have. Raises InfeasibleError where its examples cannot be split as they must."""
        shape, option = shape_of(var), self.option
        replicated = Spec.replicated(len(shape))
        if is_extended(aval_of(var).dtype) or _is_raw_key(var):
            return (replicated,)
        specs = tuple(specs_of(shape, self.mesh.shape))
        fixed = self.fixed(var, self.problem.paths.get(var))
        if fixed is not None:
            return tuple(s for s in specs if fixed.allows(s))
        if not option.enable_auto_sharding:
            return (replicated,)
        if role in ("batch", "received"):
            return self._batch_specs(var, specs)
        if role == "state" and option.sharded_update:
            return self.most_split(specs)
        if option.data_parallel:
            return self.most_split(specs) if option.force_zero_stage_3 else (replicated,)
        if role == "parameter" and not option.allow_replicated_parameters and len(specs) > 1:
            return specs[1:]
        return specs

    def most_split(self, specs: Sequence[Spec]) -> tuple[Spec, ...]:
        """Those of `specs` that have the most shards."""
        most = max(s.n_shards(self.mesh.shape) for s in specs)
        return tuple(s for s in specs if s.n_shards(self.mesh.shape) == most)

    def _batch_specs(self, var: Var, specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        dim = self.dims.get(var)
        axes = self.batch_axes
        if dim is None or axes is None:
            return specs
        wanted = tuple(s for s in specs if s.dims[dim] == axes)
        if self.option.data_parallel:
            wanted = tuple(s for s in wanted if s.axes == axes)
        if not wanted:
            raise self._uneven(var, dim)
        return wanted

    def _uneven(self, var: Var, dim: int) -> UnevenBatchError:
        n = math.prod(self.mesh.shape[axis] for axis in self.batch_axes or ())
        name = f"`{self.problem.paths[var]}`" if var in self.problem.paths else "a value"
        return UnevenBatchError(
            f"`{_batch_option(self.option)}` splits the examples over {n} devices, and {name} of shape "
            f"{shape_of(var)} has {shape_of(var)[dim]} of them in dimension {dim}, in each micro-batch. Use a multiple "
            f"of {n}, fewer devices or micro-batches, or leave the option out."
        )

    def carry_specs(self, var: Var, specs: Iterable[Spec]) -> tuple[Spec, ...]:
        """Of the `specs` of what a loop reads or carries, those that split its examples as they must be."""
        dim, axes = self.dims.get(var), self.batch_axes
        if dim is None or axes is None:
            return tuple(specs)
        known = tuple(specs)
        wanted = tuple(s for s in known if s.dims[dim] == axes and not set(s.partial) & set(axes))
        return wanted or tuple(s for s in known if not s.dims[dim]) or known[:1]

    def required(self, eqn: JaxprEqn, factors: Factors, in_update: bool, reads_arrays: bool) -> Required:
        """What the options fix in this equation.

        reads_arrays: whether an operand may be split at all.
        """
        axes = self.batch_axes
        if axes is None:
            return Required()
        kept = self._factors_of_examples(eqn, factors)
        for k, v in enumerate(eqn.invars):
            dim = None if is_literal(v) else self.dims.get(v)
            if dim is not None:
                factor = factors.leading_factor(k, dim)
                if factor is not None and factors.may_split(factor, math.prod(self.mesh.shape[a] for a in axes)):
                    return Required(dict.fromkeys(axes, factor), kept)
                return Required(dict.fromkeys(axes, None), kept)
        free = not self.option.data_parallel or (in_update and self.option.sharded_update)
        return Required(dict.fromkeys(axes, None) if reads_arrays and not free else {}, kept)

    def _factors_of_examples(self, eqn: JaxprEqn, factors: Factors) -> frozenset[int]:
        """Factors that cut the dimension of the examples, of any operand or result."""
        arrays = (*zip(eqn.invars, factors.operands, strict=True), *zip(eqn.outvars, factors.results, strict=True))
        found = set[int]()
        for v, dims in arrays:
            dim = None if is_literal(v) else self.dims.get(v)
            if dim is not None:
                found.update([f for f in dims[dim] if factors.sizes[f] > 1][:1])
        return frozenset(found)


def _batch_axes(option: AutoShardingOption, mesh_shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Mesh axes that must split the examples, and no others may; None where the options leave that open.

    Raises InfeasibleError, as another mesh may be what the options are for.
    """
    live = tuple(axis for axis, n in enumerate(mesh_shape) if n > 1)
    axis = option.force_batch_dim_to_mesh_dim
    if axis is not None and live and axis >= len(mesh_shape):
        raise InfeasibleError(
            f"`force_batch_dim_to_mesh_dim={axis}` names no axis of a logical mesh of {mesh_shape}. Use a number below "
            f"{len(mesh_shape)}, or ask for a logical mesh of two axes."
        )
    if option.data_parallel and axis is not None and live not in ((), (axis,)):
        raise InfeasibleError(
            f"`{_batch_option(option)}` splits the examples over all of a logical mesh of {mesh_shape}, and "
            f"`force_batch_dim_to_mesh_dim={axis}` over axis {axis} alone. Leave one of them out."
        )
    if option.data_parallel:
        return live
    return None if axis is None else tuple(a for a in live if a == axis)


def _is_raw_key(var: Var) -> bool:
    """Whether this may be a random key of the old style, of which no device has a use for a part."""
    return shape_of(var) == (2,) and aval_of(var).dtype == np.uint32


def _batch_option(option: AutoShardingOption) -> str:
    """The name of the option that says how examples are split."""
    if option.force_data_parallel:
        return "force_data_parallel"
    return "force_zero_stage_3" if option.force_zero_stage_3 else "force_batch_dim_to_mesh_dim"


def no_way(option: AutoShardingOption, var: Var, made: Spec, wanted: Spec, ends: str = "") -> str:
    """Why an array in the spec `made` cannot be had in the spec `wanted`; `ends`: what makes and what reads it."""
    names = {"all-gather": "allow_all_gather", "all-to-all": "allow_all_to_all"}
    forbidden = " and ".join(f"`{names[kind]}=False`" for kind in option.forbidden_collectives)
    others = [f"`{name}`" for name in option.set_names if name not in names.values()]
    advice = f", or one of {', '.join(others)}" if others else ""
    return (
        f"{forbidden} cannot be kept: {dtype_name(var)}{list(shape_of(var))}{ends} lies as `{made}` and is wanted as "
        f"`{wanted}`. Leave that option out{advice}."
    )


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
