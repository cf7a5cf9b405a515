"""A split step while it is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.segments import Segments
from minialpa.inter.microbatch.split_step import Accumulator, SplitStep, Stack, operation
from minialpa.ir.equations import Atom, fresh_var, is_literal, operand_vars, shape_of
from minialpa.ir.op import Op
from minialpa.support.private_jax import changed_aval
from minialpa.tracing.new_equations import EquationMaker


class Draft:
    """A `SplitStep` under construction.

    Attributes:
        segments: the place of each equation, and the forms of values.
        maker: makes the equations of all loops.
        values: for each loop, numbered from 1, the micro-batch's variable for each variable of the full batch.
        accumulators, stacks: by the full-batch variable that they compute.
        micro_inputs: for each batch argument the variable that holds the rows of one micro-batch.
        batch_dims: for variables of the loops, and batch arguments, the dimension of the examples.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.maker = EquationMaker()
        self.values: list[dict[Var, Atom]] = [{} for _ in range(segments.n_loops + 1)]
        self.accumulators: dict[Var, Accumulator] = {}
        self.stacks: dict[Var, Stack] = {}
        self.micro_inputs: dict[Var, Var] = {}
        self.batch_dims: dict[Var, int] = {}
        self._operations: dict[int, list[Op]] = defaultdict(list)
        self._micro_index: Var | None = None
        self._split_inputs()

    def _split_inputs(self) -> None:
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
        """Append an equation to a segment."""
        self._operations[segment].append(operation(self.segments.step, eqn, segment, source))

    def micro_index(self) -> Var:
        """The int32 scalar that holds the number of the micro-batch."""
        if self._micro_index is None:
            self._micro_index = fresh_var(jax.core.ShapedArray((), np.dtype("int32")))
        return self._micro_index

    def finish(self) -> SplitStep:
        """The step, without dead equations, accumulators and stacks."""
        step = self.segments.step

        # A total needs the value of its loop, though no equation reads it.
        operations = [op for segment in sorted(self._operations) for op in self._operations[segment]]
        parts = {accumulator.total: accumulator.loop for accumulator in self.accumulators.values()}
        parts.update((stack.total, stack.loop) for stack in self.stacks.values())
        operations, needed = _live(operations, step.flat.outvars, parts)

        return SplitStep(
            traced=step,
            n_micro_batches=self.segments.n_micro_batches,
            ops=tuple(operations),
            micro_inputs=tuple((var, rows) for var, rows in self.micro_inputs.items() if rows in needed),
            micro_index=self._micro_index,
            accumulators=tuple(
                accumulator for accumulator in self.accumulators.values() if accumulator.total in needed
            ),
            stacks=tuple(stack for stack in self.stacks.values() if stack.total in needed),
            outvars=step.flat.outvars,
            batch_dims=self.batch_dims,
            own=self.segments.found,
        )


def _live(operations: Sequence[Op], results: Sequence[Atom], parts: Mapping[Var, Var]) -> tuple[list[Op], set[Var]]:
    """The operations that `results` need or that have side effects, in order, and all variables that they read.

    parts: (total -> the variable of its loop), which is needed with the total.
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
