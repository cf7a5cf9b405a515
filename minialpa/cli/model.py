"""MODEL of the command line in, a training step and its arguments out.

MODEL is a name of `minialpa.models`, or `FILE.py:FUNCTION` or `MODULE:FUNCTION` with code of the user. All errors of
this code become MinialpaErrors.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from minialpa.cli.arguments import CONTRACT
from minialpa.errors import MinialpaError, meant

if TYPE_CHECKING:
    from minialpa.api.parallelized import ParallelizedFunc
    from minialpa.plan import Plan


@dataclass(frozen=True, slots=True)
class NamedStep:
    """A step for one device. name: as on the command line."""

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]


def load_step(args: argparse.Namespace, planned_batch: int | None = None) -> NamedStep:
    """By the options of `add_model`, and `sequence`, the positions of an example, if present. Raises MinialpaError.

    planned_batch: of a saved plan, for functions that take a batch size.
    """
    from minialpa.support.progress import phase

    name, batch = args.model, _Batch(args.batch, planned_batch, getattr(args, "sequence", None))
    with phase("loading the model", ticks=False):
        if ":" in name:
            return _users_step(name, args.args, batch)
        if args.args is not None:
            raise MinialpaError(f"--args names arguments of a step of yours, and `{name}` is no `FILE.py:FUNCTION`.")
        return _corpus_step(name, batch)


def on_cpu() -> None:
    """Planning needs no device, and GPUs may be busy or absent."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def parallel_step(args: argparse.Namespace, model: NamedStep, method: Any) -> ParallelizedFunc:
    import minialpa

    made: ParallelizedFunc = minialpa.parallelize(
        model.step, method=method, on_ragged="error", plan_cache=None, planning_effort=args.effort
    )
    return made


def check_examples(args: argparse.Namespace, plan: Plan) -> None:
    """Raise MinialpaError for another size than on the command line."""
    if args.batch is not None and plan.n_examples not in (args.batch, None):
        raise MinialpaError(
            f"`{args.model}` was called with `batch_size={args.batch}`, and its batch has {plan.n_examples} examples. "
            "Make the batch with `batch_size` examples along dimension 0, or leave out `--batch`."
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """Numbers of examples, from the command line and a saved plan, and positions of an example."""

    asked: int | None
    planned: int | None
    sequence: int | None = None

    @property
    def size(self) -> int | None:
        return self.asked or self.planned


def _corpus_step(name: str, batch: _Batch) -> NamedStep:
    import jax

    import minialpa
    from minialpa import models

    known = {one.lower(): one for one in (*models.MODELS, *models.SIZES)}
    found = known.get(name.lower())
    if found is None:
        file = Path(name.removesuffix(".py") + ".py")
        yours = f" Name a function of {file}, as in `{file}:FUNCTION`. {CONTRACT}" if file.is_file() else ""
        raise MinialpaError(
            f"There is no model `{name}`.{yours or meant(name, known.values())} `minialpa --models` lists all models."
        )
    case = models.build(found)
    state = jax.eval_shape(case.init, jax.eval_shape(jax.random.key, 0))  # a real key would start a device
    n = batch.size or case.batch_size
    # A full batch may need gigabytes.
    examples = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape[1:]), leaf.dtype), case.make_batch(0, 1))
    return NamedStep(name, case.train_step(minialpa.value_and_grad), (state, examples))


# ---- code of the user ------------------------------------------------------------------------------------------------


def _users_step(name: str, arguments: str | None, batch: _Batch) -> NamedStep:
    import minialpa

    place, _, path = name.rpartition(":")
    with _own_arguments(place):
        module = _import_module(name, place, path)
        found = _attribute(module, place, path)
        if not callable(found):
            raise MinialpaError(f"`{name}` is a {type(found).__name__}, not a function. {CONTRACT}")
        if arguments is None:
            step, args = _returned_step(name, found, batch)
        else:
            step, args = found, _named_arguments(module, place, arguments.split(","), batch)

        plain = _plain(step)
        with users_code(f"The step of `{name}`"):
            minialpa.parallelize(plain).trace(*args)
    _check_batch(name, args, batch)
    return NamedStep(name, plain, args)


@contextmanager
def _own_arguments(place: str) -> Iterator[None]:
    """This command's arguments are not for the user's script."""
    argv, sys.argv = sys.argv, [place]
    try:
        yield
    finally:
        sys.argv = argv


def _returned_step(name: str, make: Callable[..., Any], batch: _Batch) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if _is_parallelized(make):
        raise MinialpaError(f"`{name}` is a training step. Name its arguments, as in `--args state,batch`.")
    if batch.asked is not None and not _takes_batch_size(name, make):
        raise MinialpaError(
            f"`{name}` has no parameter `batch_size`. Add this parameter to the function, or leave out `--batch`."
        )
    if batch.sequence is not None and not _sequence_parameter(name, make):
        raise MinialpaError(
            f"`{name}` has no parameter `seq_len`. Add this parameter to the function, or leave out `--sequence`."
        )
    returned = _call(name, make, batch)
    if not isinstance(returned, tuple | list) or len(returned) < 2 or not callable(returned[0]):
        kind = type(returned).__name__
        if isinstance(returned, tuple | list):
            kind = f"({', '.join(type(value).__name__ for value in returned)})"
        raise MinialpaError(f"`{name}` returned {kind}, and it must return the step and its arguments. {CONTRACT}")
    step, *args = returned
    return step, _spread(step, args)


def _named_arguments(module: ModuleType, place: str, names: list[str], batch: _Batch) -> tuple[Any, ...]:
    values, sized = [], False
    for name in names:
        value, label = _attribute(module, place, name.strip()), f"{place}:{name.strip()}"
        # Modules of equinox, which are arguments, can be called too.
        if callable(value) and (isinstance(value, functools.partial) or inspect.isroutine(inspect.unwrap(value))):
            function = _plain(value)
            sized = sized or _takes_batch_size(label, function)
            value = _call(label, function, batch)
        values.append(value)
    if batch.asked is not None and not sized:
        raise MinialpaError(
            f"No function in `--args {','.join(names)}` has a parameter `batch_size`. Name a function that returns "
            "the batch and has this parameter, or leave out `--batch`."
        )
    return tuple(values[0]) if len(values) == 1 and type(values[0]) in (tuple, list) else tuple(values)


def _spread(step: Callable[..., Any], args: list[Any]) -> tuple[Any, ...]:
    """`[(state, batch)]` -> `(state, batch)`. A list is one argument if the step takes only one."""
    if len(args) != 1 or type(args[0]) not in (tuple, list):
        return tuple(args)
    if type(args[0]) is list:
        try:
            inspect.signature(step).bind(args[0])
            return tuple(args)
        except (TypeError, ValueError):
            pass
    return tuple(args[0])


def _is_parallelized(value: Any) -> bool:
    from minialpa.api.parallelized import ParallelizedFunc

    return isinstance(value, ParallelizedFunc)


def _plain(step: Any) -> Callable[..., Any]:
    if not _is_parallelized(step):
        return cast(Callable[..., Any], step)
    return functools.partial(step.__wrapped__, *step._bound) if step._bound else step.__wrapped__


def _takes_batch_size(name: str, function: Callable[..., Any]) -> bool:
    with users_code(f"`{name}`"):
        parameters = inspect.signature(function).parameters.values()
    return any(p.name == "batch_size" or p.kind is p.VAR_KEYWORD for p in parameters)


def _sequence_parameter(name: str, function: Callable[..., Any]) -> str:
    """For positions; empty without such a parameter."""
    with users_code(f"`{name}`"):
        parameters = inspect.signature(function).parameters
    return next((one for one in ("seq_len", "sequence") if one in parameters), "")


def _call(name: str, function: Callable[..., Any], batch: _Batch) -> Any:
    """Raises MinialpaError if the function needs other arguments."""
    takes = _takes_batch_size(name, function)
    position = _sequence_parameter(name, function)
    options = {"batch_size": batch.size} if takes and batch.size is not None else {}
    options |= {position: batch.sequence} if position and batch.sequence is not None else {}
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if not set(needed) <= {"batch_size", *options}:
        raise MinialpaError(
            f"`{name}` is called without arguments, except `batch_size`, and it needs {', '.join(needed)}. "
            "Give each a default value. If this is the training step itself, name its arguments: `--args state,batch`."
        )
    if not set(needed) <= set(options):
        raise MinialpaError(f"`{name}` needs a batch size. Give one with `--batch`.")
    with users_code(f"`{name}`"):
        return function(**options)


def _check_batch(name: str, args: tuple[Any, ...], batch: _Batch) -> None:
    """Raise MinialpaError if a function took the batch size of the command line and did not use it."""
    import jax

    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(args)]
    if batch.asked is not None and not any(batch.asked in shape for shape in shapes):
        raise MinialpaError(
            f"`{name}` was called with `batch_size={batch.asked}`, and no argument of its step has a dimension of this "
            "size. Make the batch with `batch_size` examples, or leave out `--batch`."
        )


def _import_module(name: str, place: str, path: str) -> ModuleType:
    """A file, or a dotted name in the current folder or among the installed ones."""
    if not place or not path:
        raise MinialpaError(f"`{name}` is no `FILE.py:FUNCTION` or `MODULE:FUNCTION`. {CONTRACT}")
    if place.endswith(".py") or os.sep in place:
        return _import_file(place)

    sys.path.insert(0, os.getcwd())
    try:
        with users_code(f"Importing `{place}`"):
            return importlib.import_module(place)
    except MinialpaError as error:
        missing = getattr(error.__cause__, "name", None) if isinstance(error.__cause__, ModuleNotFoundError) else None
        if missing is None or not f"{place}.".startswith(f"{missing}."):
            raise  # the missing module is one that `place` imports
        raise MinialpaError(
            f"There is no module `{place}` in this folder or among the installed ones. Start minialpa in the folder "
            f"of `{place}`, or name its file, as in `FOLDER/{place.rpartition('.')[2]}.py:{path}`."
        ) from error


def _import_file(place: str) -> ModuleType:
    """Its folder is first on the path, as in `python FILE.py`. Its `__name__` is its stem."""
    file = Path(place).resolve()
    if not file.is_file():
        near = meant(file.name, [one.name for one in file.parent.glob("*.py")])
        raise MinialpaError(f"There is no file `{place}`.{near}")
    known = sys.modules.get(file.stem)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known

    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise MinialpaError(f"`{place}` is no Python file. Name a file that ends in `.py`.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    sys.modules.setdefault(file.stem, module)  # dataclasses look their module up; an installed module stays
    try:
        with users_code(f"Importing `{place}`"):
            spec.loader.exec_module(module)
    except MinialpaError:
        if sys.modules.get(file.stem) is module:
            del sys.modules[file.stem]
        raise
    return module


def _attribute(module: ModuleType, place: str, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        with users_code(f"`{place}:{path}`"):
            names = dir(found)
            has = hasattr(found, part)
        if not has:
            near = meant(part, [one for one in names if not one.startswith("_")])
            raise MinialpaError(f"`{place}` has no `{path}`.{near or ' Name a function of it after the colon.'}")
        found = getattr(found, part)
    return found


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Raise its errors as MinialpaErrors that name the last line outside of libraries."""
    try:
        yield
    except MinialpaError:
        raise
    except (Exception, SystemExit) as error:
        libraries = (str(Path(__file__).parents[1]), sys.base_prefix, "<")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]
        user_frames = [f for f in frames if "site-packages" not in f.filename]
        place = f" at {user_frames[-1].filename}:{user_frames[-1].lineno}" if user_frames else ""
        if isinstance(error, SyntaxError):
            place = f" at {error.filename}:{error.lineno}"
        text = " ".join(str(error).partition("\n\n")[0].split())
        raise MinialpaError(f"{what} failed{place} with {type(error).__name__}{f': {text}' * bool(text)}") from error
