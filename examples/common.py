"""Common parts of the examples: flags, the call of `minialpa.train`, synthetic data, and files of metrics."""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

import minialpa

Batch = dict[str, np.ndarray[Any, Any]]

# ---- flags ----------------------------------------------------------------------------------------------------------


def flag_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of all examples; an example adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps of the whole run, including earlier starts")
    parser.add_argument("--folder", type=Path, help="checkpoints and metrics; a run continues from the last checkpoint")
    parser.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints; 10 by default")
    parser.add_argument("--stages", type=int, default=0, help="pipeline stages; 0 leaves everything to the planner")
    parser.add_argument("--ray", action="store_true", help="run on the hosts of a Ray cluster, or start one here")
    parser.add_argument("--hosts", type=int, metavar="N", help="with --ray: the number of its hosts; all by default")
    parser.add_argument("--profile", action="store_true", help="write a timeline of a step to FOLDER/trace.json")
    parser.add_argument("--tensorboard", action="store_true", help="write the metrics to FOLDER/tensorboard, too")
    return parser


def start(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Read the flags, and start the session that they describe."""
    flags = parser.parse_args(argv)
    if flags.folder is None and (flags.profile or flags.tensorboard or flags.save_every):
        parser.error("--profile, --tensorboard and --save-every write to the folder: add --folder FOLDER")
    if flags.hosts is not None and not flags.ray:
        parser.error("--hosts is a number of hosts of a Ray cluster: add --ray")
    if flags.save_every is None and flags.folder is not None:
        flags.save_every = 10
    flags.checkpoints = flags.folder and flags.folder / "checkpoints"

    logging.basicConfig(format="%(message)s")
    logging.getLogger("minialpa.training").setLevel(logging.INFO)
    if flags.ray:
        minialpa.init(cluster="ray", num_hosts=flags.hosts)
    return flags


def method_of(flags: argparse.Namespace) -> minialpa.AutoParallel | minialpa.PipeshardParallel:
    """The planner decides everything, or a pipeline of `--stages` stages."""
    if flags.stages == 0:
        return minialpa.AutoParallel()
    return minialpa.PipeshardParallel(
        num_micro_batches=4,
        layer_option=minialpa.AutoLayerOption(layer_num=flags.stages),
        stage_option=minialpa.UniformStageOption(num_stages=flags.stages),
    )


def train(
    flags: argparse.Namespace, step: Any, create_state: Any, batches: Any, **options: Any
) -> minialpa.TrainingResult:
    """Train with the flags. options: further options of `minialpa.train`."""
    with Reports(flags) as report:
        result = minialpa.train(
            step,
            create_state,
            batches,
            n_steps=flags.steps,
            folder=flags.checkpoints,
            save_every=flags.save_every,
            report=report,
            **options,
        )

    executable = step.get_last_executable()
    if flags.profile and executable is not None:  # None: the run was done before it began
        executable.dump_stage_execution_trace(flags.folder / "trace.json")
        print(f"{flags.folder / 'trace.json'} has the timeline of a step, for ui.perfetto.dev.")
    return result


# ---- data: endless, and the same in every run -----------------------------------------------------------------------


def texts(vocabulary: int, length: int, batch_size: int, *, seed: int = 1) -> Iterator[Batch]:
    """`tokens` and `labels` [batch length] of a text in which each token has four likely successors."""
    successors = np.random.default_rng(0).integers(vocabulary, size=(vocabulary, 4))
    rng = np.random.default_rng(seed)
    while True:
        tokens = [rng.integers(vocabulary, size=batch_size)]
        for _ in range(length):
            tokens.append(successors[tokens[-1], rng.integers(4, size=batch_size)])
        text = np.stack(tokens, axis=1).astype(np.int32)
        yield {"tokens": text[:, :-1], "labels": text[:, 1:]}


def pictures(size: int, n_classes: int, batch_size: int, *, seed: int = 1) -> Iterator[Batch]:
    """`image` [batch size size 3] and `label` [batch]: each class has a picture, to which noise is added."""
    of_class = np.random.default_rng(0).standard_normal((n_classes, size, size, 3), np.float32)
    rng = np.random.default_rng(seed)
    while True:
        label = rng.integers(n_classes, size=batch_size).astype(np.int32)
        noise = rng.standard_normal((batch_size, size, size, 3), np.float32)
        yield {"image": of_class[label] + noise, "label": label}


# ---- metrics --------------------------------------------------------------------------------------------------------


class Reports:
    """The `report` of `minialpa.train`: a progress bar, and files in the folder if there is one.

    metrics.csv has the metrics of each step, and evaluation.csv the metrics of each evaluation.
    """

    def __init__(self, flags: argparse.Namespace) -> None:
        self._bar = Progress()
        self._task = self._bar.add_task("training", total=flags.steps)
        self._files: dict[str, list[CsvFile | TensorBoard]] = {"metrics": [], "evaluation": []}
        if flags.folder is not None:
            flags.folder.mkdir(parents=True, exist_ok=True)
            for name, files in self._files.items():
                files.append(CsvFile(flags.folder / f"{name}.csv"))
                if flags.tensorboard:
                    files.append(TensorBoard(flags.folder / "tensorboard" / name))

    def __call__(self, done: minialpa.StepReport) -> None:
        # Planning has its own bar, which disappears when the first step is done.
        self._bar.start()
        self._bar.update(self._task, completed=done.n_steps)
        if done.n_steps % 10 == 0 or done.evaluation is not None:
            evaluation = "" if done.evaluation is None else f"; evaluation: {_text(done.evaluation)}"
            self._bar.console.print(f"step {done.n_steps}: {_text(done.metrics)}{evaluation}")

        for name, values in (("metrics", done.metrics), ("evaluation", done.evaluation)):
            for file in self._files[name] if values is not None else ():
                file.write(done.n_steps, values)

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class CsvFile:
    """A file with a line for each step, equal to the file of a run without interruptions.

    When a run repeats a step after a checkpoint, the new line replaces the line of this step and all later lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = math.inf  # the file may have lines of an earlier start

    def write(self, n_steps: int, values: dict[str, float]) -> None:
        if n_steps <= self._last:
            self._begin_at(n_steps, ",".join(["step", *values]))
        self._last = n_steps
        with self._path.open("a", encoding="utf-8") as file:
            file.write(",".join([str(n_steps), *map(repr, values.values())]) + "\n")

    def _begin_at(self, n_steps: int, header: str) -> None:
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else [header]
        kept = [lines[0], *(line for line in lines[1:] if int(line.partition(",")[0]) < n_steps)]
        # A process that is killed here leaves the old file or the new one.
        new = self._path.with_suffix(".new")
        new.write_text("\n".join(kept) + "\n", encoding="utf-8")
        os.replace(new, self._path)


class TensorBoard:
    """Event files for TensorBoard, which drops the events of repeated steps."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise SystemExit("--tensorboard needs tensorboardX: python -m pip install tensorboardX") from error
        self._make, self._folder, self._last = SummaryWriter, folder, math.inf

    def write(self, n_steps: int, values: dict[str, float]) -> None:
        if n_steps <= self._last:
            self._writer = self._make(str(self._folder), purge_step=n_steps)
        self._last = n_steps
        for name, value in values.items():
            self._writer.add_scalar(name, value, n_steps)
        self._writer.flush()


def _text(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())
