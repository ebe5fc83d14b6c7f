"""Histories in JSON: of Hugging Face's Trainer, or lines with a step and a time since the start.

A Trainer keeps no more than the mean of a run, unless a callback adds times.

References
----------
.. [1] transformers (Apache-2.0), trainer.py, log, and trainer_utils.py, speed_metrics
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from prism.common.errors import PrismError
from prism.traces.columns import meaning, step_column
from prism.traces.file import RecordedFile
from prism.traces.logs.lines import read_log
from prism.traces.logs.tools import Tool
from prism.traces.steps import StepTimes, read_table_times

_CLOCKS = ("elapsed", "elapsed_time", "elapsed_s", "time_elapsed", "timestamp", "wall_time")
_STEPS = re.compile(rb"['\"]global_step['\"]: (\d+)")
_RUNTIME = re.compile(rb"['\"]train_runtime['\"]: ['\"]?([\d.]+)")
_RATE = re.compile(rb"['\"]train_steps_per_second['\"]: ['\"]?([\d.]+)")


class _Lines(RecordedFile):
    """The records of a JSON, one a line."""

    def __init__(self, file: RecordedFile) -> None:
        super().__init__(file.path, file.source, file.named)
        self.text = "\n".join(map(json.dumps, file.records)).encode()


def is_history(file: RecordedFile) -> bool:
    """Tell a Trainer's state, results or output; or JSON with steps, a clock and no durations."""
    text = file.head if file.kind == "json" else file.text
    if b'"log_history"' in text or _RUNTIME.search(text):
        return True
    return file.kind == "json" and not _has_times(file) and _clock_of(file) is not None


def _has_times(file: RecordedFile) -> bool:
    return any(meaning(name).kind == "duration" for name in file.columns)


def _clock_of(file: RecordedFile) -> Tool | None:
    """Make the tool of lines with a step and a clock; None where they have none."""
    step = step_column(file.columns)
    clock = next((name for name in _CLOCKS if name in file.columns), None)
    if step is None or clock is None:
        return None
    return Tool(
        "the history",
        b'"',
        (b'"',),
        rf'\{{(?=.*"{step}": (?P<step>\d+)).*"{clock}": "?(?P<elapsed>[^",}}]+)',
        "time between lines",
        f'{{"{step}": 10, "{clock}": 57.3}}',
        is_mean=True,
        is_rate=True,
    )


def read_history(
    files: Sequence[RecordedFile], column: str | None = None,
    where: Mapping[str, str] | None = None, unit: str | None = None,
    per_step: Mapping[str, float] | None = None,
) -> StepTimes:  # fmt: skip
    """Read the steps of a history, whose entries have a time of a step or since the start."""
    file = files[0]
    if column is not None or _has_times(file):
        return read_table_times(files, column, where, unit, per_step)
    tool = _clock_of(file)
    if tool is not None:
        return read_log([_Lines(file)], where, tool)
    text = file.text or file.read_text()
    steps, runtime, rate = (part.search(text) for part in (_STEPS, _RUNTIME, _RATE))
    mean = float(runtime[1]) / max(int(steps[1]), 1) if runtime and steps else 0.0
    mean = mean or (1.0 / max(float(rate[1]), 1e-9) if rate else 0.0)
    told = f", but their mean in the run: {mean:.4g} s (train_runtime over steps)" if mean else ""
    raise PrismError(
        f"{file.source}: Hugging Face's Trainer wrote no step times{told}. The bar in its standard "
        "error has them, and so has LLaMA-Factory's trainer_log.jsonl; or add elapsed_time to its "
        "log_history by a callback"
    )
