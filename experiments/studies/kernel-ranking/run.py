"""Which causes make a step vary, under which assumptions: two jobs in six settings, three traces.

    python experiments/studies/kernel-ranking/run.py [--threads 2] [--figures]

Writes table.json, the tables of README.md and the figures beside itself. The traces are read from
the folder in PRISM_DATA, or from ../shared/data beside the checkout; without them that part is left
out.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure

import prism
from prism.common.resultfiles import summary
from prism.plots.base import save_figure
from prism.plots.rank import plot_ranking
from prism.simulation.labels import short_label

matplotlib.style.use("prism.plots.light")

HERE = Path(__file__).parent
DATA = Path(os.environ.get("PRISM_DATA", HERE.parents[3] / "shared" / "data"))
SEED = 1
JOBS = ("llama3-70b-fsdp-512", "llama3-405b-16k")
STRESSED = ["variability.library=h100-stressed"]  # its network: CV 18 %, leaves congested in 8 %
STALLS = ["variability.effects.stall={entity: job, rate_per_hour: 20, duration_s: 3}"]
OWN = [
    "variability.effects.rank={cv: 0, lemon_fraction: 0}",
    "variability.effects.step.cv=0",
    "variability.effects.microbatch.cv=0",
    "variability.effects.call.cv=0",
    "variability.effects.regime.probability=0",
]  # no shared effect: every kernel varies by itself alone
EXPOSED = ["parallelism.overlap=false"]
CASES = {
    "healthy": [],
    "stressed": STRESSED,
    "stressed, stalls, no overlap": STRESSED + STALLS + EXPOSED,
    "own noise only, healthy": OWN,
    "own noise only, stressed": STRESSED + OWN,
    "own noise only, stressed, no overlap": STRESSED + OWN + EXPOSED,
}
DRAWN = ("healthy", "stressed", "own noise only, stressed, no overlap")
TRACES = {"AR": "ops_AR.parquet", "SE": "ops_SE_first21.parquet", "ST": "ops_ST.parquet"}
FIGURES = ("cv", "critical_path_share", "first_order", "total_order", "total_order_ci",
           "covariance_share", "tail_share", "mean_if_frozen", "std_reduction",
           "std_reduction_ci", "p95_reduction", "p95_reduction_ci")  # fmt: skip


def stem(job, case):
    """Name of a figure's file."""
    return f"{job}-{case}".replace(",", "").replace(" ", "-")


def rank(job, threads):
    """Rank a job: the result, and its summary with findings."""
    result = prism.rank(job, seed=SEED, threads=threads)
    return result, summary(result)


def shorten(numbers):
    """Keep of a summary what the tables show."""
    kept = {key: numbers[key] for key in ("mean", "std", "p95", "findings", "warnings")}
    rows = [(row, kind) for kind in ("kernels", "effects") for row in numbers[kind]]
    rows.sort(key=lambda found: -(found[0]["total_order"] or 0.0))
    kept["causes"] = [
        {"name": row["name"], "kind": kind} | {k: row[k] for k in FIGURES if k in row}
        for row, kind in rows
    ]
    return kept


def rank_jobs(threads):
    """Rank every job in every setting."""
    found = {}
    for job in JOBS:
        for case, overrides in CASES.items():
            begin = time.perf_counter()
            result, numbers = rank(prism.load_job(job, overrides), threads)
            found[job, case] = shorten(numbers)
            tell(f"{job}, {case}", found[job, case], time.perf_counter() - begin)
            keep(found)
            if case in DRAWN:
                save_figure(plot_ranking(result), HERE / f"{stem(job, case)}.png")
    return found


def rank_traces(threads):
    """Fit and rank every production trace that is there."""
    found = {}
    for name, file in TRACES.items():
        path = DATA / "production_traces" / file
        if not path.exists():
            print(f"{name}: left out, no {path}; set PRISM_DATA to the folder of measured data")
            continue
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / f"{name}.nc"
            prism.save(prism.fit(str(path), seed=SEED), model)
            result, numbers = rank(prism.load_job(str(model)), threads)
        found["trace", name] = shorten(numbers)
        tell(f"trace {name}", found["trace", name], time.perf_counter() - begin)
        save_figure(plot_ranking(result), HERE / f"trace-{name}.png")
    return found


def keep(found):
    """Write all figures found so far."""
    text = json.dumps({" | ".join(key): value for key, value in found.items()}, indent=1)
    (HERE / "table.json").write_text(text + "\n")


def tell(title, numbers, seconds):
    """Print the largest causes of one ranking."""
    print(f"\n{title}: CV {100 * numbers['std'] / numbers['mean']:.3g} %, {seconds:.0f} s")
    for row in numbers["causes"][:6]:
        cut = row.get("std_reduction")
        text = f"  {short_label(row['name'], row['kind']):28s}"
        text += f" total-order {100 * (row['total_order'] or 0.0):6.2f} %"
        print(text + ("" if cut is None else f", std if frozen {-100 * cut:+.1f} %"), flush=True)


def table(found, job, key):
    """Causes by cases [cause, case] of one figure, and the causes' names: those that matter."""
    cells = {}
    for column, case in enumerate(CASES):
        for row in found[job, case]["causes"]:
            at = cells.setdefault((row["name"], row["kind"]), np.full(len(CASES), np.nan))
            at[column] = np.nan if row.get(key) is None else row[key]
    kept = {k: v for k, v in cells.items() if np.nanmax(np.abs(v), initial=0.0) >= 0.02}
    order = sorted(kept, key=lambda k: (k[1] == "kernels", -np.nanmax(kept[k])))
    return [short_label(*k) for k in order], np.array([kept[k] for k in order])


def draw(found, key, title, name):
    """One table of shares per job as a picture: causes in rows, settings in columns."""
    tables = [table(found, job, key) for job in JOBS]
    height = max(len(names) for names, _ in tables)
    figure = Figure(figsize=(12.0, 2.4 + 0.33 * height), layout="constrained", dpi=130,
                    facecolor="white")  # fmt: skip
    for ax, job, (names, values) in zip(figure.subplots(1, 2), JOBS, tables, strict=True):
        ax.imshow(np.nan_to_num(values), cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value) and abs(value) >= 0.005:
                ax.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=9,
                        color="white" if value > 0.6 else "black")  # fmt: skip
        ax.set_yticks(range(len(names)), names, fontsize=9)
        ax.set_xticks(
            range(len(CASES)),
            [c.replace(" only", "").replace(", ", "\n") for c in CASES],
            fontsize=7.5,
        )
        ax.tick_params(length=0)
        ax.grid(False)
        ax.set_title(job, fontsize=10, loc="left")
        ax.spines[:].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(HERE / name, metadata={"Software": None})


def markdown(found):
    """Tables for the README: the largest causes in each setting."""
    lines = []
    for job in (*JOBS, "trace"):
        cases = [case for other, case in found if other == job]
        lines += [f"\n{job}\n", "| | CV | most in all | most by kernels' own noise | "
                  "most if frozen | alone, sum |", "|---|---|---|---|---|---|"]  # fmt: skip
        for case in cases:
            numbers = found[job, case]
            rows = numbers["causes"]
            own = [row for row in rows if row["kind"] == "kernels"]
            frozen = sorted(rows, key=lambda row: -(row.get("std_reduction") or 0.0))
            alone = sum(row["first_order"] or 0.0 for row in rows)
            columns = ((rows, "total_order"), (own, "total_order"), (frozen, "std_reduction"))
            cells = [
                ", ".join(f"{short_label(r['name'], r['kind'])} {percent(r, k)}" for r in some[:3])
                for some, k in columns
            ]
            cv = f"{100 * numbers['std'] / numbers['mean']:.2g} %"
            lines.append(" | ".join(["", case, cv, *cells, f"{100 * alone:.0f} %", ""]).strip())
    return "\n".join(lines)


def percent(row, key):
    """Write a share with half of its interval."""
    value, bounds = row.get(key), row.get(f"{key}_ci")
    if value is None:
        return ""
    if not bounds or value < 0.001:
        return f"{100 * value:.2g} %"
    half = 50 * (bounds[1] - bounds[0])
    digits = 0 if half >= 1.0 else 1
    return f"{100 * value:.{digits}f} ± {half:.{digits}f} %"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--figures", action="store_true", help="tables and figures of table.json")
    options = parser.parse_args()
    if options.figures:
        stored = json.loads((HERE / "table.json").read_text())
        found = {tuple(key.split(" | ")): value for key, value in stored.items()}
    else:
        traces = rank_traces(options.threads)
        found = rank_jobs(options.threads) | traces
    keep(found)
    print(markdown(found))
    draw(found, "total_order", "share of the variance, with others [%]", "variance.png")
    draw(found, "std_reduction", "standard deviation cut if frozen at its median [%]", "frozen.png")


if __name__ == "__main__":
    main()
