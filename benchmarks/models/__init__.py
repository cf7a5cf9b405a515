"""Models of many packages, trained by minialpa and by `jax.jit`: the table of docs/models.md.

catalogue    what a row is, and the methods
plain frameworks hugging_face science      the models, each a function
row          trains one model under its methods, and compares; prints JSON
processes    trains models in processes of their own, several at a time
results      a file of rows, with which an interrupted run goes on
page         the page from the rows
table        the command: all models, and the page
"""

from __future__ import annotations

from benchmarks.registry import Rows, Size, benchmark


@benchmark("models")
def models(size: Size) -> Rows:
    """Models of other packages: three training steps against those of one device, by method."""
    # Imported here, because the list of benchmarks does without.
    from benchmarks.models.all_models import MODELS
    from benchmarks.models.catalogue import PIPE_2, SHARD_2
    from benchmarks.models.processes import train
    from benchmarks.models.row import rows_of

    if size == "tiny":
        return list(rows_of("mlp", [SHARD_2, PIPE_2]))
    of_model: dict[str, Rows] = {}
    train(list(MODELS), n_processes=2, done=of_model.__setitem__)
    return [row for name in MODELS for row in of_model[name]]
