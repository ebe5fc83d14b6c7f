"""A fitted trace: graph, distributions, effects, engine arrays, and the file that holds them."""
