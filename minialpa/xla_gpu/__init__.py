"""What XLA for GPUs makes of functions, on a machine that need not have one.

In: exported functions and their plan, and a target, the GPU that they are for. Out: the memory that they need, the
collectives that they start, what runs beside these, and XLA's own times of the kernels.
Imports: `attention`, `cluster`, `hlo`, `plan`, `programs` and `support`.
"""
