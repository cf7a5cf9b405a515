"""The programs of a region on shards: a region, its groups and the number of parts of each group in, programs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import Atom, is_literal, shape_of
from minialpa.rules.body_groups import Groups, Node, Region, leading_nodes, node_of
from minialpa.rules.shards import localize, part_of, run_from
from minialpa.tracing.evaluation import eval_equation, eval_on_shards


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BodyShards:
    """A region on shards.

    Attributes:
        region: the programs and their arrays.
        groups: the dimensions that are split together; a group has `groups.sizes[group]` blocks.
        n_splits: the number of parts of each group that is split.
        starts: the number of the shard's first block for each positional group that is split; empty if unknown.
    """

    region: Region
    groups: Groups
    n_splits: Mapping[Node, int]
    starts: Mapping[Node, Any]

    def structs(self, atoms: Sequence[Atom]) -> list[jax.ShapeDtypeStruct]:
        return [self._struct(atom) for atom in atoms]

    def _struct(self, atom: Any) -> jax.ShapeDtypeStruct:
        parts = (self.n_splits.get(self.groups.find(node_of(atom, d)), 1) for d in range(len(shape_of(atom))))
        shape = tuple(size // n for size, n in zip(shape_of(atom), parts, strict=True))
        return jax.ShapeDtypeStruct(shape, atom.aval.dtype, weak_type=getattr(atom.aval, "weak_type", False))

    def program(self, part: int) -> Any:
        """The part of this number on shards, as a closed jaxpr; it keeps sharding constraints for micro-batches."""
        structs = self.structs(self.region.parts[part].invars)
        return jax.make_jaxpr(lambda *args: self._run(part, args, eval_equation))(*structs)

    def run(self, part: int, args: Sequence[Any]) -> list[Any]:
        return self._run(part, args, eval_on_shards)

    def _run(self, part: int, args: Sequence[Any], evaluate: Callable[..., list[Any]]) -> list[Any]:
        program = self.region.parts[part]
        consts = zip(program.constvars, program.consts, strict=True)
        env: dict[Any, Any] = {var: self._own_part(var, value) for var, value in consts}
        env.update(zip(program.invars, args, strict=True))

        for eqn in program.eqns:
            operands = [self._own_part(atom, atom.val) if is_literal(atom) else env[atom] for atom in eqn.invars]
            env.update(zip(eqn.outvars, self._run_equation(eqn, operands, evaluate), strict=True))
        return [self._literal_result(atom) if is_literal(atom) else env[atom] for atom in program.outvars]

    def _run_equation(
        self, eqn: JaxprEqn, operands: Sequence[Any], evaluate: Callable[..., list[Any]]
    ) -> Sequence[Any]:
        factors = self.region.factors[eqn]
        groups = {f: self.groups.find(nodes[0]) for f, nodes in leading_nodes(eqn, factors).items()}
        n_splits = {f: self.n_splits.get(group, 1) for f, group in groups.items()}

        # A group may have fewer blocks than the factor has elements.
        begins = {
            f: self.starts[group] * (factors.sizes[f] // self.groups.sizes[group])
            for f, group in groups.items()
            if f in factors.blocked and group in self.starts
        }
        if begins:
            return run_from(eqn, factors, operands, n_splits, begins)
        return evaluate(eqn, operands, localize(eqn, factors, n_splits))

    def _own_part(self, atom: Atom, value: Any) -> Any:
        """The shard of an array which the device holds in full."""
        for d, size in enumerate(shape_of(atom)):
            group = self.groups.find(node_of(atom, d))
            if size > 1 and group in self.starts:
                start = self.starts[group] * (size // self.groups.sizes[group])
                value = part_of(value, d, start, self.n_splits[group])
        return value

    def _literal_result(self, atom: Any) -> Any:
        """The shard of a literal as an array; a literal may be a Python number."""
        return self._own_part(atom, np.asarray(atom.val, getattr(atom.aval, "dtype", None)))
