"""Where slow nodes go: symmetry, screening, search, selection and alternatives."""
