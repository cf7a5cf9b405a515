"""Models of many packages, trained by minialpa and by `jax.jit`: the table of docs/models.md.

catalogue    what a row is, and the methods
plain frameworks hugging_face science      the models, each a function
row          trains one model under its methods, and compares; prints JSON
table        all rows, in processes of their own; writes the page
"""

from __future__ import annotations

from benchmarks.registry import Rows, Size, benchmark


@benchmark("models")
def models(size: Size) -> Rows:
    """Models of other packages: three training steps against those of one device, by method."""
    # Imported here, because the list of benchmarks does without.
    from benchmarks.models.all_models import MODELS
    from benchmarks.models.catalogue import PIPE_2, SHARD_2
    from benchmarks.models.row import rows_of
    from benchmarks.models.table import rows_of as rows_of_all

    if size == "full":
        return rows_of_all(list(MODELS), n_processes=2)
    return list(rows_of("mlp", [SHARD_2, PIPE_2]))
