"""Real nodes: their names and how slow they are, from host lists, burn-in tables, nccl-tests."""
