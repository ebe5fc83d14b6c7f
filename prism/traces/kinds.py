"""Whether a recording is a trace of ops or a series of step times, told by content.

Only what tells them apart is looked at: either may still prove to be broken. Left out: reading
them (detect.py, steps.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from prism.errors import PrismError
from prism.traces.choose import unit_of
from prism.traces.content import find_kind, read_table, read_text
from prism.traces.logs import is_log
from prism.traces.pipeline import is_pipeline
from prism.traces.tidy import is_tidy


def recording_kind(what: str) -> Literal["trace", "step_times"] | None:
    """Say whether a file or folder is a trace of ops, or step times; None if it is neither.

    Only what tells them apart is looked at: either may still prove to be broken.
    """
    path = Path(what)
    if path.is_dir():
        return "trace"
    try:
        kind = find_kind(path, what)
        if kind == "json":
            return "trace"
        text = read_text(path, what) if kind == "text" else None
        if text is not None and is_log(text):
            return "step_times"
        columns = read_table(path, what, kind, text).columns
    except PrismError:
        return None
    if is_pipeline(columns) or is_tidy(columns):
        return "trace"
    # steps without a unit are step times still: their reader says what is wrong
    are_steps = "step" in columns or any(unit_of(name) is not None for name in columns)
    return "step_times" if are_steps else None


def holds_step_times(what: str) -> bool:
    """Say whether a file holds step times rather than ops."""
    return recording_kind(what) == "step_times"
