"""What one hot node costs, by where it is: three jobs, four slowdowns, seven schedules.

    python experiments/studies/placement/run.py [--threads 2] [--figures]

Writes table.json, the tables of README.md and the figures beside itself; --figures draws them
again from table.json. About 5 minutes of processor time.
"""

import argparse
import json
import time
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure

import prism
from prism.analyses.placements.problem import make_problem
from prism.analyses.placements.slack import level, slot_cost
from prism.cluster.nodemap import slow_node
from prism.plots.base import BLUE, COLOURS, GREY, LINE_STYLES, ORANGE, RED, save_figure
from prism.plots.place import plot_slots
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import prepare

matplotlib.style.use("prism.plots.light")

HERE = Path(__file__).parent
SEED = 1
TOLERANCE = 0.003
FACTORS = (1.1, 1.2, 1.5, 2.0)
LLAMA = "llama3-405b-16k"
SMALL = ["parallelism.dp=16", "cluster.nodes=256"]  # 2,048 of its GPUs: what counts is a replica
PLAIN = ["parallelism.vpp=1", "parallelism.schedule=1f1b"]
JOBS = {
    LLAMA: (LLAMA, []),
    "llama3-405b, 2,048 GPUs, 1F1B": (LLAMA, SMALL + PLAIN),
    "llama3-405b, 2,048 GPUs, 1F1B, 64 microbatches": (
        LLAMA, SMALL + PLAIN + ["parallelism.microbatches=64"]
    ),
    "gpt3-175b-512": ("gpt3-175b-512", []),
    "llama3-70b-fsdp-512": ("llama3-70b-fsdp-512", []),
}  # fmt: skip
SCHEDULES = {
    "interleaved, 8 chunks, 16 microbatches (as shipped)": [],
    "interleaved, 8 chunks, 64 microbatches": ["parallelism.microbatches=64"],
    "1F1B, 16 microbatches": PLAIN,
    "1F1B, 16 microbatches, blocking p2p": [*PLAIN, "parallelism.p2p=blocking"],
    "1F1B, 64 microbatches": [*PLAIN, "parallelism.microbatches=64"],
    "1F1B, 64 microbatches, long last stage": [
        *PLAIN,
        "parallelism.microbatches=64",
        "parallelism.layer_split=[7,8,8,8,8,8,8,8,8,8,8,8,8,8,7,8]",
    ],
    "GPipe, 16 microbatches": ["parallelism.vpp=1", "parallelism.schedule=gpipe"],
}
MARKS = {
    "one hot node, step time": (0.09, 0.35),
    "same slowdown, other stage, p95": (0.080, 0.156),
    "between placements": (0.26, 0.26),
}
"""Published, arXiv:2510.15596."""


def simulate(name, factor, threads):
    """Place one slow node: the step without it, with it at its best and at its worst place."""
    base, overrides = JOBS[name]
    begin = time.process_time()
    result = prism.place(
        prism.load_job(base, overrides), nodes={0: slow_node(factor)}, spares=1,
        tolerance=TOLERANCE, seed=SEED, threads=threads,
    )  # fmt: skip
    numbers = prism.summary(result)
    rows = {row["name"]: row for row in numbers["placements"]}
    well, now = numbers["alternatives"]["spares"], rows[numbers["current"]]
    row = {"job": name, "factor": factor, "healthy_p50": well["p50"], "healthy_p95": well["p95"],
           "worst_over_best_p50": numbers["worst_over_best_p50"],
           "worst_over_best_p95": numbers["worst_over_best_p95"],
           "p_correct": numbers["p_correct"]}  # fmt: skip
    for which in ("best", "worst"):
        found = rows[numbers[which]]
        row |= {f"{which}_stages": found["stages"], f"{which}_cost_p50": _over(found, well, "p50"),
                f"{which}_cost_p95": _over(found, well, "p95")}  # fmt: skip
    half = 0.5 * (well["saved_ci"][1] - well["saved_ci"][0])
    row["cost_p95_half"] = half * now["p95"] / well["p95"]
    alone = np.array(numbers["slot_cost"]).max(axis=1)
    row["alone"] = alone.tolist()
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()
           if k != "alone"}, f"{time.process_time() - begin:.0f} s", flush=True)  # fmt: skip
    if name == LLAMA and factor == 1.2:
        save_figure(plot_slots(result), HERE / "llama3-405b-16k-stages.png")
    return row


def _over(row, well, key):
    """Cost of the slow node as a share of the step without it."""
    return row[key] / well[key] - 1.0


def stage_costs(overrides, factor, threads):
    """Cost of a slow node by stage, all else at its mean, as a share of the step."""
    job = prism.load_job(LLAMA, ["parallelism.dp=4", "cluster.nodes=64", *overrides])
    slow = slow_node(factor)
    problem = level(make_problem(prepare(job, SEED), {0: slow}, RunContext(SEED, threads)))
    (step,) = problem.slowed_times([(problem.hosts, {})])
    return (slot_cost(problem, slow).max(axis=1) / step).tolist()


def draw(table):
    """Cost by stage and schedule, and worst over best by slowdown."""
    figure = Figure(figsize=(12.4, 4.6), layout="constrained", dpi=130, facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1.0))
    for i, (name, costs) in enumerate(table["schedules"].items()):
        style = {"color": (*COLOURS, GREY)[i], "linestyle": LINE_STYLES[i % 4]}
        left.plot(100.0 * np.array(costs["1.2"]), marker=".", label=name, **style)
        ratio = [(1.0 + max(costs[str(x)])) / (1.0 + min(costs[str(x)])) for x in FACTORS]
        right.plot(FACTORS, ratio, marker="o", **style)
    left.set_xlabel("stage of the slow node")
    left.set_ylabel("longer step, all else at its mean [%]")
    left.set_title("llama3-405b, one node 1.2x slower", fontsize=10, loc="left")
    left.set_ylim(0.0, None)
    right.axhspan(*(1.0 + x for x in MARKS["same slowdown, other stage, p95"]), color=ORANGE,
                  alpha=0.25, label="published: p95, other stage")  # fmt: skip
    right.axhline(1.26, color=GREY, linestyle=":", label="published: between placements")
    right.set_xlabel("slowdown of the node")
    right.set_title("step, worst stage over best stage", fontsize=10, loc="left")
    right.legend(fontsize=8, frameon=False, loc="upper left")
    for ax in (left, right):
        ax.grid(color="0.9", linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  fontsize=8, frameon=False)  # fmt: skip
    figure.savefig(HERE / "stages.png", metadata={"Software": None})
    draw_jobs(table)


def draw_jobs(table):
    """Cost of the slow node at its best and worst place, simulated, by job and slowdown."""
    figure = Figure(figsize=(9.0, 4.4), layout="constrained", dpi=130, facecolor="white")
    ax = figure.add_subplot()
    names = list(JOBS)
    for j, factor in enumerate(FACTORS):
        for row in table["jobs"]:
            if row["factor"] != factor:
                continue
            y = names.index(row["job"]) + 0.18 * (j - 1.5)
            ends = [100.0 * row[f"{which}_cost_p50"] for which in ("best", "worst")]
            ax.plot(ends, [y, y], color="0.7", linewidth=3.0, zorder=1)
            ax.plot(ends[0], y, "o", color=BLUE, markersize=5)
            ax.plot(ends[1], y, "o", color=RED, markersize=5)
            ax.annotate(f"{factor:g}x", (max(ends), y), xytext=(6, 0), textcoords="offset points",
                        va="center", fontsize=7.5, color=GREY)  # fmt: skip
    low, high = (100.0 * x for x in MARKS["one hot node, step time"])
    ax.axvspan(low, high, color=ORANGE, alpha=0.2, label="published: 9 to 35 %", zorder=0)
    ax.plot([], [], "o", color=BLUE, label="node at its best place")
    ax.plot([], [], "o", color=RED, label="at its worst")
    ax.set_yticks(range(len(names)), [name.replace(", ", ",\n", 1) for name in names], fontsize=8)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel("p50 of the step over that without the slow node [%]")
    ax.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)
    ax.grid(color="0.9", linewidth=0.8, axis="x")
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "jobs.png", metadata={"Software": None})


def markdown(table):
    """Tables of the README."""
    lines = ["| job | slowdown | p50 without it | best stage: p50, p95 | worst stage: p50, p95 | "
             "worst / best p50, p95 |", "|---|---|---|---|---|---|"]  # fmt: skip
    for row in table["jobs"]:
        half = 100.0 * row["cost_p95_half"]
        cells = [row["job"], f"{row['factor']:g}", f"{row['healthy_p50']:.2f} s"]
        for which in ("best", "worst"):
            stage = ", ".join(map(str, sorted(set(row[f"{which}_stages"]))))
            p50, p95 = (100.0 * row[f"{which}_cost_{q}"] for q in ("p50", "p95"))
            cells.append(f"{stage}: {p50:+.1f} %, {p95:+.1f} ± {half:.1f} %")
        cells.append(f"{row['worst_over_best_p50']:.3f}, {row['worst_over_best_p95']:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"| llama3-405b, schedule | {' | '.join(f'{x:g}x' for x in FACTORS)} |",
              f"|---|{'---|' * len(FACTORS)}"]  # fmt: skip
    for name, costs in table["schedules"].items():
        cells = []
        for x in FACTORS:
            found = np.array(costs[str(x)])
            ratio = (1.0 + found.max()) / (1.0 + found.min())
            cells.append(
                f"{100.0 * found.min():.1f} % ({found.argmin()}) to {100.0 * found.max():.1f} % "
                f"({found.argmax()}), {ratio:.3f}"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--figures", action="store_true")
    options = parser.parse_args()
    path = HERE / "table.json"
    if not options.figures:
        schedules = {
            name: {str(x): stage_costs(overrides, x, options.threads) for x in FACTORS}
            for name, overrides in SCHEDULES.items()
        }
        jobs = [simulate(name, x, options.threads) for name in JOBS for x in FACTORS]
        path.write_text(json.dumps({"jobs": jobs, "schedules": schedules}, indent=1) + "\n")
    table = json.loads(path.read_text())
    draw(table)
    print(markdown(table))


if __name__ == "__main__":
    main()
