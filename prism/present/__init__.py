"""Answers as people read them: in a terminal, as a page, and what a file or a name holds."""
