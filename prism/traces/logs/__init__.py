"""Step times in logs of trainers, in TensorBoard's files and in what trackers export."""

from prism.traces.logs.events import is_events, read_events
from prism.traces.logs.exports import is_export, read_export
from prism.traces.logs.lines import is_log, read_log

__all__ = ["is_events", "is_export", "is_log", "read_events", "read_export", "read_log"]
