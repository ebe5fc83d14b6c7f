"""What independent ops get wrong: `--dependence none` against `full` on one job and seed.

    python experiments/studies/dependence/run.py [--threads 2]

On GPUs after a burn-in, and on those of a cluster without. Writes table.json and the figure (of the
latter) beside itself. `none` redraws every effect per op from its
pooled distribution, so each op keeps its own mean and spread and only the dependence between ops is
gone.
"""

import argparse
import json
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure

import prism
from prism.common.text import format_duration
from prism.plots.base import save_figure
from prism.plots.estimate import plot_dependence

matplotlib.style.use("prism.plots.light")

HERE = Path(__file__).parent
JOB, REPLICATES, RUNS, SEED = "llama3-405b-16k", 10_000, 1_000, 1
# steps alone: what interrupts a run, and what the model may be wrong by, is the same for both
STEPS_ALONE = {"run.failures": "none", "run.checkpoint": None, "run.batch_ramp": None,
               "variability.effects.run.cv": 0.0, "variability.model_error": 0.0}  # fmt: skip
LIBRARIES = ("h100-healthy", "h100-uncurated")
LABELS = {"full": "effects shared (full)", "none": "every op independent (none)"}


def quantities(sample):
    """Return the figures of a sample that are compared [s, or 1 where a ratio]."""
    p50, p95, p99 = np.quantile(sample, [0.5, 0.95, 0.99])
    std = sample.std(ddof=1)
    return {"mean": sample.mean(), "std": std, "cv": std / sample.mean(), "p50": p50,
            "p95": p95, "p99": p99, "p95_over_p50": p95 / p50}  # fmt: skip


def with_errors(sample, cluster, n_bootstrap=400):
    """Add standard errors by resampling clusters, which alone are independent."""
    rng = np.random.default_rng(SEED)
    members = [sample[cluster == k] for k in np.unique(cluster)]
    draws = []
    for _ in range(n_bootstrap):
        picked = rng.integers(0, len(members), len(members))
        draws.append(quantities(np.concatenate([members[k] for k in picked])))
    return {
        name: {"value": float(value), "se": float(np.std([d[name] for d in draws], ddof=1))}
        for name, value in quantities(sample).items()
    }


def simulate(library, threads):
    """Estimate the job with and without dependence."""
    about = STEPS_ALONE | {"variability.library": library}
    return {
        name: prism.estimate(
            prism.load_job(JOB, about | {"variability.dependence": name}),
            replicates=REPLICATES, run_replicates=RUNS, seed=SEED, threads=threads,
        )
        for name in LABELS
    }  # fmt: skip


def tabulate(results):
    """Collect both distributions of both results, and the error that independence makes."""
    full = results["full"]
    table = {
        "job": JOB, "replicates": REPLICATES, "run_replicates": RUNS, "seed": SEED,
        "steps": int(full.attrs["steps"]), "ideal_step_time_s": float(full.ideal_step_time),
    }  # fmt: skip
    for variable, key in (("step_time", "cluster_idx"), ("time_to_train", "run_cluster_idx")):
        rows = {
            name: with_errors(result[variable].to_numpy(), result[key].to_numpy())
            for name, result in results.items()
        }
        ratio = {
            name: rows["none"][name]["value"] / rows["full"][name]["value"] for name in rows["full"]
        }
        table[variable] = rows | {"none_over_full": ratio}
    return table


def draw(results, path_stem):
    """Both distributions, step time left and time-to-train right."""
    figure = Figure(figsize=(13.0, 4.6), layout="constrained", facecolor="white", dpi=150)
    left, right = figure.subplots(1, 2)
    labelled = {LABELS[name]: result for name, result in results.items()}
    plot_dependence(labelled, left)
    ideal = float(results["full"].ideal_step_time)
    left.axvline(ideal, color="#555555", linestyle="--", linewidth=1.2)
    left.set_xlim(left=ideal - 0.04)
    left.annotate(f"ideal {format_duration(ideal)}", (ideal, 0.9), xytext=(5, 0), fontsize=9,
                  textcoords="offset points")  # fmt: skip
    plot_dependence(labelled, right, "time_to_train")
    for suffix in (".png", ".svg"):
        save_figure(left, path_stem.with_suffix(suffix))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=None)
    threads, tables = parser.parse_args().threads, {}
    for library in LIBRARIES:
        results = simulate(library, threads)
        table = tables[library] = tabulate(results)
        draw(results, HERE / "dependence")
        for variable in ("step_time", "time_to_train"):
            print(f"{library}, {variable:14} {'full':>24} {'none':>24} {'none/full':>10}")
            for name, ratio in table[variable]["none_over_full"].items():
                cells = (table[variable][which][name] for which in ("full", "none"))
                print(f"{name:14}", *(f"{c['value']:13.7g} +- {c['se']:7.2g}" for c in cells),
                      f"{ratio:10.5f}")  # fmt: skip
    (HERE / "table.json").write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
