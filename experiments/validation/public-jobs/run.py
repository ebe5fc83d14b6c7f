"""Predict published step times from job files alone, and the step-to-step spread of MLPerf systems.

    python experiments/validation/public-jobs/run.py [--ideal] [--set KEY=VALUE ...]

Reads jobs.yaml and mlperf.csv beside itself, with their published figures, and writes results.csv
and spread.csv; figure.py draws them. With --set it tries other values and writes nothing; with
--ideal it computes ideal steps alone, in a minute.
"""

import argparse
import csv
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from ruamel.yaml import YAML
from scipy.stats import spearmanr

import prism
from prism.engine import LANES
from prism.simulation.execution.context import make_context
from prism.simulation.prepare import prepare
from prism.simulation.program import ideal_program
from prism.simulation.steps import run_blocks

HERE = Path(__file__).resolve().parent
SEED, REPLICATES = 1, 1024  # 16 cluster draws
FOUR_A_NODE = ("gb200", "gb300")
FRAMEWORKS = ("megatron", "megatron-2022", "compiled-2024", "eager", "eager-2023", "nanotron")
SICK = 100.0, 50.0  # GB/s of an all-reduce in a node, and over 32 of them, below which one is sick
FAR = 0.15  # share beyond which a row is listed
TEXT = {"job", "class", "model", "source", "release", "precision", "system", "round", "device"}
WHOLE = {"gpus", "held_out"}
LAYOUT = ("tp", "cp", "pp", "vpp", "dp", "microbatches", "microbatch_size")


class Entry(NamedTuple):
    """One published step time: a row of jobs.yaml, computed in a precision, on a number of GPUs."""

    row: dict[str, Any]
    precision: str
    release: str
    gpus: int
    seconds: float

    @property
    def key(self):
        """What tells predictions apart: two releases of one job are predicted once."""
        return self.row["name"], self.precision, self.gpus

    @property
    def group(self):
        """Class of the job: device, framework, precision, and whether it has experts."""
        moe = " moe" if "ep" in self.row["parallelism"] else ""
        return f"{self.row['device']} {self.row['framework']} {self.precision}{moe}"

    @property
    def model(self):
        """Name of the model, whatever its layout."""
        return self.row["name"].partition(",")[0].partition(" with ")[0]

    @property
    def held_out(self):
        """Whether nothing is fitted to it."""
        rules = file()["held_out"]
        return any(all(self.row.get(k) == v for k, v in rule.items()) for rule in rules)


@cache
def file():
    """Give what jobs.yaml holds."""
    return YAML(typ="safe").load(HERE / "jobs.yaml")


def published():
    """Give every published step time."""
    return [
        Entry(row, precision, release, gpus, seconds)
        for row in file()["jobs"]
        for precision, releases in row["measured"].items()
        for release, sizes in releases.items()
        for gpus, seconds in sizes.items()
    ]


def nanotron(folder, nodes):
    """Give the step times of nanotron without a pipeline, tp up to a node, on some nodes.

    `folder` is that of the measured data (layout_sweep).
    """
    rows = layout_rows(folder)
    rows = rows[(rows.status == "Success") & (rows.pp == 1) & (rows.tp <= 8)]
    rows = rows[rows.nodes.isin(nodes) & (rows["AR_Intra-node_(GB_per_s)"] > SICK[0])]
    rows = rows[(rows.nodes < 32) | (rows["AllReduce_(GB_per_s)"] > SICK[1])]
    return [layout_entry(row) for row in rows.itertuples()]


def layout_rows(folder):
    """Read nanotron's layouts (layout_sweep); sizes that failed ones lack are the others'."""
    rows = pd.read_csv(folder / "layout_sweep" / "nanotron_h100.csv")
    for key in ("interm_dim", "tie_word_embeddings"):
        rows[key] = rows[key].fillna(rows.groupby("num_params")[key].transform("first"))
    rows["num_kv_heads"] = rows.num_kv_heads.fillna(rows.num_heads)
    return rows


def layout_entry(row):
    """Make one of nanotron's layouts an entry."""
    layout = {"tp": row.tp, "pp": row.pp, "microbatches": row.batch_accum,
              "microbatch_size": row.mbs}  # fmt: skip
    parallelism = {key: int(n) for key, n in layout.items()}
    model = {"n_layers": row.num_layers, "hidden_size": row.hidden_size,
             "ffn_size": row.interm_dim, "n_heads": row.num_heads,
             "n_kv_heads": row.num_kv_heads, "vocab_size": row.vocab_size,
             "seq_len": row.seq_len}  # fmt: skip
    sharding = "zero1" if row.zero_stage else "ddp"
    entry = {
        "name": f"{row.num_params}B, tp {row.tp}, {row.mbs} x {row.batch_accum}, {sharding}",
        "device": "h100", "framework": "nanotron", "source": "nanotron",
        "model": {key: int(n) for key, n in model.items()}
        | {"tied_embeddings": bool(row.tie_word_embeddings)},
        "parallelism": parallelism | {"data_parallel": sharding if row.dp > 1 else "none"},
    }  # fmt: skip
    return Entry(entry, "bf16", "2024", int(row.nodes) * 8, row.step_s)


def four_a100(folder):
    """Give the step times of Llama 2 7B on four A100, whose code is not stated: eager of its time.

    Their links carry about 25 GB/s; `folder` is that of the measured data (layout_sweep).
    """
    rows = pd.read_csv(folder / "layout_sweep" / "uci_llama2_7b_4xA100.csv")
    model = {"n_layers": 32, "hidden_size": 4096, "ffn_size": 11008, "n_heads": 32,
             "vocab_size": 32000, "seq_len": 4096}  # fmt: skip
    out = []
    for row in rows[rows.Status == "SUCCESS"].itertuples():
        layout = {"tp": int(row.TP), "pp": int(row.PP), "cp": int(row.CP)}
        replicas, sharding = int(row.DP * row.CP), row.variant.lower()
        entry = {
            "name": f"{row.variant}, {', '.join(f'{k} {n}' for k, n in layout.items())}",
            "device": "a100", "framework": "eager-2023", "source": "uci", "model": model,
            "parallelism": layout | {
                "global_batch": 128, "sequence_parallel": False, "gradient_dtype": "bf16",
                "optimizer_dtype": "bf16", "data_parallel": sharding if replicas > 1 else "none"},
            "cluster": {"gpus_per_node": 4, "nodes": 1,
                        "links": {"nvlink": {"bandwidth_gbytes_per_s": 25.0, "efficiency": 0.9}}},
        }  # fmt: skip
        out.append(Entry(entry, "bf16", "2024", 4, row.Avg_Step_Time_s))
    return out


def job_of(entry):
    """Make the job of a published step time."""
    row, gpus = entry.row, entry.gpus
    layout = row["parallelism"]
    dp = gpus // int(np.prod([layout.get(key, 1) for key in ("tp", "pp", "cp")]))
    per_node = min(gpus, 4 if row["device"] in FOUR_A_NODE else 8)
    parallelism = {**layout, "dp": dp, "precision": entry.precision}
    if row["framework"] in FRAMEWORKS:
        parallelism["framework"] = row["framework"]
    cluster = {"nodes": gpus // per_node, "gpus_per_node": per_node, "device": row["device"],
               **row.get("cluster", {})}  # fmt: skip
    return prism.load_job({"model": row["model"], "parallelism": parallelism, "cluster": cluster,
                           "run": {"steps": 1}})  # fmt: skip


def ideal_steps(entries, overrides=()):
    """Give a row of figures for each published step time, with the ideal step alone.

    Parameters
    ----------
    entries : iterable of Entry
        Those of `published` that are asked for.
    overrides : iterable of str
        Settings of the job, as ``prism estimate --set`` takes them.

    Returns
    -------
    rows : list of dict
        ``job``, ``class``, ``model``, ``source``, ``release``, ``precision``, ``gpus``,
        ``held_out``, ``measured_s`` and ``ideal_s`` [s]; a job that is not modelled has no row.
    """
    return _predict(entries, overrides, ideal)


def ideal(job):
    """Give the step without any effect [s]."""
    return _ideal(prepare(job, SEED))


def _ideal(step):
    return {
        "ideal_s": float(
            run_blocks(ideal_program(step.program), range(1), make_context(SEED))[0][0, 0]
        )
    }


def _predict(entries, overrides, simulation):
    rows, known, missing = [], {}, Counter()
    for entry in entries:
        if entry.key not in known:
            try:
                known[entry.key] = simulation(job_of(entry).replace(*overrides))
            except prism.PrismError as error:
                known[entry.key] = None
                missing[str(error).partition("\n")[0]] += 1
        if known[entry.key] is not None:
            rows.append({
                "job": entry.row["name"], "class": entry.group, "model": entry.model,
                "source": entry.row["source"],
                "release": entry.release, "precision": entry.precision, "gpus": entry.gpus,
                "held_out": int(entry.held_out), "measured_s": entry.seconds, **known[entry.key],
            })  # fmt: skip
    for reason, n in missing.most_common():
        print(f"not modelled yet, {n} jobs: {reason}", file=sys.stderr)
    return rows


def mlperf_job(row):
    """Make the job of a row of mlperf.csv."""
    settings = {f"parallelism.{key}": int(row[key]) for key in LAYOUT}
    settings |= {f"cluster.{key}": int(row[key]) for key in ("nodes", "gpus_per_node")}
    settings |= {"cluster.device": row["device"], "parallelism.precision": row["precision"]}
    settings |= {"parallelism.framework": "megatron"}
    settings |= {"variability.library": f"{row['device']}-healthy"}
    return prism.load_job(row["base"], settings)


def simulate(job):
    """Give ideal, mean, its error, p95 less p50 on one allocation, spread of allocations, runs."""
    step = prepare(job, SEED, engine="auto")
    steps = run_blocks(step.program, range(REPLICATES // LANES), make_context(SEED))[0]
    means, medians = steps.mean(axis=1, dtype=float), np.median(steps, axis=1)
    return {
        **_ideal(step), "mean_s": float(means.mean()),
        "mean_se_s": float(means.std(ddof=1) / np.sqrt(means.size)),
        "p50_s": float(np.median(medians)),
        "p95_less_p50_s": float(np.quantile(steps - medians[:, None], 0.95)),
        "between_s": float(medians.std(ddof=1)),
        "runs_s": step.effects.run_cv * float(np.median(medians)),
    }  # fmt: skip


def predict(overrides=(), groups=(), entries=None):
    """Predict every published step time, or some entries, of some classes or of all."""
    some = published() if entries is None else entries
    chosen = [entry for entry in some if not groups or entry.group in groups]
    return _predict(chosen, overrides, simulate)


def predict_spread(overrides=(), simulation=None):
    """Predict median and spread of every MLPerf system, beside the measured ones."""
    with (HERE / "mlperf.csv").open(newline="") as file:
        systems = list(csv.DictReader(file))
    rows = []
    for row in systems:
        found = (simulation or simulate)(mlperf_job(row).replace(*overrides))
        rows.append({
            "system": row["system"], "round": row["round"], "job": row["base"],
            "device": row["device"], "precision": row["precision"],
            "gpus": int(row["nodes"]) * int(row["gpus_per_node"]),
            "measured_p50_s": float(row["p50_s"]),
            "measured_p95_less_p50_s": float(row["p95_less_p50_s"]),
            "measured_between_s": float(row["between_runs_s"]), **found,
        })  # fmt: skip
    return rows


def predicted(row):
    """Mean step where it was simulated, else the ideal one [s]."""
    return row.get("mean_s", row["ideal_s"])


def of_class(rows):
    """Give (class, its rows), in the order of the file."""
    names = dict.fromkeys(row["class"] for row in rows)
    return [(name, [row for row in rows if row["class"] == name]) for name in names]


def classes(rows):
    """Give geometric mean and standard deviation of predicted over published, by class."""
    out = []
    for name, own in of_class(rows):
        for key in ("ideal_s", "mean_s"):
            if key in own[0]:
                ratio = np.array([row[key] / row["measured_s"] for row in own])
                logs = np.log(ratio)
                spread = logs.std(ddof=1) if logs.size > 1 else np.nan
                found = np.exp(logs.mean()), spread, ratio.min(), ratio.max()
                out.append((name, key, len(own), *map(float, found)))
    return out


def pairs(rows):
    """Give (row, ratio to its 16-bit step, published, and predicted) of every narrower format."""
    wide = {(r["job"], r["release"], r["gpus"]): r for r in rows if r["precision"] == "bf16"}
    out = []
    for row in rows:
        other = wide.get((row["job"], row["release"], row["gpus"]))
        if other is not None and other is not row:
            published = row["measured_s"] / other["measured_s"]
            out.append((row, published, predicted(row) / predicted(other)))
    return out


def growth(rows):
    """Give the growth from the smallest to the largest size, published and predicted."""
    out = []
    names = ("job", "precision", "release")
    for series in dict.fromkeys(tuple(row[k] for k in names) for row in rows):
        own = [row for row in rows if tuple(row[k] for k in names) == series]
        if len(own) > 1:
            own.sort(key=lambda row: row["gpus"])
            first, last = own[0], own[-1]
            error = np.hypot(*(r.get("mean_se_s", 0.0) / predicted(r) for r in (first, last)))
            out.append((*series, first["gpus"], last["gpus"],
                        last["measured_s"] / first["measured_s"] - 1.0,
                        predicted(last) / predicted(first) - 1.0, float(error)))  # fmt: skip
    return out


def show(rows):
    """Print how near the step times are: by class and source, pairs, growth, and what is far."""
    print("class, predicted over published: n, geometric mean, sd of the log, least, most")
    for name, key, n, mean, std, low, high in classes(rows):
        print(f"  {name:32s} {key[:-2]:5s} {n:3d}  {mean:.3f} +- {std:.3f}  {low:.3f} {high:.3f}")
    print("class and source (* held out): n, geometric mean, sd of the log, mean over that of the "
          "class's other sources")  # fmt: skip
    for name, own in of_class(rows):
        for source, held in dict.fromkeys((row["source"], row["held_out"]) for row in own):
            inside = np.array([(r["source"], r["held_out"]) == (source, held) for r in own])
            logs = np.log([predicted(row) / row["measured_s"] for row in own])
            mean, rest = logs[inside].mean(), logs[~inside]
            text = f"{np.exp(mean - rest.mean()):.3f}" if rest.size else ""
            print(f"  {name:32s} {source + '*' * held:16s} {inside.sum():3d}  {np.exp(mean):.3f} "
                  f"+- {logs[inside].std():.3f}  {text}")  # fmt: skip
    print("step over that in bf16: published, predicted, difference")
    for row, published, found in pairs(rows):
        print(f"  {row['job']:44s} {row['precision']:9s} {row['release']:8s} {row['gpus']:5d} "
              f"{published:.3f} {found:.3f} {found - published:+.3f}")  # fmt: skip
    print("growth from the first to the last size [%]: published, predicted, error, difference")
    for job, precision, release, first, last, *shares in growth(rows):
        measured, found, error = (100.0 * share for share in shares)
        print(f"  {job:44s} {precision:9s} {release:8s} {first:4d}-{last:<5d} {measured:+6.1f} "
              f"{found:+6.1f} +- {error:.1f}  {found - measured:+6.1f}")  # fmt: skip
    print(f"further than {100 * FAR:.0f} % from the published: seconds, predicted over published")
    for row in rows:
        ratio = predicted(row) / row["measured_s"]
        if abs(ratio - 1.0) > FAR:
            print(f"  {row['class']:32s} {row['job']:60s} {row['release']:8s} {row['gpus']:5d} "
                  f"{row['measured_s']:8.3f} {ratio:.2f}")  # fmt: skip


def show_medians(spread):
    """Print the median steps of MLPerf's systems, by job, device and precision."""
    print("MLPerf, predicted over measured p50: n, geometric mean, sd of the log, by system")
    keys = ("job", "device", "precision")
    for group in dict.fromkeys(tuple(row[k] for k in keys) for row in spread):
        own = [row for row in spread if tuple(row[k] for k in keys) == group]
        ratio = [r.get("p50_s", r["ideal_s"]) / r["measured_p50_s"] for r in own]
        logs = np.log(ratio)
        print(f"  {' '.join(group):36s} {len(own):3d}  {np.exp(logs.mean()):.3f} +- "
              f"{logs.std():.3f}  {' '.join(f'{r:.2f}' for r in ratio)}")  # fmt: skip


def show_spread(spread):
    """Print the spread of MLPerf's systems."""
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


def read(path):
    """Read a table that `write` wrote."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {k: v if k in TEXT else int(v) if k in WHOLE else float(v) for k, v in row.items()}
        for row in rows
    ]


def show_nanotron(rows):
    """Print predicted over measured by nodes and sharding, and of 3.57B without tp."""
    table = pd.DataFrame(rows)
    table["log"] = np.log(table.mean_s / table.measured_s)
    own = table.job.str.extract(r"^(?P<model>\S+B), tp (?P<tp>\d+), .*, (?P<sharding>\w+)$")
    table[own.columns] = own
    for keys in ([], ["gpus"], ["gpus", "sharding"], ["tp"]):
        for key, part in table.groupby(keys) if keys else [((), table)]:
            print(" ".join(map(str, key)).ljust(16), f"{len(part):4d}  "
                  f"{np.exp(part.log.mean()):.3f} +- {part.log.std():.3f}")  # fmt: skip
    wide = table[(table.model == "3.57B") & (table.tp == "1")]
    best = wide.loc[wide.groupby("gpus").measured_s.idxmin()]
    print(best[["job", "gpus", "measured_s", "mean_s"]].to_string(index=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--ideal", action="store_true", help="ideal steps alone")
    parser.add_argument(
        "--layouts", type=Path, metavar="DATA", help="nanotron and four A100, from layout_sweep"
    )
    args = parser.parse_args()
    if args.layouts is not None:
        show_nanotron(predict(args.set, entries=nanotron(args.layouts, (1, 4, 8, 32))))
        show(predict(args.set, entries=four_a100(args.layouts)))
        return
    if args.ideal:
        show(ideal_steps(published(), args.set))
        show_medians(predict_spread(args.set, ideal))
        return
    rows, spread = predict(args.set), predict_spread(args.set)
    show(rows)
    show_medians(spread)
    show_spread(spread)
    if not args.set:
        write(HERE / "results.csv", rows)
        write(HERE / "spread.csv", spread)


if __name__ == "__main__":
    main()
