"""Instructions and compiled functions go in, arrays in numbered buffers come out. See README.md."""
