"""The planner: a traced step and a cluster in, a `Plan` out; `lower` makes the program of a plan. See README.md."""
