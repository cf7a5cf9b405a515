"""Programs: the errors of the verifier, and the guarantees of emission."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from minialpa import AutoLayerOption, ClusterSpec, models
from minialpa.errors import VerifyError
from minialpa.inter.lower.emit import emit_program
from minialpa.inter.pipeline import plan_step
from minialpa.options import PlanOptions
from minialpa.programs.program import (
    BlockRows,
    Free,
    Instruction,
    LeafBlocks,
    Program,
    Run,
    Transfer,
    numbered_leaves,
    verify_program,
)
from minialpa.tracing.gradients import value_and_grad
from tests.helpers import trace


@pytest.fixture(scope="module")
def program() -> Program:
    case = models.build("mlp", n_layers=4)
    state, batch = case.init(jax.random.key(0)), case.make_batch(0, case.batch_size)
    traced = trace(case.train_step(value_and_grad), state, batch, donate=(0,))
    options = PlanOptions(n_micro_batches=4, layers=AutoLayerOption(layer_num=2))
    return emit_program(traced, plan_step(traced, ClusterSpec.preset("cpu"), options))


def with_instructions(program: Program, instructions: list[Any]) -> Program:
    return dataclasses.replace(program, instructions=tuple(instructions))


def first(program: Program, kind: type[Instruction]) -> int:
    return next(i for i, x in enumerate(program.instructions) if isinstance(x, kind))


def test_emitted_programs_pass_the_verifier(program: Program) -> None:
    verify_program(program)
    assert {type(x).__name__ for x in program.instructions} == {"Run", "Accumulate", "Transfer", "Free"}


def test_reading_an_empty_buffer_is_refused(program: Program) -> None:
    broken = [x for x in program.instructions if not isinstance(x, Transfer)]
    with pytest.raises(VerifyError, match="which are empty"):
        verify_program(with_instructions(program, broken))


def test_freeing_twice_is_refused(program: Program) -> None:
    at = first(program, Free)
    free = program.instructions[at]
    assert isinstance(free, Free)
    twice = Free((*free.buffers, *free.buffers))
    for again in ([free, free], [twice]):
        broken = [*program.instructions[:at], *again, *program.instructions[at + 1 :]]
        with pytest.raises(VerifyError, match="frees the buffers"):
            verify_program(with_instructions(program, broken))


def test_a_lost_result_is_refused(program: Program) -> None:
    lost = Free((program.outputs[0].buffers[0],))
    with pytest.raises(VerifyError, match="ends with the empty result buffers"):
        verify_program(with_instructions(program, [*program.instructions, lost]))


def test_a_wrong_number_of_buffers_is_refused(program: Program) -> None:
    at = first(program, Run)
    run = program.instructions[at]
    assert isinstance(run, Run)
    less = dataclasses.replace(run, inputs=run.inputs[1:])
    broken = [*program.instructions[:at], less, *program.instructions[at + 1 :]]
    with pytest.raises(VerifyError, match=r"calls `\w+` with \d operands and \d results in place of.*bug in minialpa"):
        verify_program(with_instructions(program, broken))


def test_a_donated_buffer_that_lives_on_is_refused(program: Program) -> None:
    at = next(
        i for i, x in enumerate(program.instructions) if isinstance(x, Run) and program.functions[x.function].donated
    )
    broken = [*program.instructions[: at + 1], *program.instructions[at + 2 :]]
    with pytest.raises(VerifyError, match="donates the buffers"):
        verify_program(with_instructions(program, broken))


def test_state_buffers_are_reused_by_the_update(program: Program) -> None:
    updates = [f for f in program.functions if f.name.startswith("update")]
    assert (
        sum(len(f.donated) for f in updates) >= len(program.donated_leaves) - 2
    )  # step counts are scalars of two meshes


def test_only_results_and_constants_outlive_a_step(program: Program) -> None:
    live = {slot.buffer for slot in program.inputs}
    for instruction in program.instructions:
        match instruction:
            case Free(buffers):
                live -= set(buffers)
            case Run(_, _, outputs):
                live |= set(outputs)
            case Transfer(_, target):
                live.add(target)
    assert live <= {b for slot in program.outputs for b in slot.buffers} | {s.buffer for s in program.constants}


# ---- leaf blocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows", [(), ((0, 2), (3, 5)), ((1, 2), (2, 4)), ((0, 2),), ((0, 1), (0, 2)), ((0, 2), (2, 2))]
)
def test_blocks_are_the_rows_of_a_leaf_in_order(rows: BlockRows) -> None:
    with pytest.raises(VerifyError, match=r"Argument leaf 1 is cut into the rows .* not all its rows in order"):
        LeafBlocks(arguments=(None, rows))
    with pytest.raises(VerifyError, match="Result leaf 0"):
        LeafBlocks(results=(rows,))


def test_each_block_has_a_number() -> None:
    assert list(numbered_leaves("abc", (None, ((0, 2), (2, 5)), None))) == [
        ("a", None), ("b", (0, 2)), ("b", (2, 5)), ("c", None)
    ]  # fmt: skip
    assert list(numbered_leaves("ab", ())) == [("a", None), ("b", None)]
