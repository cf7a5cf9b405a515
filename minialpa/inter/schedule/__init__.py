"""Schedules: a pipeline size in, the order of passes of each stage out; a plan in, the timeline of one step out."""
