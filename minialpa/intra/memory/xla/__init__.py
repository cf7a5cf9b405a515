"""XLA for CPUs and for GPUs as `CompilerModel`s: equations and reshardings of one device become the kernels that run.

`model` has the values, which the planner imports; the other modules say what XLA fuses, lays out, combines and copies.
Imports: `intra.memory`, `intra.strategies` and `tracing`.
"""
