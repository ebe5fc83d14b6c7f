"""Answers in a terminal, a module per kind; built from the summaries that ``--json`` prints."""
