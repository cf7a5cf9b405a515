"""Functions that run where a training step keeps its state, although their method does not name that step.

After `train_step` has put `state` on two meshes, `evaluate(state, batch)` with `AutoParallel()` is planned there.
Training steps follow only their own method.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minialpa.methods import FollowingMethod, Method, Target, options_to_follow
from minialpa.options import PlanOptions
from minialpa.plan import PlacedValue, Plan
from minialpa.session import Session
from minialpa.tracing.trace import TracedStep

if TYPE_CHECKING:
    from minialpa.runtime.executable import Executable


@dataclass(frozen=True, slots=True)
class TrainingStep:
    name: str
    executable: Callable[[], Executable | None]
    target: Target


@dataclass(frozen=True, slots=True)
class Followed:
    """A training step whose meshes hold arguments of a call.

    Attributes:
        options: the options of the call's own method that the followed plan leaves open.
    """

    name: str
    executable: Executable
    target: Target
    options: PlanOptions

    @property
    def plan(self) -> Plan:
        return self.executable.get_parallel_plan()

    @property
    def meshes(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(first device, logical shape) of each stage."""
        return tuple((stage.first_device, stage.logical_shape) for stage in self.plan.stages)

    def placements(self, traced: TracedStep, leaves: Sequence[Any]) -> dict[int, PlacedValue]:
        """The placements of argument leaves on these meshes, by number. Batches that are cut have no placement."""
        is_cut = self.options.n_micro_batches > 1
        found = {
            i: self.executable.placement_of(leaf, path)
            for i, (leaf, path, dim) in enumerate(
                zip((*leaves, *traced.refs.captured), traced.in_paths, traced.batch_dims, strict=True)
            )
            if dim is None or not is_cut
        }
        return {i: value for i, value in found.items() if value is not None}


def computes_gradients(traced: TracedStep) -> bool:
    return bool(traced.gradients) or any(origin.direction == "backward" for origin in traced.origins)


def note_training_step(session: Session, name: str, executable: Executable, target: Target) -> None:
    known = session.training_steps
    if not any(step.executable() is executable for step in known):
        known.append(TrainingStep(name, weakref.ref(executable), target))


def find_followed(session: Session, method: Method | FollowingMethod | Plan, leaves: Sequence[Any]) -> Followed | None:
    """The training step whose meshes hold most of these leaves; of several, the latest.

    None if no mesh holds a leaf, or if `method` asks for devices, stages or shardings or has a plan.
    """
    if not session.training_steps or isinstance(method, FollowingMethod | Plan):
        return None

    best, n_best = None, 0
    for step in reversed(session.training_steps):
        executable = step.executable()
        if executable is None:
            continue
        options = options_to_follow(method, len(executable.get_parallel_plan().stages))
        n_there = 0 if options is None else sum(executable.placement_of(leaf, "") is not None for leaf in leaves)
        if options is not None and n_there > n_best:
            best, n_best = Followed(step.name, executable, step.target, options), n_there
    return best


def refusal(name: str, followed: Followed, own: Plan, error: Exception) -> str:
    """The warning for a function that cannot run on the meshes of `followed`, and has the plan `own`."""
    has_other_meshes = {(stage.first_device, stage.n_devices) for stage in own.stages} != {
        (stage.first_device, stage.n_devices) for stage in followed.plan.stages
    }
    cost = "each call moves the arguments that have other shardings or meshes"
    if has_other_meshes:
        cost += "; on a cluster, each switch between the two also restarts workers, which takes seconds"
    return (
        f"`{name}` has arguments where `{followed.name}` keeps its state, and cannot be planned there: {error} It has "
        f"a plan of its own, so {cost}."
    )
