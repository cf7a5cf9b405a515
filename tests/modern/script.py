"""Training scripts as their authors run them on eight devices, and with the lines that change for minialpa."""

from __future__ import annotations

import contextlib
import difflib
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx

import minialpa

_FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in _FOLDER.glob("*.py") if "\nCHANGES = " in path.read_text())


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a script trains: `step(*in_place, *state, *batch)` returns the new state and metrics.

    in_place: leading arguments that the step does not return: constants, and modules and Refs that it changes.
    captured: Refs that the step reads and changes as part of its closure.
    context: entered around the training loop.
    state_comes: the place of the new state among the results.
    evaluate: a function of the last state and of the last batch, called as the step is.
    """

    step: Callable[..., Any]
    batches: Sequence[tuple[Any, ...]]
    in_place: tuple[Any, ...] = ()
    state: tuple[Any, ...] = ()
    captured: Any = ()
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    state_comes: Literal["first", "last"] = "first"
    evaluate: Callable[..., Any] | None = None


def changed_lines(name: str) -> int:
    """Lines that differ under minialpa, including its import."""
    before, after = _text(name, {}), _text(name, _changes(name))
    added = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line.startswith("+ ")]
    return len(added) + 1


def as_written(name: str) -> Script:
    return _run(name, _text(name, {}), {})


def under_minialpa(name: str, method: Any) -> Script:
    return _run(name, _text(name, _changes(name)), {"minialpa": minialpa, "method": method})


def train(script: Script, evaluate: bool = True) -> tuple[list[Any], list[Any], list[Any]]:
    """The metrics of all steps, and the arrays of the last state and of its evaluation."""
    state, metrics = script.state, []
    with script.context():
        for batch in script.batches:
            out = script.step(*script.in_place, *state, *batch)
            n = len(state)
            if n == 0:
                of_step = out
            elif script.state_comes == "first":
                state, of_step = out[:n], out[n:]
            else:
                of_step, state = out[:-n], out[-n:]
            metrics.append(_values(of_step))
        arguments = (*script.in_place, *state, *script.batches[-1])
        evaluated = script.evaluate(*arguments) if script.evaluate and evaluate else ()
        return metrics, _values((script.in_place, state, script.captured)), _values(evaluated)


def _text(name: str, changes: dict[str, str]) -> str:
    text = (_FOLDER / f"{name}.py").read_text().partition("\nCHANGES = ")[0]
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(f"{name}.py has {old!r} {text.count(old)} times, not once.")
        text = text.replace(old, new)
    return text


def _changes(name: str) -> dict[str, str]:
    text = (_FOLDER / f"{name}.py").read_text().partition("\nCHANGES = ")[2]
    changes: dict[str, str] = eval(text)
    return changes


def _run(name: str, text: str, names: dict[str, Any]) -> Script:
    module = types.ModuleType(f"tests.modern.{name}")
    module.__dict__.update(names)
    sys.modules[module.__name__] = module  # dataclasses look for their module
    exec(compile(text, str(_FOLDER / f"{name}.py"), "exec"), module.__dict__)
    script: Script = module.make()
    return script


def _values(tree: Any) -> list[Any]:
    """The arrays of a pytree, of modules and of Refs."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    flat = [leaf for x in leaves for leaf in (jax.tree.leaves(nnx.state(x)) if isinstance(x, nnx.Pytree) else [x])]
    arrays = (jax.Array, minialpa.arrays.RemoteArray)
    return [x[...] if isinstance(x, jax.Ref) else x for x in flat if isinstance(x, (jax.Ref, *arrays))]
