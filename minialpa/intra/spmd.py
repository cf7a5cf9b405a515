"""Programs of one device: equations over shards, with explicit collectives.

`walk` goes through equations as a device does: it reshards operands, runs each equation on shards, applies all-reduces
that cannot wait (those of a maximum, for example), and reshards results. The caller says what a shard is:
`shard_program` computes with arrays under `jax.shard_map`, `collectives_of` only counts. So the collectives that a plan
predicts are those that run.

Nothing is left to XLA's partitioner, which does not know partial sums and chooses collectives of its own.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.cost import Collective, CollectiveKind
from minialpa.errors import TraceError, VerifyError
from minialpa.intra.ordering import wait_for_all
from minialpa.intra.strategies.all_reduce import all_reduce, is_narrow
from minialpa.intra.strategies.balance import balance_of
from minialpa.intra.strategies.candidates import eager_reductions
from minialpa.intra.strategies.combining import WITH_GRADIENTS, Sharing, n_together, sum_groups
from minialpa.intra.strategies.loops import ScanBody, body_specs, scan_body
from minialpa.intra.strategies.overlap import hidden_values
from minialpa.intra.strategies.reshard import ReshardStep, reshard_table
from minialpa.ir.equations import (
    Atom,
    aval_of,
    bytes_of,
    is_extended,
    is_literal,
    shape_of,
    source_line,
)
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of
from minialpa.rules.shards import run_shard
from minialpa.sharding import AXIS_NAMES, EquationSpecs, Spec, abstract_mesh
from minialpa.tracing.evaluation import eval_equation
from minialpa.tracing.ragged_products import only_keeps_apart

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardOps(Generic[T]):
    """What `walk` does with shards of type T.

    Attributes:
        literal: makes the shard of a literal.
        move: takes one step of a resharding; gets the shard, the step and the variable or literal.
        run: runs an equation on the shards of its operands.
        loop: runs a scan whose iterations are a program of shards.
    """

    literal: Callable[[Atom], T]
    move: Callable[[T, ReshardStep, Atom], T]
    run: Callable[[JaxprEqn, Factors, EquationSpecs, list[T]], list[T]]
    loop: Callable[[JaxprEqn, ScanBody, ShardedEquations, list[T]], list[T]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShardedEquations:
    """Equations of one program on `mesh`, with their specs.

    Attributes:
        eqns: in the order in which they run.
        invars: arguments; each comes in its spec of `specs`.
        outvars: results.
        specs: the spec in which each variable is left where it is made.
        equations: specs of operands and results, by the `id` of the equation.
        out_specs: the specs of the results, in order.
        mesh: the devices.
        forbidden: kinds of collectives that resharding may not use.
        combined: kinds of sums that start together.
        early: inputs that are there before the program starts.
        awaited: results that somebody waits for.
        in_loop: whether it is one iteration of a loop.
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
    early: frozenset[Var] = frozenset()
    awaited: frozenset[Var] = frozenset()
    in_loop: bool = False


def walk(program: ShardedEquations, inputs: Sequence[T], ops: ShardOps[T]) -> list[T]:
    """Run `program`; the shards of its results."""
    shards = _Shards(program, ops)
    shards.held.update(((v, program.specs[v]), shard) for v, shard in zip(program.invars, inputs, strict=True))
    for eqn in program.eqns:
        shards.run(eqn)
    return [shards.operand(atom, spec) for atom, spec in zip(program.outvars, program.out_specs, strict=True)]


class _Shards(Generic[T]):
    """The shards that one run of a program has made, by variable and spec.

    A variable that several readers want in one spec is resharded once, and chains of steps share their beginnings.
    """

    def __init__(self, program: ShardedEquations, ops: ShardOps[T]) -> None:
        self.program, self.ops = program, ops
        self.held: dict[tuple[Var, Spec], T] = {}
        #: Shards after an exchange of halves.
        self.swapped: dict[tuple[Var, ReshardStep], T] = {}
        #: As the plan was priced, so that sums that start together go the same way.
        self.n_together = n_together(program.eqns, sum_groups(program.eqns))
        #: What makes the variables that are made of nothing, such as positions.
        self.makers: dict[Var, JaxprEqn] = {}

    def operand(self, atom: Atom, spec: Spec) -> T:
        """The shard of a variable or literal in `spec`."""
        if is_literal(atom):
            return self.moved(self.ops.literal(atom), atom, Spec.replicated(len(shape_of(atom))), spec)
        if (atom, spec) not in self.held:
            src = self.program.specs[atom]
            self.moved(self.held[atom, src], atom, src, spec)
        return self.held[atom, spec]

    def moved(self, shard: T, atom: Atom, src: Spec, dst: Spec) -> T:
        """`shard` resharded, by the steps that are not done yet."""
        if src == dst:
            return shard

        program = self.program
        n_sums = 1 if is_literal(atom) else self.n_together.get(atom, 1)
        sharing = Sharing(program.combined, n_sums)
        table = reshard_table(shape_of(atom), bytes_of(atom), program.mesh, program.forbidden, sharing)
        for step in table.path(src, dst):
            if is_literal(atom):
                shard = self.ops.move(shard, step, atom)
            elif (atom, step.dst) in self.held:
                shard = self.held[atom, step.dst]
            else:
                shard = self.held[atom, step.dst] = self.ops.move(shard, step, atom)
        return shard

    def run(self, eqn: JaxprEqn) -> None:
        """Run an equation, and hold its results in the specs in which they are made and left."""
        chosen = self.program.equations[eqn]
        operands = [self.operand(atom, spec) for atom, spec in zip(eqn.invars, chosen.operands, strict=True)]
        if chosen.body:
            self._run_loop(eqn, chosen, operands)
            return

        factors = factors_of(eqn)
        if eqn.primitive.name == "iota" and not eqn.invars:
            self.makers[eqn.outvars[0]] = eqn
        run = self._run_balanced if chosen.is_balanced else self.ops.run
        made = run(eqn, factors, chosen, operands)
        # Only sums can stay pending. A maximum, for example, is reduced at once.
        finish = eager_reductions(factors, chosen.operands, chosen.made, self.program.mesh.shape)
        for v, shard, step, src, dst in zip(eqn.outvars, made, finish, chosen.made, chosen.results, strict=True):
            finished = shard if step is None else self.ops.move(shard, step, v)
            self.held[v, src] = finished
            self.held[v, dst] = self.moved(finished, v, src, dst)

    def _run_balanced(self, eqn: JaxprEqn, factors: Factors, chosen: EquationSpecs, operands: list[T]) -> list[T]:
        """Run an equation between two exchanges that give all devices equal work."""
        balance = balance_of(factors, chosen.operands, chosen.made, self.program.mesh.shape)
        assert balance is not None, (eqn.primitive, chosen)

        steps = zip(eqn.invars, operands, balance.operands, strict=True)
        swapped = [shard if step is None else self._swapped(atom, shard, step) for atom, shard, step in steps]
        made = self.ops.run(eqn, factors, chosen, swapped)
        ends = zip(eqn.outvars, made, balance.results, strict=True)
        return [shard if step is None else self.ops.move(shard, step, v) for v, shard, step in ends]

    def _swapped(self, atom: Atom, shard: T, step: ReshardStep) -> T:
        """The shard of an operand after an exchange of halves."""
        if is_literal(atom):
            return self.ops.move(shard, step, atom)
        if (atom, step) not in self.swapped:
            maker = self.makers.get(atom)
            if maker is not None:
                # What is made of nothing is made anew, so that nothing has to be exchanged.
                whole = Spec.replicated(len(shape_of(atom)))
                (shard,) = self.ops.run(maker, factors_of(maker), EquationSpecs((), (whole,), (whole,)), [])
                taken = replace(step, kind="cut-halves", src=whole)
                self.swapped[atom, step] = self.ops.move(shard, taken, atom)
            else:
                self.swapped[atom, step] = self.ops.move(shard, step, atom)
        return self.swapped[atom, step]

    def _run_loop(self, eqn: JaxprEqn, chosen: EquationSpecs, operands: list[T]) -> None:
        body, inside = _iteration(eqn, chosen, self.program)
        results = self.ops.loop(eqn, body, inside, operands)
        specs = zip(eqn.outvars, chosen.results, strict=True)
        self.held.update(zip(specs, results, strict=True))


def _iteration(eqn: JaxprEqn, chosen: EquationSpecs, program: ShardedEquations) -> tuple[ScanBody, ShardedEquations]:
    """The body of a scan, and the program of one iteration."""
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
        equations={inner: inner_specs for inner, inner_specs in zip(flat.eqns, chosen.body, strict=True)},
        out_specs=out_specs,
        early=frozenset(body.early),
        awaited=frozenset(body.awaited),
        in_loop=True,
    )
    return body, inside


# ---- counting -------------------------------------------------------------------------------------------------------


class Communication(NamedTuple):
    """A collective that a program uses.

    Attributes:
        collective: kind, bytes and mesh axes.
        times: how often it happens when the program runs once.
        group: number of the collectives that it starts with, see `sum_groups`; None for a start of its own.
        loop: the loop that it is in; None outside of loops.
        can_hide: whether all the work of the loop, or that of the program, can hide it, see `hidden_values`.
        after: bit i is set if it waits for collective i of the program, which sums with the gradients.
    """

    collective: Collective
    times: int
    group: int | None
    loop: JaxprEqn | None = None
    can_hide: bool = False
    after: int = 0


def collectives_of(program: ShardedEquations) -> list[Communication]:
    """What the program communicates when it runs once, in order."""
    found: list[Communication] = []
    groups = sum_groups(program.eqns)
    hidden = hidden_values(program.eqns, program.invars, program.early, program.awaited, in_loop=program.in_loop)

    # The shards are bits: the sums that each of them waits for.
    def move(after: int, step: ReshardStep, atom: Atom) -> int:
        collective = step.collective(bytes_of(atom), program.mesh.shape)
        if collective is not None:
            sums = collective.kind in ("all-reduce", "reduce-scatter")
            group = None if is_literal(atom) or not sums else groups.get(atom)
            can_hide = not is_literal(atom) and atom in hidden
            found.append(Communication(collective, 1, group, can_hide=can_hide, after=after))
            after |= (group == WITH_GRADIENTS) << (len(found) - 1)
        return after

    def run(eqn: JaxprEqn, _: Factors, __: EquationSpecs, operands: Sequence[int]) -> list[int]:
        return [functools.reduce(operator.or_, operands, 0)] * len(eqn.outvars)

    def loop(eqn: JaxprEqn, body: ScanBody, inside: ShardedEquations, operands: Sequence[int]) -> list[int]:
        times = body.length
        found.extend(one._replace(times=times * one.times, loop=eqn, after=0) for one in collectives_of(inside))
        return [functools.reduce(operator.or_, operands, 0)] * len(eqn.outvars)

    walk(program, [0] * len(program.invars), ShardOps(lambda _: 0, move, run, loop))
    return found


# ---- arrays ---------------------------------------------------------------------------------------------------------


def shard_program(program: ShardedEquations) -> Callable[..., tuple[Any, ...]]:
    """The program as a function of arrays as they are stored (`Spec.stored_shape`), over all devices of its mesh."""
    mesh_shape = program.mesh.shape
    in_specs = [program.specs[v] for v in program.invars]

    def on_shards(*stored: Any) -> tuple[Any, ...]:
        shards = [_shard_of(array, spec) for array, spec in zip(stored, in_specs, strict=True)]
        results = walk(program, shards, replace(_array_ops(mesh_shape), run=_run_in_order(mesh_shape)))
        return tuple(_stored(shard, spec) for shard, spec in zip(results, program.out_specs, strict=True))

    if max(mesh_shape) == 1:
        return on_shards

    return jax.shard_map(
        on_shards,
        mesh=abstract_mesh(mesh_shape),
        in_specs=tuple(spec.partition_spec() for spec in in_specs),
        out_specs=tuple(spec.partition_spec() for spec in program.out_specs),
        check_vma=False,
    )


def _shard_of(stored: Any, spec: Spec) -> Any:
    """The shard of an array as it is stored: without the leading dimensions that count the parts of a partial sum."""
    return stored.reshape(stored.shape[len(spec.partial) :]) if spec.partial else stored


def _stored(shard: Any, spec: Spec) -> Any:
    """The reverse of `_shard_of`."""
    return jnp.expand_dims(shard, range(len(spec.partial))) if spec.partial else shard


def _array_ops(mesh_shape: tuple[int, ...]) -> ShardOps[Any]:
    return ShardOps(_literal, _move(mesh_shape), _run(mesh_shape), _loop(mesh_shape))


def _literal(atom: Atom) -> Any:
    return atom.val


def _move(mesh_shape: tuple[int, ...]) -> Callable[[Any, ReshardStep, Atom], Any]:
    def move(shard: Any, step: ReshardStep, atom: Atom) -> Any:
        if is_extended(aval_of(atom).dtype):
            # Typed keys are resharded as the integers that they are made of.
            data = take_step(jax.random.key_data(shard), step, mesh_shape)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(shard))
        return take_step(jnp.asarray(shard, aval_of(atom).dtype), step, mesh_shape)

    return move


def _run(mesh_shape: tuple[int, ...]) -> Callable[[JaxprEqn, Factors, EquationSpecs, list[Any]], list[Any]]:
    def run(eqn: JaxprEqn, factors: Factors, chosen: EquationSpecs, operands: list[Any]) -> list[Any]:
        if eqn.effects and max(mesh_shape) > 1:
            return _run_once(eqn, operands, len(mesh_shape))

        axes = split_axes(factors, chosen)
        n_splits = {factor: math.prod(mesh_shape[axis] for axis in own) for factor, own in axes.items()}
        parts = {factor: lax.axis_index(_names(own)) for factor, own in axes.items() if factor in factors.positional}
        results = run_shard(eqn, factors, operands, n_splits, parts)
        _check_shapes(eqn, chosen, results, mesh_shape)
        return results

    return run


def _run_in_order(
    mesh_shape: tuple[int, ...],
) -> Callable[[JaxprEqn, Factors, EquationSpecs, list[Any]], list[Any]]:
    """As `_run`, with barriers that every compiler keeps. Iterations of a loop are in order anyway."""
    others = _run(mesh_shape)

    def run(eqn: JaxprEqn, factors: Factors, chosen: EquationSpecs, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name == "optimization_barrier" and not only_keeps_apart(eqn):
            return wait_for_all(operands)
        return others(eqn, factors, chosen, operands)

    return run


def _check_shapes(eqn: JaxprEqn, chosen: EquationSpecs, results: Sequence[Any], mesh_shape: tuple[int, ...]) -> None:
    """Raise VerifyError unless each result has the shape that its spec says."""
    for v, shard, spec in zip(eqn.outvars, results, chosen.made, strict=True):
        expected = spec.shard_shape(shape_of(v), mesh_shape)
        if tuple(np.shape(shard)) != expected:
            raise VerifyError(
                f"The rule of `{eqn.primitive.name}` makes a shard of shape {np.shape(shard)} where {spec} of "
                f"{shape_of(v)} is {expected}. The rule is wrong; please report it."
            )


def _loop(mesh_shape: tuple[int, ...]) -> Callable[[JaxprEqn, ScanBody, ShardedEquations, list[Any]], list[Any]]:
    def loop(eqn: JaxprEqn, body: ScanBody, inside: ShardedEquations, operands: list[Any]) -> list[Any]:
        ops = _array_ops(mesh_shape)

        def iteration(carry: Any, slices: Any) -> Any:
            inputs = [*body.flat.consts, *operands[: body.n_consts], *carry, *slices]
            shards = walk(inside, inputs, ops)
            # Literals may be Python numbers, and a scan wants arrays of the dtypes that its carry has.
            results = [
                jnp.asarray(shard, aval_of(atom).dtype) if is_literal(atom) else shard
                for shard, atom in zip(shards, inside.outvars, strict=True)
            ]
            return results[: body.n_carry], results[body.n_carry :]

        carry, stacked = lax.scan(
            iteration,
            operands[body.n_consts : body.n_lead],
            operands[body.n_lead :],
            length=body.length,
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry, *stacked]

    return loop


def split_axes(factors: Factors, chosen: EquationSpecs) -> dict[int, tuple[int, ...]]:
    """The mesh axes, outermost first, that split each factor of an equation."""
    splits: dict[int, tuple[int, ...]] = {}
    for arrays, specs in ((factors.operands, chosen.operands), (factors.results, chosen.made)):
        for dims, spec in zip(arrays, specs, strict=True):
            for dim, axes in zip(dims, spec.dims, strict=True):
                if axes:
                    leading = factors.leading(dim)
                    assert leading is not None, (dim, axes)
                    splits[leading] = axes
    return splits


def _names(axes: Sequence[int]) -> tuple[str, ...]:
    return tuple(AXIS_NAMES[axis] for axis in axes)


def _run_once(eqn: JaxprEqn, operands: list[Any], n_axes: int) -> list[Any]:
    """An equation with side effects runs on the first device only; the others get its results."""
    if any(type(effect).__name__ == "OrderedDebugEffect" for effect in eqn.effects):
        raise TraceError(
            f"`{eqn.primitive.name}` at {source_line(eqn)} runs an ordered `jax.debug` callback, which jax supports on "
            "one device only. Use `ordered=False`, or `jax.experimental.io_callback(..., ordered=True)`."
        )
    names = _names(range(n_axes))
    is_first = lax.axis_index(names) == 0
    zeros = [jnp.zeros(shape_of(v), aval_of(v).dtype) for v in eqn.outvars]
    results = lax.cond(is_first, lambda *xs: eval_equation(eqn, xs), lambda *_: zeros, *operands)
    return [all_reduce(result, names, "or" if result.dtype == np.bool_ else "sum") for result in results]


# ---- collectives ----------------------------------------------------------------------------------------------------


def take_step(x: Any, step: ReshardStep, mesh_shape: tuple[int, ...]) -> Any:
    """One step of a resharding on the shard `x` of this device, together with those along the axes of the step."""
    if is_narrow(x.dtype):
        return take_step(x.astype(np.int8), step, mesh_shape).astype(x.dtype)
    names = _names(step.axes)
    n_devices = math.prod(mesh_shape[axis] for axis in step.axes)
    match step.kind:
        case "cut":
            size = x.shape[step.dim] // n_devices
            return lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, step.dim)
        case "mask":
            return jnp.where(lax.axis_index(names) == 0, x, jnp.zeros_like(x))
        case "all-gather":
            return lax.all_gather(x, names, axis=step.dim, tiled=True)
        case "all-reduce":
            return all_reduce(x, names, step.reduction)
        case "reduce-scatter":
            return lax.psum_scatter(x, names, scatter_dimension=step.dim, tiled=True)
        case "all-to-all":
            return lax.all_to_all(x, names, step.dim, step.source, tiled=True)
        case "cut-halves":
            return _cut_halves(x, step.dim, lax.axis_index(names), n_devices)
        case "swap":
            return _swap(x, step.dim, names, n_devices)


def _cut_halves(x: Any, dim: int, i: Any, n: int) -> Any:
    """What device i of n has after a swap of its part of `x`: of 2 n pieces, piece 2 i and piece 2 n - 1 - 2 i."""
    size = x.shape[dim] // (2 * n)
    starts = (2 * i * size, (2 * n - 1 - 2 * i) * size)
    halves = [lax.dynamic_slice_in_dim(x, start, size, dim) for start in starts]
    return jnp.concatenate(halves, axis=dim)


def _swap(x: Any, dim: int, names: tuple[str, ...], n: int) -> Any:
    """The first half of this device's part, then the second half of that of the device opposite: n - 1 - i for i."""
    kept, sent = jnp.split(x, 2, axis=dim)
    received = lax.ppermute(sent, names, [(i, n - 1 - i) for i in range(n)])
    return jnp.concatenate([kept, received], axis=dim)
