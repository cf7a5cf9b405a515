"""Benchmarks: one case per file, run by `python -m benchmarks.run NAME...`."""
