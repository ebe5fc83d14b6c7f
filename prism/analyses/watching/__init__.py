"""What a run that is going on is held against, and what is left of it."""
