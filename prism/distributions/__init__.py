"""Distributions of durations and effects, their tables, and the shipped libraries."""
