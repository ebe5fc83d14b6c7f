"""What one step does: kernels, collectives, their nominal times, memory, the graph."""

# modules that rooms above may import
FACE = (
    "build", "collectivecost", "energy", "experts", "kernelcost", "kernels", "memory", "modelsize",
    "opgraph", "stepgraph", "transformer", "work",
)  # fmt: skip
