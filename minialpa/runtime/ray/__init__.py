"""The only package that knows Ray: a request for hosts goes in; workers, answers and faults come out. See README.md."""
