"""XLA for CPUs and for GPUs as `Compiler`s: equations and reshardings of one device become the kernels that run.

The planner imports the values of `model`; the other modules are XLA's rules of fusion, layouts and orders.
Imports: `intra.memory`, `intra.strategies` and `tracing`.
"""
