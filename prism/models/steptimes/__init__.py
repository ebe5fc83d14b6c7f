"""Models from step times alone: body, stalls, slow drift, run effect; no step graph."""
