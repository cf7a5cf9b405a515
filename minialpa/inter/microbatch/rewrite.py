"""Micro-batches: a traced full-batch step in, the same step as loops over micro-batches out.

The full-batch program is rewritten, not traced again, so every constant in it keeps its full-batch value: a mean over
64 examples still divides by 64, and the parts that the micro-batches compute simply add up. `segments` says what each
value is and where each equation runs; here the equations are written out, each loop over variables of its own:

  * a value with a batch dimension is computed on the micro-batch's rows;
  * a reduction over examples leaves a partial result in each micro-batch, which is accumulated;
  * a value that later segments need whole, with the rows of all micro-batches, is put together behind its loop;
  * rows that an earlier loop computed are kept, or computed again, where a later one reads them;
  * values that do not depend on the examples but have their shape (dropout masks, position numbers) are computed whole
    and cut, so that each example meets the values of the full-batch run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.errors import TraceError
from minialpa.inter.microbatch.batching import Kinds, batch_factors, dim_of
from minialpa.inter.microbatch.forms import Once, Own, Partial, Rows, Same, Scale
from minialpa.inter.microbatch.segments import Segments, find_segments
from minialpa.inter.microbatch.split_step import Accumulator, Op, SplitStep, Stack, is_loop
from minialpa.inter.microbatch.whole_batch import whole_batch
from minialpa.rules.factors import Factors, factors_of, localize
from minialpa.tracing.gradients import gradient_p
from minialpa.tracing.jaxprs import (
    Atom,
    EquationMaker,
    dtype_name,
    equations_for,
    fresh_var,
    is_inexact,
    is_literal,
    operand_vars,
    shape_of,
    source_line,
)
from minialpa.tracing.trace import TracedStep

#: Sums over micro-batches are kept in floats of at least so many bytes.
_SUM_BYTES = 4


def split_micro_batches(
    step: TracedStep, n: int, chunk_of: Sequence[int | None] | None = None, *, keep_rows: bool = False
) -> SplitStep:
    """Split `step` into `n` micro-batches. `chunk_of[i]` is the chunk of traced equation `i`, if it is known.

    Partial results of different chunks are not added in the loop but after it. keep_rows: whether what an earlier loop
    computed is kept, for all micro-batches, where a later one reads it, or computed again.
    Raises TraceError if the examples cannot be split, or a result has no clear meaning over micro-batches.
    """
    if n == 1:
        return whole_batch(step, several_loops=chunk_of is not None)
    if step.batch_size is None:
        raise TraceError(f"`num_micro_batches={n}` needs an argument with examples; none is listed in `batch_argnums`.")
    if step.batch_size % n:
        raise TraceError(
            f"A batch of {step.batch_size} examples cannot be split into {n} equal micro-batches. "
            f"Choose `num_micro_batches` among its divisors: {', '.join(map(str, _divisors(step.batch_size)))}."
        )
    return _Builder(find_segments(step, n, chunk_of), keep_rows).run()


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


class _Builder:
    def __init__(self, segments: Segments, keep_rows: bool) -> None:
        self.segments, self.step, self.n = segments, segments.step, segments.n_micro_batches
        self.keep_rows = keep_rows
        self.eqns, self.sources, self.forms = segments.eqns, segments.sources, segments.forms
        self.producer = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.early = {v for i in segments.early for v in self.eqns[i].outvars}
        self.compared = _compared(segments)
        self.maker = EquationMaker()
        self.ops: dict[int, list[Op]] = defaultdict(list)
        self.in_loop: list[_Loop] = [_Loop() for _ in range(segments.n_loops + 1)]
        self.micro: dict[Var, Var] = {}  # batch argument -> its rows in a micro-batch
        self.batch_dims: dict[Var, int] = {}
        self.micro_index: Var | None = None
        self.accumulators: dict[Var, Accumulator] = {}
        self.stacks: dict[Var, Stack] = {}
        self.whole: set[Var] = set()  # variables that are known, once, under their own name
        self.segment, self.source = 0, -1

    def run(self) -> SplitStep:
        self._split_inputs()
        for segment in range(2 * self.segments.n_loops + 1):
            self.segment = segment
            if is_loop(segment):
                self._emit_loop((segment + 1) // 2)
            else:
                self._emit_once()
        for atom in self.step.flat.outvars:
            self._whole(atom)
        ops, needed = self._live()
        accumulators = tuple(a for a in self.accumulators.values() if a.total in needed)
        stacks = tuple(s for s in self.stacks.values() if s.total in needed)
        return SplitStep(
            self.step, self.n, tuple(ops), tuple((v, m) for v, m in self.micro.items() if m in needed),
            self.micro_index, accumulators, stacks, self.step.flat.outvars, self.batch_dims, self.segments.found,
        )  # fmt: skip

    def _split_inputs(self) -> None:
        for var, dim in zip(self.step.flat.invars, self.step.batch_dims, strict=True):
            if dim is not None:
                shape = list(shape_of(var))
                shape[dim] //= self.n
                self.micro[var] = fresh_var(var.aval.update(shape=tuple(shape)))
                self.batch_dims[self.micro[var]] = self.batch_dims[var] = dim

    def _live(self) -> tuple[list[Op], set[Var]]:
        """The operations that results need, in order, and what is read. What a total is made of is live where it is."""
        ops = [op for segment in sorted(self.ops) for op in self.ops[segment]]
        made_from: dict[Var, Var] = {a.total: a.loop for a in self.accumulators.values()}
        made_from.update((s.total, s.loop) for s in self.stacks.values())
        needed = {v for v in self.step.flat.outvars if not is_literal(v)}
        needed |= {made_from[v] for v in needed if v in made_from}
        keep = [False] * len(ops)
        for i in range(len(ops) - 1, -1, -1):
            eqn = ops[i].eqn
            if eqn.effects or any(v in needed for v in eqn.outvars):
                keep[i] = True
                reads = operand_vars(eqn)
                needed.update(reads)
                needed.update(made_from[v] for v in reads if v in made_from)
        return [op for op, k in zip(ops, keep, strict=True) if k], needed

    # ---- segments -------------------------------------------------------------------------------------------------

    def _emit_once(self) -> None:
        """The equations of a segment between loops, on whole arrays."""
        for i, eqn in enumerate(self.eqns):
            if self.segments.places[i] == self.segment or (self.segment == 0 and i in self.segments.early):
                self._emit_whole(i, eqn)

    def _emit_whole(self, i: int, eqn: JaxprEqn) -> None:
        if eqn.outvars and all(v in self.whole for v in eqn.outvars):
            return
        for atom in eqn.invars:
            self._whole(atom)
        self.whole.update(eqn.outvars)
        self.ops[self._between].append(Op(eqn, self._between, self.sources[i]))

    def _emit_loop(self, loop: int) -> None:
        again = set() if self.keep_rows else self._computed_again(loop)
        for i, eqn in enumerate(self.eqns):
            if self.segments.places[i] == self.segment or i in again:
                self.source = self.sources[i]
                self._emit(i, eqn)

    def _computed_again(self, loop: int) -> set[int]:
        """Equations of earlier loops whose results this one reads. Those with side effects run once only. Rows that
        were put together are kept: what an operation found among them may be compared with them, to the last bit."""
        wanted, out = set[Var](), set[int]()
        for i in range(len(self.eqns) - 1, -1, -1):
            eqn, place = self.eqns[i], self.segments.places[i]
            mine = place == self.segment
            may_repeat = place is not None and is_loop(place) and place < self.segment and not eqn.effects
            may_repeat = may_repeat and not any(v in self.compared or v in self.stacks for v in eqn.outvars)
            if may_repeat and any(v in wanted for v in eqn.outvars):
                out.add(i)
                mine = True
            if mine:
                wanted.update(
                    v for k, v in enumerate(eqn.invars) if not is_literal(v) and self._is_of_micro_batch(i, k, v)
                )
        return out

    def _is_of_micro_batch(self, i: int, k: int, atom: Atom) -> bool:
        """Whether equation `i` reads operand `k` as the micro-batch has it."""
        form = self.forms.form(atom)
        if isinstance(form, Partial):
            return atom not in self.early and (i in self.segments.own or self._partial_in_loop(i, k))
        return isinstance(form, Rows | Own)

    def _partial_in_loop(self, i: int, k: int) -> bool:
        """Whether a partial sum that equation `i` reads is of the loop that the equation runs in."""
        form, place = self.forms.form(self.eqns[i].invars[k]), self.segments.places[i]
        return isinstance(form, Partial) and place == 2 * form.loop - 1

    # ---- values that are known once -------------------------------------------------------------------------------

    def _whole(self, atom: Atom) -> None:
        """Make an atom known under its own name in the once-segments from here on."""
        if is_literal(atom) or atom in self.whole or atom in self.early:
            return
        form = self.forms.form(atom)
        if isinstance(form, Once):
            i = self.producer.get(atom)
            if i is not None:
                self._emit_whole(i, self.eqns[i])
            return
        if atom in self.micro:
            return  # an argument
        assert 2 * form.loop <= self._between, f"{self._line(atom)} is read in {self.segment} and known behind {form}"
        self.whole.add(atom)
        loop = self.in_loop[form.loop]
        if isinstance(form, Rows):
            self._stack(atom, form, loop.values[atom])
        elif isinstance(form, Same):
            self._take_any(atom, loop.values[atom])
        else:
            self._accumulate(atom, form, loop.values[atom])

    @property
    def _between(self) -> int:
        """The segment between loops that this one is, or that stands in front of this loop."""
        return self.segment - 1 if is_loop(self.segment) else self.segment

    def _add_between(self, var: Var, eqns: Sequence[JaxprEqn], out: Atom) -> None:
        """Equations that make `var`, under the name `out`, from what a loop has left."""
        for eqn in eqns:
            renamed = eqn.replace(outvars=[var if v is out else v for v in eqn.outvars])
            self.ops[self._between].append(Op(renamed, self._between, self.sources[self.producer[var]]))

    def _stack(self, var: Var, form: Rows, micro: Var) -> None:
        """Put together the rows of `var` of all micro-batches."""
        total = var if form.scale is None else fresh_var(var.aval)
        self.stacks[var] = Stack(micro, total, self.batch_dims[micro])
        if form.scale is not None:
            eqns, (out,) = self._scaled(total, form.scale)
            self._add_between(var, eqns, out)

    def _scaled(self, var: Atom, scale: Scale) -> tuple[list[JaxprEqn], list[Atom]]:
        self._whole(scale.scalar)

        def scaled(x: Any, s: Any) -> Any:
            s = s.astype(x.dtype)
            # A mean over no examples has s infinite, and a mask between it and each x_i.
            return jnp.where(x == 0, x, x / s if scale.divides else x * s)

        return self.maker.compute(("scaled", scale.divides), scaled, var, scale.scalar)

    def _accumulate(self, var: Var, form: Partial | Own, micro: Var) -> None:
        """Sum `var` over micro-batches, narrow floats in float32; own values are averaged afterwards."""
        aval = _array(var)
        reduction = form.reduction if isinstance(form, Partial) else "sum"
        n = self.n if isinstance(form, Own) else 1
        if n > 1 and not is_inexact(var):
            raise TraceError(
                f"{self._name(var)} ({dtype_name(var)}) is computed at {self._line(var)} from statistics of the "
                "micro-batch, and has no clear meaning over micro-batches. Compute it from sums, or use "
                "`num_micro_batches=1`."
            )
        if reduction != "sum":
            self.accumulators[var] = Accumulator(micro, var, reduction)
            return
        narrow = is_inexact(var) and aval.dtype.itemsize < _SUM_BYTES
        dtype = np.dtype("float32") if narrow else aval.dtype
        total = fresh_var(aval.update(dtype=dtype, weak_type=False))
        self.accumulators[var] = Accumulator(micro, total, reduction)

        def finished(x: Any) -> Any:
            (x,) = gradient_p.bind(x, call=0)  # where the planner may put the sum over devices, once for all parts
            return x / jnp.asarray(n, dtype) if n > 1 else x

        eqns, (out,) = self.maker.compute(("finished", n, dtype), finished, total)
        if isinstance(form, Partial) and form.scale is not None:
            more, (out,) = self._scaled(out, form.scale)
            eqns = [*eqns, *more]
        if dtype != aval.dtype:
            more, (out,) = self.maker.compute(("narrow", aval.dtype), lambda x: x.astype(aval.dtype), out)
            eqns = [*eqns, *more]
        self._add_between(var, eqns, out)

    def _take_any(self, var: Var, micro: Var) -> None:
        """A value that all micro-batches compute alike is the largest of theirs; that of keys, of their data."""
        dtype = _array(var).dtype
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            self.accumulators[var] = Accumulator(micro, var, "or" if dtype == np.bool_ else "max")
            return
        form = self.forms.form(var)
        assert isinstance(form, Same)
        impls = []

        def to_data(keys: Any) -> Any:
            impls.append(jax.random.key_impl(keys))
            return jax.random.key_data(keys)

        eqns, (data,) = equations_for(to_data, micro)
        source, segment = self.sources[self.producer[var]], 2 * form.loop - 1
        self.ops[segment].extend(Op(eqn, segment, source) for eqn in eqns)
        total = fresh_var(data.aval)
        self.accumulators[var] = Accumulator(data, total, "max")
        eqns, (out,) = equations_for(lambda x: jax.random.wrap_key_data(x, impl=impls[0]), total)
        self._add_between(var, eqns, out)

    def _name(self, var: Var) -> str:
        paths = zip(self.step.flat.outvars, self.step.out_paths, strict=True)
        return next((f"`{path}`" for atom, path in paths if atom is var), "A value of the update")

    def _line(self, var: Var) -> str:
        return source_line(self.eqns[self.producer[var]])

    # ---- values in a loop -----------------------------------------------------------------------------------------

    @property
    def _loop(self) -> _Loop:
        return self.in_loop[(self.segment + 1) // 2]

    def _add(self, eqn: JaxprEqn) -> list[Var]:
        self.ops[self.segment].append(Op(eqn, self.segment, self.source))
        return list(eqn.outvars)

    def _compute(self, key: Hashable, fun: Callable[..., Any], *operands: Atom) -> Atom:
        """The result of `fun` in the loop; functions of one `key` do the same."""
        eqns, (out,) = self.maker.compute(key, fun, *operands)
        for eqn in eqns:
            self._add(eqn)
        return out

    def _of_micro_batch(self, atom: Atom) -> Atom:
        """The rows of a value that has examples, or what else each micro-batch has of it, in this loop."""
        if atom in self.micro:
            return self.micro[atom]
        form = self.forms.form(atom)
        assert not isinstance(form, Once)
        if atom not in self._loop.values:
            return self.in_loop[form.loop].values[atom]
        return self._loop.values[atom]

    def _rows_of(self, atom: Var) -> Atom:
        """Rows of a value, multiplied by what they waited for."""
        form, rows = self.forms.form(atom), self._of_micro_batch(atom)
        assert isinstance(form, Rows)
        if form.scale is None:
            return rows
        if atom not in self._loop.scaled:
            eqns, (self._loop.scaled[atom],) = self._scaled(rows, form.scale)
            for eqn in eqns:
                self._add(eqn)
            self.batch_dims[self._loop.scaled[atom]] = form.dim
        return self._loop.scaled[atom]

    def _value(self, atom: Atom, *, own: bool = False) -> Atom:
        """The value of an atom in the loop: one that is known once, or a micro-batch's own aggregate."""
        if is_literal(atom):
            return atom
        form = self.forms.form(atom)
        if isinstance(form, Own) or (isinstance(form, Same) and self._is_here(form)):
            return self._of_micro_batch(atom)
        if isinstance(form, Partial) and own and atom not in self.early:
            return self._own(atom, form)
        if not isinstance(form, Once):
            self._whole(atom)
            return atom
        i = self.producer.get(atom)
        if i is None or atom in self.early or self.segments.places[i] is not None:
            return atom
        self._copy_known(atom)
        return self._loop.values[atom]

    def _is_here(self, form: Same) -> bool:
        return 2 * form.loop - 1 == self.segment

    def _copy_known(self, atom: Var) -> None:
        """Emit copies of the equations that compute a value which does not depend on the examples of this loop."""
        wanted, stack = set[int](), [atom]
        while stack:
            v = stack.pop()
            i = self.producer.get(v, -1)
            if i < 0 or i in wanted or self.segments.places[i] is not None or v in self.early:
                continue
            if self.eqns[i].outvars[0] in self._loop.values:
                continue
            wanted.add(i)
            stack.extend(operand_vars(self.eqns[i]))
        for i in sorted(wanted):
            copy = self.maker.rebuild(self.eqns[i], [self._value_or_copy(v) for v in self.eqns[i].invars])
            self._loop.values.update(zip(self.eqns[i].outvars, self._add(copy), strict=True))

    def _value_or_copy(self, atom: Atom) -> Atom:
        return self._loop.values[atom] if not is_literal(atom) and atom in self._loop.values else self._value(atom)

    def _own(self, var: Var, form: Partial) -> Atom:
        """The micro-batch's own value of a partial sum: its mean, where the sum was divided by its terms."""
        assert form.scale is None, f"{self._line(var)}: nothing waits for a scalar where a micro-batch has its own"
        if form.rescale is None:
            return self._of_micro_batch(var)
        if var not in self._loop.own:
            self._loop.own[var] = self._times(self._of_micro_batch(var), form.rescale)
        return self._loop.own[var]

    def _times(self, x: Atom, factor: float) -> Atom:
        return self._compute(("times", factor), lambda x: x * jnp.asarray(factor, x.dtype), x)

    def _rows(self, var: Atom, dim: int, *, own: bool) -> Atom:
        """The micro-batch's part, along `dim`, of a full-shape value that does not have examples of its own."""
        key = var, dim, own
        if key not in self._loop.slices:
            self._loop.slices[key] = self._local_copy(var, dim, own) or self._cut(var, dim, own)
        return self._loop.slices[key]

    def _local_copy(self, var: Var, dim: int, own: bool) -> Atom | None:
        """Recompute `var` on the rows of the micro-batch alone, where its equation allows that."""
        form = self.forms.form(var)
        if var not in self.producer or not self._may_copy(var, own):
            return None
        eqn = self.eqns[self.producer[var]]
        factors, r = factors_of(eqn), eqn.outvars.index(var)
        factor = next((f for f in factors.results[r][dim] if factors.sizes[f] > 1), None)
        if factor is None or factor in factors.reductions or not factors.may_split(factor, self.n):
            return None

        own = own or isinstance(form, Own)
        args = []
        for k, atom in enumerate(eqn.invars):
            d = dim_of(factors.operands[k], (factor,))
            args.append(self._value(atom, own=own) if d is None else self._rows(atom, d, own=own))
        copy = self.maker.rebuild(eqn, args, localize(eqn, factors, {factor: self.n}))
        out = self._add(copy)[r]

        operands = [self.forms.form(v) for v in eqn.invars]
        were_scaled = any(isinstance(operand, Partial) and operand.rescale is not None for operand in operands)
        if isinstance(form, Partial) and form.rescale is not None and not were_scaled:
            return self._times(out, form.rescale * self.segments.shares.get(var, 1.0))
        return out

    def _may_copy(self, var: Var, own: bool) -> bool:
        """Whether a micro-batch may compute `var` for itself: it is cheap or its own, and is not of examples."""
        i, form = self.producer[var], self.forms.form(var)
        if var in self.early or any(isinstance(self.forms.form(v), Rows) for v in self.eqns[i].invars):
            return False
        is_free = isinstance(form, Once) and self.segments.places[i] is None
        return is_free or isinstance(form, Own | Same) or (own and isinstance(form, Partial))

    def _cut(self, var: Var, dim: int, own: bool) -> Atom:
        cut = self._cutter(shape_of(var)[dim], dim)
        return self._compute(("cut", dim), cut, self._value(var, own=own), self._index())

    def _cutter(self, length: int, dim: int) -> Callable[[Any, Any], Any]:
        size = length // self.n
        return lambda x, m: jax.lax.dynamic_slice_in_dim(x, m * size, size, dim)

    def _index(self) -> Var:
        if self.micro_index is None:
            self.micro_index = fresh_var(jax.core.ShapedArray((), np.dtype("int32")))
        return self.micro_index

    # ---- equations of a loop --------------------------------------------------------------------------------------

    def _emit(self, i: int, eqn: JaxprEqn) -> None:
        forms = [self.forms.form(v) for v in eqn.invars]
        if not eqn.outvars:  # a callback sees each micro-batch
            self._add(eqn.replace(invars=[self._seen(v) for v in eqn.invars]))
        elif eqn.primitive.name == "optimization_barrier":
            self._emit_barrier(eqn)
        elif eqn.primitive.name == "minialpa_per_micro_batch" and isinstance(self.forms.form(eqn.outvars[0]), Own):
            self._emit_own(eqn)
        elif any(isinstance(form, Rows) for form in forms):
            self._emit_on_examples(i, eqn)
        else:
            self._emit_on_totals(i, eqn)

    def _seen(self, atom: Atom) -> Atom:
        return self._rows_of(atom) if isinstance(self.forms.form(atom), Rows) else self._value(atom)

    def _emit_barrier(self, eqn: JaxprEqn) -> None:
        args = [self._of_micro_batch(v) for v in eqn.invars]
        for old, var, new in zip(args, eqn.outvars, self._add(self.maker.rebuild(eqn, args)), strict=True):
            self._loop.values[var] = new
            if old in self.batch_dims:
                self.batch_dims[new] = self.batch_dims[old]

    def _emit_own(self, eqn: JaxprEqn) -> None:
        """`per_micro_batch`: a mean is of fewer examples, and what comes back to it is weighted as it was.

        The result leaves the step as an average, so a cotangent that is each micro-batch's own counts one n-th; one
        that is a sum over examples counts whole.
        """
        (v,) = eqn.invars
        form, rescale = self.forms.form(v), self.segments.asked_for[eqn.params["number"]]
        if not eqn.params["cotangent_of"]:
            new = self._value(v, own=True)
        elif isinstance(form, Partial):
            new = self._times(self._of_micro_batch(v), rescale)
        else:
            new = self._times(self._value(v), rescale / self.n)
        self._loop.values[eqn.outvars[0]] = new

    def _emit_on_examples(self, i: int, eqn: JaxprEqn) -> None:
        factors = factors_of(eqn)
        dims: Kinds = {}
        for v in eqn.invars:
            form = self.forms.form(v)
            if isinstance(form, Rows) and not is_literal(v):
                dims[v] = form.dim
        split = batch_factors(eqn, factors, dims, self.n)
        result = self.forms.form(eqn.outvars[0])
        scale = result.scale if isinstance(result, Rows | Partial) else None
        args = [self._operand(i, k, atom, factors, split, scale) for k, atom in enumerate(eqn.invars)]
        copy = self.maker.rebuild(eqn, args, localize(eqn, factors, dict.fromkeys(split, self.n)))
        for r, (var, new) in enumerate(zip(eqn.outvars, self._add(copy), strict=True)):
            self._loop.values[var] = new
            d = dim_of(factors.results[r], split)
            if d is not None:
                self.batch_dims[new] = d

    def _operand(self, i: int, k: int, atom: Atom, factors: Factors, split: Sequence[int], scale: Scale | None) -> Atom:
        """What operand `k` of an equation on examples is in this loop; `scale`: what the results wait for."""
        form, d = self.forms.form(atom), dim_of(factors.operands[k], split)
        if isinstance(form, Rows):
            waits = scale is not None and form.scale == scale
            return self._of_micro_batch(atom) if waits else self._rows_of(atom)
        if self._may_wait(atom, scale):
            return self._before_scaling(atom, d)
        if d is not None:
            return self._rows(atom, d, own=i in self.segments.own)
        if any(factors.takes_part_once(f, k) for f in split):
            return self._only_once(i, k, atom)
        return self._value(atom, own=i in self.segments.own)

    def _may_wait(self, atom: Atom, scale: Scale | None) -> bool:
        """Whether a value that is known once is read without the scalar that its reader is multiplied by in the end."""
        if scale is None or is_literal(atom):
            return False
        form = self.forms.form(atom)
        is_scaled = isinstance(form, Once) and (form.scale == scale or form.uniform is scale.scalar)
        return is_scaled or atom is scale.scalar

    def _before_scaling(self, atom: Atom, dim: int | None) -> Atom:
        """A value that is known once but for a scalar, without it; the rows of the micro-batch along `dim`."""
        form = self.forms.form(atom)
        shape = list(shape_of(atom))
        if not isinstance(form, Once) or form.scale is None:
            if dim is not None:
                shape[dim] //= self.n
            dtype = _array(atom).dtype
            return self._compute(("ones", tuple(shape), dtype), lambda: jnp.ones(shape, dtype))
        eqn = self.eqns[self.producer[atom]]
        factors, r = factors_of(eqn), eqn.outvars.index(atom)
        split = [] if dim is None else [f for f in factors.results[r][dim] if factors.sizes[f] > 1][:1]
        if any(f in factors.reductions or not factors.may_split(f, self.n) for f in split):
            whole = self._before_scaling(atom, None)
            return self._compute(("cut", dim), self._cutter(shape[dim or 0], dim or 0), whole, self._index())
        args = []
        for k, v in enumerate(eqn.invars):
            d = dim_of(factors.operands[k], split)
            if self._may_wait(v, form.scale):
                args.append(self._before_scaling(v, d))
            else:
                args.append(self._value(v) if d is None else self._rows(v, d, own=False))
        return self._add(self.maker.rebuild(eqn, args, localize(eqn, factors, dict.fromkeys(split, self.n))))[r]

    def _only_once(self, i: int, k: int, atom: Atom) -> Atom:
        """An operand that must count once over all micro-batches: itself in the first one, zero in the others.

        An own value counts as its average, a part in each micro-batch.
        """
        form = self.forms.form(atom)
        if isinstance(form, Partial) and form.reduction == "sum" and form.scale is None and self._partial_in_loop(i, k):
            return self._of_micro_batch(atom)
        if isinstance(form, Own):
            return self._compute("share", self._share, self._value(atom))
        if self.forms.is_zero(atom):
            return self._value(atom)

        def first(x: Any, m: Any) -> Any:
            return jnp.where(m == 0, x, jnp.zeros_like(x))

        return self._compute("first", first, self._value(atom), self._index())

    def _share(self, x: Any) -> Any:
        return x / jnp.asarray(self.n, x.dtype)

    def _emit_on_totals(self, i: int, eqn: JaxprEqn) -> None:
        form, own = self.forms.form(eqn.outvars[0]), i in self.segments.own
        if isinstance(form, Partial):
            factors = factors_of(eqn)
            kept = self.forms.kept_partial(eqn, factors, own)
            atoms = enumerate(eqn.invars)
            args = [self._of_micro_batch(v) if k in kept else self._as_partial(v, factors, k) for k, v in atoms]
        else:
            args = [self._value(v, own=own) for v in eqn.invars]
        for var, new in zip(eqn.outvars, self._add(self.maker.rebuild(eqn, args)), strict=True):
            share = self.segments.shares.get(var)
            self._loop.values[var] = new if share is None else self._times(new, share)

    def _as_partial(self, atom: Atom, factors: Factors, k: int) -> Atom:
        """An operand beside partial ones: added, an own value counts one n-th; as a factor, it counts whole."""
        value = self._value(atom, own=True)
        if isinstance(self.forms.form(atom), Own) and factors.linear == "joint" and k in factors.linear_operands:
            return self._compute("share", self._share, value)
        return value


def _compared(segments: Segments) -> set[Var]:
    """Rows of which there is a largest or smallest one among the examples: its derivative looks for it again."""
    out: set[Var] = set()
    for eqn, place in zip(segments.eqns, segments.places, strict=True):
        forms = [segments.forms.form(v) for v in eqn.outvars] if place is not None else []
        if any(isinstance(form, Partial) and form.reduction in ("max", "min") for form in forms):
            out.update(v for v in operand_vars(eqn) if isinstance(segments.forms.form(v), Rows))
    return out


class _Loop:
    """Variables of one loop: the micro-batch's value of each full-batch variable, its own value, its rows."""

    def __init__(self) -> None:
        self.values: dict[Var, Atom] = {}
        self.scaled: dict[Var, Atom] = {}
        self.own: dict[Var, Atom] = {}
        self.slices: dict[tuple[Atom, int, bool], Atom] = {}


def _array(var: Atom) -> Any:
    """The aval of an array, which has a dtype."""
    return var.aval
