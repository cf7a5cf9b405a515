"""Checkpoints in a folder: a state goes in; the state, in the shardings of a target, comes out.

orbax handles files, atomic commits and asynchronous writing. Each saved step is a sub-folder with these items:

    state      the pytree, each leaf as one array with the user's shape; orbax alone can restore it
    plan       plan.json, if given; `Plan.load` reads it
    data       state.json, the state of the data iterator, if given
    numbers    metrics.json, if given; orbax's own item `metrics` serves only `best_fn`
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from minialpa.checkpoints.folder_lock import lock
from minialpa.errors import CheckpointError, MinialpaError
from minialpa.field_types import check_value
from minialpa.plan import Plan
from minialpa.pytrees import hide_static, show_static
from minialpa.support.private_jax import api_boundaries, api_boundary
from minialpa.support.progress import phase

#: Checkpoints move here, atomically, before their deletion: a killed process leaves no incomplete step that looks
#: complete.
_DELETED = ".deleted"
#: Texts of tensorstore and XLA for errors of systems and devices.
_SYSTEM = re.compile("os_error_code='(?!2')|RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAVAILABLE|DEADLINE_EXCEEDED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The result of `CheckpointManager.restore`.

    Attributes:
        state: the pytree, in the structure and the shardings of the target.
        data: the state of the data iterator, or None.
        metrics: the saved metrics, or None.
    """

    step: int
    state: Any
    data: Any
    metrics: Mapping[str, float] | None


@api_boundaries
class CheckpointManager:
    """The checkpoints of a training run in one folder, with the names of `orbax.checkpoint.CheckpointManager`.

        with CheckpointManager("run", max_to_keep=3) as manager:
            manager.save(100, state)
            state = manager.restore(like=step.get_last_executable()).state

    `save` returns when the state is in the memory of the hosts; threads write the files. A checkpoint appears when it
    is complete, so an interrupted process leaves older checkpoints intact. `close` completes the last one.

    One manager at a time saves to a folder: until `close`, it locks the file `.minialpa-lock` there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = None,
        save_interval_steps: int = 1,
        keep_period: int | None = None,
        best_fn: Callable[[Any], float] | None = None,
        best_mode: Literal["max", "min"] = "max",
        read_only: bool = False,
    ) -> None:
        """Make the folder if necessary, and remove incomplete checkpoints of an interrupted process.

        directory: a path, or an address such as gs://bucket/folder.
        max_to_keep: checkpoints that stay; None for all.
        save_interval_steps: `save` skips steps that are no multiple of this.
        keep_period: multiples of this step stay, too.
        best_fn: from metrics to a number. The best checkpoints stay, instead of the last. NaN is worst.
        best_mode: whether the largest or the smallest number is best.
        read_only: change no file. The folder must exist.

        Raises CheckpointError if another manager saves to the folder, or if a number is not a positive integer.
        """
        ocp = _orbax()
        from minialpa.checkpoints.paths import LiteralPath, UnfinishedCheckpoint
        from minialpa.checkpoints.remote_handler import BytesRead, state_handler

        self._directory, self._read_only = _absolute_path(directory), read_only
        if read_only and "://" not in self._directory and not Path(self._directory).is_dir():
            raise CheckpointError(f"There is no folder `{directory}`. Pass the folder that checkpoints were saved to.")
        _check_counts(save_interval_steps=save_interval_steps, max_to_keep=max_to_keep, keep_period=keep_period)
        check_value("best_mode", best_mode, Literal["max", "min"], CheckpointError)
        check_value("read_only", read_only, bool, CheckpointError)
        check_value("best_fn", best_fn, Callable[[Any], float] | None, CheckpointError)
        worst = math.inf if best_mode == "min" else -math.inf
        self._is_closed = False
        self._n_bytes_to_write, self._read = 0, BytesRead()
        self._best_fn = None if best_fn is None else _number_of(best_fn, worst)
        number = None
        with _errors_of_orbax(f"Opening the checkpoints in `{directory}`"):
            if not read_only and "://" not in self._directory:
                self._folder_of_deleted()  # raises before the folder changes
                Path(self._directory).mkdir(parents=True, exist_ok=True)
                number = lock(Path(self._directory))
            self._orbax = ocp.CheckpointManager(
                self._directory if "://" in self._directory else LiteralPath(self._directory),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=max_to_keep,
                    save_interval_steps=save_interval_steps,
                    keep_period=keep_period,
                    best_fn=self._best_fn,
                    best_mode=best_mode,
                    # orbax's own `read_only` logs three warnings each time.
                    create=not read_only,
                    save_root_metadata=not read_only,
                    todelete_subdir=_DELETED,
                    temporary_path_class=UnfinishedCheckpoint,
                    # At an address, files cannot be moved aside at once.
                    cleanup_tmp_directories=not read_only and "://" in self._directory,
                    enable_async_checkpointing=not read_only,
                ),
                item_handlers={
                    "state": state_handler(self._read),
                    "plan": ocp.JsonCheckpointHandler(filename="plan.json"),
                    "data": ocp.JsonCheckpointHandler(filename="state.json"),
                    "numbers": ocp.JsonCheckpointHandler(filename="metrics.json"),
                },
            )
        # Threads that still write keep orbax's manager alive, and so the folder locked.
        self._unlock = weakref.finalize(self._orbax, os.close, number) if number is not None else None

        if not read_only:
            self._move_unfinished_aside()
            self._delete_old()

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        data: Any = None,
        plan: Plan | None = None,
        force: bool = False,
    ) -> bool:
        """Save `state` as the checkpoint of `step`. Returns False if `should_save` skips the step.

        You may donate the state when this returns. If writing fails, the next `save`, `wait_until_finished` or `close`
        raises the error.

        step: an integer, 0 or more.
        state: a pytree of numbers and arrays: jax arrays of this process, results of parallelized steps, typed random
            keys, NumPy arrays. Static leaves of equinox modules, such as functions, are not saved. Workers of a cluster
            write their shards, so all hosts must see the folder.
        metrics: numbers by name, or arrays of one number, for `best_fn` and `Checkpoint.metrics`.
        data: the state of the data iterator: bytes, or a value that JSON preserves.
        plan: the plan that computed the state, for `load_plan`.
        force: also save a step that `save_interval_steps` skips.

        Raises CheckpointError, before writing, for a leaf that cannot be saved and for a step that exists.
        """
        ocp = _orbax()
        from minialpa.checkpoints.targets import savable, stored_bytes, weak_numbers

        if self._read_only:
            raise CheckpointError(
                f"The manager of `{self._directory}` was made with `read_only=True`. Open it without this to save."
            )
        if self._is_closed:
            raise CheckpointError(f"The manager of `{self._directory}` is closed. Open another one to save there.")
        check_value("plan", plan, Plan | None, CheckpointError)
        if not _is_whole(step, 0):
            raise CheckpointError(f"Pass an integer, 0 or more, as `step`; got {step!r}.")
        if step in self.all_steps():
            raise CheckpointError(
                f"`{self._directory}` has a checkpoint of step {step}. Choose another step or folder."
            )
        if not force and not self.should_save(step):
            return False
        state = hide_static(state)
        items = {"state": ocp.args.PyTreeSave(savable(state), custom_metadata={"weak_numbers": weak_numbers(state)})}
        if plan is not None:
            items["plan"] = ocp.args.JsonSave(json.loads(plan.to_json()))
        if data is not None:
            items["data"] = ocp.args.JsonSave(_data_as_json(data))
        self._delete_old()
        numbers = None if metrics is None else {name: float(value) for name, value in metrics.items()}
        if numbers is not None:
            if self._best_fn is not None:
                self._best_fn(numbers)  # raises here; orbax would call it only after the files are written
            items["numbers"] = ocp.args.JsonSave(numbers)
        self._n_bytes_to_write = stored_bytes(state)
        with phase(f"saving step {step}"), _errors_of_orbax(f"Saving step {step} to `{self._directory}`"):
            return bool(self._orbax.save(step, args=ocp.args.Composite(**items), metrics=numbers, force=force))

    def restore(self, step: int | None = None, *, like: Any, partial_restore: bool = False) -> Checkpoint:
        """Read the checkpoint of `step`, by default the latest one, after pending saves.

        like: the target: an `Executable`, whose argument 0 is the state, or a pytree with an array, a number or a
            `jax.ShapeDtypeStruct` for each leaf. A leaf takes the sharding of its target, by default jax's default
            device. No device holds a whole sharded array. NumPy arrays stay NumPy arrays. Static leaves of equinox
            modules come from the target.
        partial_restore: read only the leaves of the target, such as the weights of a training state, `{"params":
            executable.get_input_targets()[0]}`. Otherwise the checkpoint must have no other leaves.

        Raises CheckpointError if the checkpoint does not exist, is damaged, or is of another model.
        """
        from minialpa.checkpoints.targets import (
            in_stored_tree,
            out_of_stored_tree,
            restore_arguments,
            restored,
            stored_bytes,
            target_tree,
        )

        ocp = _orbax()
        self.wait_until_finished()
        step = self._existing_step(step)
        target = target_tree(like)
        name = f"step {step} in `{self._directory}`"
        advice = (
            f"The checkpoint is damaged. Restore another step, or delete `{self._directory}/{step}`: `minialpa.train` "
            "then continues from the newest checkpoint that is left."
        )
        self._read.n_bytes = n_bytes = 0
        with (
            phase(f"restoring step {step}", look=lambda: _megabytes(self._read.n_bytes, n_bytes)),
            _errors_of_orbax(f"Reading {name}", advice),
        ):
            if not self._has_item(step, "state"):
                raise CheckpointError(
                    f"There is no `state` in {name}, so minialpa did not save this checkpoint. Restore another step, "
                    "or read this one with the program that saved it."
                )
            # Raises for an unreadable folder, which orbax would take for empty.
            list((self._orbax.directory / str(step)).iterdir())
            stored = self._orbax.item_metadata(step)["state"]
            if stored is None:
                raise CheckpointError(
                    f"The metadata of the `state` of {name} is missing, because saving was interrupted or a file was "
                    f"deleted. {advice}"
                )
            weak = (stored.custom_metadata or {}).get("weak_numbers", ())
            arguments = restore_arguments(target, stored.tree, name, weak, partial_restore=partial_restore)
            n_bytes = stored_bytes(target)
            item = target
            if partial_restore:
                item, arguments = (in_stored_tree(tree, stored.tree) for tree in (target, arguments))
            items = {"state": ocp.args.PyTreeRestore(item=item, restore_args=arguments)}
            items |= {extra: ocp.args.JsonRestore() for extra in ("data", "numbers") if self._has_item(step, extra)}
            found = self._orbax.restore(step, args=ocp.args.Composite(**items))
            state = out_of_stored_tree(found["state"], target) if partial_restore else found["state"]
            state = show_static(restored(state, target, name, weak))
            data, metrics = found.get("data"), found.get("numbers")
            return Checkpoint(step=step, state=state, data=_data_of_json(data), metrics=metrics)

    def load_plan(self, step: int | None = None) -> Plan | None:
        """The plan in a checkpoint, by default the latest one; None if it has no plan.

        Raises CheckpointError for a missing checkpoint, and VerifyError for a plan of another version.
        """
        found = self._load_json(step, "plan")
        return None if found is None else Plan.from_json(json.dumps(found))

    def load_data(self, step: int | None = None) -> Any:
        """The state of the data iterator in a checkpoint, by default the latest one; None if it has no such state.

        Raises CheckpointError for a missing checkpoint.
        """
        return _data_of_json(self._load_json(step, "data"))

    def _load_json(self, step: int | None, item: str) -> Any:
        self.wait_until_finished()
        step = self._existing_step(step)
        if not self._has_item(step, item):
            return None
        ocp = _orbax()
        with _errors_of_orbax(f"Reading the item `{item}` of step {step} in `{self._directory}`"):
            return self._orbax.restore(step, args=ocp.args.Composite(**{item: ocp.args.JsonRestore()}))[item]

    def should_save(self, step: int) -> bool:
        """Whether `save` saves this step: a multiple of `save_interval_steps` after the latest checkpoint."""
        return bool(self._orbax.should_save(step))

    def latest_step(self) -> int | None:
        return max(self.all_steps(), default=None)

    def all_steps(self) -> tuple[int, ...]:
        """In order. A checkpoint that is being written counts."""
        return tuple(sorted(self._orbax.all_steps()))

    def is_saving(self) -> bool:
        return bool(self._orbax.is_saving_in_progress())

    def wait_until_finished(self) -> None:
        """Wait until every checkpoint is written. Raises CheckpointError if writing failed."""
        with self._writing(), _errors_of_orbax(f"Saving to `{self._directory}`"):
            self._orbax.wait_until_finished()
        if not self._read_only:
            self._delete_old()

    def close(self) -> None:
        """Wait until every checkpoint is written, and end the threads. Other methods then fail."""
        self._is_closed = True
        try:
            with self._writing(), _errors_of_orbax(f"Saving to `{self._directory}`"):
                self._orbax.close()
            if not self._read_only:
                self._delete_old()
        finally:
            if self._unlock is not None:
                self._unlock()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if not self.is_saving():
            yield
            return
        from minialpa.checkpoints.paths import unfinished_bytes

        def look() -> tuple[str, int, int] | None:
            return _megabytes(unfinished_bytes(Path(self._directory)), self._n_bytes_to_write)

        with phase("writing the checkpoint", look=look):
            yield

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _existing_step(self, step: int | None) -> int:
        steps = self.all_steps()
        if not steps:
            raise CheckpointError(
                f"There is no checkpoint in `{self._directory}`, since no folder in it has the number of a step as its "
                "name. Pass the folder that checkpoints were saved to."
            )
        if step is not None and step not in steps:
            raise CheckpointError(
                f"There is no checkpoint of step {step} in `{self._directory}`. The nearest are "
                f"{', '.join(map(str, sorted(sorted(steps, key=lambda other: abs(other - step))[:8])))}."
            )
        return steps[-1] if step is None else step

    def _move_unfinished_aside(self) -> None:
        """orbax would delete them in place, and fail if a lost worker still writes there."""
        from minialpa.checkpoints.paths import unfinished_checkpoints

        for unfinished in unfinished_checkpoints(Path(self._directory)):
            deleted = self._folder_of_deleted()
            deleted.mkdir(exist_ok=True)
            unfinished.rename(deleted / unfinished.name)

    def _delete_old(self) -> None:
        for old in self._folder_of_deleted().glob("*"):
            shutil.rmtree(old, ignore_errors=True)

    def _folder_of_deleted(self) -> Path:
        """Raises CheckpointError for a link, which may lead anywhere."""
        path = Path(self._directory, _DELETED)
        if path.is_symlink():
            raise CheckpointError(
                f"`{path}` is a link, and the manager deletes checkpoints there. Remove the link, or choose another "
                "folder."
            )
        return path

    def _has_item(self, step: int, item: str) -> bool:
        return bool((self._orbax.directory / str(step) / item).exists())


@api_boundary
def save_checkpoint(path: str | os.PathLike[str], tree: Any, *, step: int, plan: Plan | None = None) -> None:
    """Save a pytree as the checkpoint of `step` in the folder `path`, and wait until it is written.

    See `CheckpointManager.save` for possible leaves. Raises CheckpointError if the step exists.
    """
    with CheckpointManager(path) as manager:
        manager.save(step, tree, plan=plan, force=True)  # `force`: at any interval; an existing step is an error


@api_boundary
def restore_checkpoint(
    path: str | os.PathLike[str], target: Any, *, step: int | None = None, partial_restore: bool = False
) -> Any:
    """The pytree of the checkpoint of `step` in the folder `path`, by default the latest one.

    See `CheckpointManager.restore` for `target` (there `like`), `partial_restore` and errors.
    """
    with CheckpointManager(path, read_only=True) as manager:
        return manager.restore(step, like=target, partial_restore=partial_restore).state


def _megabytes(done: int, total: int) -> tuple[str, int, int] | None:
    done, total = min(done, total) // 10**6, total // 10**6
    return ("MB", done, total) if done else None


def _check_counts(save_interval_steps: Any, **optional: Any) -> None:
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {"save_interval_steps": save_interval_steps, **given}.items():
        if not _is_whole(value, 1):
            raise CheckpointError(f"Pass a positive integer as `{name}`; got {value!r}.")


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise CheckpointError(
            "Checkpoints need orbax, which is not installed. Install `minialpa[checkpoint]`."
        ) from error
    return orbax.checkpoint


def _number_of(best_fn: Callable[[Any], float], worst: float) -> Callable[[Any], float]:
    """`best_fn`, with `worst` for NaN."""

    def number(metrics: Any) -> float:
        value = float(best_fn(metrics))
        return worst if math.isnan(value) else value

    return number


def _absolute_path(directory: str | os.PathLike[str]) -> str:
    """Raises CheckpointError for a name that tensorstore cannot write."""
    if not isinstance(directory, str | os.PathLike):
        raise CheckpointError(
            f"Pass the folder of the checkpoints, a path, as the first argument; got a {type(directory).__name__}."
        )
    text = os.fspath(directory)
    if "://" in text:
        return text
    path = str(Path(text).absolute())
    # tensorstore ends a folder's name at a backslash, and would write elsewhere.
    if "\\" in path or path.encode(errors="ignore").decode() != path:
        raise CheckpointError(
            f"Checkpoints cannot be in the folder {path!r}, since tensorstore, which writes them, takes only names "
            "without backslashes that are UTF-8. Choose another folder."
        )
    return path


@contextmanager
def _errors_of_orbax(doing: str, then: str = "") -> Iterator[None]:
    """then: advice for damaged files, which errors of the system, such as too many open files, lack."""
    try:
        yield
    except MinialpaError:
        raise
    except Exception as error:
        advice = "" if _is_of_the_system(error) else then
        text = str(error).split(" [tensorstore_spec=")[0]  # a page of JSON that repeats the file name follows
        raise CheckpointError(
            f"{doing} failed with {type(error).__name__}: {text.rstrip('.')}. {advice}".rstrip()
        ) from error


def _is_of_the_system(error: Exception) -> bool:
    """Whether memory, the file system or a device failed, and no file is missing or damaged."""
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)
    return isinstance(error, MemoryError) or _SYSTEM.search(str(error)) is not None


def _data_as_json(data: Any) -> dict[str, Any]:
    if isinstance(data, bytes):
        return {"bytes": base64.b64encode(data).decode()}
    try:
        is_kept = _equal_with_types(json.loads(json.dumps(data)), data)
    except (TypeError, ValueError):
        is_kept = False
    if not is_kept:
        raise CheckpointError(
            f"`data` of type {type(data).__name__} cannot be saved: pass bytes, or dicts with text as keys, lists, "
            "texts, numbers, booleans and None, such as the `get_state` of a data iterator returns."
        )
    return {"value": data}


def _equal_with_types(read: Any, data: Any) -> bool:
    """In Python, True equals 1."""
    if type(read) is not type(data):
        return False
    if isinstance(data, dict):
        return read.keys() == data.keys() and all(_equal_with_types(read[key], data[key]) for key in data)
    if isinstance(data, list):
        return len(read) == len(data) and all(map(_equal_with_types, read, data))
    return bool(read == data)


def _data_of_json(data: dict[str, Any] | None) -> Any:
    if data is None:
        return None
    return base64.b64decode(data["bytes"]) if "bytes" in data else data["value"]
