"""How much of a given CV reaches the step under tp, pp, dp and fsdp of the same GPU count.

One effect at a time, each at 1, 2 and 5 %: rank (drawn per GPU), call and residual (per kernel or
call), microbatch, step. Writes ``table.json``, ``table.md`` and ``cv-propagation.png`` here.
``python experiments/studies/cv-propagation/run.py`` takes some two minutes of processor time.
"""

import json
import math
from functools import lru_cache
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from prism.distributions.library import load_library
from prism.jobs.job import job_from_dict
from prism.simulation.steps import simulate
from prism.simulation.variability import resolve_variability
from prism.workload.build import build_workload

HERE = Path(__file__).parent
MODEL = {"n_layers": 64, "hidden_size": 4096, "ffn_size": 14336, "n_heads": 64, "n_kv_heads": 64,
         "vocab_size": 32768, "seq_len": 4096}  # fmt: skip
BATCH = 1024  # sequences of a step
LAYOUTS = {
    "tp": lambda n: {"tp": 8, "dp": n // 8, "data_parallel": "zero1"},
    "pp": lambda n: {"pp": 16, "dp": n // 16, "data_parallel": "zero1"},
    "dp": lambda n: {"dp": n, "data_parallel": "ddp"},
    "fsdp": lambda n: {"dp": n, "data_parallel": "fsdp"},
}
GPUS, LEVELS = (64, 1024), (0.01, 0.02, 0.05)
EFFECTS = ("rank", "residual", "call", "microbatch", "step")
OFF = {
    "rank": {"cv": 0.0, "lemon_fraction": 0.0, "node_share": 0.0, "memory_loading": 1.0},
    "step": {"cv": 0.0}, "microbatch": {"cv": 0.0, "backward_loading": 1.0, "loss_loading": 1.0},
    "call": {"cv": 0.0}, "residual": {"law": "normal", "cv": 0.0},
    "regime": {"probability": 0.0}, "stall": {"rate_per_hour": 0.0},
}  # fmt: skip
REPLICATES = {64: 4096, 1024: 2048}


def job(layout: str, n: int, effect: str, cv: float):
    """Make a model of 16 G parameters on n H100s, with one effect alone."""
    p = LAYOUTS[layout](n)
    effects = {k: dict(v) for k, v in OFF.items()}
    effects[effect]["cv"] = cv
    return job_from_dict(
        {
            "model": MODEL,
            "parallelism": {**p, "microbatches": BATCH // p["dp"]},
            "cluster": {"nodes": n // 8, "max_slowdown": 2.0},
            "variability": {"effects": effects},
        },
        f"{layout}-{n}",
    )


def measure(layout: str, n: int, effect: str, cv: float) -> dict:
    """CV of the step and rise of its mean over the ideal, with standard errors by cluster."""
    result = simulate(job(layout, n, effect, cv), replicates=REPLICATES[n], seed=7)
    ideal = float(result.ideal_step_time)
    times = result.step_time.values.reshape(-1, 64) / ideal
    mean, clusters = times.mean(axis=1), len(times)
    # jackknife over clusters, which are the independent units
    total, square = times.sum(axis=1), (times**2).sum(axis=1)
    m = (clusters - 1) * 64
    left_mean = (total.sum() - total) / m
    left = np.sqrt(np.maximum(0.0, (square.sum() - square) / m - left_mean**2)) / left_mean
    return {
        "layout": layout, "gpus": n, "effect": effect, "cv": cv,
        "step_cv": float(times.std() / times.mean()),
        "step_cv_se": float(math.sqrt((clusters - 1) * left.var())),
        "rise": float(mean.mean() - 1.0),
        "rise_se": float(mean.std(ddof=1) / math.sqrt(clusters)),
        "ideal": ideal,
    }  # fmt: skip


def largest(n: int, distribution=None) -> tuple[float, float]:
    """Mean and standard deviation of the largest of n draws, in units of one's own.

    Of a distribution of mean 1, or of standard normals.
    """
    u = ((np.arange(200_000) + 0.5) / 200_000) ** (1.0 / n)
    z = (
        stats.norm.ppf(u)
        if distribution is None
        else (distribution.ppf(u) - 1.0) / distribution.std
    )
    return float(z.mean()), float(z.std())


def closed_form(row: dict) -> tuple[float, float] | None:
    """CV of the step and rise of its mean in plain data parallelism, else None.

    A step is the largest of n replicas' forwards and backwards, then what is alike for all
    (communication that is left, the optimizer): with s the CV of one replica's sum, c its share of
    the ideal step, and e, d the mean and standard deviation of the largest of n, the mean rises by
    s e c and the standard deviation is s d c. A rank's factor is the same in all m microbatches
    (s = cv); a microbatch's is in its forward and backward (cv / sqrt m), a call's in one of them
    on one model chunk, and a kernel's in itself: cv / sqrt m times the root of the sum of squared
    durations over their sum. Sums of many are normal; one draw has its own distribution.
    """
    cv, n = row["cv"], row["gpus"]
    if row["effect"] == "step":
        return cv, 0.0
    if row["layout"] != "dp":
        return None
    m, work = BATCH // n, parts(row["layout"], n)
    alone = {"rank": 1.0, "microbatch": m**-0.5, "call": work["calls"] * m**-0.5,
             "residual": work["kernels"] * m**-0.5}  # fmt: skip
    made = job(row["layout"], n, row["effect"], cv)
    distributions = resolve_variability(made, load_library("h100-healthy"))
    distribution = {
        "rank": distributions.rank.distribution,
        "microbatch": distributions.microbatch.distribution if m == 1 else None,
    }
    mean, std = largest(n, distribution.get(row["effect"]))
    s = cv * alone[row["effect"]] * work["seconds"] * m / row["ideal"]
    return s * std / (1.0 + s * mean), s * mean


@lru_cache
def parts(layout: str, n: int) -> dict[str, float]:
    """Seconds of a microbatch; root of the sum of squares over the sum, of calls and of kernels."""
    work = build_workload(job(layout, n, "rank", 0.0), load_library("h100-healthy"))
    calls = [[k.duration for k in getattr(c, kind)]
             for row in work.chunks for c in row for kind in ("forward", "backward")]  # fmt: skip
    total = sum(map(sum, calls))
    return {
        "seconds": total,
        "calls": math.sqrt(sum(sum(call) ** 2 for call in calls)) / total,
        "kernels": math.sqrt(sum(k * k for call in calls for k in call)) / total,
    }


def draw(rows: list[dict]) -> None:
    """CV of the step over the given CV, and rise of the mean over it, by layout, at 2 %."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.2), sharex=True, sharey="row")
    colours = dict(zip(LAYOUTS, ("#4477aa", "#ee6677", "#228833", "#ccbb44"), strict=True))
    for column, n in enumerate(GPUS):
        for i, layout in enumerate(LAYOUTS):
            some = [r for r in rows if (r["layout"], r["gpus"], r["cv"]) == (layout, n, 0.02)]
            x = np.arange(len(EFFECTS)) + 0.2 * (i - 1.5)
            for axis, name in zip(axes[:, column], ("step_cv", "rise"), strict=True):
                axis.bar(
                    x, [r[name] / r["cv"] for r in some], 0.18, color=colours[layout],
                    yerr=[2.0 * r[f"{name}_se"] / r["cv"] for r in some], label=layout,
                )  # fmt: skip
                for at, row in zip(x, some, strict=True):
                    known = closed_form(row)
                    if known is not None:
                        value = known[name == "rise"] / row["cv"]
                        axis.plot([at - 0.1, at + 0.1], [value] * 2, "k-", lw=1.2)
        axes[0, column].set_title(f"{n:,} GPUs")
        axes[1, column].set_xticks(range(len(EFFECTS)), EFFECTS)
    axes[0, 0].set_ylabel("CV of the step / CV given")
    axes[1, 0].set_ylabel("rise of the mean / CV given")
    axes[0, 0].legend(frameon=False, ncols=2)
    for axis in axes.ravel():
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("What reaches the step of an effect of 2 % (two errors; lines: closed form)")
    figure.tight_layout()
    figure.savefig(HERE / "cv-propagation.png", dpi=110)


def table(rows: list[dict]) -> str:
    """Markdown table of all rows, in percent."""
    lines = ["| effect | CV | GPUs | " + " | ".join(LAYOUTS) + " | closed form, dp |",
             "|---|---|---|" + "---|" * (len(LAYOUTS) + 1)]  # fmt: skip
    by = {(r["layout"], r["gpus"], r["effect"], r["cv"]): r for r in rows}
    for effect in EFFECTS:
        for cv in LEVELS:
            for n in GPUS:
                cells = []
                for layout in LAYOUTS:
                    r = by[layout, n, effect, cv]
                    cells.append(f"{100 * r['step_cv']:.2f} ± {200 * r['step_cv_se']:.2f}, "
                                 f"{100 * r['rise']:+.2f} ± {200 * r['rise_se']:.2f}")  # fmt: skip
                known = closed_form(by["dp", n, effect, cv])
                text = "" if known is None else f"{100 * known[0]:.2f}, {100 * known[1]:+.2f}"
                lines.append(
                    f"| {effect} | {100 * cv:.0f} % | {n:,} | {' | '.join(cells)} | {text} |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = [measure(layout, n, effect, cv)
            for effect in EFFECTS for cv in LEVELS for n in GPUS for layout in LAYOUTS]  # fmt: skip
    (HERE / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
    (HERE / "table.md").write_text(table(rows))
    draw(rows)
    print(table(rows))


if __name__ == "__main__":
    main()
