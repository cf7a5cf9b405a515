"""The phases of a planned step as text: a traced step and its plan in, one text per phase out.

A plan has decisions and no equations, so `realise` first rewrites the step by these decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.errors import InfeasibleError
from minialpa.inter.lower.emit import emit_program
from minialpa.inter.microbatch.split_step import SplitStep, is_loop
from minialpa.inter.staging.staged_step import RealisedStep, mesh_problems, realise
from minialpa.inter.staging.verify_fit import verify_staged
from minialpa.inter.strategies_text import specs_text, strategy_lines
from minialpa.intra.graph.problem import MeshEquations
from minialpa.ir.block import Block, verify_block
from minialpa.ir.op import Op
from minialpa.ir.text import Fact, ProgramText, direction, modules, type_text, where
from minialpa.plan import Plan
from minialpa.programs.program import Accumulate, Instruction, Program, Run, Transfer
from minialpa.sharding import EquationSpecs, Spec
from minialpa.support.private_jax import jaxpr_text
from minialpa.tracing.trace import TracedStep


@dataclass(frozen=True, slots=True)
class _RealisedPlan:
    """A traced step, its plan, and the step rewritten by the plan."""

    traced: TracedStep
    plan: Plan
    realised: RealisedStep


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase.

    Attributes:
        name: as in `minialpa plan MODEL --dump`.
        adds: the facts that the phase adds.
        verify: raises VerifyError; runs before `lines`.
    """

    name: str
    adds: str
    lines: Callable[[_RealisedPlan], Iterator[str]]
    verify: Callable[[_RealisedPlan], None]


def phases(traced: TracedStep, plan: Plan) -> dict[str, str]:
    """Name -> text of each phase, in order. Raises VerifyError if the plan is for another step."""
    planned = _RealisedPlan(traced, plan, realise(traced, plan))
    return {phase.name: _phase_text(phase, planned) for phase in PHASES}


def _phase_text(phase: Phase, planned: _RealisedPlan) -> str:
    phase.verify(planned)
    return "\n".join((f"{phase.name}: {phase.adds}", "", *phase.lines(planned), ""))


def jaxpr_file(traced: TracedStep) -> dict[str, str]:
    """name -> text, whose first line describes the file."""
    flat = traced.flat
    jaxpr = jaxpr_text(flat.constvars, flat.invars, flat.eqns, flat.outvars)
    return {"jaxpr.txt": f"the traced step, for the whole batch, with lines of its source\n\n{jaxpr}"}


def planning_files(traced: TracedStep, plan: Plan) -> dict[str, str]:
    """The phases of planning a step, and its strategies: name -> text, whose first line describes the file."""
    planned = _RealisedPlan(traced, plan, realise(traced, plan))
    texts = {f"phases/{i}-{phase.name}.txt": _phase_text(phase, planned) for i, phase in enumerate(PHASES)}
    return texts | {"strategies.txt": "\n".join(_strategies_lines(planned))}


def _strategies_lines(planned: _RealisedPlan) -> Iterator[str]:
    yield "the shardings of each operation that the planner could choose from, with their seconds; * is chosen"
    yield ""
    yield "A line has the specs of results and operands, as in phases/5-shardings.txt, and the seconds of one run: the"
    yield "sum, compute, collectives that finish the results, and resharding of the operands from their specs in the"
    yield "plan. An operation that follows another one has its strategy. Operations without a choice are left out."
    staged, plan = planned.realised.staged, planned.plan
    block, text = _split_text(staged.split)
    number = {eqn: i for i, eqn in enumerate(block.eqns)}
    for k, (problem, stage) in enumerate(zip(mesh_problems(staged), plan.stages, strict=True)):
        yield ""
        yield f"stage {k}, {' x '.join(map(str, stage.logical_shape))} devices:"
        try:
            yield from strategy_lines(
                problem, stage, plan.cluster, lambda eqn: text.lines((modules,), [number[eqn]])[0]
            )
        except InfeasibleError as error:  # the plan breaks its own options, such as an edited file
            yield str(error)


# ---- before micro-batches --------------------------------------------------------------------------------------------


def _traced_lines(planned: _RealisedPlan) -> Iterator[str]:
    return _whole_batch_lines(planned.traced, (direction, modules, where))


def _layer_lines(planned: _RealisedPlan) -> Iterator[str]:
    return _whole_batch_lines(planned.realised.cut, (_layer_fact(planned.plan), direction, modules))


def _rematerialised_lines(planned: _RealisedPlan) -> Iterator[str]:
    return _whole_batch_lines(planned.realised.rematerialised, (_layer_fact(planned.plan), direction, modules))


def _layer_fact(plan: Plan) -> Fact:
    def layer(_: int, op: Op) -> str:
        groups, group = plan.layer_of_group, op.origin.group
        return f"layer {groups[group]}" if groups and group is not None else ""

    return layer


def _whole_batch_lines(step: TracedStep, facts: Sequence[Fact]) -> Iterator[str]:
    text = step.flat.text(_input_names(step))
    yield from _input_lines(step)
    yield ""
    yield from text.lines(facts)
    yield ""
    yield from _result_lines(step, step.flat, text)


def _input_names(step: TracedStep) -> dict[Var, str]:
    constants = {value: f"constant{k}" for k, value in enumerate(step.flat.constvars)}
    return constants | dict(zip(step.flat.invars, step.in_paths, strict=True))


def _input_lines(step: TracedStep) -> Iterator[str]:
    for value, path, dim in zip(step.flat.invars, step.in_paths, step.batch_dims, strict=True):
        examples = "" if dim is None else f"   dimension {dim} holds the examples"
        yield f"argument {path} {type_text(value)}{examples}"


def _result_lines(step: TracedStep, block: Block, text: ProgramText) -> Iterator[str]:
    for atom, path, replaced in zip(block.outvars, step.out_paths, step.aliases, strict=True):
        instead = "" if replaced is None else f"   replaces {step.in_paths[replaced]}"
        yield f"{path} = {text.name_of(atom)}{instead}"


# ---- micro-batches ---------------------------------------------------------------------------------------------------


def _split_lines(planned: _RealisedPlan) -> Iterator[str]:
    split = planned.realised.staged.split
    block, text = _split_text(split)
    for whole, rows in split.micro_inputs:
        yield f"{text.name_of(rows)} {type_text(rows)}: {type_text(whole)} in {split.n_micro_batches} micro-batches"
    for segment in range(2 * split.n_loops + 1):
        numbers = [i for i, op in enumerate(block.ops) if op.segment == segment]
        if numbers:
            yield ""
            yield f"{_segment_name(segment, split)}:"
            yield from text.lines((direction, modules), numbers)
        yield from _combined_lines(split, segment, text)
    yield ""
    yield from _result_lines(split.traced, block, text)


def _segment_name(segment: int, split: SplitStep) -> str:
    """Segment 0 is the prologue, segment 2 k - 1 is loop k, and segment 2 k follows loop k."""
    if segment == 0:
        return "once, before the micro-batches"
    loop = f" (loop {(segment + 1) // 2})" if split.n_loops > 1 else ""
    if not is_loop(segment):
        return f"once, after the micro-batches{loop}"
    return f"for each of {split.n_micro_batches} micro-batches{loop}" if split.n_micro_batches > 1 else f"once{loop}"


def _combined_lines(split: SplitStep, segment: int, text: ProgramText) -> Iterator[str]:
    """One line for each value that combines the micro-batches of a loop."""
    made = {value for op in split.in_segment(segment) for value in op.eqn.outvars}
    for one in split.accumulators:
        if one.loop in made:
            yield f"{text.name_of(one.complete)} = {one.reduction} of {text.name_of(one.loop)} over micro-batches"
    for joined in split.concatenations:
        if joined.loop in made:
            batches = f"micro-batches along dimension {joined.dim}"
            yield f"{text.name_of(joined.complete)} = {text.name_of(joined.loop)} of all {batches}"


def _split_text(split: SplitStep) -> tuple[Block, ProgramText]:
    """The operations of a split step, with equal numbers in all phases from here on."""
    block = Block(invars=split.inputs, ops=split.ops, outvars=split.outvars)
    names = _input_names(split.traced)
    names |= {rows: f"{names[whole]}[rows]" for whole, rows in split.micro_inputs}
    if split.micro_index is not None:
        names[split.micro_index] = "micro_batch"
    number = block.text(names).name_of
    names |= {one.complete: f"{one.reduction}({number(one.loop)})" for one in split.accumulators}
    names |= {one.complete: f"all({number(one.loop)})" for one in split.concatenations}
    return block, block.text(names)


# ---- tasks and shardings ---------------------------------------------------------------------------------------------


def _task_lines(planned: _RealisedPlan) -> Iterator[str]:
    staged = planned.realised.staged
    block, text = _split_text(staged.split)
    for task in staged.tasks:
        yield f"{task.name} on mesh {task.mesh}, {_segment_name(task.segment, staged.split)}:"
        yield f"  reads {', '.join(map(text.name_of, task.invars))}"
        yield from (f"  {line}" for line in text.lines((modules,), _operation_numbers(task.eqns, block)))
        yield f"  leaves {', '.join(map(text.name_of, task.outvars))}"
        yield ""


def _operation_numbers(eqns: Sequence[JaxprEqn], block: Block) -> list[int]:
    """Numbers in `block`, which name operations in all phases."""
    number = {eqn: i for i, eqn in enumerate(block.eqns)}
    return [number[eqn] for eqn in eqns]


def _sharding_lines(planned: _RealisedPlan) -> Iterator[str]:
    staged, plan = planned.realised.staged, planned.plan
    block, text = _split_text(staged.split)
    for k, (problem, stage) in enumerate(zip(mesh_problems(staged), plan.stages, strict=True)):
        yield f"mesh {k} of {' x '.join(map(str, stage.logical_shape))} devices, from device {stage.first_device} on:"
        for (value, _), spec in zip(problem.inputs, stage.input_specs, strict=True):
            yield f"  {text.name_of(value)} {type_text(value)} {_spec_text(spec)}"
        specs = _specs_fact(problem, stage.equation_specs, block)
        yield from (f"  {line}" for line in text.lines((specs,), _operation_numbers(problem.eqns, block)))
        yield ""
    for result in plan.outputs:
        places = zip(result.specs, result.mesh_ids, strict=True)
        yield f"{result.path} {', '.join(f'{_spec_text(spec)} on mesh {mesh}' for spec, mesh in places)}"


def _spec_text(spec: Spec) -> str:
    return str(spec) or "scalar"


def _specs_fact(problem: MeshEquations, chosen: Sequence[EquationSpecs], block: Block) -> Fact:
    of_number = dict(zip(_operation_numbers(problem.eqns, block), chosen, strict=True))

    return lambda number, _: specs_text(of_number[number])


# ---- instructions ----------------------------------------------------------------------------------------------------


def _instruction_lines(planned: _RealisedPlan) -> Iterator[str]:
    program = emit_program(planned.traced, planned.plan)
    for slot in program.inputs:
        part = planned.realised.cut.argument(slot.leaf)
        # A block of a stacked leaf, and the examples of a micro-batch.
        rows = f"{_rows_text(part.rows)}{_rows_text(slot.rows)}"
        yield f"b{slot.buffer} = {planned.traced.in_paths[part.leaf]}{rows} on mesh {slot.mesh}"
    yield ""
    yield from (_instruction_text(program, one) for one in program.instructions)
    yield ""
    for k, output in enumerate(program.outputs):
        part = planned.realised.cut.result(k)
        yield f"{planned.traced.out_paths[part.leaf]}{_rows_text(part.rows)} = {_buffers_text(output.buffers)}"


def _rows_text(rows: Sequence[int] | None) -> str:
    return "" if rows is None else f", rows {rows[0]} to {rows[1]}"


def _instruction_text(program: Program, one: Instruction) -> str:
    """For example `b4 = forward0(b1, b2) on mesh 0`."""
    match one:
        case Run():
            function = program.functions[one.function]
            return (
                f"{_buffers_text(one.outputs)} = {function.name}({_buffers_text(one.inputs)}) on mesh {function.mesh}"
            )
        case Accumulate():
            name = program.functions[one.function].name
            return f"{_buffers_text(one.accumulators)} += {_buffers_text(one.values)}   by {name}"
        case Transfer():
            return f"b{one.target} = b{one.source} sent to mesh {one.mesh} as {one.spec}"
        case _:
            return f"free {_buffers_text(one.buffers)}"


def _buffers_text(numbers: Sequence[int]) -> str:
    return ", ".join(f"b{number}" for number in numbers)


# ---- verifiers -------------------------------------------------------------------------------------------------------


def _verify_split(planned: _RealisedPlan) -> None:
    """A combined value exists once the last of its parts does."""
    split = planned.realised.staged.split
    block, _ = _split_text(split)
    later = {result: block.made_by[value] + 1 for value, result in split.combined if value in block.made_by}
    known_before = {result for value, result in split.combined if value not in block.made_by}
    rows = {rows for _, rows in split.micro_inputs}
    index = set() if split.micro_index is None else {split.micro_index}
    verify_block(block, known_before | rows | index, later=later)


def _verify_tasks(planned: _RealisedPlan) -> None:
    for task in planned.realised.staged.tasks:
        verify_block(Block(invars=task.invars, ops=tuple(map(Op, task.eqns)), outvars=task.outvars))


def _verify_shardings(planned: _RealisedPlan) -> None:
    staged = planned.realised.staged
    verify_staged(staged, mesh_problems(staged), planned.plan)


#: In the order of planning.
PHASES = (
    Phase(
        "trace",
        "the step for the whole batch; parts of the step, modules of the model, source lines",
        _traced_lines,
        lambda planned: verify_block(planned.traced.flat),
    ),
    Phase(
        "layers",
        "the layer of each forward operation and of its derivatives; scans cut between layers",
        _layer_lines,
        lambda planned: verify_block(planned.realised.cut.flat),
    ),
    Phase(
        "rematerialise",
        "values that backward passes recompute instead of keeping them",
        _rematerialised_lines,
        lambda planned: verify_block(planned.realised.rematerialised.flat),
    ),
    Phase("microbatch", "operations of each micro-batch, and operations that run once", _split_lines, _verify_split),
    Phase("stages", "tasks: which operations run together, on which mesh", _task_lines, _verify_tasks),
    Phase(
        "shardings",
        "the specs of each value: results <- operands, or results <- computed <- operands before a collective",
        _sharding_lines,
        _verify_shardings,
    ),
    # `emit_program` verifies the instructions that it returns.
    Phase("instructions", "operations of the runtime over numbered buffers", _instruction_lines, lambda planned: None),
)
