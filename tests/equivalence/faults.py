"""Faults to put into minialpa, one at a time, and the number of examples until the engine shows each of them.

    python -m tests.equivalence.faults                            all faults, 200 examples for each
    python -m tests.equivalence.faults --only "scale" --log F     some of them; F keeps the outcomes

A fault replaces a text of one file, in a copy of the package that runs in separate processes. `parts` names parts of
the grammar or layers, and only examples with one of them run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Fault:
    """A replacement of a text.

    name: the wrong behaviour. file: in the package. right: a text that occurs once. wrong: its replacement.
    """

    name: str
    file: str
    right: str
    wrong: str
    parts: tuple[str, ...] = ()


#: After the name of a fault come parts of the grammar, and the text with and without the fault.
_FAULTS = """
=== recognition/rewrites.py

a division of scores is a product [attention, fused attention]
- return c if eqn.primitive.name == "mul" else 1 / c
+ return c

a factor of scores is taken for 1 [attention, fused attention]
- if c != number or over:
+ if over:

a bias that is subtracted is added [slopes]
- -1.0 if eqn.primitive.name == "sub" else 1.0
+ 1.0

a mask hides what it shows [masks]
- return Mask(which, positive=True), if_true, if_false.value
+ return Mask(which, positive=False), if_true, if_false.value

masked scores are as low as the first mask has them [two_masked_values]
- or (scores.masks and scores.masked_score != c)

a bias before a mask is one after it [bias_after_a_mask]
- dtype.itemsize < 4 or scores.masks:
+ dtype.itemsize < 4:

=== recognition/masks.py

a negated mask is the mask [masks]
- return self._conditions_of_all([(eqn.invars[0], axes, not positive)])
+ return self._conditions_of_all([(eqn.invars[0], axes, positive)])

`or` of masks is `and` [prefix_or_causal]
- if eqn.primitive.name != ("and" if positive else "or") or
+ if eqn.primitive.name not in ("and", "or") or

what a comparison of positions leaves out is one position less [infinite_band]
- difference = combined(filled(shape, -1), difference, -1)
+ difference = combined(filled(shape, 0), difference, -1)

=== attention/blockwise.py

a total of blocks keeps its first maximum [attention, fused attention]
- return maximum, old_weight * total + weight.sum(axis=-1), old_weight[..., None] * mixed + new
+ return maximum, total + weight.sum(axis=-1), old_weight[..., None] * mixed + new

hidden blocks count one key each [far_ahead]
- old_weight * total + n_keys.astype(problem.dtype) * weight
+ old_weight * total + weight

a maximum of -inf is subtracted [infinite_band]
- return jnp.where(maximum == -jnp.inf, 0, maximum)
+ return maximum

a softmax has the derivative of an exponential [attention, fused attention]
- score_bar = p * p_bar - p * inner
+ score_bar = p * p_bar

masked scores have gradients [some_see_nothing]
- score_bar = jnp.where(seen, score_bar, 0)
+ pass

values of hidden blocks have no gradients [far_ahead]
- value_bar + lax.dynamic_index_in_dim(rows.masked, i, 2), bias_bars
+ value_bar, bias_bars

a window begins one key later [infinite_band]
- bounds = [ahead >= -self.kind.left]
+ bounds = [ahead > -self.kind.left]

=== inter/microbatch/normalisations.py

data is standardised by micro-batches [batch norm, norm of the whole batch, standardised data]
- return self.of_weights and self.averaged >= {1, 2}
+ return self.averaged >= {1, 2}

a statistic needs no running averages [batch norm, norm of the whole batch, standardised data]
- self.of_weights and self.averaged >= {1, 2} and
+ self.of_weights and

one running average of two is enough [batch norm, norm of the whole batch, standardised data]
- self.averaged >= {1, 2}
+ bool(self.averaged)

a loss may read the statistics [batch norm, norm of the whole batch, standardised data]
- and self.is_affine and not self.is_used_otherwise
+ and self.is_affine

=== inter/microbatch/averages.py

what is no running average is one [batch norm, norm of the whole batch, standardised data]
- return bool(self.inputs) and bool(self.moments) and None not in self.arrays
+ return bool(self.moments) and None not in self.arrays

=== inter/microbatch/forms.py

a micro-batch's own mean is a sum's part [batch norm, norm of the whole batch, standardised data]
- return float(self.n)
+ return 1.0

a micro-batch's own variance is over all examples but one [batch norm, norm of the whole batch, standardised data]
- return n_in_micro_batch / max(n_in_micro_batch - 1, 1) * (count - 1) / count
+ return 1.0

=== inter/microbatch/draft.py

running averages add up over micro-batches [batch norm, norm of the whole batch, standardised data]
- self._add_up(atom, part, self.segments.n_micro_batches, None, segment)
+ self._add_up(atom, part, 1, None, segment)

=== rules/elementwise.py

parts of a total are made narrower [narrow totals]
- return not is_inexact(source) or has_all(target.aval.dtype, source.aval.dtype)
+ return True

=== inter/microbatch/forms.py

what is added to a sum counts once for each micro-batch
- if not all_per_micro_batch or (others and first.scale is not None):
+ if others and first.scale is not None:

=== inter/microbatch/draft.py

a sum that waits for a divisor is multiplied by it
- x / scalar if scale.divides else x * scalar
+ x * scalar

a mean over no examples is NaN where a mask hides it [absent class]
- return jnp.where(x == 0, x, x / scalar if scale.divides else x * scalar)
+ return x / scalar if scale.divides else x * scalar

=== inter/microbatch/loop_values.py

each micro-batch has the first rows of what has no examples
- jax.lax.dynamic_slice_in_dim(x, m * size, size, dim)
+ jax.lax.dynamic_slice_in_dim(x, 0 * m, size, dim)

each micro-batch draws the first rows of random numbers
- dict.fromkeys(positional, m))
+ dict.fromkeys(positional, 0 * m))

=== rules/factors.py

bitwise `and` is logical [counts]
- "and": (lax.bitwise_and, lax.reduce_and),
+ "and": (lambda a, b: ((a != 0) & (b != 0)).astype(a.dtype), lax.reduce_and),

=== inter/lower/task_functions.py

totals of micro-batches are those of the last
- combine(r, accumulator, value.astype(accumulator.dtype))
+ value.astype(accumulator.dtype)

=== inter/staging/accumulators.py

totals inside a pass forget what was before [planned for GPUs]
- return accumulator + value.astype(accumulator.dtype)
+ return value.astype(accumulator.dtype)

=== inter/staging/cast_weights.py

a cast weight is cast for those who read it whole, too [casts once]
- return types.pop() if len(types) == 1 and var not in self.left else None
+ return next((t for t in types if t is not None), None)

=== intra/strategies/all_reduce.py

any of booleans is all of them [one flag]
- "and": "min", "max": "max", "min": "min", "or": "max"
+ "and": "min", "max": "max", "min": "min", "or": "min"

a maximum over devices drops NaN [counts with NaN]
- return jnp.where(jnp.isnan(x), of_nan, _reordered_bits(lax.bitcast_convert_type(x, dtype)))
+ return _reordered_bits(lax.bitcast_convert_type(x, dtype))

integers are multiplied over devices as if they were added [counts]
- return how not in (("sum",) if is_complex else ("sum", "max", "min"))
+ return how not in (("sum",) if is_complex else ("sum", "max", "min", "prod"))

=== intra/shard_arrays.py

each device adds what one should [spread arguments]
- return jnp.where(lax.axis_index(names) == 0, x, jnp.zeros_like(x))
+ return x

devices exchange the wrong halves [attention, fused attention]
- [(i, n - 1 - i) for i in range(n)]
+ [(i, i) for i in range(n)]

=== rules/random.py

shards draw the random numbers of the first [spread arguments]
-  + jnp.asarray(starts.results[0][d], np.uint32)

=== rules/index.py

shards look rows up that are not theirs [spread arguments]
- mine = where(found.is_mine, rows, jnp.zeros_like(rows))
+ mine = rows

shards of updates are added where the largest counts [counts]
- "scatter-max": "max",
+ "scatter-max": "sum",

=== rules/elementwise.py

division is linear in the divisor [spread arguments]
- elementwise(eqn, "each", (0,) if is_inexact(eqn.outvars[0]) else ())
+ elementwise(eqn, "each", (0, 1) if is_inexact(eqn.outvars[0]) else ())

exponentials are linear [spread arguments]
-     return elementwise(eqn)
-
-
- @rule("add"
+     return elementwise(eqn, "joint", (0,))
+
+
+ @rule("add"

=== rules/reduction.py

products over shards are sums [counts]
- "reduce_prod": "prod",
+ "reduce_prod": "sum",

cumulative sums begin anew in each shard [counts]
- dims = _blocked_axes(table, shape_of(eqn.invars[0]), [eqn.params["axis"]])
+ dims = _blocked_axes(table, shape_of(eqn.invars[0]), [])

windows do not look beyond their shard [spread arguments]
- return padding == (0, 0) and all(
+ return all(

=== rules/body_outcomes.py

what a loop adds to a sum counts in each shard [spread arguments]
- return state, fits and all(k in partial or states[k] == "zero" for k in linear)
+ return state, fits

branches may differ in what is a part [spread arguments]
- return found.pop() if len(found) == 1 else None
+ return found.pop()

=== rules/kernel_body.py

kernels bring nothing along from one position to the next [kernels]
-     except _CarriedError:
-         return True
+     except _CarriedError:
+         return False

=== inter/lower/row_equations.py

a layer reads the rows of the first
- lax.slice_in_dim(x, r.start, r.stop, axis=r.dim)
+ lax.slice_in_dim(x, 0, r.stop - r.start, axis=r.dim)

=== inter/staging/sums_in_scans.py

sums in scans leave the last layer out [planned for GPUs]
- value = left[number] if one.accumulator is None else adding(next(waiting), left[number])
+ value = left[number] if one.accumulator is None else next(waiting)
"""


def _read(text: str) -> tuple[Fault, ...]:
    file, found = "", []
    for paragraph in text.strip().split("\n\n"):
        head, *lines = paragraph.splitlines()
        if head.startswith("=== "):
            file = head.removeprefix("=== ")
            continue
        name, _, parts = head.removesuffix("]").partition(" [")
        right, wrong = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        found.append(Fault(name, file, right, wrong, tuple(parts.split(", ")) if parts else ()))
    return tuple(found)


FAULTS = _read(_FAULTS)


def patched(fault: Fault) -> str:
    """The file of a fault with the fault in it. Raises ValueError unless its text occurs exactly once."""
    text = (_ROOT / "minialpa" / fault.file).read_text()
    if text.count(fault.right) != 1:
        raise ValueError(f"{fault.file} has the text of {fault.name!r} {text.count(fault.right)} times, not once")
    return text.replace(fault.right, fault.wrong)


def first_shown(fault: Fault, n_examples: int, seed: int) -> tuple[int, str] | None:
    """The number of examples until one was wrong or crashed, and its outcome; None if all were right."""
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
    parser.add_argument("--log", type=Path, help="a file of outcomes; the faults in it are not tried")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if args.only in fault.name or args.only in fault.file]
    lines = args.log.read_text().splitlines() if args.log and args.log.exists() else []
    known = dict(map(json.loads, lines))
    for fault in chosen:
        if fault.name not in known:
            known[fault.name] = first_shown(fault, args.examples, args.seed)
            if args.log:
                with args.log.open("a") as file:
                    file.write(json.dumps([fault.name, known[fault.name]]) + "\n")
        shown = known[fault.name]
        print(f"{fault.name}: " + (f"{shown[0]} examples, {shown[1]}" if shown else "NOT SHOWN"), flush=True)
    print(f"{sum(known[fault.name] is not None for fault in chosen)} of {len(chosen)} faults are shown")


if __name__ == "__main__":
    _main()
