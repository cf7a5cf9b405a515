"""The memory model: a program of one device in, the bytes that it needs while it runs out. See README.md."""
