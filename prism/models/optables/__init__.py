"""A profile as a job with a table of ops: its layers, their shapes, and what has none."""
