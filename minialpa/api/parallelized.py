"""The function that `parallelize` returns: the arguments of a call go in, its results come out.

A call with new shapes is traced, planned and compiled. A call like the last one is only compared and run.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax

from minialpa.api.call_patterns import CallPattern, Match, pattern_of
from minialpa.api.compiled_call import CompiledCall, check_alive, result_of_call
from minialpa.api.following import Followed, computes_gradients, find_followed, note_training_step, refusal
from minialpa.api.invalid_values import call_checked, checks_values
from minialpa.api.jitted import unjitted
from minialpa.api.pins import NO_PINS, Pins, find_pins
from minialpa.api.plan_folder import PlanCache, folder_of
from minialpa.api.ragged import OnRagged, is_uneven
from minialpa.api.step_compiler import check_plan, compile_creation, compile_step, function_name
from minialpa.api.step_planner import OnStale, StepPlanner, state_shapes
from minialpa.api.users_mesh import border_pins
from minialpa.calls import (
    Argnames,
    Argnums,
    Call,
    Parameters,
    is_train_state,
    on_leaves,
    rebuild,
    shown,
)
from minialpa.errors import InfeasibleError, MinialpaError, ShardingError, TraceError
from minialpa.field_types import check_value
from minialpa.inter.host_state import with_state_in_host
from minialpa.inter.microbatch.find_batch import find_batch
from minialpa.methods import (
    CreateStateParallel,
    FollowingMethod,
    FollowParallel,
    Method,
    Target,
    attention_of,
    axis_names_of,
    check_method,
    resolve_devices,
)
from minialpa.options import PlanningEffort, Shardings
from minialpa.plan import Plan
from minialpa.pytrees import check_no_graph
from minialpa.recognition.step import recognise
from minialpa.rules.rule_check import check_registered_rules
from minialpa.session import Session, current_session, has_workers, running_session
from minialpa.sharding import bare_specs_over
from minialpa.support.collection import collection_paused
from minialpa.support.private_jax import NO_MESH, api_boundaries, under_mesh, warn
from minialpa.support.progress import phase
from minialpa.support.sizes import bytes_text
from minialpa.tracing.arguments import find_batch_dims, leaf_type
from minialpa.tracing.host_memory import on_device
from minialpa.tracing.refs import is_ref_leaf, ref_type
from minialpa.tracing.trace import NoBatch, TracedStep, trace_step, with_batch

if TYPE_CHECKING:
    from minialpa.plan.check import PlanCheck
    from minialpa.runtime.executable import Executable

#: Most arguments in one message.
_MOST_CHANGES = 8

P = ParamSpec("P")
T = TypeVar("T")


def _without_mesh(fun: Callable[P, T]) -> Callable[P, T]:
    """`fun` outside of the user's `jax.set_mesh`: planning and compiling set their own meshes."""

    @functools.wraps(fun)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with under_mesh(NO_MESH):
            return fun(*args, **kwargs)

    return run


#: A program, and the function from its leaves to the result of the call.
Compiled = tuple["Executable", Callable[[Sequence[Any]], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCall:
    """The last call, whose program the next step of a training loop runs.

    Attributes:
        n_training_steps: number of training steps in the session then. A new one may be a step to follow.
        pattern: recognises calls that run this program; None if their arguments cannot show it.
    """

    session: Session
    n_training_steps: int
    executable: Executable
    pattern: CallPattern | None

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Match | None:
        if self.pattern is None or self.session is not running_session():
            return None
        is_current = len(self.session.training_steps) == self.n_training_steps
        return self.pattern.match(args, kwargs) if is_current else None


@dataclass(slots=True)
class _Latest:
    """The last call of a function, shared with its bound methods."""

    recent: LastCall | None = None


@api_boundaries
@dataclass(frozen=True, slots=True)
class Lowered:
    """A planned, uncompiled step. See `ParallelizedFunc.lower`."""

    plan: Plan
    _compile: Callable[[], Compiled] = field(repr=False)

    def compile(self) -> Executable:
        """Compile the step for the devices of its session."""
        executable, _ = self._compile()
        return executable


@api_boundaries
class ParallelizedFunc:
    """A step that runs on all devices. It plans and compiles once for each set of argument shapes.

    `parallelize` makes it and describes its options. Methods such as `plan(*args)` take the arguments of a call, with
    arrays or `jax.ShapeDtypeStruct`s.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        method: Method | FollowingMethod | Plan,
        *,
        static_argnums: Argnums = "auto",
        static_argnames: Argnames = (),
        donate_argnums: Argnums = "auto",
        donate_argnames: Argnames = (),
        batch_argnums: Argnums = "auto",
        in_shardings: Any = "auto",
        out_shardings: Any = "auto",
        on_stale: OnStale = "refuse",
        on_ragged: OnRagged = "fewer",
        plan_cache: PlanCache = None,
        planning_effort: PlanningEffort | None = None,
        shardings: Shardings | None = None,
    ) -> None:
        check_method(method)
        check_value("on_stale", on_stale, OnStale)
        check_value("on_ragged", on_ragged, OnRagged)
        check_value("plan_cache", plan_cache, PlanCache)
        check_value("planning_effort", planning_effort, PlanningEffort | None)
        check_value("shardings", shardings, Shardings | None)
        _check_function(fun)
        with suppress(Exception):  # attributes of a callable object may raise anything
            functools.update_wrapper(self, fun, updated=())
        plain, jitted = unjitted(fun)
        self._wrapped, self._fun, self._method = fun, plain, method
        # The object of a bound method; empty for functions. See `__get__`.
        self._bound: tuple[Any, ...] = ()
        # Options of `parallelize` win.
        is_static_given = not _is_auto(static_argnums) or bool(static_argnames)
        is_donate_given = not _is_auto(donate_argnums) or bool(donate_argnames)
        static = (static_argnums, static_argnames) if is_static_given else jitted.static
        self._parameters = Parameters(
            plain,
            static=static,
            donate=(donate_argnums, donate_argnames) if is_donate_given else jitted.donate,
            batch=batch_argnums,
            only_arrays=jitted.only_arrays,
        )
        if is_donate_given:
            self._parameters.check_apart()
        self._finds_static = _is_auto(static[0])
        self._are_pins_of_jit = _is_auto(in_shardings) and _is_auto(out_shardings)
        self._shardings = (
            jitted.in_shardings if _is_auto(in_shardings) else in_shardings,
            jitted.out_shardings if _is_auto(out_shardings) else out_shardings,
        )
        self._options: dict[str, Any] = {
            "static_argnums": static_argnums,
            "static_argnames": static_argnames,
            "donate_argnums": donate_argnums,
            "donate_argnames": donate_argnames,
            "batch_argnums": batch_argnums,
            "in_shardings": in_shardings,
            "out_shardings": out_shardings,
            "on_stale": on_stale,
            "on_ragged": on_ragged,
            "plan_cache": plan_cache,
            "planning_effort": planning_effort,
            "shardings": shardings,
        }

        self._planner = StepPlanner(
            method,
            on_stale,
            on_ragged,
            folder_of(plan_cache),
            planning_effort,
            shardings,
        )
        # By the key of the call, the session, and the meshes of a followed training step. One thread compiles at a
        # time.
        self._executables: dict[tuple[Any, ...], Compiled] = {}
        self._compiling = threading.RLock()
        self._earlier_types: dict[str, str] | None = None  # types of the leaves of the last call that was compiled
        # Keys of calls that compute gradients.
        self._training_keys: set[Hashable] = set()
        self._latest = _Latest()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if checks_values():
            return call_checked(self._name, self, args, kwargs)
        args = (*self._bound, *args)
        args, kwargs = self._parameters.as_positional(args, kwargs)
        recent = self._latest.recent  # another thread may replace it
        if recent is not None and (match := recent.match(args, kwargs)) is not None:
            return match.result_of(recent.executable.run(match.leaves))

        call = self._parameters.bind(args, kwargs)
        check_alive(call, self._parameters)
        executable, result_of = self._get_program(call)
        return result_of_call(call, result_of(executable.run(call.leaves)))

    @property
    def method(self) -> Method | FollowingMethod | Plan:
        return self._method

    def __repr__(self) -> str:
        name, method = self._name, self._method
        if isinstance(method, Plan):
            return f"<parallelized {name} by a saved plan for {method.cluster.n_devices} devices>"
        chosen = [f for f in dataclasses.fields(method) if getattr(method, f.name) != _default(f)]
        options = ", ".join(f"{f.name}={reprlib.repr(getattr(method, f.name))}" for f in chosen)
        return f"<parallelized {name} by {type(method).__name__}({options})>"

    def __get__(self, instance: Any, owner: type | None = None) -> ParallelizedFunc:
        """As a method, the object is argument 0, as for `jax.jit`. All objects share programs."""
        return self if instance is None else self._bound_to((instance,))

    def _bound_to(self, bound: tuple[Any, ...]) -> ParallelizedFunc:
        """The same function as a method of the object in `bound`, or with () as a plain function."""
        method = object.__new__(type(self))
        method.__dict__.update(self.__dict__, _bound=bound)
        return method

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return self._parameters.bind((*self._bound, *args), kwargs)

    def __reduce__(self) -> tuple[Callable[..., ParallelizedFunc], tuple[Any, ...]]:
        """Copies and unpickled functions plan and compile for themselves."""
        if self._bound:
            return ParallelizedFunc.__get__, (self._bound_to(()), *self._bound)
        return functools.partial(type(self), **self._options), (self._wrapped, self._method)

    def get_executable(self, *args: Any, **kwargs: Any) -> Executable:
        """Plan and compile for these arguments, without running."""
        executable, _ = self._get_program(self._bind(args, kwargs))
        return executable

    def get_last_executable(self) -> Executable | None:
        """The executable of the last call; None before the first call."""
        recent = self._latest.recent
        return None if recent is None else recent.executable

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments, without compiling or running."""
        _, plan = self._plan_in_session(self._bind(args, kwargs))
        return plan

    def use_plan(self, plan: Plan | None) -> None:
        """Use `plan` for calls with its step, shapes and cluster; None forgets such plans. The method plans other
        calls.

        With the plan of its checkpoint, a restarted run needs no planning and computes equal numbers. Raises
        ShardingError if the function's method is a plan or follows another function.
        """
        if isinstance(self._method, Plan | FollowingMethod):
            raise ShardingError(
                f"{self._name} takes no other plan, because its `method` is a {type(self._method).__name__}. Call "
                "`use_plan` on a function with a method that plans, such as `method=AutoParallel()`."
            )
        if plan is None:
            self._planner.forget_given()
        else:
            self._planner.remember(plan)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """`jax.jit(step).trace` for one device, with the static arguments of this function and without a plan."""
        call = self._bind(args, kwargs)
        paths, _ = self._parameters.paths(call)
        flat_fun = on_leaves(self._fun, call, paths)

        @functools.wraps(flat_fun)
        def step(*values: Any) -> Any:
            return flat_fun(*jax.tree.leaves(values))

        types = [
            ref_type(found) if is_ref_leaf(leaf) else found
            for leaf, path in zip(call.leaves, paths, strict=True)
            for found in [leaf_type(leaf, path)]
        ]
        return jax.jit(step).trace(*jax.tree.unflatten(call.tree[0], types))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a call, with a `jax.ShapeDtypeStruct` for each leaf."""
        call = self._bind(args, kwargs)
        traced = self._trace(call)
        shapes_of_leaves = jax.tree.leaves(state_shapes(traced))
        result_of = shown(traced.out_tree)  # adds static leaves, which are not traced
        return result_of(shapes_of_leaves)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Plan the step for these arguments without compiling: minialpa's form of `jax.jit(step).lower`.

        The result has `.plan`, a `Plan`, and `.compile()`, which returns the `Executable` that the next such call runs.
        """
        self._check_plans("lower")
        call = self._bind(args, kwargs)
        session = current_session()
        followed = self._find_followed(call.key(), call, session)
        traced, plan, target = self._plan_for(call, session, followed)
        if call.key() in self._training_keys:
            followed = None

        def compile_() -> Executable:
            return compile_step(call, traced, plan, target, session)

        return Lowered(plan, lambda: self._keep_program(call, session, followed, compile_))

    def explain(self, what: str, *args: Any, **kwargs: Any) -> str:
        """A table of one choice in the plan for these arguments: the alternatives and their costs.

        what: "stages", "micro-batches" or "remat" for the whole plan, or a part of an argument's or result's path, such
            as `params['w']`. For each possible sharding of that leaf, the planner keeps stages and micro-batches, and
            solves the other shardings.
        """
        from minialpa.inter.alternatives import explain_step

        check_value("what", what, str, TraceError)
        self._check_plans("explain")
        traced, plan = self._plan_in_session(self._bind(args, kwargs))
        with phase("explaining"), collection_paused(), under_mesh(NO_MESH):
            return explain_step(traced, plan, what)

    def check(self, *args: Any, target: str | None = None, cache: str | Path | None = None, **kwargs: Any) -> PlanCheck:
        """Compare the plan with XLA's program for GPUs. See `minialpa.check`."""
        self._check_plans("check")
        traced, plan = self._plan_in_session(self._bind(args, kwargs))
        with under_mesh(NO_MESH):
            return check_plan(traced, plan, target, cache)

    def phases(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        """The step as text after each phase of planning. See `minialpa.phases`."""
        from minialpa.inter.phases import phases

        self._check_plans("phases")
        traced, plan = self._plan_in_session(self._bind(args, kwargs))
        with under_mesh(NO_MESH):
            return phases(traced, plan)

    def export_specs(self, *args: Any, mesh: int = 0, **kwargs: Any) -> tuple[Any, Any]:
        """Pytrees of PartitionSpecs: for the tuple of arguments, without static ones, and for the results.

        `in_shardings` and `out_shardings` of `jax.jit` take them, on a mesh with the plan's logical shape and the axes
        "x" and "y". In a pipeline, leaves that are not on mesh number `mesh` have None.
        """
        self._check_plans("export_specs")
        call = self._bind(args, kwargs)
        traced, plan = self._plan_in_session(call)
        specs = plan.export_specs(mesh)
        inputs = [specs.inputs.get(value.path) for value in plan.inputs]
        outputs = [specs.outputs.get(value.path) for value in plan.outputs]
        # Values of captured Refs, and new values of Refs, come last.
        return (
            jax.tree.unflatten(call.tree[0], inputs[: call.tree[0].num_leaves]),
            jax.tree.unflatten(traced.out_tree, outputs[: traced.out_tree.num_leaves]),
        )

    def preshard_dynamic_args(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments on the devices and in the shardings in which the step reads them. Compiles if necessary.

        Returns a tuple; with keyword arguments, a pair of this tuple and a dict.
        """
        call = self._bind(args, kwargs)
        check_alive(call, self._parameters)
        executable, _ = self._get_program(call)
        new_args, new_kwargs = rebuild(call, executable.place(call.leaves))
        new_args = new_args[len(self._bound) :]
        return (new_args, new_kwargs) if kwargs else new_args

    def place_batch(self, batch: Any) -> Any:
        """A batch on the devices and in the shardings in which the compiled program for its shapes reads it.

        batch: the argument that holds examples, or a tuple of such arguments.

        Returns `batch` unchanged without such a program. Leaves that the step cuts into micro-batches become
        `MicroBatchedArray`s, which `np.asarray` reads. Raises TraceError for a wrong number of arguments.
        """
        recent = self._latest.recent
        # A loader's thread may come here between two sessions, and must not start one.
        session = running_session()
        if recent is None or recent.session is not session:
            return batch
        numbers = self._batch_numbers(recent.executable.get_parallel_plan())
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
        known = sorted(list(self._executables.items()), key=lambda item: item[1][0] is not recent.executable)
        for (key, *where), (executable, _) in known:
            positions = self._parameters.positions_in_call(key, values)
            if positions is None or where[:3] != [session.devices, session.cluster, session.runtime]:
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
        """The numbers of the arguments that hold examples; empty if one has no name."""
        if self._parameters.batch != "auto":
            return self._parameters.batch
        numbers = tuple(self._parameters.number(name) for name in plan.batch)
        # Extra arguments in `*args` have no names.
        return numbers if min(numbers, default=-1) >= 0 else ()

    # ---- calls ----------------------------------------------------------------------------------------------------

    def _get_program(self, call: Call) -> Compiled:
        """The program for a call, which becomes the last call."""
        session = current_session()
        n_training_steps = len(session.training_steps)
        executable, result_of = self._find_program(call, session)
        self._latest.recent = LastCall(
            session=session,
            n_training_steps=n_training_steps,
            executable=executable,
            pattern=pattern_of(call, executable.out_tree),
        )
        return executable, result_of

    @_without_mesh
    def _find_program(self, call: Call, session: Session) -> Compiled:
        key = call.key()
        followed = self._find_followed(key, call, session)
        where = (session.devices, session.cluster, session.runtime, followed and followed.meshes)
        found = self._executables.get((key, *where))
        if found is None:
            found = self._keep_program(call, session, followed, lambda: self._compile(call, session, followed))
        if key in self._training_keys:
            note_training_step(session, self._name, found[0], self.target(session))
        return found

    @_without_mesh
    def _keep_program(
        self, call: Call, session: Session, followed: Followed | None, compile_: Callable[[], Executable]
    ) -> Compiled:
        """A known program, or else the result of `compile_`."""
        key, where = call.key(), (session.devices, session.cluster, session.runtime)
        with self._compiling:  # threads that make the first call at the same time compile once
            found = self._executables.get((key, *where, followed and followed.meshes))
            if found is None:
                executable = compile_()
                executable.name = function_name(self._fun)
                found = executable, shown(executable.out_tree)
                executable.call = CompiledCall(
                    name=self._name, parameters=self._parameters, bound=self._bound, key=key, result_of=found[1]
                )
                # Only tracing shows whether this is a training step, which follows no other step.
                meshes = None if followed is None or key in self._training_keys else followed.meshes
                self._executables[key, *where, meshes] = found
                self._earlier_types = self._parameters.leaf_types(call)
            return found

    def _find_followed(self, key: Hashable, call: Call, session: Session) -> Followed | None:
        """A step to follow; None for a training step."""
        if not session.training_steps or key in self._training_keys:
            return None
        return find_followed(session, self._method, call.leaves)

    @property
    def _name(self) -> str:
        return self.__dict__.get("__qualname__") or repr(self._fun)

    def _compile(self, call: Call, session: Session, followed: Followed | None) -> Executable:
        config: Any = jax.config  # which does not declare its flags
        if config.jax_disable_jit:
            raise TraceError(
                f"`jax_disable_jit` is on, and {self._name} runs as compiled programs. Turn it off, or call the plain "
                "function to go through it step by step."
            )
        if not isinstance(self._method, CreateStateParallel):
            traced, plan, target = self._plan_for(call, session, followed)
            return compile_step(call, traced, plan, target, session)

        if self._parameters.donate not in ("auto", ()):
            raise ShardingError(
                f"{self._name} creates a state (its `method` is `CreateStateParallel`), so it keeps its arguments, "
                "which are on every mesh. Leave `donate_argnums` and `donate_argnames` out."
            )
        if any(given is not None and not _is_auto(given) for given in self._shardings):
            raise ShardingError(
                f"{self._name} creates a state (its `method` is `CreateStateParallel`) in the shardings of its "
                "training step. Leave `in_shardings` and `out_shardings` out, or pass None for both if the function is "
                "jitted."
            )
        traced = self._trace(call)
        with under_mesh(call.mesh):
            train_step = self._method.train_step.get_executable(state_shapes(traced), *self._method.other_args)
        return compile_creation(call, traced, train_step, self.target(session), session)

    # ---- planning -------------------------------------------------------------------------------------------------

    def target(self, session: Session | None = None) -> Target:
        """The devices to plan for and to run on."""
        method = self._method
        if isinstance(method, CreateStateParallel):
            return method.train_step.target(session)
        if isinstance(method, FollowParallel):
            return method.src_func.target(session)
        return Target(method.cluster) if isinstance(method, Plan) else resolve_devices(method.devices, session)

    def _check_plans(self, what: str) -> None:
        """Raise ShardingError if this function creates a state, and so has no plan of its own."""
        if isinstance(self._method, CreateStateParallel):
            raise ShardingError(
                f"{self._name} creates a state (its `method` is `CreateStateParallel`), so it has no plan of its own. "
                f"Call `train_step.{what}` of its training step instead."
            )

    @_without_mesh
    def _plan_for(
        self, call: Call, session: Session | None = None, followed: Followed | None = None
    ) -> tuple[TracedStep, Plan, Target]:
        """The traced step and its plan. If no plan fits, the optimizer's state moves to host memory."""
        traced = self._trace(call)
        try:
            return traced, *self._plan_traced(call, traced, session, followed)
        except InfeasibleError as error:
            failure = error

        may_move = isinstance(self._method, Method) and not self._planner.offloads_optimizer and not is_uneven(failure)
        has_host = self.target(session).cluster.device.host_bytes is not None
        hosted = with_state_in_host(traced) if may_move and has_host else traced
        if hosted is traced:
            raise failure
        try:
            with self._planner.offload_optimizer():
                plan, target = self._plan_traced(call, hosted, session, followed)
        except MinialpaError:
            failure.add_note("The state of the optimizer in host memory (`offload_optimizer`) would not help.")
            raise failure from None
        n_bytes = max(stage.host_bytes for stage in plan.stages)
        warn(
            f"{self._name} fits in the memory of the devices only with the state of its optimizer in host memory "
            f"({bytes_text(n_bytes)} for each device), so the state stays there between steps. To plan so from the "
            "start, pass `AutoShardingOption(offload_optimizer=True)`."
        )
        return hosted, plan, target

    def _plan_traced(
        self, call: Call, traced: TracedStep, session: Session | None, followed: Followed | None
    ) -> tuple[Plan, Target]:
        """A plan from `use_plan` comes first. Otherwise, a call without gradients runs on the meshes of `followed`, if
        possible; else the method decides.
        """
        target = self.target(session)
        pins = self._pins(call, traced)
        if computes_gradients(traced):
            self._training_keys.add(call.key())
            followed = None
        if followed is None or pins != NO_PINS or self._planner.is_given(traced, target):
            return self._plan_with_pins(call, traced, target, pins), target

        try:
            plan = self._planner.plan_followed(traced, followed, call.leaves)
        except (InfeasibleError, ShardingError) as error:
            plan = self._plan_by_method(traced, target)
            warn(refusal(self._name, followed, plan, error))
            return plan, target
        return (self._plan_by_method(traced, target), target) if plan is None else (plan, followed.target)

    def _plan_with_pins(self, call: Call, traced: TracedStep, target: Target, pins: Pins) -> Plan:
        """The plan with shardings that may be left out: of `jax.jit`, of types on Explicit axes, and of arrays on the
        user's mesh.
        """
        if self._are_pins_of_jit and pins != NO_PINS:
            plan, error = self._plan_with_wishes(traced, target, pins)
            if error is not None:
                warn(f"The shardings of `jax.jit` around {self._name} have no effect. {error}")
            return plan
        if pins != NO_PINS or self._options["shardings"] == "ignore":
            return self._plan_by_method(traced, target, pins)

        return self._plan_with_wishes(traced, target, border_pins(call, traced))[0]

    def _plan_with_wishes(
        self, traced: TracedStep, target: Target, pins: Pins
    ) -> tuple[Plan, InfeasibleError | ShardingError | None]:
        """The plan with pins, or else without, and the reason."""
        try:
            return self._plan_by_method(traced, target, pins), None
        except (InfeasibleError, ShardingError) as error:
            if pins == NO_PINS:
                raise
            return self._plan_by_method(traced, target), error

    def _plan_in_session(self, call: Call) -> tuple[TracedStep, Plan]:
        """The traced step, and the plan by which a call would run in the present session, if any."""
        session = running_session()
        followed = None if session is None else self._find_followed(call.key(), call, session)
        traced, plan, _ = self._plan_for(call, followed=followed)
        return traced, plan

    def _pins(self, call: Call, traced: TracedStep) -> Pins:
        return find_pins(call, traced, *self._shardings, finds_static=self._finds_static)

    def _plan_by_method(self, traced: TracedStep, target: Target, pins: Pins = NO_PINS) -> Plan:
        with self._explained(traced):
            plan = self._planner.plan(traced, target, is_first=self._earlier_types is None, pins=pins)
        pins.check(plan)
        return plan

    @contextmanager
    def _explained(self, traced: TracedStep) -> Iterator[None]:
        """Errors about examples name the arguments that hold them. Errors have public types."""
        try:
            yield
        except (TraceError, InfeasibleError) as error:
            if self._parameters.batch == "auto" and traced.batch_arguments and "example" in str(error):
                names = ", ".join(f"`{name}`" for name in traced.batch_arguments)
                error.add_note(f"The examples were taken to be in {names}. Otherwise, give `batch_argnums`.")
            if type(error) in (TraceError, InfeasibleError):
                raise
            public = InfeasibleError(str(error)) if isinstance(error, InfeasibleError) else TraceError(str(error))
            for note in getattr(error, "__notes__", ()):
                public.add_note(note)
            raise public from error

    @_without_mesh
    def _trace(self, call: Call) -> TracedStep:
        """With recognised attentions, and optimizer state in host memory, as the method asks."""
        with phase("tracing", ticks=False):
            traced = self._traced_as_written(call)
            attention = attention_of(self._method)
            with collection_paused():
                if attention != "written":
                    traced = recognise(traced, everywhere=attention == "fused")
                return with_state_in_host(traced) if self._planner.offloads_optimizer else traced

    def _warn_of_object(self, call: Call) -> None:
        """Warn that the program keeps the present attributes of `self`, unless `self` is static."""
        owner = next((value for name, value in call.static if name == 0), None) if self._bound else None
        has_state = bool(getattr(type(owner), "__dictoffset__", 0)) and bool(vars(owner))
        is_auto = self._finds_static and not isinstance(owner, type)
        if has_state and is_auto and type(owner).__hash__ is object.__hash__:
            warn(
                f"`{self._name}` is called on a {type(owner).__name__}, and its program keeps the attributes that the "
                "object has now: a later change has no effect. Pass what changes as an argument, or register the class "
                "as a pytree. If the attributes never change, pass `static_argnums=0`.",
            )

    def _traced_as_written(self, call: Call) -> TracedStep:
        """The traced step with examples and state, before attentions are recognised."""
        tree, names = call.tree
        values = jax.tree.unflatten(tree, call.leaves)
        paths, numbers = self._parameters.paths(call)
        self._warn_of_object(call)

        known = self._parameters
        for name, value in zip(names, values, strict=True):
            check_no_graph(value, f"Argument `{known.label(name)}`")
        state_like = self._state_like(call, names, values)
        try:
            with collection_paused(), bare_specs_over(axis_names_of(self._method)):
                traced = trace_step(
                    on_leaves(self._fun, call, paths),
                    [*map(on_device, call.leaves)] if self._planner.offloads_optimizer else call.leaves,
                    in_paths=paths,
                    is_batch=[known.batch != "auto" and number in known.batch for number in numbers],
                    arg_of_leaf=numbers,
                    donate="auto" if known.batch == "auto" else known.donate,
                    state_like=state_like,
                    in_tree=tree,
                )
        except (MinialpaError, jax.errors.UnexpectedTracerError):
            raise
        except Exception as error:
            # jax refuses shapes by these errors. Other errors are the step's own.
            if known.batch == "auto" and set(numbers) == {0, 1} and isinstance(error, TypeError | ValueError):
                _explain_sizes(call.leaves, paths, [number == 1 for number in numbers], error)
            self._explain_mismatch(call, error)
            raise
        check_registered_rules(traced.flat.eqns, on_default_device=not has_workers())
        if known.batch != "auto":
            return traced

        # The program shows which arguments the step updates, and how the others reach the loss.
        found = find_batch(traced, numbers, () if known.donate == "auto" else known.donate)
        if isinstance(found, NoBatch):
            traced, found = dataclasses.replace(traced, no_batch=found), ()
        return with_batch(traced, found, arg_of_leaf=numbers, donate=known.donate, state_like=state_like)

    def _state_like(self, call: Call, names: Sequence[int | str], values: Sequence[Any]) -> list[int]:
        modules = () if call.graph is None else call.graph.names
        is_state = [name in modules or is_train_state(value) for name, value in zip(names, values, strict=True)]
        return [self._parameters.number(name) for name, found in zip(names, is_state, strict=True) if found]

    def _explain_mismatch(self, call: Call, error: Exception) -> None:
        """Raise TraceError if the types of leaves differ from the last compiled call."""
        now, earlier = self._parameters.leaf_types(call), self._earlier_types
        if earlier is None or now == earlier:
            return
        changes = [
            f"`{path}`: {now.get(path, 'not there')}; earlier {earlier.get(path, 'not there')}"
            for path in {**earlier, **now}
            if now.get(path) != earlier.get(path)
        ]
        rest = f"\n  and {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
        listed = "\n  ".join(changes[:_MOST_CHANGES])
        raise TraceError(
            f"The step fails with {error!r} on arguments that differ from an earlier call. Pass arguments as before, "
            f"or change the step so that it takes both.\n  {listed}{rest}"
        ) from error


def _check_function(fun: Any) -> None:
    if isinstance(fun, staticmethod | classmethod):
        kind = type(fun).__name__
        raise TraceError(f"`parallelize` takes no {kind}. Write `@{kind}` above `@minialpa.parallelize`.")
    if not callable(fun):
        raise TraceError(
            f"Pass a function as the first argument of `parallelize`, and options by name, such as `method=...`; got a "
            f"{type(fun).__name__}."
        )


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _default(option: dataclasses.Field[Any]) -> Any:
    return option.default if option.default_factory is dataclasses.MISSING else option.default_factory()


def _explain_sizes(leaves: Sequence[Any], paths: Sequence[str], is_batch: Sequence[bool], error: Exception) -> None:
    """Raise TraceError if arguments hold different numbers of examples, which likely caused `error`."""
    try:
        find_batch_dims([leaf_type(leaf, path) for leaf, path in zip(leaves, paths, strict=True)], paths, is_batch)
    except TraceError as reason:
        raise reason from error
