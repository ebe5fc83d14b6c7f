"""What one step does: kernels, collectives, their nominal times, memory, the graph."""

# modules that rooms above may import
FACE = (
    "build", "collectivecost", "described", "energy", "kernelcost", "kernels", "memory",
    "modelsize", "opgraph", "stepgraph", "work",
)  # fmt: skip
