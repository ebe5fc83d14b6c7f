"""What one step does: kernels, collectives, their nominal times, memory, the graph."""
