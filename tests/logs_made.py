"""Lines of step times as each tool writes them, with values of our own.

Formats, not texts, from the tools' sources: Megatron-LM training.py (BSD-3), Primus's copy of it
(MIT), NeMo's and Megatron Bridge's (Apache-2.0), torchtitan metrics.py (BSD-3), DeepSpeed timer.py
and pipe/engine.py (Apache-2.0), MaxText metric_logger.py (Apache-2.0), verl, NeMo AutoModel,
tqdm-loggable and transformers (Apache-2.0, MIT).
"""

import json
from datetime import datetime, timedelta

import numpy as np

BEGIN = datetime(2025, 6, 4, 8, 51, 48)


def at(seconds):
    """Time of day so many seconds after the begin, to the millisecond."""
    return BEGIN + timedelta(seconds=round(seconds, 3))


def iso(seconds, comma=","):
    moment = at(seconds)
    return f"{moment:%Y-%m-%d %H:%M:%S}{comma}{moment.microsecond // 1000:03d}"


def megatron(step, seconds, clock, total=1000, batch=256):
    return (
        f" [{iso(clock, '.')}] iteration {step:8d}/{total:8d} | consumed samples: {batch * step:9d}"
        f" | elapsed time per iteration (ms): {1e3 * seconds:.1f} | throughput per GPU "
        f"(TFLOP/s/GPU): 400.1 | learning rate: 1.5E-04 | global batch size: {batch:5d} |\n"
    )


def primus(step, seconds, clock):
    return megatron(step, seconds, clock).replace(
        f"{1e3 * seconds:.1f} |", f"{1e3 * seconds:.1f}/5000.0 |"
    )


def nemo(step, seconds, clock):
    return (
        f"[NeMo I {iso(clock)} rank0:progress_printer] Training epoch 0, iteration {step}/999 | "
        f"lr: 1.961e-06 | global_batch_size: 8 | global_step: {step} | reduced_train_loss: 1.315 | "
        f"train_step_timing in s: {seconds:.4g}\n"
    )


def nemo_bar(step, seconds, clock):
    part = f"Epoch 0: : {step // 10}%|##   | {step}/1000 [10:48<00:00, reduced_train_loss=0.01, "
    part += f"global_step={step}.00, consumed_samples=256.0, train_step_timing in s={seconds:.3f}]"
    return f"\r{part}\r{part}"


def maxtext(step, seconds, clock):
    return (
        f"I{at(clock):%m%d %H:%M:%S}.{at(clock).microsecond:06d} 125344476638336 "
        f"metric_logger.py:181] completed step: {step}, seconds: {seconds:.3f}, TFLOP/s/device: "
        "236.448, Tokens/s/device: 9423.869, total_weights: 30708, loss: 9.1\n"
    )


def deepspeed_pipe(step, seconds, clock):
    return f"steps: {step} loss: 2.0585 iter time (s): {seconds:0.3f} samples/sec: 53.694\n"


def deepspeed(step, seconds, clock, batch=64):
    return (
        f"[{iso(clock)}] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped=0, lr=[1]\n"
        f"[{iso(clock)}] [INFO] [timer.py:260:stop] epoch=0/micro_step={4 * step}/global_step="
        f"{step}, RunningAvgSamplesPerSec=58.7, CurrSamplesPerSec={batch / seconds}, "
        "MemAllocated=6.01GB, MaxMemAllocated=19.52GB\n"
    )


def torchtitan(step, seconds, clock):
    return (
        f"[rank0]:[titan] {iso(clock)} - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: "
        "12.2254  \x1b[38;2;54;234;195mgrad_norm: 1.0000  memory: 27.34GiB(28.78%)  \x1b[34mtps: "
        "7,034  \x1b[36mtflops: 21.73  \x1b[35mmfu: 2.20%\x1b[39m\n"
    )


def nanotron(step, seconds, clock):
    return (
        f"{at(clock):%m/%d/%Y %H:%M:%S} [INFO|DP=0|PP=0|TP=0]: iteration: {step} / 1000 | "
        f"consumed_tokens: 85.8G | elapsed_time_per_iteration_ms: {seconds:.3g}K | tokens_per_sec: "
        "22.7K | tokens_per_sec_per_gpu: 11.3K | global_batch_size: 64 | lm_loss: 2.38\n"
    )


def mmengine(step, seconds, clock):
    return (
        f"{at(clock):%m/%d %H:%M:%S} - mmengine - INFO - Iter(train) [{step:4d}/5000]  lr: 2e-05  "
        f"eta: 4:23:10  time: {seconds:.4f}  data_time: 0.0137  memory: 9806  loss: 1.2345\n"
    )


def swift(step, seconds, clock):
    return (
        f"{at(clock):%Y-%m-%dT%H:%M:%S.%f}000Z {{'loss': 0.42, 'train_speed(iter/s)': 0.191866, "
        f"'epoch': 0.2, 'global_step/max_steps': '{step}/4491', 'elapsed_time': '25m 37s'}}\n"
    )


def olmo_core(step, seconds, clock):
    return (
        f"{iso(clock, '.')}\thost:0\tolmo_core.train.callbacks.console_logger:89\tINFO\t"
        f"[step={step}/12000,epoch=1,eta=50m 10s]\n    throughput/device/BPS=3.945\n"
        "    throughput/device/TPS=258,537\n    train/CE loss=6.445\n"
    )


def pith(step, seconds, clock):
    return (
        f"{at(clock):%Y-%m-%d %H:%M:%S} | INFO | step {step:08d}/00000060 | step-time "
        f"{seconds:.3f} sec | cross-entropy-loss 2.66 | tokens-per-second 74,402\n"
    )


def verl(step, seconds, clock):
    return (
        f"(TaskRunner pid=4035927) step:{step} - global_seqlen/min:484245 - actor/entropy:0.323 - "
        f"perf/mfu/actor:0.343 - training/global_step:{step} - timing_s/gen:{0.7 * seconds} - "
        f"timing_s/update_actor:{0.2 * seconds} - timing_s/step:{seconds} - "
        f"timing_per_token_ms/gen:0.01 - perf/time_per_step:{seconds} - perf/throughput:148.9\n"
    )


def automodel(step, seconds, clock, end="tps 11278.56(1409.82/gpu) | num_label_tokens 21541"):
    return (
        f"{iso(clock)} | INFO | root | step {step} | epoch 0 | loss 0.6974 | grad_norm 1.5436 | "
        f"lr 1.00e-05 | mem 24.90 GiB | {end}\n"
    )


def automodel_time(step, seconds, clock):
    return automodel(step, seconds, clock, f"time {seconds:.2f}s")


def levanter(step, seconds, clock, total=80_000):
    count = f"{step:.2f}"[:4].rstrip(".") if step < 1000 else f"{step / 1000:.2f}k"
    return (
        f"INFO:{iso(clock)}:tqdm_loggable: Progress on:train {count}it/{total / 1000:.1f}kit "
        f"rate:{seconds:,.1f}s/it remaining:9:01:02 elapsed:{int(clock) // 60}:01 "
        "postfix:loss=2.31\n"
    )


def llama_factory(step, seconds, clock):
    line = {"current_steps": step, "total_steps": 3235, "loss": 1.25, "lr": 2e-5, "epoch": 0.99,
            "percentage": 0.31, "elapsed_time": str(timedelta(seconds=int(clock))),
            "remaining_time": "0:03:25"}  # fmt: skip
    return json.dumps(line) + "\n"


def bridge(step, seconds, clock):
    return f"Step Time : {seconds:.2f}s GPU utilization: 666.0MODEL_TFLOP/s/GPU\n"


def bar(step, seconds, clock, total=400):
    speed = f"{seconds:5.2f}s/it" if seconds >= 1.0 else f"{1 / seconds:5.2f}it/s"
    return (
        f"\r  1%|#   | {step}/{total} [{int(clock) // 60:02d}:{int(clock) % 60:02d}<33:12, {speed}]"
    )


def log_of(tool, values, every=1, begin=0, **kwargs):
    """Lines of a run whose values are of steps, or means of `every`."""
    clock, text = 0.0, ""
    for i, seconds in enumerate(values):
        clock += every * seconds
        text += tool(begin + every * (i + 1), seconds, clock, **kwargs)
    return text


TOOLS = {
    "megatron": megatron, "primus": primus, "nemo": nemo, "nemo bar": nemo_bar, "maxtext": maxtext,
    "deepspeed pipe": deepspeed_pipe, "deepspeed": deepspeed, "torchtitan": torchtitan,
    "nanotron": nanotron, "mmengine": mmengine, "ms-swift": swift,
    "olmo-core": olmo_core, "pith": pith, "verl": verl, "automodel": automodel,
    "automodel time": automodel_time, "levanter": levanter,
}  # fmt: skip


def lines(seconds, total=1000, first=1):
    """Lines of Megatron's log, a step each."""
    return "".join(
        f" iteration {s:8d}/ {total:7d} | elapsed time per iteration (ms): {1e3 * x:.2f} | lr 0 |\n"
        for s, x in enumerate(seconds, start=first)
    )


def steps(n, seed=0, slower=1.0, since=None):
    """Steps of 2 s with noise of 1 %, from one on slower [s]."""
    level = np.where(np.arange(n) >= (n if since is None else since), slower, 1.0)
    return 2.0 * level * (1.0 + 0.01 * np.random.default_rng(seed).standard_normal(n))
