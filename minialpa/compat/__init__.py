"""Interfaces of other systems: their scripts' calls go in, minialpa's public functions run. See README.md."""
