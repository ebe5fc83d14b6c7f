"""PyTorch-profiler traces, and how the ranks of any profiler come together in one tidy table."""
