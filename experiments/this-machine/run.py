"""Measure, fit and predict real training jobs of several processes on the machine at hand.

`python experiments/this-machine/run.py` trains a small transformer data parallel and as a two-stage
pipeline, fits part of the recorded steps and predicts the others (`prism validate --trace`), then
predicts a job that was not traced from parts measured apart. Needs torch; about 5 minutes on two
idle cores, and more steps are recorded where there is time (`--seconds` a job). It writes
table.json, table.md (the README's table) and this-machine.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import prism
from prism.library import Entry, load_library, save_library
from prism.measure import measure
from prism.measures import compare
from prism.measuring.entries import pooled_law
from prism.measuring.samples import from_dataset
from prism.measuring.steptrace import step_times
from prism.measuring.tinymodel import Sizes

HERE = Path(__file__).resolve().parent
SEED = 1
SIZES = Sizes(layers=4, hidden=128, heads=4, vocab=512, seq=64, microbatch_size=2)
SPLITS = ("first-half", "even")
FIGURES = (
    "n_train", "n_measured", "n_effective", "ks", "ks_critical_5pct", "ks_p_value", "ks_floor",
    "mean_error", "p50_error", "p95_error", "p95_floor", "p95_measured_se", "cv_ratio",
)  # fmt: skip


def jobs(cores: int) -> dict[str, prism.StepJob]:
    """Jobs by name; four ranks only where every one has a core."""
    found = {
        "data parallel, 2 ranks": prism.StepJob(2, "ddp", 4, SIZES),
        "pipeline, 2 stages": prism.StepJob(2, "pipeline", 4, SIZES),
    }
    if cores >= 4:
        found["data parallel, 4 ranks"] = prism.StepJob(4, "ddp", 4, SIZES)
    return found


def record(job: prism.StepJob, folder: Path, seconds: float, steps: int) -> dict[str, Any]:
    """Run a job and return its figures; the trace stays in the folder."""
    result = prism.measure_step(folder, job, steps=steps, limit_s=seconds, seed=SEED)
    return prism.summarize_step(result)


def validate(trace: Path, split: str, bootstrap: int) -> tuple[Any, dict[str, Any]]:
    """Predict one part of a trace from the other."""
    result = prism.validate(trace=str(trace), train=split, bootstrap=bootstrap, seed=SEED)
    numbers = prism.summarize_validation(result)
    row = {name: numbers[name] for name in FIGURES}
    row["baselines"] = {
        name: {key: base[key] for key in ("ks", "p95_error", "mean_error", "cv_ratio")}
        for name, base in numbers["baselines"].items()
    }
    return result, row


def from_parts(traces: dict[str, Path], seconds: float, folder: Path) -> dict[str, Any]:
    """Predict the pipeline's step, which is not looked at, from parts measured apart.

    Forward and backward are the data-parallel job's, divided over the stages by flop; their law
    goes into the library of the collectives that `prism measure` times on two idle ranks. prism
    simulates the pipeline over it; what a job of durations lacks, messages, all-reduces and the
    optimizer, is added at its mean.
    """
    ops = pd.read_csv(traces["data parallel, 2 ranks"])
    n_bytes = int(SIZES.microbatch_size * SIZES.seq * SIZES.hidden * 4)
    found = measure(
        "collective", folder / "parts.nc", ops=("p2p", "all_reduce"), sizes=(f"{n_bytes}B",),
        repetitions=1_000, limit_s=seconds, seed=SEED,
    )  # fmt: skip
    assert found is not None
    means = {
        case.family: float(np.mean(seconds))
        for case, seconds in zip(
            from_dataset(found).cases, from_dataset(found).seconds, strict=True
        )
    }
    work = {way: _durations(ops, f"{way}-compute") for way in ("forward", "backward")}
    law, n = pooled_law(list(work.values()))
    library = load_library(folder / "parts.nc")
    entry = Entry(
        "residual/compute", "measured: forward and backward of the other job", "", law, n=n
    )
    whole = dataclasses.replace(library, entries={**library.entries, entry.name: entry})
    save_library(whole, folder / "whole.nc")
    shares = stage_shares()
    job = {
        "model": {"durations": {
            f"{way}_s": [float(share * work[way].mean()) for share in shares] for way in work}},
        "parallelism": {"pp": 2, "schedule": "1f1b", "p2p": "blocking", "microbatches": 4},
        "variability": {"library": str(folder / "whole.nc"), "effects": {
            name: {"cv": 0} for name in ("rank", "step", "microbatch", "call")}},
        "run": {"steps": 1_000},
    }  # fmt: skip
    (folder / "parts.yaml").write_text(json.dumps(job))
    result = prism.simulate(prism.load_job(str(folder / "parts.yaml")), 4_096, seed=SEED)
    rest = 5.0 * means["p2p"] + 2.0 * means["all_reduce"]
    rest += max(shares) * float(_durations(ops, "optimizer").mean())
    predicted = np.asarray(result["step_time"].values, dtype=np.float64) + rest
    measured = step_times(pd.read_csv(traces["pipeline, 2 stages"]))["step_s"].to_numpy()
    numbers = compare(measured, predicted)
    return {
        "stage_shares": list(shares),
        "transfer_mean": means["p2p"],
        "all_reduce_mean": means["all_reduce"],
        "measured_p50": float(np.median(measured)),
        "predicted_p50": float(np.median(predicted)),
        **{k: numbers[k] for k in ("ks", "mean_error", "p50_error", "p95_error", "cv_ratio")},
    }


def _durations(ops: pd.DataFrame, name: str) -> np.ndarray:
    return ops.loc[ops["name"] == name, "duration_s"].to_numpy()


def stage_shares() -> tuple[float, float]:
    """Share of each of two stages in the model's flop: layers, and the head on the last."""
    layer = 12.0 * SIZES.hidden**2 + SIZES.seq * SIZES.hidden
    first = SIZES.layers / 2 * layer
    last = first + SIZES.hidden * SIZES.vocab
    return first / (first + last), last / (first + last)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw predicted against measured CDFs of the even splits."""
    import matplotlib.pyplot as plt

    from prism.plots.base import save_figure
    from prism.plots.validation import plot_validation

    figure, axes = plt.subplots(1, len(results), figsize=(6.6 * len(results), 5.2), squeeze=False)
    for ax, (name, result) in zip(axes[0], results.items(), strict=True):
        plot_validation(result, ax)
        ax.set_title(name, loc="left", fontsize=11, pad=78)
    figure.tight_layout()
    save_figure(axes[0, 0], path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=45.0, help="of every job [s]")
    parser.add_argument("--steps", type=int, default=800, help="of every job at most")
    parser.add_argument("--bootstrap", type=int, default=60)
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    table: dict[str, Any] = {"jobs": {}}
    drawn, traces = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, job) in enumerate(jobs(len(os.sched_getaffinity(0))).items()):
            target = Path(folder) / str(i)
            figures = record(job, target, options.seconds, options.steps)
            traces[name] = target / "trace.csv"
            replayed = prism.summarize_replay(prism.replay(str(traces[name])))
            rows = {}
            for split in SPLITS:
                result, rows[split] = validate(traces[name], split, options.bootstrap)
                if split == "even":
                    drawn[name] = result
                print_row(name, split, rows[split])
            table["jobs"][name] = {
                "step_time": figures["step_time"],
                "states": figures["states"],
                "replay_mean_error": replayed["mean_error"],
                "splits": rows,
            }
            table["machine"] = figures["machine"]
        table["pipeline from parts"] = from_parts(traces, options.seconds, Path(folder))
    print("pipeline from parts:", {k: v for k, v in table["pipeline from parts"].items()})
    (options.output / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    (options.output / "table.md").write_text(markdown(table["jobs"]))
    draw(drawn, options.output / "this-machine.png")


def markdown(measured: dict[str, Any]) -> str:
    """Lay out the README's table."""
    lines = [
        "| training steps | n, n_eff | KS full / independent / copy | critical 5 %, floor "
        "| p-value "
        "| p95 error full / independent / copy | floor, se | CV ratio full / independent / copy |",
        "|" + "---|" * 8,
    ]
    for name, job in measured.items():
        for split, row in job["splits"].items():
            full = [row, row["baselines"]["independent"], row["baselines"]["copy"]]
            ks = " / ".join(f"{r['ks']:.2f}" for r in full)
            p95 = " / ".join(f"{100 * r['p95_error']:+.1f} %" for r in full)
            cv = " / ".join(f"{r['cv_ratio']:.2f}" for r in full)
            lines.append(
                f"| {name}, {split} | {row['n_train']}+{row['n_measured']}, "
                f"{row['n_effective']:.0f} | {ks} | {row['ks_critical_5pct']:.2f}, "
                f"{row['ks_floor']:.2f} | {row['ks_p_value']:.2f} | {p95} | "
                f"{100 * row['p95_floor']:.1f}, {100 * row['p95_measured_se']:.1f} % | {cv} |"
            )
    return "\n".join(lines) + "\n"


def print_row(name: str, split: str, row: dict[str, Any]) -> None:
    bases = row["baselines"]
    print(
        f"{name}, {split}: n {row['n_train']}+{row['n_measured']}, KS {row['ks']:.3f} (floor "
        f"{row['ks_floor']:.3f}, copy {bases['copy']['ks']:.3f}, independent "
        f"{bases['independent']['ks']:.3f}), p {row['ks_p_value']:.2f}, p95 "
        f"{100 * row['p95_error']:+.1f} % (floor {100 * row['p95_floor']:.1f} %, independent "
        f"{100 * bases['independent']['p95_error']:+.1f} %), CV ratio {row['cv_ratio']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
