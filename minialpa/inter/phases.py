"""The phases of a planned step as text: a traced step and its plan in, one text per phase out.

A plan has decisions and no equations, so `realise` first rewrites the step by these decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.lower.emit import emit_program
from minialpa.inter.microbatch.split_step import SplitStep, is_loop
from minialpa.inter.staging.staged_step import RealisedStep, mesh_problems, realise
from minialpa.inter.staging.verify_fit import verify_staged
from minialpa.intra.graph.problem import MeshEquations
from minialpa.ir.block import Block, verify_block
from minialpa.ir.op import Op
from minialpa.ir.text import Fact, ProgramText, direction, modules, type_text, where
from minialpa.plan import Plan
from minialpa.programs.program import Accumulate, Instruction, Program, Run, Transfer
from minialpa.sharding import EquationSpecs, Spec
from minialpa.tracing.trace import TracedStep


@dataclass(frozen=True, slots=True)
class _Planned:
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
    lines: Callable[[_Planned], Iterator[str]]
    verify: Callable[[_Planned], None]


def phases(traced: TracedStep, plan: Plan) -> dict[str, str]:
    """Name -> text of each phase, in order. Raises VerifyError if the plan is for another step."""
    planned = _Planned(traced, plan, realise(traced, plan))
    texts = {}
    for phase in PHASES:
        phase.verify(planned)
        texts[phase.name] = "\n".join((f"{phase.name}: {phase.adds}", "", *phase.lines(planned), ""))
    return texts


# ---- before micro-batches --------------------------------------------------------------------------------------------


def _traced(planned: _Planned) -> Iterator[str]:
    return _whole_batch(planned.traced, (direction, modules, where))


def _layers(planned: _Planned) -> Iterator[str]:
    return _whole_batch(planned.realised.cut, (_layer_of(planned.plan), direction, modules))


def _rematerialised(planned: _Planned) -> Iterator[str]:
    return _whole_batch(planned.realised.rematerialised, (_layer_of(planned.plan), direction, modules))


def _layer_of(plan: Plan) -> Fact:
    def layer(_: int, op: Op) -> str:
        groups, group = plan.layer_of_group, op.origin.group
        return f"layer {groups[group]}" if groups and group is not None else ""

    return layer


def _whole_batch(step: TracedStep, facts: Sequence[Fact]) -> Iterator[str]:
    text = step.flat.text(_input_names(step))
    yield from _inputs(step)
    yield ""
    yield from text.lines(facts)
    yield ""
    yield from _results(step, step.flat, text)


def _input_names(step: TracedStep) -> dict[Var, str]:
    constants = {value: f"constant{k}" for k, value in enumerate(step.flat.constvars)}
    return constants | dict(zip(step.flat.invars, step.in_paths, strict=True))


def _inputs(step: TracedStep) -> Iterator[str]:
    for value, path, dim in zip(step.flat.invars, step.in_paths, step.batch_dims, strict=True):
        examples = "" if dim is None else f"   dimension {dim} holds the examples"
        yield f"argument {path} {type_text(value)}{examples}"


def _results(step: TracedStep, block: Block, text: ProgramText) -> Iterator[str]:
    for atom, path, replaced in zip(block.outvars, step.out_paths, step.aliases, strict=True):
        instead = "" if replaced is None else f"   replaces {step.in_paths[replaced]}"
        yield f"{path} = {text.name_of(atom)}{instead}"


# ---- micro-batches ---------------------------------------------------------------------------------------------------


def _split(planned: _Planned) -> Iterator[str]:
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
        yield from _combined(split, segment, text)
    yield ""
    yield from _results(split.traced, block, text)


def _segment_name(segment: int, split: SplitStep) -> str:
    if segment == 0:
        return "once, before the micro-batches"
    loop = f" (loop {(segment + 1) // 2})" if split.n_loops > 1 else ""
    if not is_loop(segment):
        return f"once, after the micro-batches{loop}"
    return f"for each of {split.n_micro_batches} micro-batches{loop}" if split.n_micro_batches > 1 else f"once{loop}"


def _combined(split: SplitStep, segment: int, text: ProgramText) -> Iterator[str]:
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


def _tasks(planned: _Planned) -> Iterator[str]:
    staged = planned.realised.staged
    block, text = _split_text(staged.split)
    for task in staged.tasks:
        yield f"{task.name} on mesh {task.mesh}, {_segment_name(task.segment, staged.split)}:"
        yield f"  reads {', '.join(map(text.name_of, task.invars))}"
        yield from (f"  {line}" for line in text.lines((modules,), _numbers(task.eqns, block)))
        yield f"  leaves {', '.join(map(text.name_of, task.outvars))}"
        yield ""


def _numbers(eqns: Sequence[JaxprEqn], block: Block) -> list[int]:
    number = {eqn: i for i, eqn in enumerate(block.eqns)}
    return [number[eqn] for eqn in eqns]


def _shardings(planned: _Planned) -> Iterator[str]:
    staged, plan = planned.realised.staged, planned.plan
    block, text = _split_text(staged.split)
    for k, (problem, stage) in enumerate(zip(mesh_problems(staged), plan.stages, strict=True)):
        yield f"mesh {k} of {' x '.join(map(str, stage.logical_shape))} devices, from device {stage.first_device} on:"
        for (value, _), spec in zip(problem.inputs, stage.input_specs, strict=True):
            yield f"  {text.name_of(value)} {type_text(value)} {_spec(spec)}"
        specs = _specs(problem, stage.equation_specs, block)
        yield from (f"  {line}" for line in text.lines((specs,), _numbers(problem.eqns, block)))
        yield ""
    for result in plan.outputs:
        places = zip(result.specs, result.mesh_ids, strict=True)
        yield f"{result.path} {', '.join(f'{_spec(spec)} on mesh {mesh}' for spec, mesh in places)}"


def _spec(spec: Spec) -> str:
    return str(spec) or "scalar"


def _specs(problem: MeshEquations, chosen: Sequence[EquationSpecs], block: Block) -> Fact:
    of_number = dict(zip(_numbers(problem.eqns, block), chosen, strict=True))

    def specs(number: int, _: Op) -> str:
        one = of_number[number]
        results, operands = (" ".join(map(_spec, some)) for some in (one.results, one.operands))
        return f"{results} <- {operands}"

    return specs


# ---- instructions ----------------------------------------------------------------------------------------------------


def _instructions(planned: _Planned) -> Iterator[str]:
    program = emit_program(planned.traced, planned.plan)
    for slot in program.inputs:
        part = planned.realised.cut.argument(slot.leaf)
        rows = f"{_rows(part.rows)}{_rows(slot.rows)}"  # a block of a stacked leaf, and a micro-batch of examples
        yield f"b{slot.buffer} = {planned.traced.in_paths[part.leaf]}{rows} on mesh {slot.mesh}"
    yield ""
    yield from (_instruction(program, one) for one in program.instructions)
    yield ""
    for k, output in enumerate(program.outputs):
        part = planned.realised.cut.result(k)
        yield f"{planned.traced.out_paths[part.leaf]}{_rows(part.rows)} = {_buffers(output.buffers)}"


def _rows(rows: Sequence[int] | None) -> str:
    return "" if rows is None else f", rows {rows[0]} to {rows[1]}"


def _instruction(program: Program, one: Instruction) -> str:
    match one:
        case Run():
            function = program.functions[one.function]
            return f"{_buffers(one.outputs)} = {function.name}({_buffers(one.inputs)}) on mesh {function.mesh}"
        case Accumulate():
            name = program.functions[one.function].name
            return f"{_buffers(one.accumulators)} += {_buffers(one.values)}   by {name}"
        case Transfer():
            return f"b{one.target} = b{one.source} sent to mesh {one.mesh} as {one.spec}"
        case _:
            return f"free {_buffers(one.buffers)}"


def _buffers(numbers: Sequence[int]) -> str:
    return ", ".join(f"b{number}" for number in numbers)


# ---- verifiers -------------------------------------------------------------------------------------------------------


def _verify_split(planned: _Planned) -> None:
    """A combined value exists once the last of its parts does."""
    split = planned.realised.staged.split
    block, _ = _split_text(split)
    later = {result: block.made_by[value] + 1 for value, result in split.combined if value in block.made_by}
    known_before = {result for value, result in split.combined if value not in block.made_by}
    rows = {rows for _, rows in split.micro_inputs}
    index = set() if split.micro_index is None else {split.micro_index}
    verify_block(block, known_before | rows | index, later=later)


def _verify_tasks(planned: _Planned) -> None:
    for task in planned.realised.staged.tasks:
        verify_block(Block(invars=task.invars, ops=tuple(map(Op, task.eqns)), outvars=task.outvars))


def _verify_shardings(planned: _Planned) -> None:
    staged = planned.realised.staged
    verify_staged(staged, mesh_problems(staged), planned.plan)


#: In the order of planning.
PHASES = (
    Phase(
        "trace",
        "the step for the whole batch; parts of the step, modules of the model, source lines",
        _traced,
        lambda planned: verify_block(planned.traced.flat),
    ),
    Phase(
        "layers",
        "the layer of each forward operation and of its derivatives; scans cut between layers",
        _layers,
        lambda planned: verify_block(planned.realised.cut.flat),
    ),
    Phase(
        "rematerialise",
        "values that backward passes recompute instead of keeping them",
        _rematerialised,
        lambda planned: verify_block(planned.realised.rematerialised.flat),
    ),
    Phase("microbatch", "operations of each micro-batch, and operations that run once", _split, _verify_split),
    Phase("stages", "tasks: which operations run together, on which mesh", _tasks, _verify_tasks),
    Phase("shardings", "the specs of each value: results <- operands", _shardings, _verify_shardings),
    # `emit_program` verifies the instructions that it returns.
    Phase("instructions", "operations of the runtime over numbered buffers", _instructions, lambda planned: None),
)
