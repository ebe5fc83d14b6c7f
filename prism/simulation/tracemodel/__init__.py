"""What a fitted trace is: graph, laws and effects, engine arrays, and the file that holds them."""
