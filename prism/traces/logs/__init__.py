"""Step times in logs of trainers, in TensorBoard's files and in what trackers export."""

from prism.traces.logs.lines import is_log, read_log, say_skipped, settings_in
from prism.traces.logs.patterns import EXAMPLE, pattern_tool
from prism.traces.logs.tools import TOOLS
from prism.traces.logs.trackers import (
    is_events,
    is_export,
    is_history,
    read_events,
    read_export,
    read_history,
)

__all__ = [
    "EXAMPLE", "TOOLS", "is_events", "is_export", "is_history", "is_log", "pattern_tool",
    "read_events", "read_export", "read_history", "read_log", "say_skipped", "settings_in",
]  # fmt: skip
