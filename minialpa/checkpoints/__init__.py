"""Checkpoints: the state of a training run goes to files in orbax's format, and comes back under any plan.

See README.md. Imports: `arrays`, `errors`, `plan`, `programs`, `pytrees` and `runtime`; orbax at its first use.
"""
