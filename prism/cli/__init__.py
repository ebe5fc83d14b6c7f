"""Commands: what is typed is parsed, an analysis called, its answer shown."""

# what rooms above may import, by module
FACE = {
    "app": "prism",
}  # fmt: skip
