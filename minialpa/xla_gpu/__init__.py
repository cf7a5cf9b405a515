"""A plan compiled by XLA for GPUs, on a machine without one.

In: exported functions, their plan, and the GPU as a target. Out: memory, collectives, kernels that run beside these,
and XLA's estimates of kernels. Imports: `attention`, `cluster`, `hlo`, `plan`, `programs` and `support`.
"""
