"""Held-out data against predictions: of traces, of step times, and the law of their distance."""
