"""Examples for the engine: a number in, a training step and a method to run it out, as plain data that can be replayed.

Each number gives a different example. `_often` weighs the groups. Cheap parts that have found most faults come most
often. Parts that mix examples, and may be refused, come in one of twenty examples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from minialpa.options import Attention
from tests.equivalence.attention_layers import FUSED, MASKED, WRITTEN
from tests.equivalence.exact import draw_counted
from tests.equivalence.layers import AVERAGES, IN_BRANCHES, KINDS, OWN, RETURNS_WEIGHTS, RULES, VARIANCES, WRAPS, Layer
from tests.equivalence.losses import JOINS, PAIRING, PER_EXAMPLE, REDUCTIONS, RESULTS, Loss, Term
from tests.equivalence.model import DATA, POOLS, BatchNorm, Model
from tests.equivalence.steps import (
    CARRIED,
    FLOAT_INPUT,
    GRADIENTS,
    MIXING,
    NO_BATCH_NORM,
    OPTIMIZERS,
    SCHEMES,
    SEVERAL,
    Training,
)
from tests.equivalence.ways import FLAGS, ONE_STAGE, TWO_RUNS, Way


@dataclass(frozen=True, slots=True)
class Example:
    """A training step, and a way to run it. `repr` is an expression that makes it."""

    training: Training
    way: Way


def example_of(number: int) -> Example:
    """The example with this number."""
    random = Random(number)
    training = _training(random)
    inside = 0 < (training.model.boundary or 0) < len(training.model.layers)
    way = _way(random, inside)
    way = dataclasses.replace(way, attention=_attention(random, training.model))
    example = _in_narrower_types(random, _on_gpus(random, _other_batches(random, Example(training, way))))
    return _spread(random, _with_flags_and_keys(random, _with_counts(random, example)))


def pieces(example: Example) -> frozenset[str]:
    """The parts of the grammar in an example, by which outcomes are counted."""
    model = example.training.model
    names = layers(example)
    norms = [layer for layer in model.layers if isinstance(layer, BatchNorm)]
    found = {
        "attention": bool(names & {*ATTENTIONS}),
        "masks": bool(names & {*MASKED}),
        "fused attention": bool(names & {*ATTENTIONS}) and example.way.attention == "fused",
        "ragged batch": example.training.batch_size % example.way.n != 0,
        "another batch before": bool(example.way.first),
        "planned for GPUs": example.way.gpus,
        "narrower types": example.training.model.narrows,
        "narrow totals": any(term.reduction == "made narrower" for term in example.training.loss.terms),
        "absent class": any(term.reduction == "an absent class" for term in example.training.loss.terms),
        "one flag": "any one" in example.training.results,
        "counts": bool(example.training.counted),
        "counts with NaN": any(one.dtype == "float16" for one in example.training.counted),
        "typed keys": example.training.typed,
        "a flag before": bool(example.way.flag),
        "casts once": example.way.casts_once,
        "spread arguments": bool(example.way.spread),
        "branches with dropout": bool(names & {*IN_BRANCHES}),
        "batch norm": any(norm.may_be_own for norm in norms),
        "norm of the whole batch": any(not norm.may_be_own for norm in norms),
        "standardised data": model.data != DATA[0],
        "returned weights": any(isinstance(layer, Layer) and layer.wrap == RETURNS_WEIGHTS for layer in model.layers),
        "kernels": any("pallas" in name or name in ("registered_function", "partitioned") for name in names),
    }
    return frozenset(name for name, is_in in found.items() if is_in)


def layers(example: Example) -> frozenset[str]:
    """The names of the layers of an example."""
    return frozenset(layer.name for layer in example.training.model.layers if isinstance(layer, Layer))


def _often(random: Random, *weighted: tuple[int, Sequence[Any]]) -> Any:
    """One of several groups, by weight, then one of the group."""
    (group,) = random.choices([group for _, group in weighted], [weight for weight, _ in weighted])
    return random.choice(group)


def _some(random: Random, names: Sequence[str], most: int) -> tuple[str, ...]:
    return tuple(random.sample(sorted(names), random.randint(0, most)))


#: Layers with the form of an attention, or close to it.
ATTENTIONS = ("attention", "causal_heads", *FUSED, *WRITTEN, *MASKED)

# ---- models ---------------------------------------------------------------------------------------------------------

_LAYERS = {kind: [name for name, rule in RULES.items() if kind in rule.kinds and not rule.mixes] for kind in KINDS}
#: Without the many masked layers, which are drawn separately.
_FEW = {kind: [name for name in names if name not in MASKED] for kind, names in _LAYERS.items()}
_MEETING = {kind: [name for name, rule in RULES.items() if kind in rule.kinds and rule.mixes] for kind in KINDS}


def _model(random: Random, scheme: str) -> Model:
    """A model that works with a scheme of training."""
    kind = _often(random, (5, ["vector"]), (4, ["sequence"]), (2, ["image"]))
    n_layers = random.randint(1, 3)
    model = Model(
        kind,
        tuple(_layer(random, kind, scheme) for _ in range(n_layers)),
        boundary=random.randint(0, n_layers),
        from_tokens=kind == "sequence" and scheme not in FLOAT_INPUT and random.random() < 0.5,
        tied=random.random() < 0.2,
        pool=random.choice(POOLS),
        checkpoint=random.random() < 0.1,
    )
    if model.from_tokens or scheme in NO_BATCH_NORM:
        return model
    return dataclasses.replace(model, data=_often(random, (8, DATA[:1]), (1, DATA)))


def _layer(random: Random, kind: str, scheme: str) -> Layer | BatchNorm:
    """A layer for activations of a kind, which works with a scheme of training; some need separate examples."""
    may_meet = scheme not in NO_BATCH_NORM
    if may_meet and random.random() < 0.1:
        averages = _often(random, (2, [OWN]), (1, [tuple(AVERAGES)]))
        return BatchNorm(random.choice(list(VARIANCES)), (random.choice(averages), random.choice(averages)))
    meets = may_meet and random.random() < 0.01
    names = (_MEETING if meets else _FEW)[kind]
    if not meets:
        new = _often(random, (14, [()]), (5, [(*FUSED, *WRITTEN)]), (4, [MASKED]), (1, [IN_BRANCHES]))
        names = [name for name in _LAYERS[kind] if name in new] or names
    name = random.choice([name for name in names if scheme not in RULES[name].without])
    wraps = [wrap for wrap in WRAPS if wrap not in RULES[name].without]
    return Layer(name, "plain" if meets else _often(random, (3, ["plain", "residual"]), (4, wraps)))


def _attention(random: Random, model: Model) -> Attention:
    """The attentions that become one operation; by default, all of the grammar are too short."""
    has_attention = any(isinstance(layer, Layer) and layer.name in ATTENTIONS for layer in model.layers)
    choice: Attention = _often(random, (3, ["fused"]), (2, ["auto"])) if has_attention else "auto"
    return choice


# ---- losses and steps -----------------------------------------------------------------------------------------------

_USUAL = ("mean", "sum", "masked mean", "masked mean of at least one", "weighted")
_APART = tuple(name for name in REDUCTIONS if name not in PAIRING)
_ONCE = tuple(name for name in SCHEMES if name not in (*SEVERAL, *MIXING))


def _loss(random: Random) -> Loss:
    terms = tuple(
        Term(
            random.choice(list(PER_EXAMPLE)),
            _often(random, (24, _USUAL), (55, _APART), (1, PAIRING)),
            random.choice([1.0, 0.5]),
        )
        for _ in range(random.choice([1, 1, 1, 2, 2, 3]))
    )
    return Loss(terms, _often(random, (3, ["sum"]), (2, JOINS)), random.choice([0.0, 0.0, 0.01]))


def _training(random: Random) -> Training:
    scheme = _often(random, (15, ["plain"]), (22, _ONCE), (22, SEVERAL), (1, MIXING))
    return Training(
        _model(random, scheme),
        _loss(random),
        scheme,
        optimizer=_often(random, (3, ["sgd", "adam"]), (4, list(OPTIMIZERS))),
        gradient=_often(random, (2, GRADIENTS[:1]), (3, GRADIENTS)),
        key=random.choice(["argument", "state"]),
        results=_some(random, tuple(RESULTS), 3),
        carries=_some(random, CARRIED, 2),
        shows_gradients=random.random() < 0.5,
        batch_size=random.choice([8, 8, 16]),
        seed=random.randint(0, 999),
    )


#: The scheme that cuts the batch into halves.
_BY_HALVES = "accumulated by hand"
_BY_FORCE = ("data", "zero2", "zero3", "3d")


def _other_batches(random: Random, example: Example) -> Example:
    """The example, with another batch.

    In one of eight, its micro-batches do not divide the batch; or it runs after a call with another batch.
    """
    training, way = example.training, example.way
    if random.random() > 0.125 or way.n == 1 or training.scheme == _BY_HALVES:
        return example
    # Methods with a forced split of the examples need batches that the devices divide.
    devices = way.mesh[0] * (way.mesh[1] if len(way.mesh) == 2 else 1) if way.kind in _BY_FORCE else 1
    size = random.choice([n for n in (5, 6, 7, 9, 10, 12, 14) if n % way.n and n % devices == 0] or [8])
    first = random.choice([0, way.n * devices, 16 * devices, 16 * devices])
    return Example(dataclasses.replace(training, batch_size=size), dataclasses.replace(way, first=first))


def _on_gpus(random: Random, example: Example) -> Example:
    """The example; two in five are planned for GPUs, and one stage may then rematerialise, too."""
    way = example.way
    if random.random() > 0.4 or way.kind == "none":
        return example
    remat = random.choice(["none", "none", "dots", "full"]) if way.kind in ONE_STAGE else way.remat
    return Example(example.training, dataclasses.replace(way, gpus=True, remat=remat))


def _in_narrower_types(random: Random, example: Example) -> Example:
    """The example; one in five reads its parameters in a narrower type, and most of these are cast once.

    Only without gradients at parameters that the step has changed. The rounding of these parameters differs from run to
    run, because XLA may leave out a pair of conversions.
    """
    training, way = example.training, example.way
    if random.random() > 0.2 or training.scheme in SEVERAL:
        return example
    training = dataclasses.replace(training, model=dataclasses.replace(training.model, narrows=True))
    casts_once = way.kind != "none" and way.n > 1 and random.random() < 0.8
    return Example(training, dataclasses.replace(way, casts_once=casts_once))


def _with_counts(random: Random, example: Example) -> Example:
    """The example; two in five have exact reductions of other arrays."""
    if random.random() > 0.4:
        return example
    training = dataclasses.replace(example.training, counted=draw_counted(random))
    return Example(training, example.way)


def _with_flags_and_keys(random: Random, example: Example) -> Example:
    """The example; one in four has typed keys, and one in eight runs after a call under another setting."""
    training, way = example.training, example.way
    if random.random() < 0.25:
        training = dataclasses.replace(training, typed=True)
    if random.random() < 0.125:
        way = dataclasses.replace(way, flag=random.choice(list(FLAGS)))
    return Example(training, way)


def _spread(random: Random, example: Example) -> Example:
    """The example; two in three of `ShardParallel` on several devices have shardings of arguments."""
    way = example.way
    if way.kind != "shard" or math.prod(way.mesh) == 1 or way.first or random.random() < 1 / 3:
        return example
    return Example(example.training, dataclasses.replace(way, spread=random.randint(1, 999)))


# ---- ways to run them -----------------------------------------------------------------------------------------------

_PIPELINES = (
    "pipeline",
    "pipeline-gpipe",
    "pipeline-given",
    "pipeline-auto",
    "pipeline-interleaved",
    "pipeline-zb",
    "pipeline-zb-v",
)


def _way(random: Random, has_boundary: bool) -> Way:
    """A way to run a model; if it has a boundary between layers, possibly with this boundary."""
    kind = _often(
        random, (12, ["shard"]), (4, ["data", "zero2", "zero3"]), (6, _PIPELINES), (1, ["3d"]), (1, ["auto", "none"])
    )
    n = random.choice([1, 2, 2, 2, 4, 4, 4, 8])
    if kind in ("auto", "none"):
        return Way(kind, random.choice([(1,), (2,)]), n)
    if not kind.startswith("pipeline") and kind != "3d":
        return Way(kind, _often(random, (6, [(1,), (2,)]), (2, [(4,), (8,), (2, 2), (2, 4)])), n)
    stages = random.choice([2, 2, 2, 4]) if kind in ("pipeline-gpipe", "pipeline-zb", "pipeline-zb-v") else 2
    by_boundary = has_boundary and stages == 2 and kind not in ("3d", *TWO_RUNS)
    return Way(
        kind,
        (stages * random.choice([1, 1, 2]),),
        n,
        stages,
        remat=random.choice(["none", "none", "dots", "full"]),
        manual=by_boundary and random.random() < 0.5,
    )
