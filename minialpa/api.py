"""`parallelize` returns a function that takes and returns what a training step does, and runs it on all devices.

The first call with new shapes is traced, planned and compiled; later ones run the program that was compiled then.
The first call that needs the planner or the runtime imports it, because importing them takes longer than all the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
from jax.tree_util import PyTreeDef

from minialpa.calls import Argnums, Call, Parameters, Shape, is_train_state, on_leaves, rebuild, shown
from minialpa.cluster import ClusterSpec
from minialpa.errors import InfeasibleError, MinialpaError, ShardingError, TraceError, WorkerError
from minialpa.inter.lower.mesh_programs import input_types
from minialpa.inter.microbatch.find_batch import find_batch
from minialpa.inter.staging.replan import check_fits, difference, logical_mesh_of
from minialpa.methods import (
    AutoParallel,
    CreateStateParallel,
    FollowingMethod,
    FollowParallel,
    Method,
    Target,
    check_method,
    plan_to_method,
    resolve_devices,
)
from minialpa.options import PlanOptions
from minialpa.plan import Plan, verify_plan
from minialpa.programs.program import Program
from minialpa.pytrees import check_no_graph, update_modules
from minialpa.session import Session, current_session, running_session
from minialpa.support.collection import collection_paused
from minialpa.support.progress import ProgressBar
from minialpa.tracing.arguments import find_batch_dims, leaf_type
from minialpa.tracing.jaxprs import aval_of, is_weak
from minialpa.tracing.trace import NoBatch, TracedStep, trace_step, with_batch

if TYPE_CHECKING:
    from minialpa.runtime.executable import Executable
    from minialpa.runtime.runner import Runner

OnStale = Literal["refuse", "replan"]
#: What a call needs: the program on its devices, and what makes its result of the leaves that the program returns.
Compiled = tuple["Executable", Callable[[Sequence[Any]], Any]]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A step that is planned for some arguments, before it is compiled. See `ParallelizedFunc.lower`.

    Attributes:
        plan: the plan.
    """

    plan: Plan
    _compile: Callable[[], Compiled] = field(repr=False)

    def compile(self) -> Executable:
        """The step, compiled for the devices of the session in which it was planned."""
        executable, _ = self._compile()
        return executable


class ParallelizedFunc:
    """A step that is planned, compiled and cached for each set of argument shapes, and runs by the plan."""

    #: The plan that was made or loaded last, by any function. Scripts that were written for Alpa ask for it.
    last_plan: ClassVar[Plan | None] = None
    #: The layers of each of its stages, also where the answer is one stage and the plan itself needs no layers.
    last_layers: ClassVar[tuple[tuple[int, ...], ...]] = ()

    def __init__(
        self,
        fun: Callable[..., Any],
        method: Method | FollowingMethod | Plan,
        *,
        static_argnums: Argnums = "auto",
        donate_argnums: Argnums = "auto",
        batch_argnums: Argnums = "auto",
        on_stale: OnStale = "refuse",
    ) -> None:
        check_method(method)
        if on_stale not in ("refuse", "replan"):
            raise ShardingError(f'`on_stale` is "refuse" or "replan"; got {on_stale!r}.')
        functools.update_wrapper(self, fun)
        self._fun, self._method, self._on_stale = fun, method, on_stale
        self._parameters = Parameters(fun, static_argnums, donate_argnums, batch_argnums)
        self._options: dict[str, Any] = {
            "static_argnums": static_argnums,
            "donate_argnums": donate_argnums,
            "batch_argnums": batch_argnums,
            "on_stale": on_stale,
        }

        # Compiled programs by the shapes of the call and by the session; one thread compiles at a time.
        self._executables: dict[tuple[Any, ...], Compiled] = {}
        self._compiling = threading.RLock()
        self._known_trees: list[tuple[PyTreeDef, tuple[int | str, ...]]] = []
        # The last call's types and program, so that a training loop looks nothing up.
        self._recent: tuple[tuple[Session, object], Compiled] | None = None
        self._last: Executable | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._parameters.bind(args, kwargs)
        self._check_alive(call)
        executable, result_of = self._get(call)
        self._last = executable
        result = result_of(executable.run(call.leaves))
        if call.graph is None:
            return result
        values, result = result
        update_modules(call.modules, values)
        return result

    def __repr__(self) -> str:
        name = getattr(self._fun, "__qualname__", None) or repr(self._fun)
        method = self._method
        if isinstance(method, Plan):
            return f"<parallelized {name} by a saved plan for {method.cluster.n_devices} devices>"
        chosen = [f for f in dataclasses.fields(method) if getattr(method, f.name) != _default(f)]
        options = ", ".join(f"{f.name}={reprlib.repr(getattr(method, f.name))}" for f in chosen)
        return f"<parallelized {name} by {type(method).__name__}({options})>"

    def __reduce__(self) -> tuple[Callable[..., ParallelizedFunc], tuple[Any, ...]]:
        """A copy, or what is read from a pickle, plans and compiles for itself."""
        return functools.partial(type(self), **self._options), (self._fun, self._method)

    def get_executable(self, *args: Any, **kwargs: Any) -> Executable:
        """Plan and compile for these arguments, arrays or `jax.ShapeDtypeStruct`s, without running."""
        executable, _ = self._get(self._parameters.bind(args, kwargs))
        self._last = executable
        return executable

    def get_last_executable(self) -> Executable | None:
        """The executable of the last call; None before the first."""
        return self._last

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments, arrays or `jax.ShapeDtypeStruct`s. Compiles and runs nothing."""
        return self._plan_for(self._trace(self._parameters.bind(args, kwargs)))[0]

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The step as `jax.jit(step).trace` gives it, for one device: `.jaxpr`, `.out_info`, `.lower()`.

        Static arguments are those of this function. Nothing is planned: see `lower`.
        """
        call = self._parameters.bind(args, kwargs)

        flat_fun = on_leaves(self._fun, call)

        @functools.wraps(self._fun)
        def step(*values: Any) -> Any:
            return flat_fun(*jax.tree.leaves(values))

        paths, _ = self._parameters.paths(call)
        types = [leaf_type(leaf, path) for leaf, path in zip(call.leaves, paths, strict=True)]
        return jax.jit(step).trace(*jax.tree.unflatten(call.tree[0], types))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The step, planned for these arguments and not compiled yet, in the place of `jax.jit(step).lower`.

        `.plan` is its `Plan`, and `.compile()` compiles it for the devices and returns the `Executable`, which the
        next call with such arguments runs.
        """
        self._check_plans("lower")
        call = self._parameters.bind(args, kwargs)
        session = current_session()
        traced = self._trace(call)
        plan, target = self._plan_for(traced, session)
        return Lowered(plan, lambda: self._keep(call, session, lambda: _compiled(call, traced, plan, target, session)))

    def explain(self, what: str, *args: Any, **kwargs: Any) -> str:
        """A table of what the plan for these arguments chose and of what every other choice would cost.

        what: part of the path of arguments or results, such as `params['w']`. The planner forces each sharding that
            they could have, keeps all other decisions but the shardings, and plans the step again. "stages",
            "micro-batches" and "remat" compare the choices for the plan as a whole in the same way.
        """
        from minialpa.inter.alternatives import explain_step

        self._check_plans("explain")
        traced = self._trace(self._parameters.bind(args, kwargs))
        plan, _ = self._plan_for(traced)
        with collection_paused():
            return explain_step(traced, plan, what)

    def export_specs(self, *args: Any, mesh: int = 0, **kwargs: Any) -> tuple[Any, Any]:
        """Pytrees of PartitionSpecs: of the arguments, as a tuple without the static ones, and of the results.

        `in_shardings` and `out_shardings` of `jax.jit` take them, on a mesh with the logical shape of the plan and the
        axes "x" and "y". In a pipeline, only arguments and results on mesh `mesh` have a spec; the others have None.
        """
        self._check_plans("export_specs")
        call = self._parameters.bind(args, kwargs)
        traced = self._trace(call)
        plan, _ = self._plan_for(traced)
        specs = plan.export_specs(mesh)
        return (
            jax.tree.unflatten(call.tree[0], [specs.inputs.get(value.path) for value in plan.inputs]),
            jax.tree.unflatten(traced.out_tree, [specs.outputs.get(value.path) for value in plan.outputs]),
        )

    def preshard_dynamic_args(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments, on the devices and in the shardings in which the step reads them."""
        call = self._parameters.bind(args, kwargs)
        self._check_alive(call)
        executable, _ = self._get(call)
        new_args, new_kwargs = rebuild(call, executable.place(call.leaves))
        return (new_args, new_kwargs) if kwargs else new_args

    def place_batch(self, batch: Any) -> Any:
        """The batch, on the devices and in the shardings in which the compiled program for its shapes reads it.

        batch: the argument that holds examples, or a tuple of them if there are several. Compiles nothing: a batch that
        no program takes yet comes back as it is. Leaves that the step cuts into micro-batches come back in these parts,
        as `MicroBatchedArray`s: arrays with a shape and a dtype, which `np.asarray` reads.
        """
        recent = self._recent
        # A loader's thread may come here between two sessions, and must not start one.
        session = running_session()
        if recent is None or recent[0][0] is not session:
            return batch
        numbers = self._batch_numbers(recent[1][0].get_parallel_plan())
        if not numbers:
            return batch
        parts = (batch,) if len(numbers) == 1 else tuple(batch)
        if len(parts) != len(numbers):
            raise TraceError(
                f"A batch has {len(parts)} parts, and the step has {len(numbers)} arguments with examples "
                f"(numbers {numbers}). Make each batch a tuple with one part for each of these arguments."
            )

        # Two calls may differ in other arguments only. A loop repeats its last call most often.
        values = dict(zip(numbers, parts, strict=True))
        known = sorted(list(self._executables.items()), key=lambda item: item[1] is not recent[1])
        for (key, *where), (executable, _) in known:
            positions = self._parameters.positions_in_call(key, values)
            if positions is None or where != [session.devices, session.cluster, session.runtime]:
                continue

            (tree, _), *_ = key
            leaves: list[Any] = [None] * tree.num_leaves
            for number, at in positions.items():
                leaves[at] = jax.tree.leaves(values[number])
            placed = executable.place(leaves)
            return jax.tree.unflatten(
                jax.tree.structure(batch), [leaf for number in numbers for leaf in placed[positions[number]]]
            )
        return batch

    def _batch_numbers(self, plan: Plan) -> tuple[int, ...]:
        """The numbers of the arguments that hold examples: as given, or else as found for a plan."""
        if self._parameters.batch != "auto":
            return self._parameters.batch
        numbers = tuple(self._parameters.number(name) for name in plan.batch)
        # Arguments beyond the signature, as those of `*args`, have no name to be found by.
        return numbers if min(numbers, default=-1) >= 0 else ()

    # ---- calls ----------------------------------------------------------------------------------------------------

    def _check_alive(self, call: Call) -> None:
        """Raise before anything runs: a compiled program may crash on an array that has no memory any more."""
        for i, leaf in enumerate(call.leaves):
            is_deleted = getattr(leaf, "is_deleted", None)
            if is_deleted is None:
                # Numbers and NumPy arrays cannot be deleted, and neither can what only has a shape.
                if isinstance(leaf, Shape):
                    raise TraceError(
                        f"`{self._path(call, i)}` is a shape, and a call needs arrays. Only `plan` and "
                        f"`get_executable` take a `{type(leaf).__name__}`."
                    )
                continue

            if isinstance(leaf, jax.core.Tracer):
                raise TraceError(
                    f"`{self._path(call, i)}` is a traced value. A parallelized function runs on devices and cannot be "
                    "called inside `jax.jit`, `jax.grad` or `jax.vmap`; call it outside, or call the plain function."
                )
            if is_deleted():
                raise WorkerError(
                    f"`{self._path(call, i)}` has been deleted: it was donated to an earlier call, whose result "
                    "took over its memory. Pass that result, or keep arguments alive with `donate_argnums=()`."
                )

    def _path(self, call: Call, i: int) -> str:
        return self._parameters.paths(call)[0][i]

    def _get(self, call: Call) -> Compiled:
        # A training loop passes a step its own results, whose types are the same objects from call to call.
        session = current_session()
        wanted = (session, call.types())
        recent = self._recent  # another thread may replace it
        if recent is None or recent[0] != wanted:
            recent = self._recent = (wanted, self._find(call, session))
        return recent[1]

    def _find(self, call: Call, session: Session) -> Compiled:
        key = (call.key(), session.devices, session.cluster, session.runtime)
        found = self._executables.get(key)
        if found is not None:
            return found
        return self._keep(call, session, lambda: self._compile(call, session))

    def _keep(self, call: Call, session: Session, compile_: Callable[[], Compiled]) -> Compiled:
        """The program for a call: the one that is there already, or else what `compile_` returns."""
        key = (call.key(), session.devices, session.cluster, session.runtime)
        with self._compiling:  # threads that make the first call at the same time compile once
            found = self._executables.get(key)
            if found is None:
                found = compile_()
                self._executables[key] = found
                self._known_trees.append(call.tree)
            return found

    def _compile(self, call: Call, session: Session) -> Compiled:
        traced = self._trace(call)
        if isinstance(self._method, CreateStateParallel):
            return self._compile_creation(call, traced, self._method, session), shown(call, traced.out_tree)

        plan, target = self._plan_for(traced, session)
        return _compiled(call, traced, plan, target, session)

    def _compile_creation(
        self, call: Call, traced: TracedStep, method: CreateStateParallel, session: Session
    ) -> Executable:
        """The program that creates the state of a training step, which is planned and compiled first."""
        from minialpa.inter.lower.state_program import state_program
        from minialpa.runtime.executable import Executable

        if self._parameters.donate not in ("auto", ()):
            raise ShardingError(
                "A function that creates a state keeps its arguments: they are on every mesh. Leave `donate_argnums` "
                "out."
            )
        # The program of the step, and not its plan alone, says on which of several meshes it reads a leaf.
        step = method.train_step.get_executable(_state_shapes(traced), *method.other_args)
        plan = step.get_parallel_plan()
        with ProgressBar() as bar:
            bar.report("Compiling the state", 0, 1)
            with collection_paused():
                created = state_program(traced, step.program, [stage.mesh for stage in plan.stages])
            runner = _make_runner(created.program, traced, method.train_step.target(session), session)
        placements = [[value.placement() for value in values] for values in (created.inputs, created.outputs)]
        return Executable(
            plan, created.program, runner, call.tree[0], traced.out_tree, placements=(placements[0], placements[1])
        )

    # ---- planning -------------------------------------------------------------------------------------------------

    def target(self, session: Session | None = None) -> Target:
        """Where this function is planned for, and where it runs."""
        method = self._method
        if isinstance(method, CreateStateParallel):
            return method.train_step.target(session)
        if isinstance(method, FollowParallel):
            return method.src_func.target(session)
        return Target(method.cluster) if isinstance(method, Plan) else resolve_devices(method.devices, session)

    def _check_plans(self, what: str) -> None:
        """Raise ShardingError for a function that has no plan of its own."""
        if isinstance(self._method, CreateStateParallel):
            raise ShardingError(
                f"A function that creates a state has the placements of the training step, and no plan of its own. Use "
                f"`train_step.{what}`."
            )

    def _plan_for(self, traced: TracedStep, session: Session | None = None) -> tuple[Plan, Target]:
        target = self.target(session)
        if isinstance(self._method, CreateStateParallel):
            return self._method.train_step.plan(_state_shapes(traced), *self._method.other_args), target
        if isinstance(self._method, Plan):
            plan = self._saved_plan(traced, self._method)
        else:
            with self._batch_named(traced):
                plan = self._new_plan(traced, self._method, target)
        layers = _layers_of_stages(traced, self._method, plan)
        ParallelizedFunc.last_plan, ParallelizedFunc.last_layers = plan, layers
        return plan, target

    @contextmanager
    def _batch_named(self, traced: TracedStep) -> Iterator[None]:
        """Errors of what examples go through say which arguments were found to hold them."""
        try:
            yield
        except (TraceError, InfeasibleError) as error:
            if self._parameters.batch == "auto" and traced.batch_arguments:
                names = ", ".join(f"`{name}`" for name in traced.batch_arguments)
                error.add_note(f"The examples were taken to be in {names}; `batch_argnums=(…)` says it otherwise.")
            raise

    def _new_plan(self, traced: TracedStep, method: Method | FollowParallel, target: Target) -> Plan:
        """The plan of a method.

        The devices may not divide the last batch of an epoch. Then its examples are split in another way or not at all,
        with a warning.
        """
        try:
            return _make_plan(traced, method, target)
        except InfeasibleError as error:
            if not self._known_trees or not _is_uneven(error):
                raise
            warnings.warn(
                f"{error} This batch has another shape than the one before, so it is planned without the option.",
                UserWarning,
                stacklevel=2,
            )
        return _make_plan(traced, method, target, any_batch=True)

    def _saved_plan(self, traced: TracedStep, saved: Plan) -> Plan:
        """The saved plan. If it is stale and `on_stale` is "replan", a plan with its decisions and new shardings."""
        verify_plan(saved)
        if self._on_stale == "refuse":
            check_fits(traced, saved)
            return saved
        found = difference(traced, saved)
        if found is None:
            return saved

        method = plan_to_method(saved)
        plan = _make_plan(traced, method, resolve_devices(method.devices))
        warnings.warn(
            f"The plan was made for another call: {found}. Its stages, micro-batches, schedule and rematerialisation "
            f"are kept, and the shardings were solved again: {plan.cost.total_s:.3g} s per step, where the plan had "
            f"{saved.cost.total_s:.3g} s.",
            UserWarning,
            stacklevel=2,
        )
        return plan

    def _trace(self, call: Call) -> TracedStep:
        tree, names = call.tree
        values = jax.tree.unflatten(tree, call.leaves)
        paths, numbers = self._parameters.paths(call)

        known = self._parameters
        for name, value in zip(names, values, strict=True):
            check_no_graph(value, f"Argument `{known.label(name)}`")
        state_like = self._state_like(call, names, values)
        try:
            with collection_paused():
                traced = trace_step(
                    on_leaves(self._fun, call),
                    call.leaves,
                    in_paths=paths,
                    is_batch=[known.batch != "auto" and number in known.batch for number in numbers],
                    arg_of_leaf=numbers,
                    donate="auto" if known.batch == "auto" else known.donate,
                    state_like=state_like,
                )
        except MinialpaError:
            raise
        except Exception as error:
            self._explain_mismatch(call, error)
            if known.batch == "auto" and set(numbers) == {0, 1}:
                _explain_sizes(call.leaves, paths, [number == 1 for number in numbers], error)
            raise
        if known.batch != "auto":
            return traced

        # The step itself says which arguments it updates, and follows the others up to the loss.
        found = find_batch(traced, numbers)
        if isinstance(found, NoBatch):
            traced, found = dataclasses.replace(traced, no_batch=found), ()
        return with_batch(traced, found, arg_of_leaf=numbers, donate=known.donate, state_like=state_like)

    def _state_like(self, call: Call, names: Sequence[int | str], values: Sequence[Any]) -> list[int]:
        """The numbers of the arguments that are a training state by their type: modules of flax.nnx, `TrainState`s."""
        modules = () if call.graph is None else call.graph.names
        is_state = [name in modules or is_train_state(value) for name, value in zip(names, values, strict=True)]
        return [self._parameters.number(name) for name, found in zip(names, is_state, strict=True) if found]

    def _explain_mismatch(self, call: Call, error: Exception) -> None:
        """Raise a clearer error if the arguments have another structure than those of earlier calls."""
        if self._known_trees and call.tree not in self._known_trees:
            raise TraceError(
                f"The step fails on these arguments: {error!r}. Their structure differs from that of earlier calls:\n"
                f"  now     {call.tree[0]}\n  earlier {self._known_trees[-1][0]}"
            ) from error


def _compiled(call: Call, traced: TracedStep, plan: Plan, target: Target, session: Session) -> Compiled:
    """The program of a plan on its devices. Raises ShardingError if there are not enough."""
    from minialpa.inter.lower.emit import emit_program
    from minialpa.runtime.executable import Executable

    _check_devices(plan, target, session)
    with ProgressBar() as bar:
        bar.report("Compiling", 0, 1)
        with collection_paused():
            program = emit_program(traced, plan)
        runner = _make_runner(program, traced, target, session)
        executable = Executable(plan, program, runner, call.tree[0], traced.out_tree)
        return executable, shown(call, traced.out_tree)


def _default(option: dataclasses.Field[Any]) -> Any:
    """The default of an option of a method; `MISSING`, to which no value is equal, if it has none."""
    return option.default if option.default_factory is dataclasses.MISSING else option.default_factory()


def _explain_sizes(leaves: Sequence[Any], paths: Sequence[str], is_batch: Sequence[bool], error: Exception) -> None:
    """Raise a clearer error if a step fails because the arrays of its batch have different numbers of examples."""
    try:
        find_batch_dims([leaf_type(leaf, path) for leaf, path in zip(leaves, paths, strict=True)], paths, is_batch)
    except TraceError as reason:
        raise reason from error


def _check_batch(traced: TracedStep, options: PlanOptions) -> None:
    """Raise TraceError if a method splits the examples of a step and no argument is known to hold them.

    A search that may choose micro-batches, or none, goes on if there is no candidate, but does not choose between
    candidates.
    """
    if traced.no_batch is None:
        return
    sharding = options.sharding
    if options.n_micro_batches > 1:
        raise TraceError(f"`num_micro_batches={options.n_micro_batches}` splits examples. {traced.no_batch.reason}")
    if sharding.data_parallel or sharding.force_batch_dim_to_mesh_dim is not None:
        raise TraceError(f"Data parallelism splits examples. {traced.no_batch.reason}")
    if options.choose_micro_batches and traced.no_batch.ambiguous:
        raise TraceError(f"The planner may split examples. {traced.no_batch.reason}")


def _state_shapes(traced: TracedStep) -> Any:
    """The state that a traced function returns, with a shape in place of every leaf."""
    avals = [aval_of(atom) for atom in traced.flat.outvars]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak(aval)) for aval in avals]
    return jax.tree.unflatten(traced.out_tree, shapes)


def _layers_of_stages(
    traced: TracedStep, method: Method | FollowParallel | Plan, plan: Plan
) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage. If there is one stage, the layers into which the method would have cut the step."""
    from minialpa.inter.layers.cut_scans import whole_scans
    from minialpa.inter.layers.layered_step import LayeredStep

    if plan.remat:
        return tuple(stage.layers for stage in plan.stages)
    option = None if isinstance(method, Plan | FollowParallel) else method.options().layers
    if option is None or traced.n_groups == 0:  # a step that returns its arguments
        return ((0,),)
    return (tuple(range(max(1, whole_scans(LayeredStep(step=traced, fingerprint=plan.fingerprint), option).n_layers))),)


def _check_devices(plan: Plan, target: Target, session: Session) -> None:
    """Raise ShardingError unless there are the devices that a plan needs."""
    n_devices = len(target.devices or session.devices) if session.runtime is None else session.cluster.n_devices
    ends = [stage.first_device + stage.n_devices for stage in plan.stages]
    needed = max(ends)
    if needed > n_devices:
        raise ShardingError(
            f"The plan needs {needed} devices and there are {n_devices} (`plan.stages[{ends.index(needed)}]`). Plan "
            "for fewer devices, or pass more."
        )


def _make_runner(program: Program, traced: TracedStep, target: Target, session: Session) -> Runner:
    """The program on the devices of the session, or on those that the method names."""
    devices = target.devices or session.devices
    if session.runtime is None:
        from minialpa.runtime.local import LocalExecutable

        return LocalExecutable(program, devices)
    if target.devices:
        raise ShardingError(
            "`devices` lists devices of this process, and the session runs on a Ray cluster. Leave `devices` out, or "
            "give a ClusterSpec or a LogicalMesh."
        )
    from minialpa.runtime.cluster.cluster_executable import ClusterExecutable

    return ClusterExecutable(session.runtime, program, input_types(program, traced))


def _is_uneven(error: BaseException | None) -> bool:
    """Whether an error says that the devices do not divide the examples."""
    from minialpa.intra.graph.option_constraints import UnevenBatchError

    return error is not None and (isinstance(error, UnevenBatchError) or _is_uneven(error.__cause__))


def _make_plan(traced: TracedStep, method: Method | FollowParallel, target: Target, *, any_batch: bool = False) -> Plan:
    """`any_batch`: whether examples may be split otherwise than the method asks."""
    if isinstance(method, FollowParallel):
        return _follow_plan(traced, method, target, any_batch)
    from minialpa.inter.compilers import compiler_of
    from minialpa.inter.pipeline import plan_step

    options = method.options()
    _check_batch(traced, options)
    if any_batch:
        options = dataclasses.replace(options, sharding=options.sharding.for_any_batch())
    with ProgressBar() as bar, collection_paused():
        plan = plan_step(
            traced,
            target.cluster,
            options,
            compiler=compiler_of(target.cluster, target.jax_version),
            logical_mesh=target.logical_mesh,
            progress=bar.report,
        )
    verify_plan(plan)
    return plan


def _follow_plan(traced: TracedStep, method: FollowParallel, target: Target, any_batch: bool) -> Plan:
    """The plan that keeps to that of another function. any_batch: see `_make_plan`."""
    from minialpa.inter.compilers import compiler_of
    from minialpa.inter.context import PlanningContext
    from minialpa.inter.followed_plan import plan_following

    source = method.source()
    with ProgressBar() as bar, collection_paused():
        context = PlanningContext(
            traced=traced,
            cluster=source.cluster,
            compiler=compiler_of(source.cluster, target.jax_version),
            options=method.options(),
            logical_mesh=logical_mesh_of(source),
            report=bar.report,
        )
        plan = plan_following(context, source, any_batch=any_batch)
    verify_plan(plan)
    return plan


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    method: Method | FollowingMethod | Plan | None = None,
    static_argnums: Argnums = "auto",
    donate_argnums: Argnums = "auto",
    batch_argnums: Argnums = "auto",
    on_stale: OnStale = "refuse",
) -> Any:
    """Run a step, written for one device, on all devices. Use it as a call or a decorator, with or without arguments.

    method: the parallel method, a saved `Plan`, or a method that keeps to the plan of another function, such as
        `CreateStateParallel` and `FollowParallel`. With None the planner chooses everything (`AutoParallel`).
    static_argnums: arguments that are Python values; "auto": those that are not pytrees of arrays and numbers.
    donate_argnums: arguments whose memory the results may take over; "auto": training states that the step replaces.
    batch_argnums: arguments whose leaves hold examples along dimension 0; micro-batches are cut from these. "auto"
        finds them (`inter/microbatch/find_batch.py`): the second argument of `step(state, batch)`, and in other
        signatures those whose leading dimension goes through the step as that of examples does. Raises TraceError,
        which names the candidates, if they cannot be told apart and the method splits examples.
    on_stale: what to do if a saved `Plan` was made for other shapes or another step. "refuse" raises a VerifyError
        that says what differs; "replan" keeps the stages, micro-batches, schedule and rematerialisation of the plan,
        solves the shardings again, and warns.
    """
    if fun is None:
        return functools.partial(
            parallelize,
            method=method,
            static_argnums=static_argnums,
            donate_argnums=donate_argnums,
            batch_argnums=batch_argnums,
            on_stale=on_stale,
        )
    return ParallelizedFunc(
        fun,
        AutoParallel() if method is None else method,
        static_argnums=static_argnums,
        donate_argnums=donate_argnums,
        batch_argnums=batch_argnums,
        on_stale=on_stale,
    )


def _method(method: Method | None) -> Method:
    """The method of those functions that plan for a cluster that the user gives."""
    chosen = AutoParallel() if method is None else method
    check_method(chosen)
    if isinstance(chosen, Plan):
        raise ShardingError("`method` is a saved plan, which has its own cluster. Use `replan` to plan as it did.")
    return chosen


def plan(
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    cluster: ClusterSpec,
    method: Method | None = None,
    batch_argnums: Argnums = "auto",
) -> Plan:
    """Plan `fun(*args)` for `cluster`, with no device. `args` may hold `jax.ShapeDtypeStruct`s in place of arrays."""
    chosen = dataclasses.replace(_method(method), devices=cluster)
    return ParallelizedFunc(fun, chosen, batch_argnums=batch_argnums).plan(*args)


def explain(
    fun: Callable[..., Any],
    args: Sequence[Any],
    what: str,
    *,
    cluster: ClusterSpec,
    method: Method | None = None,
    batch_argnums: Argnums = "auto",
) -> str:
    """As `ParallelizedFunc.explain`, for the plan that `plan` makes of the same arguments."""
    chosen = dataclasses.replace(_method(method), devices=cluster)
    return ParallelizedFunc(fun, chosen, batch_argnums=batch_argnums).explain(what, *args)


def replan(plan: Plan, fun: Callable[..., Any], args: Sequence[Any], *, batch_argnums: Argnums = "auto") -> Plan:
    """A plan for `fun(*args)` that decides as `plan` does, except for the shardings, which are solved again.

    It keeps stages, submeshes, logical shapes, micro-batches, schedule and rematerialisation. Raises VerifyError if the
    model has other layers.
    """
    return ParallelizedFunc(fun, plan_to_method(plan), batch_argnums=batch_argnums).plan(*args)


@dataclass(frozen=True, slots=True)
class DPResult:
    """What the search for stages decided, in Alpa's terms. It unpacks as Alpa's tuple, which has a profile file first.

    Attributes:
        forward_stage_layer_ids: the layers of each stage.
        submesh_physical_shapes: (hosts, devices per host) of each stage.
        submesh_logical_shapes: the mesh shape of each stage.
        submesh_autosharding_option_dicts: the fields of the sharding option of each stage.
    """

    forward_stage_layer_ids: tuple[tuple[int, ...], ...]
    submesh_physical_shapes: tuple[tuple[int, int], ...]
    submesh_logical_shapes: tuple[tuple[int, ...], ...]
    submesh_autosharding_option_dicts: tuple[dict[str, Any], ...]

    def __iter__(self) -> Iterator[Any]:
        no_profile_file = None
        return iter((no_profile_file, *(getattr(self, field.name) for field in dataclasses.fields(self))))


def get_last_dp_result() -> DPResult:
    """The stages of the plan that was made last. Raises MinialpaError before the first."""
    plan = ParallelizedFunc.last_plan
    if plan is None:
        raise MinialpaError("No plan was made yet. Call a parallelized function, its `plan`, or `minialpa.plan` first.")
    stages = plan.stages
    return DPResult(
        forward_stage_layer_ids=ParallelizedFunc.last_layers,
        submesh_physical_shapes=tuple(stage.submesh for stage in stages),
        submesh_logical_shapes=tuple(stage.logical_shape for stage in stages),
        submesh_autosharding_option_dicts=tuple(dataclasses.asdict(stage.option) for stage in stages),
    )
