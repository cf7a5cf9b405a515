"""The driver of a cluster: programs and arguments go in, arrays that stay on workers come out. See README.md."""
