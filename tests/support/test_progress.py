"""Progress: counts never fall, estimates are of steady work, and only terminals show them."""

import io
import logging
import os
import pty
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import minialpa
from minialpa.runtime.cluster.watch import Watch
from minialpa.support.progress import RunningPhase, phase
from tests.runtime.cluster.in_process_session import Training, in_process_session

#: A search of stages, compiled, with one step and a checkpoint.
_TRAINING = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 4)
import minialpa

def step(params, batch):
    def loss(p):
        x = batch["x"]
        for _ in range(4):
            x = jnp.tanh(x @ p["w"])
        return jnp.mean((x @ p["v"] - batch["y"]) ** 2)
    value, grads = minialpa.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

params = {"w": jnp.ones((64, 64)), "v": jnp.ones((64, 64))}
batch = {"x": jnp.ones((32, 64)), "y": jnp.ones((32, 64))}
method = minialpa.PipeshardParallel(
    num_micro_batches=2, layer_option=minialpa.AutoLayerOption(layer_num=4), stage_option="auto"
)
params, loss = minialpa.parallelize(step, method=method, plan_cache=None)(params, batch)
minialpa.save_checkpoint(sys.argv[1], params, step=1)
print(float(loss))
"""


class _Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_time_left_is_estimated_from_a_fixed_total() -> None:
    clock = _Clock()
    compiling = RunningPhase("compiling", clock=clock)
    compiling.report("programs", 0, 12)
    assert compiling.line() == "compiling: 0 of 12 programs  0:00"

    clock.now_s += 1.5
    compiling.report("programs", 1, 12)
    assert compiling.line() == "compiling: 1 of 12 programs  0:01", "too early for an estimate"

    clock.now_s += 58.5
    compiling.report("programs", 4, 12)
    assert compiling.line() == "compiling: 4 of 12 programs  1:00, about 2:00 left"

    clock.now_s += 3600
    compiling.report("programs", 12, 12)
    assert compiling.line() == "compiling: 12 of 12 programs  1:01:00"


def test_a_total_that_grows_gives_no_estimate() -> None:
    clock = _Clock()
    planning = RunningPhase("planning", clock=clock)
    for n in range(1, 20):
        clock.now_s += 10
        planning.report("stage costs", n, n + 4)
    assert planning.line() == "planning: 19 of 23 stage costs  3:10"


def test_work_that_repeats_continues_its_count() -> None:
    planning = RunningPhase("planning", clock=_Clock())
    shown = []
    for _ in range(3):
        for done in range(5):
            planning.report("stage shardings", done, 4)
            shown.append(planning.line())
        planning.report("finding layers", 0, 0)
    assert shown[4].startswith("planning: 4 of 4 stage shardings")
    assert shown[5].startswith("planning: 4 of 8 stage shardings")
    assert shown[-1].startswith("planning: 12 of 12 stage shardings")
    assert planning.line() == "planning: finding layers  0:00"


def test_no_reports_make_a_count_fall() -> None:
    numbers = random.Random(0)
    for _ in range(100):
        one = RunningPhase("planning", clock=_Clock())
        counts = []
        for _ in range(50):
            total = numbers.randint(1, 9)
            one.report("stage costs", numbers.randint(0, total), total)
            counts.append([int(number) for number in re.findall(r"\d+", one.line())[:2]])
        assert all(done <= total for done, total in counts)
        assert all(list(column) == sorted(column) for column in zip(*counts, strict=True))


def test_the_log_has_one_line_for_each_finished_phase(caplog: pytest.LogCaptureFixture) -> None:
    clock = _Clock()
    caplog.set_level(logging.INFO, "minialpa")
    with phase("planning", clock=clock) as report:
        report("finding layers", 0, 0)
        clock.now_s += 1
        for done in range(3):
            report("stage costs", done, 4)
            clock.now_s += 20
    with pytest.raises(ValueError), phase("compiling", clock=clock):
        raise ValueError
    assert caplog.messages == ["planning took 61.0 s (finding layers in 1.0 s, 2 stage costs in 60.0 s)"]


def test_a_step_and_its_checkpoint_log_their_phases(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "minialpa")
    method = minialpa.ShardParallel(devices=jax.devices()[:2])
    step = minialpa.parallelize(lambda x: x @ x, method=method, plan_cache=None)
    minialpa.save_checkpoint(tmp_path, {"product": step(np.ones((1000, 1000), np.float32))}, step=3)
    minialpa.restore_checkpoint(tmp_path, {"product": jax.ShapeDtypeStruct((1000, 1000), np.float32)})
    names = [message.split(" took ")[0] for message in caplog.messages if " took " in message]
    assert [name for name in names if name != "writing the checkpoint"] == [
        "tracing", "planning", "emitting instructions", "compiling", "saving step 3", "restoring step 3",
    ]  # fmt: skip
    assert re.search(r"compiling took .* \(1 programs in", caplog.text)
    assert re.search(r"restoring step 3 took .* \(4 MB in", caplog.text)


def test_workers_report_how_many_functions_they_have_compiled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minialpa")
    with in_process_session(1, 4) as runtime:
        training = Training()
        training.advance()
        n_functions = len(training.step.get_last_executable().function_names)
        watch = Watch(runtime.launcher)
        watch.add(runtime.workers)
        while None in [watch.status(worker).pid for worker in runtime.workers]:
            time.sleep(0.01)
        numbers = {watch.status(worker).compiled[0] for worker in runtime.workers}
        assert len(numbers) == 1 and n_functions > 2
        assert sum(watch.n_compiled(worker, *numbers) for worker in runtime.workers) == n_functions
        assert all(watch.n_compiled(worker, -2) == 0 for worker in runtime.workers)
    assert re.search(rf"compiling on workers took .* \({n_functions} programs in", caplog.text)


def test_programs_without_a_console_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        with phase("planning") as report:
            report("stage costs", 0, 1)


# ---- terminals -------------------------------------------------------------------------------------------------------


def _shown_on_terminal(code: str, *args: str) -> str:
    """The text that Python code writes to standard error on a terminal."""
    terminal, end_of_child = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdout=subprocess.PIPE,
        stderr=end_of_child,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(end_of_child)
    try:
        text = b"".join(_pieces(terminal)).decode()
    finally:
        os.close(terminal)
        child.communicate()
    assert child.returncode == 0, text
    return text


def _pieces(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the child has closed the terminal
            return
        if not piece:
            return
        yield piece


def test_a_terminal_shows_each_phase_and_counts_that_never_fall(tmp_path: Path) -> None:
    text = _shown_on_terminal(_TRAINING, str(tmp_path))
    lines = [line for line in re.split(r"\r\x1b\[2K|\r", text) if line]
    phases = list(dict.fromkeys(re.split(r":|  ", line)[0] for line in lines))
    assert [name for name in phases if name != "writing the checkpoint"] == [
        "tracing", "planning", "emitting instructions", "compiling", "saving step 1",
    ]  # fmt: skip

    counts: dict[str, list[tuple[int, int]]] = {}
    for line in lines:
        if found := re.search(r"(\d+) of (\d+) ([a-z ]+?)(?:  |$)", line):
            done, total, what = found.groups()
            counts.setdefault(what, []).append((int(done), int(total)))
    assert counts.keys() >= {"stage shardings", "programs"}
    for seen in counts.values():
        for number in zip(*seen, strict=True):
            assert list(number) == sorted(number)
    assert text.endswith("\r\x1b[2K\r"), "the line is erased in the end"


def test_an_environment_variable_and_a_call_keep_a_program_silent() -> None:
    text = _shown_on_terminal("""
import os, minialpa
from minialpa.support.progress import phase
with phase("planning"): pass
os.environ["MINIALPA_PROGRESS"] = "0"
with phase("compiling"): pass
os.environ["MINIALPA_PROGRESS"] = "1"
with phase("calibrating"): pass
minialpa.util.disable_tqdm_globally()
with phase("saving"): pass
""")
    assert [name for name in ("planning", "compiling", "calibrating", "saving") if name in text] == [
        "planning", "calibrating",
    ]  # fmt: skip


def test_a_pipe_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with phase("planning") as report:
        report("stage costs", 0, 1)
    assert capfd.readouterr() == ("", "")
