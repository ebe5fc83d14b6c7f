"""Answers as people read them: in a terminal, as a page, and what a file or a name holds."""

# what rooms above may import, by module
FACE = {
    "answer": "Answer",
    "answers.fit": "fit_answer",
    "answers.measure": "measurement_answer",
    "cells": "Cell Column Table",
    "explore.page": "HOST serve",
    "imports": "import_answer imported_yaml table_answer table_yaml topology_answer topology_yaml",
    "jobtemplate": "job_yaml",
    "junit": "junit_xml",
    "openmetrics": "openmetrics_text",
    "reports.page": "MOST_BYTES check_page make_page read_parts",
    "show": "describe describe_jobs describe_libraries",
    "terminal": "render",
}  # fmt: skip
