"""A graph of nodes with strategies and costs in; one strategy per node and a lower bound on the cost out."""
