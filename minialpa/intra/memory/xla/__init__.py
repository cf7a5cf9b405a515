"""XLA for CPUs and for GPUs as `Compiler`s: equations and reshardings of one device in, kernels in their order out.

The planner imports the values of `model`; the other modules are XLA's rules of fusion, layouts and orders.
Imports: `intra.memory`, `intra.strategies` and `cost`.
"""
