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

# what rooms above may import, by module
FACE = {
    "choose": "check_column check_groups chosen_rows groups_among is_mostly_numbers rows_in_name",
    "columns": "UNITS meaning several_columns",
    "file": "RawTable RecordedFile",
    "formats.hta": "KernelMoments OTHERS",
    "formats.nccltests": "BandwidthTest BandwidthTests",
    "growing": "GrowingLog Reading count_done read_log",
    "kernelnames": "COLLECTIVES classify collective_kind",
    "kineto.events": "Event arguments read_events",
    "kineto.periods": "mark_by_rhythm",
    "kineto.rank": "read_rank",
    "looks": "what_is",
    "table": "KERNEL_FORMATS LEFT_OUT SHORTEST_S Trace",
}  # fmt: skip
