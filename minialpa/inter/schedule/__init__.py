"""Schedules: the order in which the stages of a pipeline run their passes, and timelines of plans in that order.

Imports: `plan`, `cluster`.
"""
