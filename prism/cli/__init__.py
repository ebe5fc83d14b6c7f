"""Commands: what is typed is parsed, an analysis called, its answer shown."""
