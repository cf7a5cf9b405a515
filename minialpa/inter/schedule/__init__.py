"""Schedules: the order in which the stages of a pipeline run their passes.

`simulate` finds how long a step takes in such an order, with the seconds and bytes of a plan.
Imports: `plan`, `cluster`.
"""
