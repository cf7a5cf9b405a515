"""The solver of minialpa on one graph with a time limit in seconds, as in the contest of google/iopddl.

The planner solves hundreds of graphs by counted work and stops when nothing is gained any more. A contest gives seconds
for one graph, so here a search goes on until they are over.

solve             the phases of minialpa's solver, and then slices of search
persistence       a slice: the bound rises by moving prices, and annealing finds cheaper choices
forest_search     annealing on forests of nodes that share a scarce row
carried_messages  messages of a graph that has lost strategies
"""
