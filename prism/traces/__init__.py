"""Recordings of real jobs, read into one tidy table of ops, or into measured step times.

Formats are distinguished by content. Left out: fitting anything to what was read.
"""

from prism.traces.readers import (
    Recording,
    find_recording,
    holds,
    read_step_times,
    read_trace,
    unknown_format,
)
from prism.traces.steps import StepTimes, read_totals, say_taken, total_per_run
from prism.traces.table import Trace, make_trace

__all__ = [
    "Recording",
    "StepTimes",
    "Trace",
    "find_recording",
    "holds",
    "make_trace",
    "read_step_times",
    "read_totals",
    "read_trace",
    "say_taken",
    "total_per_run",
    "unknown_format",
]

# modules that rooms above may import
FACE = (
    "choose", "columns", "file", "formats.hta", "formats.nccltests", "growing", "kernelnames",
    "looks", "table",
)  # fmt: skip
