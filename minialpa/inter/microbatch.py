"""Micro-batches: a traced full-batch step in, the same step as a loop over micro-batches out.

The full-batch program is rewritten, not traced again, so every constant in it keeps its full-batch value: a mean over
64 examples still divides by 64, and the parts that the micro-batches compute simply add up. What is once per step and
what is once per micro-batch follows from how values depend on the examples (`batching`):

  * a value with a batch dimension is computed on the micro-batch's rows;
  * a reduction over examples leaves a *partial* result, to be summed (or maximised, ...) over micro-batches; partial
    results pass through linear equations;
  * what needs the total of a partial result, and is not needed by the micro-batches themselves, waits for the update;
  * a total that the micro-batches do need (batch statistics) is replaced by the micro-batch's own, *private* value,
    and private float results are averaged. A sum divided by its number of terms is then divided by that number in the
    micro-batch. If it only depends on the batch and not on parameters, it is computed beforehand, exactly;
  * values that do not depend on the examples but have their shape (dropout masks, position numbers) are computed whole
    and cut, so that each example meets the values of the full-batch run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.errors import TraceError
from minialpa.gradients import gradient_p
from minialpa.inter.batching import AGGREGATE, batch_factors, batch_kinds, part_barriers
from minialpa.inter.partials import PRIVATE, Form, Forms, Partial
from minialpa.inter.split_step import Accumulator, Op, Phase, SplitStep, Stack
from minialpa.inter.totals import find_totals
from minialpa.inter.whole_batch import whole_batch
from minialpa.intra.factors import Factors, factors_of, localize
from minialpa.jaxprs import (
    Atom,
    EquationMaker,
    dtype_name,
    equations_for,
    fresh_var,
    is_inexact,
    is_literal,
    live_equations,
    shape_of,
    source_line,
)
from minialpa.trace import TracedStep


def split_micro_batches(step: TracedStep, n: int, chunk_of: Sequence[int | None] | None = None) -> SplitStep:
    """Split `step` into `n` micro-batches. `chunk_of[i]` is the chunk of traced equation `i`, if it is known.

    Partial results of different chunks are not added in the loop but after it.
    Raises TraceError if the examples cannot be split, or a result has no clear meaning over micro-batches.
    """
    if n == 1:
        return whole_batch(step)
    if step.batch_size is None:
        raise TraceError(f"`num_micro_batches={n}` needs an argument with examples; none is listed in `batch_argnums`.")
    if step.batch_size % n:
        raise TraceError(
            f"A batch of {step.batch_size} examples cannot be split into {n} equal micro-batches. "
            f"Choose `num_micro_batches` among its divisors: {', '.join(map(str, _divisors(step.batch_size)))}."
        )
    return _Splitter(step, n, chunk_of).run()


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


class _Splitter:
    def __init__(self, step: TracedStep, n: int, chunk_of: Sequence[int | None] | None) -> None:
        self.step, self.n, self.maker = step, n, EquationMaker()
        kinds = batch_kinds(step, n)
        # The equations to split, and the number of the traced equation that each one comes from.
        self.sources, self.eqns = zip(*part_barriers(step.flat.eqns, kinds), strict=True)
        self.forms = Forms(self.eqns, self.sources, n, step.batch_size, chunk_of)
        self.producer = self.forms.producer
        totals = find_totals(step, self.eqns, kinds)
        self.kinds, self.needed, self.before = totals.kinds, totals.needed, totals.before
        self.ops: list[Op] = []
        self.loop: dict[Var, Atom] = {}  # full-batch variable -> its value in the loop
        self.same: set[Var] = set()  # results next to those of examples that are the same in each micro-batch
        self.private: dict[Var, Atom] = {}
        self.slices: dict[tuple[Var, int], Atom] = {}
        self.batch_dims: dict[Var, int] = {}
        self.micro_index: Var | None = None
        self.accumulators: dict[Var, Accumulator] = {}
        self.averages: list[Op] = []
        self.current = -1

    def run(self) -> SplitStep:
        micro_inputs = self._split_inputs()
        for i, eqn in enumerate(self.eqns):
            if i in self.before:
                self.ops.append(Op(eqn, Phase.PROLOGUE, self.sources[i]))
        for i, eqn in enumerate(self.eqns):
            self.current = self.sources[i]
            reads_batch = any(v in self.kinds for v in eqn.invars if not is_literal(v))
            if reads_batch and (not eqn.outvars or any(v in self.kinds for v in eqn.outvars)):
                self._emit(i, eqn)
        stacks = self._stacked_outputs()
        self._emit_update()
        used = {v for op in self.ops if op.phase is Phase.LOOP for v in op.eqn.invars if not is_literal(v)}
        micro_inputs = [(full, micro) for full, micro in micro_inputs if micro in used]
        wanted = [*(a.loop for a in self.accumulators.values()), *(s.loop for s in stacks)]
        return SplitStep(
            self.step, self.n, tuple(self._live(wanted)), tuple(micro_inputs), self.micro_index,
            tuple(self.accumulators.values()), tuple(stacks), self.step.flat.outvars, self.batch_dims,
        )  # fmt: skip

    # ---- values in the loop ---------------------------------------------------------------------------------------

    def _split_inputs(self) -> list[tuple[Var, Var]]:
        pairs = []
        for var, dim in zip(self.step.flat.invars, self.step.batch_dims, strict=True):
            if dim is not None:
                shape = list(shape_of(var))
                shape[dim] //= self.n
                micro = fresh_var(var.aval.update(shape=tuple(shape)))
                self.loop[var] = micro
                self.batch_dims[micro] = self.batch_dims[var] = dim
                pairs.append((var, micro))
        return pairs

    def _add(self, eqn: JaxprEqn) -> list[Var]:
        self.ops.append(Op(eqn, Phase.LOOP, self.current))
        return list(eqn.outvars)

    def _compute(self, key: Hashable, fun: Callable[..., Any], *operands: Atom) -> Atom:
        """The result of `fun` in the loop; functions of one `key` do the same."""
        eqns, (out,) = self.maker.compute(key, fun, *operands)
        for eqn in eqns:
            self._add(eqn)
        return out

    def _value(self, atom: Atom) -> Atom:
        """The whole value of an atom in the loop: a constant of the loop, or a micro-batch's private aggregate."""
        if is_literal(atom):
            return atom
        if atom in self.kinds:
            return self._private(atom)
        if atom not in self.loop and atom in self.producer and self.producer[atom] not in self.before:
            self._copy_invariants(atom)
        return self.loop.get(atom, atom)

    def _copy_invariants(self, atom: Var) -> None:
        """Emit copies of the equations that compute a value which does not depend on the examples."""
        wanted, stack = set[int](), [atom]
        while stack:
            i = self.producer.get(stack.pop(), -1)
            if i < 0 or i in wanted or i in self.before or self.eqns[i].outvars[0] in self.loop:
                continue
            wanted.add(i)
            stack.extend(v for v in self.eqns[i].invars if not is_literal(v))
        for i in sorted(wanted):
            eqn = self.eqns[i]
            copy = self.maker.rebuild(eqn, [v if is_literal(v) else self.loop.get(v, v) for v in eqn.invars])
            self.loop.update(zip(eqn.outvars, self._add(copy), strict=True))

    def _private(self, var: Var) -> Atom:
        form = self.forms.of[var]
        if form == PRIVATE or not isinstance(form, Partial) or form.rescale is None:
            return self.loop[var]
        if var not in self.private:
            scale = form.rescale
            self.private[var] = self._compute(
                ("scale", scale), lambda x: x * jnp.asarray(scale, x.dtype), self.loop[var]
            )
        return self.private[var]

    def _rows(self, var: Atom, dim: int) -> Atom:
        """The micro-batch's part, along `dim`, of a full-shape value that does not have examples of its own."""
        if (var, dim) not in self.slices:
            self.slices[var, dim] = self._local_copy(var, dim) or self._cut(var, dim)
        return self.slices[var, dim]

    def _local_copy(self, var: Var, dim: int) -> Atom | None:
        """Recompute `var` on the rows of the micro-batch alone, where its equation allows that."""
        i = self.producer.get(var)
        if i is None or i in self.before:
            return None
        eqn = self.eqns[i]
        if any(isinstance(self.kinds.get(v), int) for v in eqn.invars if not is_literal(v)):
            return None
        factors = factors_of(eqn)
        r = eqn.outvars.index(var)
        factor = next((f for f in factors.results[r][dim] if factors.sizes[f] > 1), None)
        if factor is None or factor in factors.reductions or not factors.may_split(factor, self.n):
            return None
        args = []
        for k, atom in enumerate(eqn.invars):
            d = _dim_of(factors.operands[k], (factor,))
            args.append(self._value(atom) if d is None else self._rows(atom, d))
        copy = self.maker.rebuild(eqn, args, localize(eqn, factors, {factor: self.n}))
        return self._add(copy)[r]

    def _cut(self, var: Var, dim: int) -> Atom:
        if self.micro_index is None:
            self.micro_index = fresh_var(jax.core.ShapedArray((), np.dtype("int32")))
        size = shape_of(var)[dim] // self.n

        def cut(x: Any, m: Any) -> Any:
            return jax.lax.dynamic_slice_in_dim(x, m * size, size, dim)

        return self._compute(("cut", dim), cut, self._value(var), self.micro_index)

    # ---- equations of the loop ------------------------------------------------------------------------------------

    def _emit(self, i: int, eqn: JaxprEqn) -> None:
        mine = [self.kinds.get(v) for v in eqn.invars if not is_literal(v)]
        if not eqn.outvars:  # a callback sees each micro-batch
            args = [self.loop[v] if v in self.loop else self._value(v) for v in eqn.invars if not is_literal(v)]
            values = iter(args)
            self._add(eqn.replace(invars=[v if is_literal(v) else next(values) for v in eqn.invars]))
        elif any(isinstance(kind, int) for kind in mine):
            self._emit_on_examples(eqn)
        else:
            self._emit_aggregate(i, eqn)

    def _emit_on_examples(self, eqn: JaxprEqn) -> None:
        factors = factors_of(eqn)
        split = batch_factors(eqn, factors, self.kinds, self.n)
        args = []
        for k, atom in enumerate(eqn.invars):
            d = _dim_of(factors.operands[k], split)
            if not is_literal(atom) and isinstance(self.kinds.get(atom), int):
                args.append(self.loop[atom])
            elif d is not None:
                args.append(self._rows(atom, d))
            elif any(factors.takes_part_once(f, k) for f in split):
                args.append(self._only_once(atom))
            else:
                args.append(self._value(atom))
        copy = self.maker.rebuild(eqn, args, localize(eqn, factors, dict.fromkeys(split, self.n)))
        for r, (var, new) in enumerate(zip(eqn.outvars, self._add(copy), strict=True)):
            self.loop[var] = new
            d = _dim_of(factors.results[r], split)
            partial = next((f for f in split if factors.is_partial(f, r)), None)
            if d is not None:
                self.batch_dims[new] = d
            elif partial is not None:
                # Inside a loop the number of terms is not that of the factors alone.
                count = 0 if _is_control(eqn) else int(np.prod([factors.sizes[f] for f in factors.reductions]))
                self.forms.of[var] = Partial(factors.reductions[partial], count)
            elif var in self.kinds:
                self.forms.of[var] = PRIVATE
            else:
                self.same.add(var)

    def _only_once(self, atom: Atom) -> Atom:
        """An operand that must count once over all micro-batches: itself in the first one, zero in the others.

        A private value counts as its average, a part in each micro-batch.
        """
        form = None if is_literal(atom) else self.forms.of.get(atom)
        if isinstance(form, Partial) and form.reduction == "sum":
            return self.loop[atom]
        if form is not None:
            return self._compute("share", self._share, self._value(atom))
        if self.forms.is_zero(atom):
            return self._value(atom)
        if self.micro_index is None:
            self.micro_index = fresh_var(jax.core.ShapedArray((), np.dtype("int32")))

        def first(x: Any, m: Any) -> Any:
            return jnp.where(m == 0, x, jnp.zeros_like(x))

        return self._compute("first", first, self._value(atom), self.micro_index)

    def _share(self, x: Any) -> Any:
        return x / jnp.asarray(self.n, x.dtype)

    def _emit_aggregate(self, i: int, eqn: JaxprEqn) -> None:
        needed = any(v in self.needed for v in eqn.outvars)
        operands = [v for v in eqn.invars if not is_literal(v) and self.kinds.get(v) == AGGREGATE]
        if any(v not in self.forms.of for v in operands):
            return  # an operand is only known after the loop
        factors = factors_of(eqn)
        partial = self.forms.stays_partial(i, eqn, factors, needed)
        if partial is not None:
            kept = self.forms.kept_partial(eqn, factors, needed)
            atoms = enumerate(eqn.invars)
            args = [self.loop[kept[k]] if k in kept else self._as_partial(v, factors, k) for k, v in atoms]
            form: Form = partial
        elif needed or all(self.forms.of[v] == PRIVATE for v in operands):
            args = [self._value(v) for v in eqn.invars]
            form = PRIVATE
        else:
            return  # the update computes it from totals
        for var, new in zip(eqn.outvars, self._add(self.maker.rebuild(eqn, args)), strict=True):
            self.loop[var], self.forms.of[var] = self._evened(new, form)

    def _evened(self, var: Var, form: Form) -> tuple[Atom, Form]:
        """Scale an unbiased variance such that n parts add up to the mean of the micro-batches' own ones."""
        if not isinstance(form, Partial) or form.rescale in (None, self.n):
            return var, form
        share = form.rescale / self.n
        scaled = self._compute(("scale", share), lambda x: x * jnp.asarray(share, x.dtype), var)
        return scaled, replace(form, rescale=float(self.n))

    def _as_partial(self, atom: Atom, factors: Factors, k: int) -> Atom:
        """An operand beside partial ones: added, a private value counts one n-th; as a factor, it counts whole."""
        value = self._value(atom)
        if not self.forms.is_private(atom):
            return value
        if factors.linear == "joint" and k in factors.linear_operands:
            return self._compute("share", self._share, value)
        return value

    # ---- results and the update -----------------------------------------------------------------------------------

    def _stacked_outputs(self) -> list[Stack]:
        stacks: dict[Var, Stack] = {}
        for atom in self.step.flat.outvars:
            if is_literal(atom) or atom in self.step.flat.invars or not isinstance(self.kinds.get(atom), int):
                continue
            micro = self.loop[atom]
            stacks[atom] = Stack(micro, atom, self.batch_dims[micro])
        return list(stacks.values())

    def _line(self, var: Var) -> str:
        return source_line(self.eqns[self.producer[var]])

    def _emit_update(self) -> None:
        done = {v for i in self.before for v in self.eqns[i].outvars}
        eqns = [e for e in self.eqns if not any(v in self.forms.of or v in done for v in e.outvars)]
        eqns = [e for e in eqns if not any(isinstance(self.kinds.get(v), int) for v in e.outvars)]
        keep = live_equations(eqns, self.step.flat.outvars)
        position = {id(e): i for i, e in zip(self.sources, self.eqns, strict=True)}
        kept = [e for e, k in zip(eqns, keep, strict=True) if k and not (e.effects and self._ran_in_loop(e))]
        used = [v for e in kept for v in e.invars] + list(self.step.flat.outvars)
        for v in used:
            if is_literal(v) or v in self.accumulators:
                continue
            if v in self.forms.of:
                self._accumulate(v)
            elif v in self.same:
                self._take_any(v)
        self.ops.extend(self.averages)
        self.ops.extend(Op(e, Phase.UPDATE, position[id(e)]) for e in kept)

    def _ran_in_loop(self, eqn: JaxprEqn) -> bool:
        return any(v in self.kinds for v in eqn.invars if not is_literal(v))

    def _accumulate(self, var: Var) -> None:
        """Sum `var` over micro-batches, 16-bit floats in float32; private values are averaged afterwards."""
        form, loop, aval = self.forms.of[var], self.loop[var], _array(var)
        reduction = form.reduction if isinstance(form, Partial) else "sum"
        narrow = is_inexact(var) and aval.dtype.itemsize == 2 and reduction == "sum"
        n = self.n if form == PRIVATE else 1
        if form == PRIVATE and not is_inexact(var):
            paths = zip(self.step.flat.outvars, self.step.out_paths, strict=True)
            name = next((f"`{path}`" for atom, path in paths if atom is var), "A value of the update")
            raise TraceError(
                f"{name} ({dtype_name(var)}) is computed at {self._line(var)} from statistics of the whole batch, and "
                "has no clear meaning over micro-batches. Compute it from sums, or use `num_micro_batches=1`."
            )
        if reduction != "sum":
            self.accumulators[var] = Accumulator(loop, var, reduction)
            return
        dtype = np.dtype("float32") if narrow else aval.dtype
        total = fresh_var(aval.update(dtype=dtype, weak_type=False))
        self.accumulators[var] = Accumulator(loop, total, reduction)

        def finished(x: Any) -> Any:
            (x,) = gradient_p.bind(x, call=0)  # where the planner may put the sum over devices, once for all parts
            return (x / jnp.asarray(n, dtype) if n > 1 else x).astype(aval.dtype)

        eqns, (out,) = self.maker.compute(("finished", n, aval.dtype), finished, total)
        self._add_after(var, eqns, out)

    def _take_any(self, var: Var) -> None:
        """A value that all micro-batches compute alike is the largest of theirs; that of keys, of their data."""
        dtype = _array(var).dtype
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            self.accumulators[var] = Accumulator(self.loop[var], var, "or" if dtype == np.bool_ else "max")
            return
        self.current = self.sources[self.producer[var]]
        impls = []

        def to_data(keys: Any) -> Any:
            impls.append(jax.random.key_impl(keys))
            return jax.random.key_data(keys)

        eqns, (data,) = equations_for(to_data, self.loop[var])
        for eqn in eqns:
            self._add(eqn)
        total = fresh_var(data.aval)
        self.accumulators[var] = Accumulator(data, total, "max")
        eqns, (out,) = equations_for(lambda x: jax.random.wrap_key_data(x, impl=impls[0]), total)
        self._add_after(var, eqns, out)

    def _add_after(self, var: Var, eqns: Sequence[JaxprEqn], out: Atom) -> None:
        """Equations that make `var`, under the name `out`, from a total."""
        renamed = [e.replace(outvars=[var if v is out else v for v in e.outvars]) for e in eqns]
        self.averages.extend(Op(e, Phase.UPDATE, self.sources[self.producer[var]]) for e in renamed)

    def _live(self, wanted: Sequence[Var]) -> list[Op]:
        keep = live_equations([op.eqn for op in self.ops], [*wanted, *self.step.flat.outvars])
        return [op for op, k in zip(self.ops, keep, strict=True) if k]


def _dim_of(dims: Sequence[tuple[int, ...]], factors: Sequence[int]) -> int | None:
    """The dimension that has one of `factors`."""
    return next((d for d, dim in enumerate(dims) if any(f in dim for f in factors)), None)


def _array(var: Var) -> Any:
    """The aval of an array, which has a dtype."""
    return var.aval


def _is_control(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("cond", "scan", "while")
