"""Step times in logs of trainers, found in lines of any launcher or logger."""

from prism.traces.logs.read import is_log, read_log

__all__ = ["is_log", "read_log"]
