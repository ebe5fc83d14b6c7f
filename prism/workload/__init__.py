"""What one step does: kernels, collectives, their nominal times, memory, the graph."""

# modules that rooms above may import
FACE = (
    "build", "collectivecost", "described", "energy", "fitting", "frameworks", "kernelcost",
    "kernels", "layers", "memory", "opgraph", "ops", "stepgraph", "work",
)  # fmt: skip
