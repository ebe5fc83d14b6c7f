"""Commands: what is typed is parsed, an analysis called, its answer shown."""

# modules that rooms above may import
FACE = (
    "app",
)  # fmt: skip
