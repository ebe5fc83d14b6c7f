"""Measure kernels and training steps on one GPU, and print them beside what prism predicts.

`python experiments/validation/one-gpu/run.py -o out` needs torch and one GPU; `--device cpu` tries
the same code with tiny sizes. It writes kernels.csv, steps.csv, classes.csv, machine.json, a job
file and a Kineto trace for each model, each file when its part is done.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from kernels import Kernel, list_kernels, measure
from model import MODELS, SMALL, Model, Training

import prism
from prism.common.files import atomic_write
from prism.jobs.devices import device_key
from prism.jobs.jobspec.blocks import ParallelismBlock
from prism.measuring.kernels import BACKENDS
from prism.measuring.machine import choose_device, describe_machine, load_torch, read_state
from prism.measuring.session import make_timer

KERNEL_S, STEPS_S = 2.5, 8.0  # of calls of a kernel, of steps of a model
EXPECTED_S = {"kernel": 3.0, "eager": 30.0, "compiled": 50.0}  # of a part, until one was measured
QUICK, TINY = 0.4, 0.1  # of these times: with --quick, on a processor


class Clock:
    """Time there is, and what was left out for want of it."""

    def __init__(self, minutes: float, share: float) -> None:
        self.began, self.limit_s, self.share = time.perf_counter(), 60.0 * minutes, share
        self.expected = {name: share * seconds for name, seconds in EXPECTED_S.items()}
        self.dropped: list[str] = []

    def left(self) -> float:
        """Seconds that are left."""
        return self.limit_s - (time.perf_counter() - self.began)

    def fits(self, name: str, kind: str) -> bool:
        """Tell whether a part fits; note it where it does not."""
        if self.expected[kind] <= self.left():
            return True
        self.dropped.append(name)
        return False

    def say(self, text: str) -> None:
        """Print a line with the time left."""
        print(f"[{self.left():4.0f} s left] {text}", flush=True)


class Results:
    """Tables of results, written anew with each row."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, list[dict[str, Any]]] = {"kernels": [], "steps": [], "classes": []}

    def add(self, table: str, *rows: dict[str, Any]) -> None:
        """Add rows to a table and write it."""
        self.rows[table] += rows
        with atomic_write(self.folder / f"{table}.csv") as path:
            pd.DataFrame(self.rows[table]).to_csv(path, index=False)


def main() -> None:
    options = read_options()
    device, torch = choose_device(options.device), load_torch()
    cuda = device == "cuda"
    if not cuda:
        torch.set_num_threads(1)  # several wait for each other where others use the cores too
    share = (QUICK if options.quick else 1.0) * (1.0 if cuda else TINY)
    clock, results = Clock(options.minutes, share), Results(options.output)
    options.output.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(device)
    with atomic_write(options.output / "machine.json") as path:
        path.write_text(json.dumps({"machine": machine, "state": read_state(device)}, indent=2))
    named = device_key(machine["device"]) or "h100"
    clock.say(f"{machine['device']}, torch {machine['torch']}; predictions for {named}")
    kernels = list_kernels(torch, device, options.quick)
    first = [kernel for kernel in kernels if kernel.importance == 0]
    models = dict(list((MODELS if cuda else SMALL).items())[: 1 if options.quick else None])
    try:
        run_kernels(first, torch, device, named, clock, results)
        for name, model in models.items():
            for mode in ("eager", "compiled"):
                run_model(f"{name}-{mode}", model, mode, torch, device, named, options.attention,
                          clock, results)  # fmt: skip
        run_kernels(kernels[len(first) :], torch, device, named, clock, results)
    except KeyboardInterrupt:
        clock.say("interrupted")
    if clock.dropped:
        text = f"no time for {len(clock.dropped)} parts (--minutes): {', '.join(clock.dropped)}"
        clock.say(text)
    print_tables(results, options.output)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="the GPU where there is one")
    parser.add_argument("--minutes", type=float, default=6.0, help="time there is [6]")
    parser.add_argument("--quick", action="store_true", help="one model, fewer kernels, 2 minutes")
    parser.add_argument("--attention", choices=sorted(BACKENDS),
                        help="backend of the models [cudnn; fa2 on a processor]")  # fmt: skip
    return parser.parse_args()


# ------------------------------------------------------------------------------------- kernels
def run_kernels(
    kernels: list[Kernel], torch: Any, device: str, named: str, clock: Clock, results: Results
) -> None:
    """Measure kernels one by one."""
    timer = make_timer(device, torch)
    for kernel in kernels:
        label = kernel.case.label
        if not clock.fits(label, "kernel"):
            continue
        try:
            found = measure(kernel, torch, timer, device, clock.share * KERNEL_S)
        except (prism.PrismError, RuntimeError) as error:
            clock.say(f"{label}: left out: {first_line(error).removeprefix(f'{label}: ')}")
            continue
        finally:
            clear(torch, device)
        mean = float(found.seconds.mean())
        row = {
            "kernel": label, **kernel.asked, "calls": found.seconds.size, "mean_s": mean,
            "p50_s": float(np.median(found.seconds)),
            "cv": float(found.seconds.std()) / mean, "settled": found.settled,
            "flop": kernel.case.flop, "traffic_bytes": kernel.case.bytes,
            **{key: found.state.get(key) for key in ("sm_clock_hz", "power_w", "temperature_c")},
            **predict_kernel(kernel.asked, named),
        }  # fmt: skip
        results.add("kernels", row)
        predicted = row.get("predicted_s")
        clock.say(f"{label}: {1e3 * mean:.4g} ms, {rate(kernel, mean)}, predicted "
                  f"{'-' if predicted is None else f'{1e3 * predicted:.4g} ms'}")  # fmt: skip


def predict_kernel(asked: dict[str, Any], device: str) -> dict[str, Any]:
    """Ask prism for a kernel's mean; nothing where it has none."""
    if not hasattr(prism, "kernel"):
        return {}
    try:
        found = prism.kernel(device=device, **asked)
    except (prism.PrismError, TypeError) as error:
        return {"source": first_line(error)}
    return {"predicted_s": found["mean"], "source": found["source"],
            "extrapolated": found["extrapolated"]}  # fmt: skip


def rate(kernel: Kernel, seconds: float) -> str:
    """Work or traffic over time."""
    if kernel.case.flop:
        return f"{kernel.case.flop / seconds / 1e12:.4g} TFLOP/s"
    return f"{kernel.case.bytes / seconds / 1e12:.3g} TB/s"


# --------------------------------------------------------------------------------------- steps
def run_model(
    name: str, model: Model, mode: str, torch: Any, device: str, named: str, attention: str | None,
    clock: Clock, results: Results,
) -> None:  # fmt: skip
    """Measure and profile steps of a model, and compare them with the job's prediction."""
    if not clock.fits(name, mode):
        return
    began = time.perf_counter()
    backend = attention or ("cudnn" if device == "cuda" else "fa2")
    job = write_job(results.folder / f"{name}.yaml", model, mode, backend, named)
    trace = results.folder / "traces" / f"{name}.json.gz"
    clock.say(f"{name}: {model.parameters / 1e9:.3g} B parameters, {backend} attention, warm-up")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        training = Training(torch, model, device, mode == "compiled", backend)
        training.warm_up()
        warm_s = time.perf_counter() - began
        seconds = training.periods(clock.share * STEPS_S)
        row = {
            "model": name, "parameters": model.parameters, "attention": backend,
            "n": seconds.size, "mean_s": float(seconds.mean()),
            "cv": float(seconds.std(ddof=1) / seconds.mean()), "warm_up_s": warm_s,
            "peak_bytes": training.peak_bytes(), **read_state(device),
        }  # fmt: skip
        with atomic_write(results.folder / f"{name}.steps.csv") as path:
            pd.DataFrame({"step_s": seconds}).to_csv(path, index_label="step")
        results.add("steps", row)
        peak = f", peak {row['peak_bytes'] / 2**30:.4g} GiB" if device == "cuda" else ""
        clock.say(
            f"{name}: {seconds.size} steps of {1e3 * row['mean_s']:.5g} ms, CV {row['cv']:.2%}"
            f"{peak}; profiling"
        )
        training.profile(trace)
    except Exception as error:  # of the compiler: of many kinds
        clock.say(f"{name}: left out: {type(error).__name__}: {first_line(error)}")
        return
    finally:
        training = None
        torch.compiler.reset()
        clear(torch, device)
        clock.expected[mode] = time.perf_counter() - began
    compare_steps(name, trace, job, row, clock, results)
    clock.expected[mode] = time.perf_counter() - began


def write_job(path: Path, model: Model, mode: str, backend: str, device: str) -> Path:
    """Write the job of a model, with the keys that this version knows."""
    sizes = asdict(model)
    layout = {name: sizes.pop(name) for name in ("microbatches", "microbatch_size")}
    wanted = {"attention": backend, "gradient_dtype": "bf16", "optimizer_dtype": "bf16"}
    known = {key: value for key, value in wanted.items() if key in ParallelismBlock.model_fields}
    job = {
        "model": {**sizes, "gated_mlp": True, "tied_embeddings": False},
        "parallelism": {"tp": 1, "pp": 1, "dp": 1, "data_parallel": "none", **layout,
                        "framework": mode, **known},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "device": device},
        "run": {"steps": 1000},
    }  # fmt: skip
    with atomic_write(path) as file:
        file.write_text("".join(f"{key}: {json.dumps(block)}\n" for key, block in job.items()))
    return path


def compare_steps(
    name: str, trace: Path, job: Path, row: dict[str, Any], clock: Clock, results: Results
) -> None:
    """Compare a profile with its job by class, as `prism compare TRACE JOB` does."""
    try:
        found = prism.summary(prism.compare(str(trace), str(job)))
    except prism.PrismError as error:
        clock.say(f"{name}: not compared: {first_line(error)}")
        return
    row["profiled_s"], row["predicted_s"] = (
        found["period"][side] for side in ("measured", "predicted")
    )
    results.add("steps")
    results.add("classes", *({"model": name, **part} for part in found["classes"]))
    clock.say(f"{name}: predicted {1e3 * row['predicted_s']:.5g} ms, "
              f"{row['predicted_s'] / row['mean_s'] - 1.0:+.1%}")  # fmt: skip


# -------------------------------------------------------------------------------------- output
def clear(torch: Any, device: str) -> None:
    """Give memory back."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def print_tables(results: Results, folder: Path) -> None:
    """Print predicted against measured: kernels, steps, and steps by class."""
    kernels = (columns(row["kernel"], row["mean_s"], row.get("predicted_s"))
               for row in results.rows["kernels"])  # fmt: skip
    steps = (columns(row["model"], row["mean_s"], row.get("predicted_s"))
             for row in results.rows["steps"])  # fmt: skip
    classes = (columns(f"{row['model']} {row['name']}", row["measured"], row["predicted"])
               for row in results.rows["classes"])  # fmt: skip
    for title, lines in (("kernel", kernels), ("step", steps), ("step by class", classes)):
        if not (lines := list(lines)):
            continue
        print(f"\n{title:52} {'measured':>12} {'predicted':>12} {'ratio':>7}  [ms]")
        print(*lines, sep="\n")
    print(f"\nwrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def columns(name: str, measured: float, predicted: float | None) -> str:
    if predicted is None:
        return f"{name:52} {1e3 * measured:12.4f} {'-':>12} {'-':>7}"
    ratio = f"{predicted / measured:7.3f}" if measured else f"{'-':>7}"
    return f"{name:52} {1e3 * measured:12.4f} {1e3 * predicted:12.4f} {ratio}"


if __name__ == "__main__":
    main()
