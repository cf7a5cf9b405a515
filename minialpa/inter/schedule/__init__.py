"""Schedules: a number of stages and micro-batches in, the order of the passes of each stage out.

`simulate` prices such an order, as the plan says. Imports: `plan`, `cluster`.
"""
