"""Which trainers' logs are read: how each tool writes the time of a step.

References
----------
.. [1] Megatron-LM, training.py, training_log; Megatron Bridge and Primus print the same line,
   Primus a mean behind a slash
.. [2] NeMo, progress printer and bar: `train_step_timing in s` of the callback that times a step
.. [3] torchtitan, metrics.py, MetricsProcessor.log
.. [4] DeepSpeed, pipe/engine.py and utils/timer.py, ThroughputTimer
.. [5] MaxText, metric_logger.py
.. [6] nanotron, logging of a step; MMEngine (XTuner), LoggerHook; ms-swift, add_train_message and
   PrintCallback of its Megatron; tqdm, whose bar transformers' Trainer, Axolotl and torchtune show
.. [7] OLMo-core, console_logger.py; LLaMA-Factory, callbacks.py, trainer_log.jsonl; pith,
   log of a step
.. [8] verl, tracking.py, LocalLogger; NeMo AutoModel, train_ft.py, log_train_metrics; tqdm-loggable
   (levanter), tqdm_logging.py; torchtune, metric_logging.py, DiskLogger
"""

import re
from typing import NamedTuple

NEVER = "(?!)"  # a pattern that finds nothing


class Tool(NamedTuple):
    """How one tool writes step times."""

    name: str
    mark: bytes  # in each line of step times, whole or damaged
    needs: tuple[bytes, ...]
    """Texts of which a mark holds one: looked for first, as a log without them is passed over at
    1 ns a byte, by the marks at up to 40 (18 MB of Megatron's lines)."""
    line: str
    """With one of the groups s, ms, rate (steps per second) and per_s (samples or tokens), or none
    (the clock tells); and step (else lines count), total, elapsed (since the start, where a line
    has no clock), bar (what counts on where step does not)."""
    what: str  # what the tool calls the value
    sample: str
    is_mean: bool = False  # over the steps since the line before; else of the last step alone
    is_rate: bool = False  # samples or tokens per second, or none: the clock tells, or the batch
    batch: bytes = NEVER.encode()  # where the log has the samples of a step
    many: bool = False  # in one line
    other: str = NEVER  # in lines that are not of a training step

    def is_in(self, text: bytes) -> bool:
        """Whether a text has lines of this tool."""
        return any(need in text for need in self.needs) and bool(re.search(self.mark, text))


# those that give a time before those that give a rate
TOOLS = (
    Tool(
        "Megatron",
        rb"elapsed time per iteration \(",
        (b"elapsed time per iteration (",),
        r"\biteration\s+(?P<step>\d{1,15})\s*/\s*(?P<total>\d{0,15}).*?"
        r"elapsed time per iteration \((?:ms\):\s*(?P<ms>[^\s|/]*)|s\):\s*(?P<s>[^\s|/]*))",
        "elapsed time per iteration",
        "iteration 10/ 1000 | ... elapsed time per iteration (ms): 5837.9 |",
        is_mean=True,
    ),
    Tool(
        "NeMo",
        rb"train_step_timing in s ?[:=]",
        (b"train_step_timing in s",),
        r"(?:(?:\||\biteration)\s*(?P<bar>\d{1,15})/\d+ (?:\[|\|).*?)?"
        r"\bglobal_step ?[:=]\s*(?P<step>\d[\d.]{0,15}(?:e\+\d\d?)?)\b.*?"
        r"train_step_timing in s ?[:=]\s*(?P<s>[^\s|,\]]*)",
        "train_step_timing in s",
        "global_step: 10 | ... | train_step_timing in s: 5.8",
    ),
    Tool(
        "nanotron",
        rb"elapsed_time_per_iteration_ms: ",
        (b"elapsed_time_per_iteration_ms",),
        r"\biteration: (?P<step>\d{1,15}) / (?P<total>\d{1,15}) .*?"
        r"elapsed_time_per_iteration_ms: (?P<ms>[^\s|]*)",
        "elapsed_time_per_iteration_ms",
        "iteration: 10 / 1000 | ... elapsed_time_per_iteration_ms: 5.84K |",
        is_mean=True,
    ),
    Tool(
        "MMEngine",
        rb"Iter\(train\) \[",
        (b"Iter(train) [",),
        r"Iter\(train\) \[\s*(?P<step>\d{1,15})/(?P<total>\d{1,15})\].*?"
        r"(?<!_)\btime: (?P<s>\S*)",
        "time",
        "Iter(train) [  10/5000]  lr: ... time: 3.1561  data_time: ...",
        is_mean=True,
    ),
    Tool(
        "verl",
        rb"\bstep:\d+ - .*(?:timing_s/step|perf/time_per_step|train/time\(s\)):",
        (b"timing_s/step:", b"perf/time_per_step:", b"train/time(s):"),
        r"(?<![\w/])step:(?P<step>\d{1,15}) - .*?"
        r"(?:timing_s/step|perf/time_per_step|train/time\(s\)):(?:np\.float\d+\()?"
        r"(?P<s>[\d.e+-]+)",
        "timing_s/step",
        "step:10 - global_seqlen/min:1024 - ... - timing_s/step:96.55 - ...",
    ),
    Tool(
        "NeMo AutoModel",
        rb"\bstep \d+ \| epoch \d+ \| .*\| time [\d.]+s\b",
        (b" | epoch ",),
        r"\bstep (?P<step>\d{1,15}) \| epoch \d+ \| .*\| time (?P<s>[\d.]+)s\b",
        "time",
        "step 10 | epoch 0 | loss 0.69 | ... | mem 24.90 GiB | time 2.46s",
        other=r"\[val\]",
    ),
    Tool(
        "MaxText",
        rb"completed step: \d+, ",
        (b"completed step: ",),
        r"\bcompleted step: (?P<step>\d{1,15}), seconds: (?P<s>[^\s,]*)",
        "seconds",
        "completed step: 10, seconds: 5.838, TFLOP/s/device: ...",
    ),
    Tool(
        "pith",
        rb" \| step-time ",
        (b" | step-time ",),
        r"\bstep (?P<step>\d{1,15})/(?P<total>\d{1,15}) \| step-time (?P<s>\S*) sec\b",
        "step-time",
        "step 00000010/00001000 | step-time 5.838 sec | ...",
    ),
    Tool(
        "DeepSpeed",
        rb"iter time \(s\):",
        (b"iter time (s):",),
        r"\bsteps: (?P<step>\d{1,15})\b.*?iter time \(s\):\s*(?P<s>\S*)",
        "iter time (s)",
        "steps: 10 loss: 2.1 iter time (s): 5.838 samples/sec: 43.8",
        is_mean=True,
    ),
    Tool(
        "DeepSpeed",
        rb"CurrSamplesPerSec=",
        (b"CurrSamplesPerSec=",),
        r"(?:\bglobal_step=|\b\d{1,9}/)(?P<step>\d{1,15}), "
        r".*?CurrSamplesPerSec=(?P<per_s>[^\s,]*)",
        "train_batch_size over CurrSamplesPerSec",
        "[2023-11-07 01:55:23,714] ... global_step=10, ... CurrSamplesPerSec=25.7, ...",
        is_rate=True,
        batch=rb"\btrain_batch_size\W+(\d{1,12})\b",
    ),
    Tool(
        "ms-swift",
        rb"['\"](?:global_step/max_steps|iteration)['\"]: ['\"]\d+/\d+['\"]",
        (b"global_step/max_steps", b"iteration'", b'iteration"'),
        r"\{(?=.*['\"]loss['\"]: ).*?['\"](?:global_step/max_steps|iteration)['\"]: "
        r"['\"](?P<step>\d{1,15})/(?P<total>\d{1,15})['\"]"
        r"(?:.*['\"]elapsed_time['\"]: ['\"](?P<elapsed>[^'\"]*))?",
        "time between lines",
        "{'loss': 0.4, ... 'global_step/max_steps': '295/4491', ... 'elapsed_time': '25m 37s', ..}",
        is_mean=True,
        is_rate=True,
        other=r"['\"](?:eval_\w+|train_runtime)['\"]",
    ),
    Tool(
        "torchtitan",
        rb"(?:\b|\dm)[tw]ps: ?[\d,]+",
        (b"tps:", b"wps:"),
        r"\bstep: +(?P<step>\d{1,15}) .*?\b[tw]ps: ?(?P<per_s>[\d,]+)",
        "time between lines",
        "[titan] 2025-06-04 08:51:58,557 - root - INFO - step: 10 ... tps: 7,034",
        is_mean=True,
        is_rate=True,
        other=r"\bvalidate step: ",
    ),
    Tool(
        "NeMo AutoModel",
        rb"\bstep \d+ \| epoch \d+ \| .*\| tps [\d.]+",
        (b" | epoch ",),
        r"\bstep (?P<step>\d{1,15}) \| epoch \d+ \| .*\| tps (?P<per_s>[\d.]+)",
        "time between lines",
        "2026-08-10 15:55:20 | INFO | root | step 10 | epoch 0 | loss 0.69 | ... | tps 11278.56(",
        is_mean=True,
        is_rate=True,
        other=r"\[val\]",
    ),
    Tool(
        "torchtune",
        rb"(?m)^Step \d+ \| .*tokens_per_second_per_gpu:",
        (b"tokens_per_second_per_gpu:",),
        r"^Step (?P<step>\d{1,15}) \| .*tokens_per_second_per_gpu:(?P<per_s>[\d.]+)",
        "time between lines",
        "its bar: 1|10|Loss: 1.59:   1%|1 | 10/3251 [00:23<2:07:13,  2.35s/it]",
        is_mean=True,
        is_rate=True,
    ),
    Tool(
        "OLMo-core",
        rb"\[step=\d+/\d+,epoch=",
        (b"[step=",),
        r"\[step=(?P<step>\d{1,15})/(?P<total>\d{1,15}),",
        "time between lines",
        "2025-12-22 10:00:02.534 ... [step=10/12000,epoch=1,eta=50m]",
        is_mean=True,
        is_rate=True,
    ),
    Tool(
        "LLaMA-Factory",
        rb'"current_steps": \d+, "total_steps": \d+, "loss"',
        (b'"current_steps": ',),
        r'"current_steps": (?P<step>\d{1,15}), "total_steps": (?P<total>\d{1,15}),'
        r'.*"elapsed_time": "(?P<elapsed>[\w ,]*\d+:\d\d:\d\d)"',
        "time between lines",
        '{"current_steps": 10, "total_steps": 500, "loss": 1.2, ... "elapsed_time": "0:00:57"}',
        is_mean=True,
        is_rate=True,
    ),
    Tool(
        "Megatron Bridge",
        rb"Step Time : ",
        (b"Step Time : ",),
        r"\bStep Time : (?P<s>[\d.]+)s\b",
        "Step Time",
        "Step Time : 9.05s GPU utilization: 666.0MODEL_TFLOP/s/GPU",
    ),
    Tool(
        "levanter",
        rb"Progress on: ?\S* [\d.]+[kMG]?it/",
        (b"Progress on:",),
        r"Progress on: ?\S* (?P<step>[\d.]+[kMG]?)it/(?P<total>[\d.]+[kMG]?)it "
        r"rate:(?:(?P<s>[\d.,]+)s/it|(?P<rate>[\d.,]+)it/s)",
        "s/it, smoothed",
        "Progress on:train 19.0it/70.0it rate:76.8s/it remaining:1:05:15 elapsed:31:40",
        many=True,
    ),
    Tool(
        "a progress bar",
        rb"\d/\d+ \[[\d:]+<[\d:?]+, ",
        (b"<",),
        r"\b(?P<step>\d{1,15})/(?P<total>\d{1,15}) \[[\d:]+<[\d:?]+, +"
        r"(?:(?P<s>[\d.]+)s/it|(?P<rate>[\d.]+)it/s)",
        "s/it, smoothed",
        "10/400 [00:50<33:12,  5.05s/it]",
        many=True,
    ),
)
