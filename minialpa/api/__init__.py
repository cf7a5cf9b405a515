"""The way of a call: a step and its arguments go in, the results of a program on all devices come out.

`parallelized` finds the program for a call, or has `step_planner` plan the step and `step_compiler` compile it.
Imports: all rooms below; the planner and the runtime by the first call that needs them, because that takes long.
"""
