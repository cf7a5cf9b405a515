"""Equations with specs (`ShardedEquations`) in; the program of one device, with explicit collectives, out.

`walk` runs the program: it reshards operands, runs each equation on shards, applies all-reduces that cannot wait (of a
maximum, for example), and reshards results. The caller chooses the type of a shard. `shard_program` (shard_arrays.py)
computes with arrays; `collectives_of` only counts. So a plan predicts the collectives that run. XLA's partitioner takes
no part: it does not know partial sums.

    y = x @ w      reshard x to R,S0 and w to S0,R; multiply shards, which makes R,R+P0; all-reduce y to R,R
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.cost import Collective, CollectiveKind
from minialpa.intra.strategies.balance import balance_of
from minialpa.intra.strategies.candidates import eager_reductions
from minialpa.intra.strategies.combining import WITH_GRADIENTS, Sharing, sum_groups
from minialpa.intra.strategies.loops import ScanBody, body_specs, scan_body
from minialpa.intra.strategies.overlap import hidden_values
from minialpa.intra.strategies.reshard import ReshardStep, forbidden_for, reshard_table
from minialpa.intra.strategies.rings import passes_of
from minialpa.intra.strategies.rotation import rotation_of
from minialpa.ir.equations import Atom, bytes_of, is_literal, operand_vars, shape_of
from minialpa.ir.repeats import NO_REPEATS, Repeats
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of
from minialpa.sharding import EquationSpecs, Spec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardOps(Generic[T]):
    """The operations of `walk` on shards of type T.

    Attributes:
        move: takes one step of a resharding.
        loop: runs a scan; its iteration is a `ShardedEquations`.
        named: a context for the operations of an equation.
    """

    literal: Callable[[Atom], T]
    move: Callable[[T, ReshardStep, Atom], T]
    run: Callable[[JaxprEqn, Factors, EquationSpecs, list[T]], list[T]]
    loop: Callable[[JaxprEqn, ScanBody, ShardedEquations, list[T]], list[T]]
    named: Callable[[JaxprEqn], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShardedEquations:
    """Equations of one program on `mesh`, with their specs.

    Attributes:
        specs: for each variable, the spec in which its maker leaves it.
        forbidden: kinds of collectives that resharding may not use.
        combined: kinds of sums that start together.
        live_on_entry, required_outputs, in_loop: for `hidden_values`.
    """

    eqns: tuple[JaxprEqn, ...]
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    specs: Mapping[Var, Spec]
    equations: Mapping[JaxprEqn, EquationSpecs]
    out_specs: tuple[Spec, ...]
    mesh: LogicalMesh
    forbidden: tuple[str, ...] = ()
    combined: tuple[CollectiveKind, ...] = ()
    live_on_entry: frozenset[Var] = frozenset()
    required_outputs: frozenset[Var] = frozenset()
    in_loop: bool = False
    repeats: Repeats = NO_REPEATS


def walk(program: ShardedEquations, inputs: Sequence[T], ops: ShardOps[T]) -> list[T]:
    """Run `program` on the shards `inputs`; returns the shards of its results, in `out_specs`."""
    shards = _Shards(program, ops)
    shards.held.update(((v, program.specs[v]), shard) for v, shard in zip(program.invars, inputs, strict=True))
    for eqn in program.eqns:
        with ops.named(eqn):
            shards.run(eqn)
    return [shards.operand(atom, spec) for atom, spec in zip(program.outvars, program.out_specs, strict=True)]


class _Shards(Generic[T]):
    """The shards of one run of a program, by variable and spec.

    A variable is resharded once for all readers in one spec, and chains of steps share their first steps.
    """

    def __init__(self, program: ShardedEquations, ops: ShardOps[T]) -> None:
        self.program, self.ops = program, ops
        self.held: dict[tuple[Var, Spec], T] = {}
        #: After an exchange of halves.
        self.swapped: dict[tuple[Var, ReshardStep], T] = {}
        #: How many sums start with the sum of a value.
        self.n_together = sum_groups(program.eqns).n_together
        #: `iota` equations, by result.
        self.makers: dict[Var, JaxprEqn] = {}

    def operand(self, atom: Atom, spec: Spec) -> T:
        if is_literal(atom):
            return self.moved(self.ops.literal(atom), atom, Spec.replicated(len(shape_of(atom))), spec)
        if (atom, spec) not in self.held:
            src = self.program.specs[atom]
            self.moved(self.held[atom, src], atom, src, spec)
        return self.held[atom, spec]

    def moved(self, shard: T, atom: Atom, src: Spec, dst: Spec) -> T:
        """Without steps that other readers took."""
        if src == dst:
            return shard

        program = self.program
        n_sums = 1 if is_literal(atom) else self.n_together.get(atom, 1)
        sharing = Sharing(program.combined, n_sums)
        forbidden = forbidden_for(atom, program.forbidden)
        table = reshard_table(shape_of(atom), bytes_of(atom), program.mesh, forbidden, sharing)
        for step in table.path(src, dst):
            if is_literal(atom):
                shard = self.ops.move(shard, step, atom)
            elif (atom, step.dst) in self.held:
                shard = self.held[atom, step.dst]
            else:
                shard = self.held[atom, step.dst] = self.ops.move(shard, step, atom)
        return shard

    def run(self, eqn: JaxprEqn) -> None:
        """Holds the results in both specs, `made` and `results`."""
        chosen = self.program.equations[eqn]
        operands = [self.operand(atom, spec) for atom, spec in zip(eqn.invars, chosen.operands, strict=True)]
        if chosen.body:
            self._run_loop(eqn, chosen, operands)
            return

        factors = factors_of(eqn)
        if eqn.primitive.name == "iota" and not eqn.invars:
            self.makers[eqn.outvars[0]] = eqn
        rotation = rotation_of(factors, chosen.operands[0], self.program.mesh.shape) if factors.shifts else None
        if rotation is not None:
            made = [self.ops.move(operands[0], rotation, eqn.invars[0])]
        else:
            run = self._run_balanced if chosen.is_balanced else self.ops.run
            made = run(eqn, factors, chosen, operands)
        finish = eager_reductions(factors, chosen.operands, chosen.made)
        for v, shard, step, src, dst in zip(eqn.outvars, made, finish, chosen.made, chosen.results, strict=True):
            finished = shard if step is None else self.ops.move(shard, step, v)
            self.held[v, src] = finished
            self.held[v, dst] = self.moved(finished, v, src, dst)

    def _run_balanced(self, eqn: JaxprEqn, factors: Factors, chosen: EquationSpecs, operands: list[T]) -> list[T]:
        balance = balance_of(factors, chosen.operands, chosen.made, self.program.mesh.shape)
        assert balance is not None, (eqn.primitive, chosen)

        steps = zip(eqn.invars, operands, balance.operands, strict=True)
        swapped = [shard if step is None else self._after_exchange(atom, shard, step) for atom, shard, step in steps]
        made = self.ops.run(eqn, factors, chosen, swapped)
        ends = zip(eqn.outvars, made, balance.results, strict=True)
        return [shard if step is None else self.ops.move(shard, step, v) for v, shard, step in ends]

    def _after_exchange(self, atom: Atom, shard: T, step: ReshardStep) -> T:
        if is_literal(atom):
            return self.ops.move(shard, step, atom)
        if (atom, step) in self.swapped:
            return self.swapped[atom, step]

        maker = self.makers.get(atom)
        if maker is not None:
            # Made anew in full, so that devices need no exchange.
            whole = Spec.replicated(len(shape_of(atom)))
            (shard,) = self.ops.run(maker, factors_of(maker), EquationSpecs((), (whole,), (whole,)), [])
            step_taken = replace(step, kind="cut-halves", src=whole)
        else:
            step_taken = step
        self.swapped[atom, step] = self.ops.move(shard, step_taken, atom)
        return self.swapped[atom, step]

    def _run_loop(self, eqn: JaxprEqn, chosen: EquationSpecs, operands: list[T]) -> None:
        body, inside = _iteration_of(eqn, chosen, self.program)
        results = self.ops.loop(eqn, body, inside, operands)
        specs = zip(eqn.outvars, chosen.results, strict=True)
        self.held.update(zip(specs, results, strict=True))


def _iteration_of(eqn: JaxprEqn, chosen: EquationSpecs, program: ShardedEquations) -> tuple[ScanBody, ShardedEquations]:
    body = scan_body(eqn)
    assert body is not None, eqn.primitive
    specs, out_specs = body_specs(body, chosen)

    flat = body.flat
    inside = replace(
        program,
        eqns=flat.eqns,
        invars=(*flat.constvars, *flat.invars),
        outvars=flat.outvars,
        specs=specs,
        equations=dict(zip(flat.eqns, chosen.body, strict=True)),
        out_specs=out_specs,
        live_on_entry=frozenset(body.live_on_entry),
        required_outputs=frozenset(body.required_outputs),
        in_loop=True,
    )
    return body, inside


# ---- counting -------------------------------------------------------------------------------------------------------


class Communication(NamedTuple):
    """A collective of a program.

    Attributes:
        times: runs per run of the program.
        group: the group with which it starts (`sum_groups`); None if it starts alone.
        can_hide: whether all the work of the loop, or of the program, can hide it (`hidden_values`).
        after: a bitmask; bit i is set if its operand depends, directly or not, on collective i of the program, a sum
            that starts with the gradients.
        n: how many successive collectives it stands for (`Repeats`).
        eqn: the equation that makes the value; for an argument of the program, or of the loop, the first that reads it.
    """

    collective: Collective
    times: int
    group: int | None
    loop: JaxprEqn | None = None
    can_hide: bool = False
    after: int = 0
    n: int = 1
    value: Atom | None = None
    eqn: JaxprEqn | None = None


@functools.lru_cache(maxsize=8)
def collectives_of(program: ShardedEquations) -> tuple[Communication, ...]:
    found: list[Communication] = []
    groups = sum_groups(program.eqns).number
    hidden = hidden_values(
        program.eqns, program.invars, program.live_on_entry, program.required_outputs, in_loop=program.in_loop
    )

    near: dict[Var, JaxprEqn] = {}
    for one in program.eqns:
        near.update((v, one) for v in one.outvars)
        for v in operand_vars(one):
            near.setdefault(v, one)

    # In place of a shard: a bitmask as `Communication.after`.
    def move(after: int, step: ReshardStep, atom: Atom) -> int:
        collective = step.collective(bytes_of(atom), program.mesh.shape)
        if collective is not None:
            sums = collective.kind in ("all-reduce", "reduce-scatter")
            group = None if is_literal(atom) or not sums else groups.get(atom)
            can_hide = not is_literal(atom) and atom in hidden
            n = 1 if is_literal(atom) else program.repeats.n_variables(atom)
            eqn = None if is_literal(atom) else near.get(atom)
            found.append(Communication(collective, 1, group, can_hide=can_hide, after=after, n=n, value=atom, eqn=eqn))
            after |= (group == WITH_GRADIENTS) << (len(found) - 1)
        return after

    def run(eqn: JaxprEqn, factors: Factors, chosen: EquationSpecs, operands: Sequence[int]) -> list[int]:
        for one, atom, times in passes_of(eqn, factors, chosen.operands, program.mesh.shape):
            found.append(Communication(one, times, None, value=atom, eqn=eqn, n=program.repeats.n_equations(eqn)))
        return [functools.reduce(operator.or_, operands, 0)] * len(eqn.outvars)

    def loop(eqn: JaxprEqn, body: ScanBody, inside: ShardedEquations, operands: Sequence[int]) -> list[int]:
        times, n = body.length, program.repeats.n_equations(eqn)
        found.extend(one._replace(times=times * one.times, loop=eqn, after=0, n=n) for one in collectives_of(inside))
        return [functools.reduce(operator.or_, operands, 0)] * len(eqn.outvars)

    walk(program, [0] * len(program.invars), ShardOps(lambda _: 0, move, run, loop))
    return tuple(found)


def split_axes(factors: Factors, chosen: EquationSpecs) -> dict[int, tuple[int, ...]]:
    """The mesh axes of each factor that shares the work of an equation, outermost first."""
    splits: dict[int, tuple[int, ...]] = {}
    for arrays, specs in ((factors.operands, chosen.operands), (factors.results, chosen.made)):
        for dims, spec in zip(arrays, specs, strict=True):
            for dim, axes in zip(dims, spec.dims, strict=True):
                if axes:
                    leading = factors.leading(dim)
                    assert leading is not None, (dim, axes)
                    if leading not in factors.rings.values():
                        splits[leading] = axes
    return splits
