"""Distributions of durations and effects, their tables, and the shipped libraries."""

# modules that rooms above may import
FACE = (
    "law", "library", "tables",
)  # fmt: skip
