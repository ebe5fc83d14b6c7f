"""Lines of step times by tool: what marks them, where step and value stand, what a value is.

Lines are read whatever a launcher, a logger or grep has put before them.

References
----------
.. [1] Megatron-LM, training.py, training_log; Megatron Bridge and Primus print the same line,
   Primus a mean behind a slash
.. [2] NeMo, progress printer and bar: `train_step_timing in s` of the callback that times a step
.. [3] torchtitan, metrics.py, MetricsProcessor.log
.. [4] DeepSpeed, pipe/engine.py and utils/timer.py, ThroughputTimer
.. [5] MaxText, metric_logger.py
"""

import re
from typing import NamedTuple


class Tool(NamedTuple):
    """How one tool writes step times."""

    name: str
    mark: re.Pattern[bytes]  # in each line of step times, whole or damaged
    line: re.Pattern[str]  # with groups step and value; unit and total where they are written
    what: str  # what the tool calls the value
    sample: str
    is_mean: bool  # over the steps since the line before; else of the last step alone
    is_rate: bool = False  # samples or tokens per second
    batch: re.Pattern[bytes] | None = None  # where the log has the samples of a step


def _tool(
    name: str, mark: str, line: str, what: str, sample: str, is_mean: bool, rate: bool = False,
    batch: str = "",
) -> Tool:  # fmt: skip
    setting = re.compile(batch.encode()) if batch else None
    marks = re.compile(mark.encode())
    return Tool(name, marks, re.compile(line), what, sample, is_mean, rate, setting)


TOOLS = (
    _tool(
        "Megatron",
        r"elapsed time per iteration \(",
        r"\biteration\s+(?P<step>\d{1,15})\s*/\s*(?P<total>\d{0,15}).*?"
        r"elapsed time per iteration \((?P<unit>ms|s)\):\s*(?P<value>[^\s|/]*)",
        "elapsed time per iteration",
        "iteration 10/ 1000 | ... elapsed time per iteration (ms): 5837.9 |",
        is_mean=True,
    ),
    _tool(
        "NeMo",
        r"train_step_timing in s ?[:=]",
        r"\bglobal_step ?[:=]\s*(?P<step>\d{1,15})(?:\.0*)?\b.*?"
        r"train_step_timing in (?P<unit>s) ?[:=]\s*(?P<value>[^\s|,\]]*)",
        "train_step_timing in s",
        "global_step: 10 | ... | train_step_timing in s: 5.8",
        is_mean=False,
    ),
    _tool(
        "MaxText",
        r"completed step: \d+, ",
        r"\bcompleted step: (?P<step>\d{1,15}), seconds: (?P<value>[^\s,]*)",
        "seconds",
        "completed step: 10, seconds: 5.838, TFLOP/s/device: ...",
        is_mean=False,
    ),
    _tool(
        "DeepSpeed",
        r"iter time \(s\):",
        r"\bsteps: (?P<step>\d{1,15})\b.*?iter time \((?P<unit>s)\):\s*(?P<value>\S*)",
        "iter time (s)",
        "steps: 10 loss: 2.1 iter time (s): 5.838 samples/sec: 43.8",
        is_mean=True,
    ),
    _tool(
        "DeepSpeed",
        r"CurrSamplesPerSec=",
        r"(?:\bglobal_step=|\b\d{1,9}/)(?P<step>\d{1,15}), "
        r".*?CurrSamplesPerSec=(?P<value>[^\s,]*)",
        "train_batch_size over CurrSamplesPerSec",
        "[2023-11-07 01:55:23,714] ... global_step=10, ... CurrSamplesPerSec=25.7, ...",
        is_mean=False,
        rate=True,
        batch=r"\btrain_batch_size\W+(\d{1,12})\b",
    ),
    _tool(
        "torchtitan",
        r"(?:\b|\dm)[tw]ps: ?[\d,]+",
        r"\bstep: +(?P<step>\d{1,15}) .*?\b[tw]ps: ?(?P<value>[\d,]+)",
        "time between lines",
        "[titan] 2025-06-04 08:51:58,557 - root - INFO - step: 10 ... tps: 7,034",
        is_mean=True,
        rate=True,
    ),
)
"""All tools, those that give a time before those that give a rate."""
