"""Distributions of durations and effects, their tables, and the shipped libraries."""

# modules that rooms above may import
FACE = (
    "distribution", "kerneltables", "library", "modelfile", "ranges",
    "samples", "sums", "tables",
)  # fmt: skip
