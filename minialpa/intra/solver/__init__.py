"""A graph of nodes with strategies and costs goes in; one strategy per node and a lower bound on the cost come out."""
