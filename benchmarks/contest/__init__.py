"""minialpa's solver on one graph with a time limit in seconds, as in the contest of google/iopddl.

The planner solves hundreds of graphs by counted work and stops when further work brings no gain. A contest gives one
graph and a number of seconds, so this search continues until the time is over.

solve             the phases of minialpa's solver, then slices of search
persistence       a slice: prices move to raise the bound, and annealing finds cheaper choices
forest_search     annealing on forests of nodes that share a scarce row
carried_messages  messages of a graph that has lost strategies
"""
