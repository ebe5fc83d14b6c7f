"""A local page with controls: a job, changed key by key, and its answers beside it."""
