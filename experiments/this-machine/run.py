"""Measure, fit and predict real training jobs of several processes on the machine at hand.

`python experiments/this-machine/run.py` trains a small transformer data parallel and as a two-stage
pipeline, fits part of the recorded steps and predicts the others (`prism validate --trace`), deals
recorded durations anew to see what depends on what, then predicts a job that was not traced from
parts measured apart. Needs torch. It writes table.json, the tables of README.md and
this-machine.png; `--from-json` writes the README's tables from table.json again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd

import prism
from prism.common.agreement import compare
from prism.distributions.library import Entry, load_library, save_library
from prism.measuring.command import measure
from prism.measuring.entries import pooled_law
from prism.measuring.samples import from_dataset
from prism.measuring.steptrace import step_times
from prism.measuring.tinymodel import Sizes
from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.reduce import simplify
from prism.simulation.tracemodel.graph import TraceNode, filled, replay
from prism.traces import read_trace

matplotlib.style.use("prism.plots.light")

HERE = Path(__file__).resolve().parent
SEED = 1
SIZES = Sizes(layers=4, hidden=128, heads=4, vocab=512, seq=64, microbatch_size=2)
SPLITS = ("first-half", "even")
NEIGHBOURS = 8  # steps between which the machine's load hardly changes
DEALS = 20  # of each kind, averaged
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
    return prism.summary(result)


def validate(trace: Path, split: str, bootstrap: int) -> tuple[Any, dict[str, Any]]:
    """Predict one part of a trace from the other."""
    result = prism.validate(trace=str(trace), train=split, bootstrap=bootstrap, seed=SEED)
    numbers = prism.summary(result)
    row = {name: numbers[name] for name in FIGURES}
    training = result["training"].to_numpy()
    own = compare(training, training)["p95_measured_se"]
    row["p95_floor_se"] = float(np.hypot(own, row["p95_measured_se"]))
    row["baselines"] = {
        name: {key: base[key] for key in ("ks", "p95_error", "mean_error", "cv_ratio")}
        for name, base in numbers["baselines"].items()
    }
    return result, row


def deal(trace: Path) -> dict[str, dict[str, float]]:
    """Show what depends on what: recorded durations dealt anew to the steps, the steps replayed.

    Whole ranks are dealt against each other, or every op on its own; over all steps, or among
    neighbours, which leaves what changes slowly. Each gives the mean, the standard deviation and
    the p95 of the step over the recorded ones. A spread below 1 says that what was dealt apart is
    slow together, one above 1 that it is slow in turn.
    """
    graph = simplify(build_trace_graph(read_trace(str(trace))))
    durations = filled(graph)
    before = replay(graph, durations)
    n = before.size
    found = {}
    for what in ("ranks", "ops"):
        for among, block in (("all steps", n), ("neighbours", NEIGHBOURS)):
            rows = []
            for seed in range(DEALS):
                rng = np.random.default_rng(seed)
                orders: dict[Any, np.ndarray] = {}
                after = durations.copy()
                for i, node in enumerate(graph.nodes):
                    for replica in range(durations.shape[1]):
                        key = _dealt_with(node, i, replica, what)
                        order = orders.setdefault(key, _order(rng, n, block))
                        after[i, replica] = durations[i, replica][order]
                x = replay(graph, after)
                rows.append([
                    x.mean() / before.mean(), x.std() / before.std(),
                    np.quantile(x, 0.95) / np.quantile(before, 0.95),
                ])  # fmt: skip
            mean, std, p95 = np.mean(rows, axis=0)
            found[f"{what}, {among}"] = {"mean": mean, "std": std, "p95": p95}
    return found


def _dealt_with(node: TraceNode, i: int, replica: int, what: str) -> Any:
    """Tell what keeps its step together when durations are dealt; collectives have no rank."""
    shared = node.is_global or len(node.stages) > 1
    if what == "ops":
        return i, shared or replica
    return "shared" if shared else (node.stages[0], replica)


def _order(rng: np.random.Generator, n: int, block: int) -> np.ndarray:
    """Shuffle n steps within blocks of them."""
    return np.concatenate([
        first + rng.permutation(min(block, n - first)) for first in range(0, n, block)
    ])  # fmt: skip


def from_parts(traces: dict[str, Path], seconds: float, folder: Path) -> dict[str, Any]:
    """Predict the pipeline's step, which is not looked at, from parts measured apart.

    Forward and backward are the data-parallel job's, divided over the stages by flop; their
    distribution goes into the library of the collectives that `prism measure` times on two idle
    ranks. prism simulates the pipeline over it; what a job of durations lacks, messages,
    all-reduces and the optimizer, is added at its mean.
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
        ax.legend(loc="lower right", fontsize=9, title=f"{name}, every other step")
    figure.tight_layout()
    save_figure(axes[0, 0], path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=320, help="of every job")
    parser.add_argument("--seconds", type=float, default=110.0, help="of every job at most [s]")
    parser.add_argument("--bootstrap", type=int, default=20)
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument("--from-json", action="store_true", help="only write README.md's tables")
    options = parser.parse_args()
    if options.from_json:
        write_readme(json.loads((options.output / "table.json").read_text()), options.output)
        return
    began = time.perf_counter()
    table: dict[str, Any] = {"jobs": {}}
    drawn: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        traces = {}
        for i, (name, job) in enumerate(jobs(len(os.sched_getaffinity(0))).items()):
            target = Path(folder) / str(i)
            figures = record(job, target, options.seconds, options.steps)
            traces[name] = target / "trace.csv"
            table["jobs"][name] = {
                "step_time": figures["step_time"],
                "states": figures["states"],
                "replay_mean_error": prism.summary(prism.replay(str(traces[name])))["mean_error"],
                "dealt": deal(traces[name]),
                "splits": {},
            }
            table["machine"] = figures["machine"]
            for split in SPLITS:
                result, row = validate(traces[name], split, options.bootstrap)
                table["jobs"][name]["splits"][split] = row
                print_row(name, split, row)
                drawn[name] = result
        table["pipeline from parts"] = from_parts(traces, 15.0, Path(folder))
    table["seconds"] = time.perf_counter() - began
    (options.output / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    write_readme(table, options.output)
    draw(drawn, options.output / "this-machine.png")


def write_readme(table: dict[str, Any], folder: Path) -> None:
    """Put the tables between the README's marks, so that it says what table.json says."""
    path = folder / "README.md"
    text = (path if path.is_file() else HERE / "README.md").read_text()
    for name, make in (
        ("machine", machine_line), ("table", splits_table), ("dealt", dealt_table),
        ("parts", parts_table),
    ):  # fmt: skip
        block = f"<!-- {name} -->\n{make(table)}<!-- end {name} -->"
        pattern = re.compile(f"<!-- {name} -->.*<!-- end {name} -->", re.DOTALL)
        text = pattern.sub(lambda _, block=block: block, text)
    path.write_text(text)


def machine_line(table: dict[str, Any]) -> str:
    """Say what was measured on, and under what load."""
    machine = table["machine"]
    loads = [x for job in table["jobs"].values() for x in job["states"]["load_average"]]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}; load average "
        f"{min(loads):.1f} to {max(loads):.1f}; {table['seconds'] / 60:.1f} minutes.\n"
    )


def splits_table(table: dict[str, Any]) -> str:
    """Lay out predicted against held-out steps."""
    lines = [
        "| training steps | n, n_eff | KS full / independent / copy | critical 5 % | p-value "
        "| p95 error full / independent | p95 floor | CV ratio full / independent / copy |",
        "|" + "---|" * 8,
    ]
    for name, job in table["jobs"].items():
        for split, row in job["splits"].items():
            full = [row, row["baselines"]["independent"], row["baselines"]["copy"]]
            ks = " / ".join(f"{r['ks']:.2f}" for r in full)
            error = 100 * row["p95_measured_se"]
            p95 = " / ".join(f"{100 * r['p95_error']:+.1f}" for r in full[:2])
            cv = " / ".join(f"{r['cv_ratio']:.2f}" for r in full)
            lines.append(
                f"| {name}, {split} | {row['n_train']}+{row['n_measured']}, "
                f"{row['n_effective']:.0f} | {ks} | {row['ks_critical_5pct']:.2f} | "
                f"{row['ks_p_value']:.2f} | {p95} ± {error:.1f} % | "
                f"{100 * row['p95_floor']:.1f} ± {100 * row['p95_floor_se']:.1f} % | {cv} |"
            )
    return "\n".join(lines) + "\n"


def dealt_table(table: dict[str, Any]) -> str:
    """Lay out what dealing durations anew does to the steps."""
    lines = ["| job | dealt anew | mean | spread | p95 |", "|" + "---|" * 5]
    for name, job in table["jobs"].items():
        for what, row in job["dealt"].items():
            lines.append(
                f"| {name} | {what} | {100 * (row['mean'] - 1):+.1f} % | x {row['std']:.2f} | "
                f"{100 * (row['p95'] - 1):+.1f} % |"
            )
    return "\n".join(lines) + "\n"


def parts_table(table: dict[str, Any]) -> str:
    """Lay out the job that was predicted from parts."""
    row = table["pipeline from parts"]
    shares = " and ".join(f"{100 * share:.0f} %" for share in row["stage_shares"])
    return (
        "| flop of the stages | p50 predicted, measured | p50 error | p95 error | KS | CV ratio |\n"
        f"|{'---|' * 6}\n| {shares} | {1e3 * row['predicted_p50']:.0f}, "
        f"{1e3 * row['measured_p50']:.0f} ms | {100 * row['p50_error']:+.1f} % | "
        f"{100 * row['p95_error']:+.1f} % | {row['ks']:.2f} | {row['cv_ratio']:.2f} |\n"
    )


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
