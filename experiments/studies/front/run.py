"""The picture on the front page: the four questions, each answered for a shipped or real job.

    python experiments/studies/front/run.py [--results DIR]

Writes docs/pictures/front.png. Needs the measured trace of production_traces in the folder
PRISM_DATA, or in ../shared/data beside the checkout. `--results` keeps and reuses the results.
"""

import argparse
import os
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

import prism
from prism.plots.base import BLUE, GREEN, GREY, ORANGE, RED, style
from prism.simulation.labels import short_label

ROOT = Path(__file__).resolve().parents[3]
PICTURE = ROOT / "docs" / "pictures" / "front.png"
LARGE, SMALL, SEED = "llama3-405b-16k", "llama3-70b-fsdp-512", 1
MOST_CAUSES = 7
DAY_S = 86_400.0


def trace_path():
    """Path of the measured production trace; the data is not part of the repository."""
    folder = Path(os.environ.get("PRISM_DATA", ROOT.parent / "shared" / "data"))
    return folder / "production_traces" / "ops_AR.parquet"


def compute(folder):
    """Make the four results, or take them from the folder where they are."""
    jobs = {
        # as README.md's first command
        "estimate": lambda: prism.estimate(prism.load_job(LARGE), seed=SEED),
        "rank": lambda: prism.rank(prism.load_job(SMALL), seed=SEED),
        "place": lambda: prism.place(
            prism.load_job(LARGE), slow_nodes=3, slowdown=1.2, seed=SEED
        ),
        "validate": lambda: prism.validate(
            trace=str(trace_path()), train="even", bootstrap=100, seed=SEED
        ),
    }  # fmt: skip
    found = {}
    for name, make in jobs.items():
        path = folder / f"{name}.nc"
        if not path.is_file():
            prism.save(make(), path)
        found[name] = xr.load_dataset(path, engine="h5netcdf")
    return found


def draw_curve(ax, values, colour, unit, digits):
    """Draw a distribution function with its median and p95 marked."""
    x = np.sort(np.asarray(values))
    share = np.arange(1, x.size + 1) / x.size
    ax.plot(x, share, color=colour, lw=2.4)
    ax.fill_between(x, share, color=colour, alpha=0.12, lw=0)
    for level, name in ((0.5, "P50"), (0.95, "P95")):
        at = np.quantile(x, level)
        ax.plot([at, at], [0, level], color=colour, lw=1, ls=":")
        ax.plot(at, level, "o", color=colour, ms=8, mec="white", zorder=4)
        ax.annotate(f"{name} {at:.{digits}f} {unit}", (at, level), xytext=(-9, 0),
                    textcoords="offset points", color=colour, fontsize=12, ha="right",
                    va="center", weight="bold")  # fmt: skip
    ax.set_xlim(x[0] - 0.35 * np.ptp(x), x[-1] + 0.05 * np.ptp(x))


def draw_estimate(result, ax, beside):
    """Draw step time and time-to-train."""
    draw_curve(ax, result["step_time"].to_numpy(), BLUE, "s", 2)
    days = result["time_to_train"].to_numpy() / DAY_S
    draw_curve(beside, days, GREEN, "d", 1)
    ideal = float(result["ideal_step_time"])
    ax.annotate(f"{ideal:.2f} s if\nnothing varied", (0.03, 0.15), xycoords="axes fraction",
                color=GREY, fontsize=10)  # fmt: skip
    ax.set(xlabel="step time [s]", ylabel="probability", ylim=(0, 1.02))
    beside.set(xlabel="time to train [days]", ylim=(0, 1.02), yticklabels=[])
    ax.set_title(f"How long will it take?   {LARGE}")


def draw_rank(result, ax):
    """Draw what fixing each cause would take off the spread of the step."""
    rows = prism.summary(result)
    causes = [(row, ORANGE) for row in rows["effects"]] + [(row, BLUE) for row in rows["kernels"]]
    causes = sorted(causes, key=lambda cause: cause[0]["std_reduction"])[-MOST_CAUSES:]
    for y, (row, colour) in enumerate(causes):
        cut = 100.0 * row["std_reduction"]
        ax.barh(y, cut, color=colour, height=0.66)
        low, high = row["std_reduction_ci"]
        ax.hlines(y, 100.0 * low, 100.0 * high, color="black", lw=1.4)
        ax.annotate(f"{cut:.0f} %", (max(cut, 100.0 * high), y), xytext=(5, 0),
                    textcoords="offset points", va="center", fontsize=10)  # fmt: skip
    ax.set_yticks(range(len(causes)), [short_label(row["name"]) for row, _ in causes])
    for name, colour in (("shared by many kernels", ORANGE), ("one kind of kernel", BLUE)):
        ax.barh(0, 0, color=colour, label=name)
    ax.legend(loc="lower right", fontsize=10)
    ax.set_xlabel("less spread of the step if it were fixed at its median [%]")
    ax.set_title(f"Why does it vary?   {SMALL}")


def draw_place(result, ax):
    """Draw what a slow node costs by stage, where three are, and where they are best."""
    numbers = prism.summary(result)
    cost = 100.0 * np.atleast_2d(numbers["slot_cost"]).max(axis=1) / numbers["alike_step"]
    stages = np.arange(cost.size)
    shade = (cost - cost.min()) / max(float(np.ptp(cost)), 1e-9)
    ax.bar(stages, cost, color=matplotlib.colormaps["YlOrRd"](0.25 + 0.6 * shade), width=0.8)
    nodes = numbers["slow_nodes"]
    for which, text, height in (("before", "slow nodes now", 1.08), ("after", "at best", 1.08)):
        at = sorted({stage for node in nodes for stage in node[which]["stages"]})
        top = height * cost.max()
        ax.plot(at, [top] * len(at), "v", color=RED if which == "before" else GREEN, ms=9)
        ax.annotate(text, (np.mean(at), top), xytext=(0, 8), textcoords="offset points",
                    ha="left" if which == "after" else "center", fontsize=11,
                    color=RED if which == "before" else GREEN)  # fmt: skip
    best = next(row for row in numbers["placements"] if row["name"] == numbers["best"])
    now = next(row for row in numbers["placements"] if row["name"] == numbers["current"])
    text = f"three nodes moved: P95 {now['p95']:.2f} s to {best['p95']:.2f} s"
    ax.annotate(text, (0.98, 0.95), xycoords="axes fraction", ha="right", fontsize=12,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8})  # fmt: skip
    ax.set_xticks(stages)
    ax.set(xlabel="pipeline stage of a node that is 1.2x slow", ylabel="longer step [%]",
           ylim=(0, 1.42 * cost.max()))  # fmt: skip
    ax.set_title(f"Where should slow nodes go?   {LARGE}")


def draw_validation(result, ax):
    """Draw held-out steps of a production job against the prediction."""
    numbers = prism.summary(result)
    measured = np.sort(result["measured"].to_numpy())
    predicted = np.sort(result["predicted"].to_numpy())
    rival = float(np.median(result["predicted_independent"]))
    if "cdf_time" in result:
        ax.fill_between(result["cdf_time"], result["cdf_lo"], result["cdf_hi"], color=BLUE,
                        alpha=0.18, lw=0, label="error of the fit")  # fmt: skip
    ax.plot(predicted, np.arange(1, predicted.size + 1) / predicted.size, color=BLUE, lw=2.4,
            label="predicted from the other half")  # fmt: skip
    ax.step(measured, np.arange(1, measured.size + 1) / measured.size, "k", lw=2.0,
            where="post", label=f"measured, {measured.size} steps")  # fmt: skip
    low, high = min(measured[0], predicted[0]), max(measured[-1], predicted[-1])
    ax.set_xlim(low - 0.45 * (high - low), high)
    text = (f"KS {numbers['ks']:.2f}, p = {numbers['ks_p_value']:.2f}\n"
            f"error of P95 {100 * numbers['p95_error']:+.1f} %")  # fmt: skip
    ax.annotate(text, (0.98, 0.06), xycoords="axes fraction", ha="right", color=BLUE, fontsize=12,
                weight="bold")  # fmt: skip
    ax.annotate(f"every op on its own:\nP50 {rival:.1f} s, far to the left", (0.0, 0.35),
                xytext=(0.05, 0.35), xycoords="axes fraction", color=GREY, fontsize=11,
                va="center", arrowprops={"arrowstyle": "->", "color": GREY})  # fmt: skip
    ax.legend(fontsize=11, loc="upper left")
    ax.set(xlabel="step time [s]", ylabel="probability", ylim=(0, 1.02))
    ax.set_title("Is it right?   held-out steps of a production job")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    if not trace_path().is_file():
        raise SystemExit(f"{trace_path()}: no such trace; set PRISM_DATA")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.results or Path(scratch)
        folder.mkdir(exist_ok=True)
        results = compute(folder)
        with style(), matplotlib.rc_context({"font.size": 11, "axes.titlesize": 13,
                                             "axes.titleweight": "bold"}):  # fmt: skip
            figure = Figure(figsize=(13.5, 8.4), dpi=140, layout="constrained")
            grid = figure.add_gridspec(2, 4)
            axes = [figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1]),
                    figure.add_subplot(grid[0, 2:]), figure.add_subplot(grid[1, :2]),
                    figure.add_subplot(grid[1, 2:])]  # fmt: skip
            draw_estimate(results["estimate"], axes[0], axes[1])
            draw_rank(results["rank"], axes[2])
            draw_place(results["place"], axes[3])
            draw_validation(results["validate"], axes[4])
            for ax in axes:
                ax.grid(visible=False)
            PICTURE.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(PICTURE)
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
