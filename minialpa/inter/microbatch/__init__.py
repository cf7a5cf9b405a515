"""Micro-batches: a `TracedStep` and a number n in, a `SplitStep` of loops over n micro-batches out; see README.md."""
