"""Runs a `Program`: argument leaves go in, result leaves come out, without a wait for devices. See README.md."""
