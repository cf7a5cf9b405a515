"""A call of `jax.experimental.custom_partitioning` in; out, the factors of its rule that its `partition` accepts.

For jax, the rule is a proposal: `partition` may return other shardings. So every factor is proposed to `partition`, on
a mesh without devices, and

    stays          if `partition` accepts the shardings, and its function makes shards of the right shapes
    is blocked     if `partition` returns other shardings or fails, or its function communicates.

A shard runs the function of `partition` without its final `psum` over the devices that split a reduction factor: the
plan adds partial sums. Without a rule, every device computes the whole operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
from jax.experimental.custom_partitioning import BATCHING, SdyShardingRule
from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from minialpa.errors import ShardingError
from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, aval_of, is_literal, renamed, sub_jaxprs
from minialpa.rules.factors import Dims, Factors, Shapes
from minialpa.rules.known_rules import replicated_factors, rule
from minialpa.rules.notation import parse_rule
from minialpa.rules.registered import jaxpr_flops
from minialpa.rules.sharding_rule import ArrayRule, ShardingRule, shapes_of
from minialpa.tracing.evaluation import eval_flat
from minialpa.tracing.flattening import flatten_calls


class _RefusedError(Exception):
    """`partition` does not accept a proposal."""


def _name(eqn: JaxprEqn) -> str:
    name = getattr(getattr(eqn.params["call"].jaxpr, "debug_info", None), "func_name", "")
    return f"custom_partitioning ({name})" if name else "custom_partitioning"


# ---- the rule -------------------------------------------------------------------------------------------------------


def _rule_of(eqn: JaxprEqn) -> ShardingRule | None:
    given = eqn.params["sharding_rule"]
    options: Mapping[str, Any] = {}
    if callable(given):
        types = [[_type(atom) for atom in atoms] for atoms in (eqn.invars, eqn.outvars)]
        given = given(*eqn.params["static_args"], _mesh({0: 2}), *types)
        if isinstance(given, tuple | list):
            given, options = given
    if isinstance(given, SdyShardingRule):
        return _rule_from_shardy(given)
    return None if given is None else _rule_from_words(given, dict(options))


def _type(atom: Atom) -> Any:
    shape = tuple(aval_of(atom).shape)
    return SimpleNamespace(shape=shape, rank=len(shape), element_type=aval_of(atom).dtype)


def _rule_from_words(text: str, options: dict[str, Any]) -> ShardingRule:
    """options: also lengths of inner factors."""
    factor_options = {
        name: tuple(options.pop(f"{name}_factors", ())) for name in ("reduction", "need_replication", "permutation")
    }
    replicated = (*factor_options["need_replication"], *factor_options["permutation"])
    return _without_outer_sizes(
        parse_rule(text, reductions=factor_options["reduction"], need_replication=replicated), options
    )


def _rule_from_shardy(given: SdyShardingRule) -> ShardingRule:
    def array(mapping: Sequence[Any]) -> ArrayRule:
        dims = [(dim,) if isinstance(dim, str) else tuple(dim) for dim in mapping]
        if dims and dims[0][0].startswith(BATCHING):
            return ArrayRule(dims[0][0].removeprefix(BATCHING) or "0", tuple(dims[1:]))
        return ArrayRule(None, tuple(dims))

    bare = ShardingRule(
        text=str(given),
        operands=tuple(map(array, given.operand_mappings)),
        results=tuple(map(array, given.result_mappings)),
        reductions=tuple((name, "sum") for name in given.reduction_factors),
        replicated=(*given.need_replication_factors, *given.permutation_factors),
    )
    return _without_outer_sizes(bare, given.factor_sizes)


def _without_outer_sizes(text: ShardingRule, sizes: Mapping[str, int]) -> ShardingRule:
    """Outermost factors are shorter on shards."""
    inner = text.inner_names()
    return replace(text, sizes=tuple((name, size) for name, size in sizes.items() if name in inner))


# ---- proposals ------------------------------------------------------------------------------------------------------


def _axis(factor: int) -> str:
    return f"factor{factor}"


def _mesh(n_splits: Mapping[int, int]) -> AbstractMesh:
    names = tuple(map(_axis, n_splits))
    return AbstractMesh(tuple(n_splits.values()), names, axis_types=(AxisType.Auto,) * len(names))


@dataclass(frozen=True, slots=True)
class _Proposal:
    """Cuts some factors, each into `n_splits[factor]` parts along its own mesh axis."""

    eqn: JaxprEqn
    factors: Factors
    n_splits: Mapping[int, int]

    def local_function(self, operands: Shapes, results: Shapes) -> Any:
        """A closed jaxpr. Raises _RefusedError."""
        params, mesh = self.eqn.params, _mesh(self.n_splits)
        whole_operands = [
            self._whole_array(*each) for each in zip(self.eqn.invars, operands, self.factors.operands, strict=True)
        ]
        whole_results = [
            self._whole_array(*each) for each in zip(self.eqn.outvars, results, self.factors.results, strict=True)
        ]
        try:
            _, function, result_shardings, operand_shardings = params["partition"](
                *params["static_args"],
                mesh,
                params["in_tree"].unflatten(whole_operands),
                params["out_tree"].unflatten(whole_results),
            )
        except Exception as error:
            raise _RefusedError(f"`partition` raises {type(error).__name__}: {error}") from error

        _check_accepted(operand_shardings, whole_operands)
        _check_accepted(result_shardings, whole_results)
        structs = [_struct(atom, shape) for atom, shape in zip(self.eqn.invars, operands, strict=True)]
        try:
            traced = jax.make_jaxpr(function, axis_env=list(mesh.shape.items()))(*params["in_tree"].unflatten(structs))
        except Exception as error:
            raise _RefusedError(f"its function raises {type(error).__name__}: {error}") from error

        local = self._without_sums(flatten_calls(traced.jaxpr, tuple(traced.consts)))
        closed = jax.make_jaxpr(lambda *arrays: eval_flat(local, arrays))(*structs)
        if shapes_of(closed.out_avals) != tuple(results):
            raise _RefusedError(f"its function makes {shapes_of(closed.out_avals)} instead of {tuple(results)}")
        return closed

    def _whole_array(self, atom: Atom, local: Sequence[int], dims: Dims) -> Any:
        leading = [self.factors.leading(dim) for dim in dims]
        axes = [None if f is None or f not in self.n_splits else _axis(f) for f in leading]
        shape = [
            size * self.n_splits.get(f, 1) if f is not None else size for f, size in zip(leading, local, strict=True)
        ]
        return _struct(atom, shape, NamedSharding(_mesh(self.n_splits), PartitionSpec(*axes)))

    def _without_sums(self, flat: Block) -> Block:
        """Without final sums over reduction factors. Raises _RefusedError for other communication."""
        reduced = {_axis(f) for f in self.n_splits if self.factors.reductions.get(f) == "sum"}
        read = {atom for eqn in flat.eqns for atom in eqn.invars if not is_literal(atom)}
        summed: dict[Any, Atom] = {}
        ops = []
        for op in flat.ops:
            eqn, axes = op.eqn, set(_named_axes(op.eqn))
            if not axes:
                ops.append(op)
            elif eqn.primitive.name == "psum" and axes <= reduced and not read.intersection(eqn.outvars):
                summed.update(zip(eqn.outvars, eqn.invars, strict=True))
            else:
                raise _RefusedError(f"its function communicates by `{eqn.primitive.name}`")
        return replace(flat, ops=tuple(ops), outvars=tuple(renamed(flat.outvars, summed)))


def _struct(atom: Atom, shape: Sequence[int], sharding: Any = None) -> Any:
    return jax.ShapeDtypeStruct(tuple(shape), aval_of(atom).dtype, sharding=sharding)


def _check_accepted(answered: Any, proposed: Sequence[Any]) -> None:
    """Raises _RefusedError."""
    leaves = jax.tree.leaves(answered, is_leaf=lambda leaf: leaf is None or isinstance(leaf, jax.sharding.Sharding))
    if len(leaves) != len(proposed):
        raise _RefusedError("`partition` returns a wrong number of shardings")
    for leaf, array in zip(leaves, proposed, strict=True):
        found = _spec(leaf, len(array.shape))
        expected = _spec(array.sharding, len(array.shape))
        if found != expected:
            raise _RefusedError(f"`partition` returns {found} instead of {expected}")


def _spec(sharding: Any, rank: int) -> tuple[Any, ...] | None:
    """None for shardings without a spec."""
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return None
    axes = [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return (*axes, *[()] * (rank - len(axes)))


def _named_axes(eqn: JaxprEqn) -> Iterable[str]:
    for name in ("axes", "axis_name", "axis_names"):
        given = eqn.params.get(name, ())
        yield from (axis for axis in (given if isinstance(given, tuple | list) else (given,)) if isinstance(axis, str))
    for body in sub_jaxprs(eqn):
        for inner in getattr(body, "jaxpr", body).eqns:
            yield from _named_axes(inner)


# ---- factors --------------------------------------------------------------------------------------------------------


def _factors_of_rule(eqn: JaxprEqn) -> Factors | None:
    """None without a readable rule."""
    try:
        text = _rule_of(eqn)
    except ShardingError:
        raise
    except Exception:
        # A callable may need attributes that only jax's own types have.
        return None
    if text is None:
        return None
    named = text.named_factors(shapes_of(eqn.invars), shapes_of(eqn.outvars), _name(eqn))
    return named.factors(jaxpr_flops(eqn.params["call"]))


def _accepts(eqn: JaxprEqn, factors: Factors, n_splits: Mapping[int, int]) -> bool:
    try:
        _Proposal(eqn, factors, n_splits).local_function(*factors.local_shapes(n_splits))
    except _RefusedError:
        return False
    return True


def _local_call(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    """Raises ShardingError if `partition` refuses the shards."""
    factors = _factors_of_rule(eqn)
    assert factors is not None, eqn
    n_splits = _n_splits(factors, (*eqn.invars, *eqn.outvars), (*operands, *results))
    if not n_splits:
        return dict(eqn.params)
    try:
        call = _Proposal(eqn, factors, n_splits).local_function(operands, results)
    except _RefusedError as refused:
        raise ShardingError(
            f"The sharding rule of `{_name(eqn)}` allows shards of shapes {list(operands)}, but {refused}. Correct the "
            "rule or `partition`, or list the split factor in `need_replication_factors`."
        ) from refused
    return dict(eqn.params, call=call)


def _n_splits(factors: Factors, atoms: Sequence[Atom], shapes: Shapes) -> dict[int, int]:
    n_splits: dict[int, int] = {}
    for atom, dims, local in zip(atoms, (*factors.operands, *factors.results), shapes, strict=True):
        for dim, whole, size in zip(dims, aval_of(atom).shape, local, strict=True):
            if size != whole:
                leading = factors.leading(dim)
                assert leading is not None, (whole, size)
                # A scan over layers may cut any number of layers; then propose two parts.
                n_splits[leading] = whole // size if whole % size == 0 else 2
    return n_splits


@rule("custom_partitioning", localize=_local_call, named=_name)
def _custom_partitioning(eqn: JaxprEqn) -> Factors:
    """Blocks factors that `partition` refuses."""
    factors = _factors_of_rule(eqn)
    if factors is None or eqn.effects:
        return replicated_factors(eqn, jaxpr_flops(eqn.params["call"]))

    # `partition` may accept each of two factors, and not both.
    accepted: dict[int, int] = {}
    for f, n in factors.smallest_splits():
        if _accepts(eqn, factors, {**accepted, f: n}):
            accepted[f] = n
    reductions = {f: how for f, how in factors.reductions.items() if f in accepted}
    return replace(factors, reductions=reductions, blocked=frozenset(range(len(factors.sizes))).difference(accepted))
