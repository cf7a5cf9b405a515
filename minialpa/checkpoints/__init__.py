"""Checkpoints: the state of a training run goes to files in orbax's format, and comes back under any plan.

Imports: `arrays`, `errors`, `plan`, `programs`, `runtime` and `runtime.cluster`; orbax when a checkpoint is written or
read.
"""
