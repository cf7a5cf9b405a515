"""A split step while it is written, and the complete values in its segments between loops.

A complete value keeps the name of its full-batch variable. Its first reader between loops makes it from values of a
loop:

  * a partial sum, by accumulation over micro-batches;
  * a per-micro-batch value, by an average;
  * a per-example value, by concatenation;
  * a value that is the same in all micro-batches, by choosing one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.errors import TraceError
from minialpa.inter.microbatch.forms import Complete, Partial, PerExample, PerMicroBatch, Same, Scale
from minialpa.inter.microbatch.segments import Segments
from minialpa.inter.microbatch.split_step import Accumulator, Concatenation, SplitStep, operation
from minialpa.ir.equations import (
    Atom,
    aval_of,
    dtype_name,
    fresh_var,
    is_inexact,
    is_literal,
    operand_vars,
    shape_of,
)
from minialpa.ir.op import Op
from minialpa.support.private_jax import changed_aval
from minialpa.tracing.gradients import gradient_p
from minialpa.tracing.new_equations import EquationMaker, equations_for


class Draft:
    """A `SplitStep` under construction.

    Attributes:
        values: for each loop, numbered from 1, the micro-batch's variable for each full-batch variable.
        accumulators, concatenations: by the full-batch variable that they compute.
        micro_inputs, batch_dims: see `SplitStep`.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.maker = EquationMaker()
        self.values: list[dict[Var, Atom]] = [{} for _ in range(segments.n_loops + 1)]
        self.accumulators: dict[Var, Accumulator] = {}
        self.concatenations: dict[Var, Concatenation] = {}
        self.micro_inputs: dict[Var, Var] = {}
        self.batch_dims: dict[Var, int] = {}
        self._operations: dict[int, list[Op]] = defaultdict(list)
        self._micro_index: Var | None = None
        self._split_inputs()

    def _split_inputs(self) -> None:
        """Make the micro-batch of each batch argument."""
        step = self.segments.step
        for var, dim in zip(step.flat.invars, step.batch_dims, strict=True):
            if dim is None:
                continue
            shape = list(shape_of(var))
            shape[dim] //= self.segments.n_micro_batches
            rows = fresh_var(changed_aval(var.aval, shape=tuple(shape)))
            self.micro_inputs[var] = rows
            self.batch_dims[rows] = self.batch_dims[var] = dim

    def add(self, eqn: JaxprEqn, segment: int, source: int) -> None:
        self._operations[segment].append(operation(self.segments.step, eqn, segment, source))

    def micro_index(self) -> Var:
        if self._micro_index is None:
            self._micro_index = fresh_var(jax.core.ShapedArray((), np.dtype("int32")))
        return self._micro_index

    def finish(self) -> SplitStep:
        """The step, without dead equations, accumulators and concatenations."""
        step = self.segments.step

        # A complete value needs the value of its loop, though no equation reads that one.
        operations = [op for segment in sorted(self._operations) for op in self._operations[segment]]
        parts = {accumulator.complete: accumulator.loop for accumulator in self.accumulators.values()}
        parts.update((joined.complete, joined.loop) for joined in self.concatenations.values())
        operations, needed = _live_operations(operations, step.flat.outvars, parts)

        return SplitStep(
            traced=step,
            n_micro_batches=self.segments.n_micro_batches,
            ops=tuple(operations),
            micro_inputs=tuple((var, rows) for var, rows in self.micro_inputs.items() if rows in needed),
            micro_index=self._micro_index,
            accumulators=tuple(
                accumulator for accumulator in self.accumulators.values() if accumulator.complete in needed
            ),
            concatenations=tuple(joined for joined in self.concatenations.values() if joined.complete in needed),
            outvars=step.flat.outvars,
            batch_dims=self.batch_dims,
            per_micro_batch=self.segments.found,
        )


def _live_operations(
    operations: Sequence[Op], results: Sequence[Atom], parts: Mapping[Var, Var]
) -> tuple[list[Op], set[Var]]:
    """The operations that `results` need or that have side effects, in order, and all variables that they read.

    parts: complete value -> the variable of its loop, which is needed with it.
    """
    needed = {var for var in results if not is_literal(var)}
    needed |= {parts[var] for var in needed if var in parts}

    live: list[Op] = []
    for op in reversed(operations):
        if op.eqn.effects or any(var in needed for var in op.eqn.outvars):
            live.append(op)
            reads = operand_vars(op.eqn)
            needed.update(reads)
            needed.update(parts[var] for var in reads if var in parts)
    return live[::-1], needed


# ---- between loops ---------------------------------------------------------------------------------------------------

#: Bytes per element of an accumulator of floats, at least: float32. In bfloat16, small parts would vanish.
_LEAST_TOTAL_BYTES = 4


class CompleteValues:
    """Writes the segments between loops of a draft. Arguments `segment` are even: segment 2 l follows loop l."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.segments = draft.segments
        self.known: set[Var] = set()

    def emit(self, i: int, segment: int) -> None:
        """Write equation `i` and the values that it reads, unless written before."""
        eqn = self.segments.eqns[i]
        if eqn.outvars and all(var in self.known for var in eqn.outvars):
            return

        for atom in eqn.invars:
            self.require(atom, segment)
        self.known.update(eqn.outvars)
        self.draft.add(eqn, segment, self.segments.sources[i])

    def require(self, atom: Atom, segment: int) -> None:
        """Make a value complete, under its full-batch name, from `segment` on."""
        if is_literal(atom) or atom in self.known or atom in self.segments.prologue_values:
            return

        form = self.segments.forms.form(atom)
        if isinstance(form, Complete):
            i = self.segments.producer.get(atom)
            if i is not None:
                self.emit(i, segment)
            return
        if atom in self.draft.micro_inputs:
            return  # an argument

        # A loop has computed it in parts.
        assert 2 * form.loop <= segment, f"{self.segments.line(atom)} is read in segment {segment} and has {form}"

        self.known.add(atom)
        part = self.draft.values[form.loop][atom]
        match form:
            case PerExample():
                self._concatenate(atom, form, part, segment)
            case Same():
                self._take_any(atom, form, part, segment)
            case PerMicroBatch():
                self._refuse_average(atom)
                self._add_up(atom, part, self.segments.n_micro_batches, None, segment)
            case Partial(reduction="sum"):
                self._add_up(atom, part, 1, form.scale, segment)
            case Partial():
                self.draft.accumulators[atom] = Accumulator(part, atom, form.reduction)

    def scaled(self, var: Atom, scale: Scale, segment: int) -> tuple[list[JaxprEqn], Atom]:
        """Equations that multiply `var` by the scalar of `scale` in `segment`, and their result."""
        self.require(scale.scalar, segment)

        def scaled(x: Any, scalar: Any) -> Any:
            scalar = scalar.astype(x.dtype)
            # A mean over zero examples has an infinite scalar and only zeros in x: 0 * inf would be NaN.
            return jnp.where(x == 0, x, x / scalar if scale.divides else x * scalar)

        eqns, (out,) = self.draft.maker.compute(("scaled", scale.divides), scaled, var, scale.scalar)
        return eqns, out

    def _add_named(self, var: Var, eqns: Sequence[JaxprEqn], out: Atom, segment: int) -> None:
        """Write `eqns`, with the result `out` renamed to `var`."""
        source = self.segments.sources[self.segments.producer[var]]
        for eqn in eqns:
            renamed = eqn.replace(outvars=[var if atom is out else atom for atom in eqn.outvars])
            self.draft.add(renamed, segment, source)

    def _concatenate(self, var: Var, form: PerExample, part: Var, segment: int) -> None:
        complete = var if form.scale is None else fresh_var(var.aval)
        self.draft.concatenations[var] = Concatenation(part, complete, self.draft.batch_dims[part])
        if form.scale is not None:
            eqns, out = self.scaled(complete, form.scale, segment)
            self._add_named(var, eqns, out, segment)

    def _refuse_average(self, var: Var) -> None:
        if is_inexact(var):
            return
        raise TraceError(
            f"{self._name(var)}, computed at {self.segments.line(var)} from batch statistics such as a mean or "
            f"variance, has the dtype {dtype_name(var)}, and only floats can be averaged over micro-batches. Compute "
            "it from sums over the batch, or set `num_micro_batches=1`."
        )

    def _name(self, var: Var) -> str:
        step = self.segments.step
        paths = zip(step.flat.outvars, step.out_paths, strict=True)
        return next((f"`{path}`" for atom, path in paths if atom is var), "A value of the update")

    def _add_up(self, var: Var, part: Var, divisor: int, scale: Scale | None, segment: int) -> None:
        """`var` = `scale` * (sum over micro-batches of `part`) / `divisor`."""
        aval = aval_of(var)
        is_narrow = is_inexact(var) and aval.dtype.itemsize < _LEAST_TOTAL_BYTES
        dtype = np.dtype("float32") if is_narrow else aval.dtype
        complete = fresh_var(changed_aval(aval, dtype=dtype, weak_type=False))
        self.draft.accumulators[var] = Accumulator(part, complete, "sum")

        def finished(x: Any) -> Any:
            (x,) = gradient_p.bind(x, call=0)  # the planner may sum over devices here, once for all parts
            return x / jnp.asarray(divisor, dtype) if divisor > 1 else x

        eqns, (out,) = self.draft.maker.compute(("finished", divisor, dtype), finished, complete)

        # Scaled before it is rounded to the dtype of the variable.
        if scale is not None:
            more, out = self.scaled(out, scale, segment)
            eqns = [*eqns, *more]
        if dtype != aval.dtype:
            more, (out,) = self.draft.maker.compute(("narrow", aval.dtype), lambda x: x.astype(aval.dtype), out)
            eqns = [*eqns, *more]
        self._add_named(var, eqns, out, segment)

    def _take_any(self, var: Var, form: Same, part: Var, segment: int) -> None:
        """Take the largest of the equal values of micro-batches; of random keys, the largest of their data."""
        dtype = aval_of(var).dtype
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            self.draft.accumulators[var] = Accumulator(part, var, "or" if dtype == np.bool_ else "max")
            return

        implementations = []

        def to_data(keys: Any) -> Any:
            implementations.append(jax.random.key_impl(keys))
            return jax.random.key_data(keys)

        eqns, (data,) = equations_for(to_data, part)
        source = self.segments.sources[self.segments.producer[var]]
        for eqn in eqns:
            self.draft.add(eqn, 2 * form.loop - 1, source)

        complete = fresh_var(data.aval)
        self.draft.accumulators[var] = Accumulator(data, complete, "max")
        eqns, (out,) = equations_for(lambda x: jax.random.wrap_key_data(x, impl=implementations[0]), complete)
        self._add_named(var, eqns, out, segment)
