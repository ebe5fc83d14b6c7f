"""Timelines: when every op of one step starts and ends, and what each rank waits for meanwhile."""
