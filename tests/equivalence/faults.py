"""Faults to put into minialpa, one at a time, and the number of examples until the engine shows each of them.

    python -m tests.equivalence.faults                            all faults, 200 examples for each
    python -m tests.equivalence.faults --only "scale" --log F     some of them; F keeps what was found

A fault replaces a text of one file. It is put into a copy of the package, which runs in processes of its own. `parts`
names parts of the grammar or layers, and only examples with one of them run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Fault:
    """name: what is wrong then. file: in the package. right: text that is there once. wrong: what is in its place."""

    name: str
    file: str
    right: str
    wrong: str
    parts: tuple[str, ...] = ()


_ATTENTION, _MASKS = ("attention", "fused attention"), ("masks",)
_SPREAD = ("spread arguments",)
_NORM = ("batch norm", "norm of the whole batch", "standardised data")

FAULTS: tuple[Fault, ...] = (
    # ---- recognition of attention
    Fault(
        "a division of scores is a product",
        "recognition/rewrites.py",
        'return c if eqn.primitive.name == "mul" else 1 / c',
        "return c",
        _ATTENTION,
    ),
    Fault(
        "a factor of scores is taken for 1",
        "recognition/rewrites.py",
        "if c != number or over:",
        "if over:",
        _ATTENTION,
    ),
    Fault(
        "a bias that is subtracted is added",
        "recognition/rewrites.py",
        '-1.0 if eqn.primitive.name == "sub" else 1.0',
        "1.0",
        ("slopes",),
    ),
    Fault(
        "a mask hides what it shows",
        "recognition/rewrites.py",
        "return Mask(which, True), if_true, if_false.value",
        "return Mask(which, False), if_true, if_false.value",
        _MASKS,
    ),
    Fault(
        "masked scores are as low as the first mask has them",
        "recognition/rewrites.py",
        "or (scores.masks and scores.masked_score != c)",
        "",
        ("two_masked_values",),
    ),
    Fault(
        "a bias before a mask is one after it",
        "recognition/rewrites.py",
        "dtype.itemsize < 4 or scores.masks:",
        "dtype.itemsize < 4:",
        ("bias_after_a_mask",),
    ),
    Fault(
        "a negated mask is the mask",
        "recognition/masks.py",
        "return self._together([(eqn.invars[0], axes, not positive)])",
        "return self._together([(eqn.invars[0], axes, positive)])",
        _MASKS,
    ),
    Fault(
        "`or` of masks is `and`",
        "recognition/masks.py",
        'if eqn.primitive.name != ("and" if positive else "or") or',
        'if eqn.primitive.name not in ("and", "or") or',
        ("prefix_or_causal",),
    ),
    Fault(
        "what a comparison of positions leaves out is one position less",
        "recognition/masks.py",
        "difference = combined(filled(shape, -1), difference, -1)",
        "difference = combined(filled(shape, 0), difference, -1)",
        ("infinite_band",),
    ),
    # ---- attention in blocks
    Fault(
        "a total of blocks keeps its first maximum",
        "attention/blockwise.py",
        "return maximum, kept * total + weight.sum(axis=-1), kept[..., None] * mixed + new",
        "return maximum, total + weight.sum(axis=-1), kept[..., None] * mixed + new",
        _ATTENTION,
    ),
    Fault(
        "hidden blocks count one key each",
        "attention/blockwise.py",
        "kept * total + n_keys.astype(problem.dtype) * weight",
        "kept * total + weight",
        ("far_ahead",),
    ),
    Fault(
        "a maximum of -inf is subtracted",
        "attention/blockwise.py",
        "return jnp.where(maximum == -jnp.inf, 0, maximum)",
        "return maximum",
        ("infinite_band",),
    ),
    Fault(
        "a softmax has the derivative of an exponential",
        "attention/blockwise.py",
        "score_bar = p * p_bar - p * inner",
        "score_bar = p * p_bar",
        _ATTENTION,
    ),
    Fault(
        "masked scores have gradients",
        "attention/blockwise.py",
        "score_bar = jnp.where(seen, score_bar, 0)",
        "pass",
        ("some_see_nothing",),
    ),
    Fault(
        "values of hidden blocks have no gradients",
        "attention/blockwise.py",
        "value_bar + lax.dynamic_index_in_dim(rows.masked, i, 2), bias_bars",
        "value_bar, bias_bars",
        ("far_ahead",),
    ),
    Fault(
        "a window begins one key later",
        "attention/blockwise.py",
        "bounds = [ahead >= -self.kind.left]",
        "bounds = [ahead > -self.kind.left]",
        ("infinite_band",),
    ),
    # ---- statistics of micro-batches
    Fault(
        "data is standardised by micro-batches",
        "inter/microbatch/normalisations.py",
        "return self.of_weights and self.averaged >= {1, 2}",
        "return self.averaged >= {1, 2}",
        _NORM,
    ),
    Fault(
        "a statistic needs no running averages",
        "inter/microbatch/normalisations.py",
        "self.of_weights and self.averaged >= {1, 2} and",
        "self.of_weights and",
        _NORM,
    ),
    Fault(
        "one running average of two is enough",
        "inter/microbatch/normalisations.py",
        "self.averaged >= {1, 2}",
        "bool(self.averaged)",
        _NORM,
    ),
    Fault(
        "a loss may read the statistics",
        "inter/microbatch/normalisations.py",
        "and self.is_affine and not self.is_used_otherwise",
        "and self.is_affine",
        _NORM,
    ),
    Fault(
        "what is no running average is one",
        "inter/microbatch/averages.py",
        "return bool(self.inputs) and bool(self.moments) and None not in self.arrays",
        "return bool(self.moments) and None not in self.arrays",
        _NORM,
    ),
    Fault(
        "a micro-batch's own mean is a sum's part",
        "inter/microbatch/forms.py",
        "return float(self.n)",
        "return 1.0",
        _NORM,
    ),
    Fault(
        "a micro-batch's own variance is over all examples but one",
        "inter/microbatch/forms.py",
        "return n_own / max(n_own - 1, 1) * (count - 1) / count",
        "return 1.0",
        _NORM,
    ),
    Fault(
        "running averages add up over micro-batches",
        "inter/microbatch/draft.py",
        "self._add_up(atom, part, self.segments.n_micro_batches, None, segment)",
        "self._add_up(atom, part, 1, None, segment)",
        _NORM,
    ),
    # ---- sums over micro-batches
    Fault(
        "parts of a total are made narrower",
        "rules/elementwise.py",
        "return not is_inexact(source) or has_all(target.aval.dtype, source.aval.dtype)",
        "return True",
        ("narrow totals",),
    ),
    Fault(
        "what is added to a sum counts once for each micro-batch",
        "inter/microbatch/forms.py",
        "if not all_own or (others and first.scale is not None):",
        "if others and first.scale is not None:",
    ),
    Fault(
        "a sum that waits for a divisor is multiplied by it",
        "inter/microbatch/draft.py",
        "x / scalar if scale.divides else x * scalar",
        "x * scalar",
    ),
    Fault(
        "a mean over no examples is NaN where a mask hides it",
        "inter/microbatch/draft.py",
        "return jnp.where(x == 0, x, x / scalar if scale.divides else x * scalar)",
        "return x / scalar if scale.divides else x * scalar",
        ("absent class",),
    ),
    Fault(
        "each micro-batch has the first rows of what has no examples",
        "inter/microbatch/loop_values.py",
        "jax.lax.dynamic_slice_in_dim(x, m * size, size, dim)",
        "jax.lax.dynamic_slice_in_dim(x, 0 * m, size, dim)",
    ),
    Fault(
        "each micro-batch draws the first rows of random numbers",
        "inter/microbatch/loop_values.py",
        "dict.fromkeys(positional, m))",
        "dict.fromkeys(positional, 0 * m))",
    ),
    Fault(
        "bitwise `and` is logical",
        "rules/factors.py",
        '"and": (lax.bitwise_and, lax.reduce_and),',
        '"and": (lambda a, b: ((a != 0) & (b != 0)).astype(a.dtype), lax.reduce_and),',
        ("counts",),
    ),
    Fault(
        "totals of micro-batches are those of the last",
        "inter/lower/task_functions.py",
        "combine(r, total, value.astype(total.dtype))",
        "value.astype(total.dtype)",
    ),
    Fault(
        "totals inside a pass forget what was before",
        "inter/staging/totals.py",
        "return total + value.astype(total.dtype)",
        "return value.astype(total.dtype)",
        ("planned for GPUs",),
    ),
    Fault(
        "a cast weight is cast for those who read it whole, too",
        "inter/staging/cast_weights.py",
        "return types.pop() if len(types) == 1 and var not in self.left else None",
        "return next((t for t in types if t is not None), None)",
        ("casts once",),
    ),
    # ---- devices
    Fault(
        "any of booleans is all of them",
        "intra/strategies/all_reduce.py",
        '"and": "min", "max": "max", "min": "min", "or": "max"',
        '"and": "min", "max": "max", "min": "min", "or": "min"',
        ("one flag",),
    ),
    Fault(
        "a maximum over devices drops NaN",
        "intra/strategies/all_reduce.py",
        "return jnp.where(jnp.isnan(x), of_nan, _turned(lax.bitcast_convert_type(x, dtype)))",
        "return _turned(lax.bitcast_convert_type(x, dtype))",
        ("counts with NaN",),
    ),
    Fault(
        "integers are multiplied over devices as if they were added",
        "intra/strategies/all_reduce.py",
        'return how not in (("sum",) if is_complex else ("sum", "max", "min"))',
        'return how not in (("sum",) if is_complex else ("sum", "max", "min", "prod"))',
        ("counts",),
    ),
    Fault(
        "each device adds what one should",
        "intra/shard_arrays.py",
        "return jnp.where(lax.axis_index(names) == 0, x, jnp.zeros_like(x))",
        "return x",
        _SPREAD,
    ),
    Fault(
        "devices exchange the wrong halves",
        "intra/shard_arrays.py",
        "[(i, n - 1 - i) for i in range(n)]",
        "[(i, i) for i in range(n)]",
        _ATTENTION,
    ),
    # ---- rules of operators
    Fault(
        "shards draw the random numbers of the first",
        "rules/random.py",
        " + jnp.asarray(starts.results[0][d], np.uint32)",
        "",
        _SPREAD,
    ),
    Fault(
        "shards look rows up that are not theirs",
        "rules/index.py",
        "mine = where(found.is_mine, rows, jnp.zeros_like(rows))",
        "mine = rows",
        _SPREAD,
    ),
    Fault(
        "shards of updates are added where the largest counts",
        "rules/index.py",
        '"scatter-max": "max",',
        '"scatter-max": "sum",',
        ("counts",),
    ),
    Fault(
        "division is linear in the divisor",
        "rules/elementwise.py",
        'elementwise(eqn, "each", (0,) if is_inexact(eqn.outvars[0]) else ())',
        'elementwise(eqn, "each", (0, 1) if is_inexact(eqn.outvars[0]) else ())',
        _SPREAD,
    ),
    Fault(
        "exponentials are linear",
        "rules/elementwise.py",
        '    return elementwise(eqn)\n\n\n@rule("add"',
        '    return elementwise(eqn, "joint", (0,))\n\n\n@rule("add"',
        _SPREAD,
    ),
    Fault(
        "products over shards are sums",
        "rules/reduction.py",
        '"reduce_prod": "prod",',
        '"reduce_prod": "sum",',
        ("counts",),
    ),
    Fault(
        "cumulative sums begin anew in each shard",
        "rules/reduction.py",
        'dims = _blocked_axes(table, shape_of(eqn.invars[0]), [eqn.params["axis"]])',
        "dims = _blocked_axes(table, shape_of(eqn.invars[0]), [])",
        ("counts",),
    ),
    Fault(
        "windows do not look beyond their shard",
        "rules/reduction.py",
        "return padding == (0, 0) and all(",
        "return all(",
        _SPREAD,
    ),
    Fault(
        "what a loop adds to a sum counts in each shard",
        "rules/body_outcomes.py",
        'return state, fits and all(k in partial or states[k] == "zero" for k in linear)',
        "return state, fits",
        _SPREAD,
    ),
    Fault(
        "branches may differ in what is a part",
        "rules/body_outcomes.py",
        "return found.pop() if len(found) == 1 else None",
        "return found.pop()",
        _SPREAD,
    ),
    Fault(
        "kernels bring nothing along from one position to the next",
        "rules/kernel_body.py",
        "    except _CarriedError:\n        return True",
        "    except _CarriedError:\n        return False",
        ("kernels",),
    ),
    # ---- layers and calls
    Fault(
        "a layer reads the rows of the first",
        "inter/lower/row_equations.py",
        "lax.slice_in_dim(x, r.start, r.stop, axis=r.dim)",
        "lax.slice_in_dim(x, 0, r.stop - r.start, axis=r.dim)",
    ),
    Fault(
        "sums in scans leave the last layer out",
        "inter/staging/sums_in_scans.py",
        "value = left[number] if one.total is None else adding(next(waiting), left[number])",
        "value = left[number] if one.total is None else next(waiting)",
        ("planned for GPUs",),
    ),
)


def patched(fault: Fault) -> str:
    """The file of a fault with the fault in it. Raises ValueError if its text is not there once."""
    text = (_ROOT / "minialpa" / fault.file).read_text()
    if text.count(fault.right) != 1:
        raise ValueError(f"{fault.file} has the text of {fault.name!r} {text.count(fault.right)} times, not once")
    return text.replace(fault.right, fault.wrong)


def first_shown(fault: Fault, n_examples: int, seed: int) -> tuple[int, str] | None:
    """How many examples ran until one was wrong or crashed, and its outcome; None if all were right."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(_ROOT / "minialpa", copy / "minialpa", ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "minialpa" / fault.file).write_text(patched(fault))
        (copy / "tests").symlink_to(_ROOT / "tests")
        command = [sys.executable, "-m", "tests.equivalence.run", "--until-wrong", "--examples", str(n_examples)]
        command += ["--seed", str(seed), "--pieces", ",".join(fault.parts)]
        env = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode not in (0, 1) or (not lines and done.returncode):
        return 1, f"the process ended with {done.returncode}: {done.stderr[-300:]}"
    n, _, outcome = lines[-1].partition(" ")
    return (int(n), outcome) if done.returncode else None


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--only", default="", help="faults with this text in their name or file")
    parser.add_argument("--part", default="0/1", help="I/N: of the faults, the I-th and each N-th after it")
    parser.add_argument("--log", type=Path, help="a file of outcomes: the faults that it holds are not tried again")
    args = parser.parse_args()
    i, n = map(int, args.part.split("/"))
    chosen = [fault for fault in FAULTS if args.only in fault.name or args.only in fault.file][i::n]
    known = _known(args.log, chosen)
    for fault in chosen:
        if fault.name not in known:
            known[fault.name] = first_shown(fault, args.examples, args.seed)
            if args.log:
                with args.log.open("a") as file:
                    file.write(json.dumps([fault.name, known[fault.name]]) + "\n")
        shown = known[fault.name]
        print(f"{fault.name}: " + (f"{shown[0]} examples, {shown[1]}" if shown else "NOT SHOWN"), flush=True)
    print(f"{sum(shown is not None for shown in known.values())} of {len(known)} faults are shown")


def _known(log: Path | None, chosen: Sequence[Fault]) -> dict[str, tuple[int, str] | None]:
    names = {fault.name for fault in chosen}
    lines = log.read_text().splitlines() if log and log.exists() else []
    return {name: shown for name, shown in map(json.loads, lines) if name in names}


if __name__ == "__main__":
    _main()
