"""Whether a recording is a trace of ops, step times or a table of measurements, by content.

Only what tells them apart is looked at: either may still prove to be broken. Left out: reading
them (detect.py, steps.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from prism.common.errors import PrismError
from prism.traces.choose import unit_of
from prism.traces.content import find_kind, read_head, read_table, read_text
from prism.traces.hta import is_hta
from prism.traces.logs import is_log
from prism.traces.nccltests import is_nccl_tests
from prism.traces.pipeline import is_pipeline
from prism.traces.tidy import is_tidy

Recording = Literal["trace", "step_times", "kernels", "collectives"]


def recording_kind(what: str) -> Recording | None:
    """Say what a file or folder holds: a trace of ops, step times, or a table of measurements.

    ``kernels`` is a table of kernels' moments, ``collectives`` output of nccl-tests; None is none
    of these.

    Only what tells them apart is looked at: either may still prove to be broken.

    Raises
    ------
    PrismError
        A parquet file that cannot be read; no other kind of file is one.
    """
    path, kind = Path(what), None
    if path.is_dir():
        return "collectives" if _holds_nccl_tests(path) else "trace"
    try:
        kind = find_kind(path, what)
        if kind in ("json", "sqlite", "chakra"):
            # mpirun's prefix starts as JSON does
            is_test = kind == "json" and is_nccl_tests(read_head(path, what))
            return "collectives" if is_test else "trace"
    except PrismError:
        return None
    text = read_text(path, what) if kind == "text" else None
    if text is not None and is_log(text):
        return "step_times"
    if text is not None and is_nccl_tests(text):
        return "collectives"
    try:
        columns = read_table(path, what, kind, text).columns
    except PrismError:
        if kind == "parquet":
            raise
        return None
    if is_hta(columns):
        return "kernels"
    if is_pipeline(columns) or is_tidy(columns):
        return "trace"
    # steps without a unit are step times still: their reader says what is wrong
    are_steps = "step" in columns or any(unit_of(name) is not None for name in columns)
    return "step_times" if are_steps else None


def _holds_nccl_tests(folder: Path) -> bool:
    """Say whether the first file of a folder that is no hidden one is output of nccl-tests."""
    try:
        files = sorted(f for f in folder.iterdir() if f.is_file() and not f.name.startswith("."))
        return bool(files) and is_nccl_tests(read_head(files[0], str(files[0])))
    except (OSError, PrismError):
        return False


def holds_step_times(what: str) -> bool:
    """Say whether a file holds step times rather than ops."""
    return recording_kind(what) == "step_times"
