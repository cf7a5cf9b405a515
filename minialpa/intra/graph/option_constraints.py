"""The options of the user in; the allowed specs of inputs and the required splits of equations out."""

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
from minialpa.intra.strategies.loops import ScanBody, examples_inside
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.ir.equations import aval_of, dtype_name, is_extended, is_literal, shape_of
from minialpa.options import DATA_PARALLEL_METHODS, AutoShardingOption
from minialpa.rules.factors import Factors
from minialpa.sharding import Spec, specs_of


@dataclass(frozen=True, slots=True)
class Required:
    """Constraints on one equation.

    axes: the factor that a mesh axis must split, or None.
    kept: factors that no other axis may split.
    """

    axes: Mapping[int, int | None] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()


class UnevenBatchError(InfeasibleError):
    """The examples cannot be split evenly over the devices that must split them."""


class OptionConstraints:
    """example_dims: the dimension of the examples of each variable with examples; `enter_loop` adds more."""

    def __init__(self, problem: MeshEquations, mesh: LogicalMesh, option: AutoShardingOption) -> None:
        self.problem, self.mesh, self.option = problem, mesh, option
        self.example_dims: dict[Var, int] = dict(problem.batch_dims)
        self.batch_axes = _batch_axes(option, mesh.shape)
        self._axis_names = option.names_on(mesh.shape)

    # ---- inputs and results ---------------------------------------------------------------------------------------

    def fixed(self, var: Var, path: str | None) -> Constraint | None:
        return constraint_of_path(path, shape_of(var), self.option, self.mesh.shape) if path else None

    def input_specs(self, var: Var, role: Role) -> tuple[Spec, ...]:
        """Raises UnevenBatchError."""
        replicated = (Spec.replicated(len(shape_of(var))),)
        # An old-style random key cannot be split.
        if is_extended(aval_of(var).dtype) or (shape_of(var) == (2,) and aval_of(var).dtype == np.uint32):
            return replicated

        specs = tuple(specs_of(shape_of(var), self.mesh.shape))
        fixed = self.fixed(var, self.problem.paths.get(var))
        if fixed is not None:
            return tuple(spec for spec in specs if fixed.allows(spec))
        if role == "received" and self.option.received_axes:
            required = self._received_spec(shape_of(var))
            return (required,) if required in specs else replicated
        if not self.option.enable_auto_sharding:
            return replicated
        if role in ("batch", "received"):
            return self._batch_specs(var, specs)
        return self._kept_specs(role, specs)

    def _received_spec(self, shape: tuple[int, ...]) -> Spec:
        dims: list[tuple[int, ...]] = [()] * len(shape)
        for axis, name in enumerate(self._axis_names):
            for received, dim in self.option.received_axes:
                if name == received and dim < len(shape) and self.mesh.shape[axis] > 1:
                    dims[dim] = (*dims[dim], axis)
        return Spec(tuple(dims))

    def _kept_specs(self, role: Role, specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """specs[0] is replicated."""
        option = self.option
        if role == "state" and option.sharded_update:
            return self.most_split(specs)
        if option.data_parallel:
            return self.most_split(specs) if option.force_zero_stage_3 else specs[:1]
        if role == "parameter" and not option.allow_replicated_parameters and len(specs) > 1:
            return specs[1:]
        return specs

    def most_split(self, specs: Sequence[Spec]) -> tuple[Spec, ...]:
        most = max(spec.n_shards(self.mesh.shape) for spec in specs)
        return tuple(spec for spec in specs if spec.n_shards(self.mesh.shape) == most)

    def _batch_specs(self, var: Var, specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        dim, axes = self.example_dims.get(var), self.batch_axes
        if dim is None or axes is None:
            return specs

        allowed = tuple(spec for spec in specs if spec.dims[dim] == axes)
        if self.option.data_parallel:
            allowed = tuple(spec for spec in allowed if spec.axes == axes)
        if not allowed:
            raise self._uneven_batch_error(var, dim)
        return allowed

    def _uneven_batch_error(self, var: Var, dim: int) -> UnevenBatchError:
        n_devices = math.prod(self.mesh.shape[axis] for axis in self.batch_axes or ())
        name = f"`{self.problem.paths[var]}`" if var in self.problem.paths else "a value"
        return UnevenBatchError(
            f"{_batch_option(self.option)} splits the examples over {n_devices} devices, but {name} of shape "
            f"{shape_of(var)} has {shape_of(var)[dim]} of them in dimension {dim}. Give each micro-batch a multiple of "
            f"{n_devices} examples, use fewer devices, or use `ShardParallel` alone, which may split other dimensions."
        )

    # ---- loops and equations --------------------------------------------------------------------------------------

    def enter_loop(self, eqn: JaxprEqn, scan: ScanBody) -> None:
        """Set `example_dims` of the variables inside the loop."""
        inside = examples_inside(eqn, scan, self.example_dims)
        # Left by another loop with this body.
        for var in (*scan.flat.invars, *(var for inner in scan.flat.eqns for var in inner.outvars)):
            self.example_dims.pop(var, None)
        self.example_dims.update(inside)

    def carry_specs(self, var: Var, specs: Iterable[Spec]) -> tuple[Spec, ...]:
        """The `specs` that split the examples of a loop operand as required; else the specs that do not."""
        dim, axes = self.example_dims.get(var), self.batch_axes
        if dim is None or axes is None:
            return tuple(specs)

        known = tuple(specs)
        allowed = tuple(spec for spec in known if spec.dims[dim] == axes and not set(spec.partial) & set(axes))
        return allowed or tuple(spec for spec in known if not spec.dims[dim]) or known[:1]

    def required(self, eqn: JaxprEqn, factors: Factors, in_update: bool, reads_arrays: bool) -> Required:
        """reads_arrays: whether any operand may be split."""
        axes = self.batch_axes
        if axes is None:
            return Required()

        kept = self._factors_of_examples(eqn, factors)
        for k, operand in enumerate(eqn.invars):
            dim = None if is_literal(operand) else self.example_dims.get(operand)
            if dim is not None:
                return Required(dict.fromkeys(axes, self._factor_to_split(factors, k, dim, axes)), kept)

        # Without examples, data parallelism replicates the work, but ZeRO shards its update.
        free = not self.option.data_parallel or (in_update and self.option.sharded_update)
        return Required(dict.fromkeys(axes, None) if reads_arrays and not free else {}, kept)

    def _factor_to_split(self, factors: Factors, k: int, dim: int, axes: Sequence[int]) -> int | None:
        factor = factors.leading_factor(k, dim)
        if factor is None or factor in factors.of_empty_arrays:
            return None
        if factors.may_split(factor, math.prod(self.mesh.shape[axis] for axis in axes)):
            return factor
        return None

    def _factors_of_examples(self, eqn: JaxprEqn, factors: Factors) -> frozenset[int]:
        """For a reshape from [b, s] to [b * s]: b and s."""
        arrays = (*zip(eqn.invars, factors.operands, strict=True), *zip(eqn.outvars, factors.results, strict=True))
        found = set[int]()
        for atom, dims in arrays:
            dim = None if is_literal(atom) else self.example_dims.get(atom)
            leading = None if dim is None else factors.leading(dims[dim])
            if leading is not None:
                found.add(leading)
        return frozenset(found)


def _batch_axes(option: AutoShardingOption, mesh_shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The mesh axes that must split the examples, and no others; None without such an option.

    Raises InfeasibleError if the options do not suit the mesh: planning continues with other meshes.
    """
    live = tuple(axis for axis, n_devices in enumerate(mesh_shape) if n_devices > 1)
    forced = option.force_batch_dim_to_mesh_dim
    if forced is not None and live and forced >= len(mesh_shape):
        raise InfeasibleError(
            f"`force_batch_dim_to_mesh_dim={forced}` is no axis of the mesh of shape {mesh_shape} that the devices "
            f"form. Set it to a number below {len(mesh_shape)}, or set `logical_shape` to a shape of {forced + 1} axes."
        )
    if option.data_parallel and forced is not None and live not in ((), (forced,)):
        raise InfeasibleError(
            f"{_batch_option(option)} splits the examples over all devices, a mesh of shape {mesh_shape}, but "
            f"`force_batch_dim_to_mesh_dim={forced}` splits them over axis {forced} alone. Remove one of the two "
            "options."
        )

    if option.data_parallel:
        return live
    return None if forced is None else tuple(axis for axis in live if axis == forced)


def _batch_option(option: AutoShardingOption) -> str:
    """Methods set options that their users do not name."""
    if option.data_parallel:
        return "Data parallelism"
    return (
        f"`force_batch_dim_to_mesh_dim={option.force_batch_dim_to_mesh_dim}` (as `get_3d_parallel_method` and "
        "`submesh_logical_shape_space` may set it)"
    )


def forbidden_message(option: AutoShardingOption, var: Var, made: Spec, required: Spec, ends: str = "") -> str:
    """ends: text that names the maker and the reader of `var`."""
    names = {"all-gather": "allow_all_gather", "all-to-all": "allow_all_to_all"}
    forbidden = " and ".join(f"`{names[kind]}=False`" for kind in option.forbidden_collectives)
    others = [f"`{name}`" for name in option.set_names if name not in names.values()]
    for method, values in DATA_PARALLEL_METHODS.items():
        if all(getattr(option, name) == value for name, value in values.items()):
            others = [f"data parallelism (`{method}`)", *(one for one in others if one.strip("`") not in values)]
    advice = f", or {' or '.join(others)}" if others else ""
    return (
        f"{forbidden} cannot be kept, because {dtype_name(var)}{list(shape_of(var))}{ends} is made in the sharding "
        f"`{made}` and read in `{required}`. Remove this option{advice}."
    )


def fold_problem(
    problem: MeshEquations, constraints: OptionConstraints, n_together: Mapping[Var, int], cache: StrategyCache
) -> Folding | None:
    """For a short step, in which one layer stands for many (`ir/repeats.py`)."""
    if not problem.repeats.alike:
        return None

    def kind(i: int) -> Hashable:
        eqn = problem.eqns[i]
        flags = tuple((var in problem.not_partial, var in problem.equal, n_together.get(var)) for var in eqn.outvars)
        dims = tuple(None if is_literal(atom) else problem.batch_dims.get(atom) for atom in eqn.invars)
        n_runs = problem.times[i] // problem.repeats.n_equations(eqn)
        return cache.kind_of(eqn), n_runs, problem.in_update[i], flags, dims

    def kind_of_input(var: Var) -> Hashable:
        constraint = constraints.fixed(var, problem.paths.get(var))
        return roles[var], shape_of(var), dtype_name(var), problem.batch_dims.get(var), constraint

    roles = dict(problem.inputs)
    number = {eqn: i for i, eqn in enumerate(problem.eqns)}
    known = problem.repeats.alike.items()
    alike = {number[one]: number[other] for one, other in known if one in number and other in number}
    return fold(problem.eqns, list(roles), alike, kind, kind_of_input, problem.times)
