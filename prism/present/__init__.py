"""Answers as people read them: in a terminal, as a page, and what a file or a name holds."""

# modules that rooms above may import
FACE = (
    "answer", "answers.fit", "answers.measure", "explore.page", "imports", "jobtemplate", "junit",
    "openmetrics", "reports.page", "show", "terminal",
)  # fmt: skip
