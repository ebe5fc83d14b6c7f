"""Pipeline traces: from ops of workers to a graph and a fitted model."""
