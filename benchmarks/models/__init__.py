"""Models of many packages, trained by minialpa and by `jax.jit`: the table of benchmarks/models.md.

catalogue    the type of a model, and the methods
plain frameworks hugging_face science      the models, each a function
row          trains one model with each of its methods, compares, and prints JSON
processes    trains models in separate processes, several at a time
results      a file of rows, from which an interrupted run continues
page         the page from the rows
table        the command: all models, and the page
"""

from __future__ import annotations

from benchmarks.registry import Rows, Size, benchmark


@benchmark("models")
def models(size: Size) -> Rows:
    """Models of other packages: three training steps of each method, compared with one device."""
    # Imported here, because the list of benchmarks does not need the models.
    from benchmarks.models.all_models import MODELS
    from benchmarks.models.catalogue import PIPE_2, SHARD_2
    from benchmarks.models.processes import train
    from benchmarks.models.row import rows_of

    if size == "tiny":
        return list(rows_of("mlp", [SHARD_2, PIPE_2]))
    of_model: dict[str, Rows] = {}
    train(list(MODELS), n_processes=2, done=of_model.__setitem__)
    return [row for name in MODELS for row in of_model[name]]
