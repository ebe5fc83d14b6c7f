"""The run of an estimate: its replicates, given what is behind it, and what pauses cost."""
