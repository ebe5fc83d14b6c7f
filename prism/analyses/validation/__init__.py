"""Held-out data against predictions of traces, step times and jobs."""
