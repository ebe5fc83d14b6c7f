"""Memory and steps of one lab's layouts: what fits, with what probability, which one is fastest.

    python experiments/validation/layout-sweep/layout_sweep.py [--data DATA] [--fit]

Reads nanotron's layouts, each labelled as run or out of memory (layout_sweep of the measured data,
in DATA, in PRISM_DATA or in ../shared/data beside the checkout), a minute. Prints tables and writes
table.json and reliability.png. With --fit it also fits what the library takes from here: the
allocator's fragmentation, from peaks that were reserved, and the spread of an estimate, from
labels.
"""

import argparse
import importlib
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.stats import norm

import prism
from prism import plots
from prism.common.errors import PrismError
from prism.plots.base import BLUE, ORANGE
from prism.simulation.execution.context import cores
from prism.workload.memory import GIB, LEAST_P_FITS, SPREAD, estimate_memory, memory_limit

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "public-jobs"))
DATA = Path(os.environ.get("PRISM_DATA", HERE.parents[3] / "shared" / "data"))

published = importlib.import_module("run")  # of public-jobs
SEED, REPLICATES = 1, 64
LARGEST, MOST_NODES = 9.0, 32  # billions of parameters and nodes up to which steps are compared
LEAST_GROUP, LEAST_TENTH = 4, 20  # layouts of a group that is ranked, rows of a tenth of P
NEARLY = 60.0, 5.0  # GiB reserved at most and come and gone at least, where fragmentation is fitted


# ----------------------------------------------------------------------------------- predictions
def predict(row):
    """Predict one layout: what of its memory lasts, comes and goes, its chance, its p50 [s]."""
    job = published.job_of(published.layout_entry(row))
    stages = estimate_memory(job)
    first, fullest = stages[0], max(stages, key=lambda stage: stage.total)
    memory = prism.memory(job)
    found = {
        "p": memory["p_fits"], "gib": memory["gib"], "allocated": memory["allocated_gib"],
        "lasting": first.lasting / GIB, "transient": first.transient / GIB,
        "full_lasting": fullest.lasting / GIB, "full_transient": fullest.transient / GIB,
        "reserve": fullest.parts["reserve"] / GIB, "limit": memory_limit(job) / GIB, "p50": np.nan,
    }  # fmt: skip
    if found["p"] >= LEAST_P_FITS or row.status == "Success":
        steps = prism.simulate(job, REPLICATES, seed=SEED, threads=1).step_time
        found["p50"] = float(steps.quantile(0.5))
    return found


def attempt(row):
    """Predict one layout; the reason where its job is refused."""
    try:
        return predict(SimpleNamespace(**row))
    except PrismError as error:
        return {"refused": str(error).partition(";")[0]}


def predict_all(rows):
    """Put predictions beside rows that ran or ran out of memory."""
    rows = rows[rows.status.isin(["Success", "OOM"])].reset_index(drop=True)
    with ProcessPoolExecutor(cores()) as pool:
        found = list(pool.map(attempt, rows.to_dict("records"), chunksize=16))
    return pd.concat([rows, pd.DataFrame(found)], axis=1).assign(ran=rows.status == "Success")


# ---------------------------------------------------------------------------------------- memory
def score_memory(table):
    """Say how many labels are predicted, and how reliable the probability is, by tenths of it."""
    known = table[table.p.notna()]
    tenth = np.minimum((10 * known.p).astype(int), 9)
    rows = []
    for k, part in known.groupby(tenth):
        ran, p = part.ran.mean(), part.p.mean()
        allowed = 0.1 + 2.0 * np.sqrt(p * (1.0 - p) / len(part))
        rows.append({
            "tenth": int(k), "n": len(part), "p": p, "ran": ran,
            "reliable": bool(abs(ran - p) <= allowed) if len(part) >= LEAST_TENTH else None,
        })  # fmt: skip
    ran_out = known[~known.ran]
    state = known[known.ran & (known.mbs == 1) & (known.tp == 1)]
    error = np.log(known.allocated[known.ran] / known["Mem_Res_(GB)"][known.ran])
    return {
        "layouts": len(table), "without a job": int(table.p.isna().sum()),
        "accuracy": float(((known.p >= 0.5) == known.ran).mean()),
        "recommended": int((known.p >= LEAST_P_FITS).sum()),
        "recommended, ran out": int((ran_out.p >= LEAST_P_FITS).sum()),
        "lasting over allocated at the optimizer's step": float(
            (state.lasting / state["Mem_Alloc_(GB)"])[state.zero_stage == 0].median()
        ),
        "allocated over reserved, log mean and sd": [float(error.mean()), float(error.std())],
        "tenths": rows,
    }  # fmt: skip


def choose_plans(table):
    """Take the fastest layout that is recommended of each model and cluster: which ran out."""
    plans = table[(table.p >= LEAST_P_FITS) & table.p50.notna()].copy()
    plans["each"] = plans.p50 / (plans.mbs * plans.batch_accum * plans.dp)
    first = plans.loc[plans.groupby(["num_params", "nodes"]).each.idxmin()]
    return {"groups": len(first), "ran out": int((~first.ran).sum())}


def fit_memory(table):
    """Fit fragmentation to reserved peaks, and with it shared the spread to labels."""
    rows = table[table.p.notna()]
    ran = rows[rows.ran & (rows["Mem_Res_(GB)"] < NEARLY[0]) & (rows.transient > NEARLY[1])]
    for name, part in (("alone", ran[ran.tp == 1]), ("tp 2 to 8", ran[ran.tp.between(2, 8)])):
        ratio = (part["Mem_Res_(GB)"] - part.lasting) / part.transient
        low, high = np.quantile(ratio, [0.05, 0.95])
        print(f"fragmentation, {name}: {np.exp(np.log(ratio).mean()):.2f}, 5 to 95 % {low:.2f} to "
              f"{high:.2f}, {len(part)} peaks")  # fmt: skip
    label = rows.ran.to_numpy()

    def loss(x):
        total = rows.full_lasting + x[0] * rows.full_transient
        total = np.maximum(total, rows.allocated) + rows.reserve  # or in the optimizer's step
        z = np.log(rows.limit / total).to_numpy() / abs(x[1])
        return -np.where(label, norm.logcdf(z), norm.logcdf(-z)).sum()

    best = minimize(loss, [1.2, 0.1], method="Nelder-Mead").x
    print(f"labels: fragmentation {best[0]:.2f}, spread {abs(best[1]):.3f} (in use: {SPREAD})")


# ----------------------------------------------------------------------------------------- steps
def rank_layouts(table):
    """Rank the layouts that ran by p50: the loss of the first choice, the place of the best one."""
    ran = table[table.ran & table.p50.notna() & (table.tp <= 8) & (table.nodes <= MOST_NODES)]
    ran = ran[(ran.pp == 1) | ran.after_pp_fix]
    ran = ran[(ran["AR_Intra-node_(GB_per_s)"] > published.SICK[0]) & (ran.num_params < LARGEST)]
    groups, least = {}, published.SICK[1]
    for name, healthy in (("all", 0.0), (f"on 32 nodes above {least:.0f} GB/s", least)):
        kept = ran[(ran.nodes < MOST_NODES) | (ran["AllReduce_(GB_per_s)"] > healthy)]
        rows = []
        for (size, nodes), part in kept.groupby(["num_params", "nodes"]):
            if len(part) < LEAST_GROUP:
                continue
            work = part.mbs * part.batch_accum * part.dp
            measured = (part.step_s / work).to_numpy()
            measured = measured[np.argsort((part.p50 / work).to_numpy())]
            rows.append({
                "model": f"{size:g}B", "nodes": int(nodes), "layouts": len(part),
                "regret": float(measured[0] / measured.min() - 1.0),
                "place of the best": int(measured.argmin()) + 1,
            })  # fmt: skip
        groups[name] = rows
    return groups


def show(found):
    """Print the tables."""
    memory = found["memory"]
    for key, value in memory.items():
        if key != "tenths":
            print(f"{key}: {value}")
    print("\n| P(fits) | layouts | ran | mean P | reliable |\n|---|---|---|---|---|")
    for row in memory["tenths"]:
        reliable = {None: "few", True: "yes", False: "no"}[row["reliable"]]
        print(f"| {row['tenth'] / 10:.1f} to {row['tenth'] / 10 + 0.1:.1f} | {row['n']} | "
              f"{row['ran']:.1%} | {row['p']:.1%} | {reliable} |")  # fmt: skip
    print(f"\nfirst choices of whole plans: {found['plans']}")
    for name, rows in found["ranking"].items():
        print(f"\n{name}\n| model | nodes | layouts | regret | place of the best |\n|" + "---|" * 5)
        for row in rows:
            print(f"| {row['model']} | {row['nodes']} | {row['layouts']} | {row['regret']:.1%} | "
                  f"{row['place of the best']} |")  # fmt: skip
        regret = np.mean([row["regret"] for row in rows])
        top = np.mean([row["place of the best"] <= 3 for row in rows])
        print(f"mean regret {regret:.1%}, best in the first three {top:.0%} of {len(rows)}")


def draw(memory):
    """Draw the share that ran by the predicted probability."""
    rows = memory["tenths"]
    p, ran, n = (np.array([row[key] for row in rows], float) for key in ("p", "ran", "n"))
    error = 2.0 * np.sqrt(np.maximum(p * (1.0 - p), 1e-4) / n)
    with plots.style():
        figure, ax = plt.subplots(figsize=(5.2, 4.2))
    ax.plot([0.0, 1.0], [0.0, 1.0], color="0.6", linewidth=1.0)
    ax.fill_between([0.0, 1.0], [-0.1, 0.9], [0.1, 1.1], color="0.6", alpha=0.15, linewidth=0.0)
    error = np.minimum(error, [ran, 1.0 - ran])  # of a share
    for few, colour, label in ((False, BLUE, f"{LEAST_TENTH} layouts or more"),
                               (True, ORANGE, "fewer")):  # fmt: skip
        own = (n < LEAST_TENTH) == few
        ax.errorbar(p[own], ran[own], error[:, own], fmt="o", color=colour, label=label,
                    linewidth=1.2)  # fmt: skip
    for x, y, count in zip(p, ran, n, strict=True):
        ax.annotate(f"{count:.0f}", (x, y), xytext=(7, -9), textcoords="offset points", fontsize=8)
    ax.set(xlim=(-0.03, 1.06), ylim=(-0.05, 1.08), xlabel="predicted P(fits)",
           ylabel="share of layouts that ran")  # fmt: skip
    ax.set_title(f"Which of {n.sum():,.0f} layouts on H100 ran")
    ax.legend(loc="upper left")
    figure.tight_layout()
    plots.save_figure(ax, HERE / "reliability.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    if not (args.data / "layout_sweep").is_dir():
        sys.exit(f"no layout_sweep in {args.data}; give --data, or set PRISM_DATA")
    table = predict_all(published.layout_rows(args.data))
    found = {"memory": score_memory(table), "plans": choose_plans(table),
             "ranking": rank_layouts(table)}  # fmt: skip
    show(found)
    if args.fit:
        fit_memory(table)
    draw(found["memory"])
    (HERE / "table.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
