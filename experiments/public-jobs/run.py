"""Predict published step times from job files alone, and the step-to-step spread of MLPerf systems.

    python experiments/public-jobs/run.py [--set KEY=VALUE ...]

Reads jobs.yaml and mlperf.csv beside itself, with their published figures, and writes results.csv
and spread.csv; figure.py draws them. With --set it tries other values and writes nothing.
"""

import argparse
import csv
import sys
from pathlib import Path

import numpy as np
from ruamel.yaml import YAML
from scipy.stats import spearmanr

import prism
from prism.simulation.prepare import prepare_variability

HERE = Path(__file__).resolve().parent
SEED, REPLICATES = 1, 1024  # 16 cluster draws
DEVICES = ("h100", "a100", "gb200")
LAYOUT = ("tp", "cp", "pp", "vpp", "dp", "microbatches", "microbatch_size")


def published():
    """Give (row of jobs.yaml, release, GPUs, seconds) of every published step time."""
    rows = YAML(typ="safe").load(HERE / "jobs.yaml")["jobs"]
    return [
        (row, release, gpus, seconds)
        for row in rows
        for release, sizes in row["measured"].items()
        for gpus, seconds in sizes.items()
    ]


def job_of(row, gpus):
    """Make the job of a row at a number of GPUs."""
    layout = row["parallelism"]
    dp = gpus // int(np.prod([layout.get(key, 1) for key in ("tp", "pp", "cp")]))
    per_node = min(gpus, 4 if row["device"] == "gb200" else 8)
    cluster = {"nodes": gpus // per_node, "gpus_per_node": per_node, "device": row["device"],
               **row.get("cluster", {})}  # fmt: skip
    return prism.load_job({
        "model": row["model"], "parallelism": {**layout, "dp": dp}, "cluster": cluster,
        "run": {"steps": 1},
    })  # fmt: skip


def mlperf_job(row):
    """Make the job of a row of mlperf.csv."""
    settings = {f"parallelism.{key}": int(row[key]) for key in LAYOUT}
    settings |= {f"cluster.{key}": int(row[key]) for key in ("nodes", "gpus_per_node")}
    settings |= {"cluster.device": row["device"], "variability.library": row["library"]}
    return prism.load_job(row["base"], settings)


def simulate(job, overrides):
    """Give ideal, mean, its error, p95 less p50 on one allocation, spread of allocations, runs."""
    result = prism.simulate(job.replace(*overrides), REPLICATES, SEED)
    steps = result.step_time.values.reshape(-1, 64)
    means, medians = steps.mean(axis=1), np.median(steps, axis=1)
    return {
        "ideal_s": float(result.ideal_step_time), "mean_s": float(means.mean()),
        "mean_se_s": float(means.std(ddof=1) / np.sqrt(means.size)),
        "p50_s": float(np.median(medians)),
        "p95_less_p50_s": float(np.quantile(steps - medians[:, None], 0.95)),
        "between_s": float(medians.std(ddof=1)),
        "runs_s": prepare_variability(job.replace(*overrides)).run_cv * float(np.median(medians)),
    }  # fmt: skip


def predict(overrides=(), devices=(), frameworks=()):
    """Predict every published step time, or those of some devices and frameworks."""
    rows, known = [], {}
    entries = [
        e for e in published()
        if (not devices or e[0]["device"] in devices)
        and (not frameworks or e[0]["framework"] in frameworks)
    ]  # fmt: skip
    for i, (row, release, gpus, seconds) in enumerate(entries):
        key = (row["name"], gpus)
        if key not in known:
            print(f"{i + 1} of {len(entries)}: {row['name']}, {gpus} GPUs", file=sys.stderr)
            known[key] = simulate(job_of(row, gpus), overrides)
        rows.append({
            "job": row["name"], "class": f"{row['device']} {row['framework']}",
            "release": release, "gpus": gpus, "measured_s": seconds, **known[key],
        })  # fmt: skip
    return rows


def predict_spread(overrides=()):
    """Predict the spread of every MLPerf system, beside the measured one."""
    with (HERE / "mlperf.csv").open(newline="") as file:
        systems = list(csv.DictReader(file))
    rows = []
    for i, row in enumerate(systems):
        print(f"{i + 1} of {len(systems)}: {row['system']}", file=sys.stderr)
        found = simulate(mlperf_job(row), overrides)
        rows.append({
            "system": row["system"], "round": row["round"], "job": row["base"],
            "device": row["device"],
            "gpus": int(row["nodes"]) * int(row["gpus_per_node"]),
            "measured_p50_s": float(row["p50_s"]),
            "measured_p95_less_p50_s": float(row["p95_less_p50_s"]),
            "measured_between_s": float(row["between_runs_s"]), **found,
        })  # fmt: skip
    return rows


def classes(rows):
    """Give geometric mean and standard deviation of predicted over published, by class."""
    out = []
    for name in dict.fromkeys(row["class"] for row in rows):
        own = [row for row in rows if row["class"] == name]
        for key in ("ideal_s", "mean_s"):
            ratio = np.array([row[key] / row["measured_s"] for row in own])
            logs = np.log(ratio)
            found = np.exp(logs.mean()), logs.std(ddof=1), ratio.min(), ratio.max()
            out.append((name, key, len(own), *map(float, found)))
    return out


def growth(rows):
    """Give the growth from the smallest to the largest size, published and predicted."""
    out = []
    for job, release in dict.fromkeys((row["job"], row["release"]) for row in rows):
        own = [row for row in rows if (row["job"], row["release"]) == (job, release)]
        if len(own) > 1:
            own.sort(key=lambda row: row["gpus"])
            first, last = own[0], own[-1]
            error = np.hypot(*(row["mean_se_s"] / row["mean_s"] for row in (first, last)))
            out.append((job, release, first["gpus"], last["gpus"],
                        last["measured_s"] / first["measured_s"] - 1.0,
                        last["mean_s"] / first["mean_s"] - 1.0, float(error)))  # fmt: skip
    return out


def show(rows, spread):
    """Print the tables of the README."""
    print("class, predicted over published: n, geometric mean, sd of the log, least, most")
    for name, key, n, mean, std, low, high in classes(rows):
        print(f"  {name:16s} {key[:-2]:5s} {n:3d}  {mean:.3f} +- {std:.3f}  {low:.3f} {high:.3f}")
    print("growth from the first to the last size [%]: published, predicted, error, difference")
    for job, release, first, last, *shares in growth(rows):
        measured, found, error = (100.0 * share for share in shares)
        print(f"  {job:38s} {release:8s} {first:4d}-{last:<5d} {measured:+6.1f} "
              f"{found:+6.1f} +- {error:.1f}  {found - measured:+6.1f}")  # fmt: skip
    print("p95 less p50 on one allocation [ms], over p50 [%], spread between runs [ms]: measured, "
          "predicted; between allocations [ms]")  # fmt: skip
    for row in spread:
        print(f"  {row['system']:46s} {row['gpus']:6d} "
              f"{1e3 * row['measured_p95_less_p50_s']:7.1f} {1e3 * row['p95_less_p50_s']:7.1f}   "
              f"{100 * measured_excess(row):5.2f} {100 * excess(row):5.2f}   "
              f"{1e3 * row['measured_between_s']:6.1f} {1e3 * row['runs_s']:6.1f}   "
              f"{1e3 * row['between_s']:6.1f}")  # fmt: skip
    for device in dict.fromkeys(row["device"] for row in spread):
        own = [row for row in spread if row["device"] == device]
        if len(own) > 3:
            print(f"{device}: " + ", ".join(f"{k} {v:.2f}" for k, v in agreement(own).items()))


def excess(row):
    return row["p95_less_p50_s"] / row["p50_s"]


def measured_excess(row):
    return row["measured_p95_less_p50_s"] / row["measured_p50_s"]


def agreement(rows):
    """Say how well the spread of some systems is predicted."""
    found, measured = np.array([[excess(r), measured_excess(r)] for r in rows]).T
    ms = np.array([r["p95_less_p50_s"] / r["measured_p95_less_p50_s"] for r in rows])
    between = np.array([r["runs_s"] / r["measured_between_s"] for r in rows])
    return {
        "systems": len(rows), "spearman": float(spearmanr(found, measured).statistic),
        "median error of the excess [points]": float(np.median(np.abs(found - measured))) * 100.0,
        "p95 - p50 within a factor of 2": float(np.mean(np.abs(np.log(ms)) < np.log(2.0))),
        "between runs, median ratio": float(np.median(between)),
    }  # fmt: skip


def write(path, rows):
    """Write rows with 5 digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    overrides = parser.parse_args().set
    rows, spread = predict(overrides), predict_spread(overrides)
    show(rows, spread)
    if not overrides:
        write(HERE / "results.csv", rows)
        write(HERE / "spread.csv", spread)


if __name__ == "__main__":
    main()
