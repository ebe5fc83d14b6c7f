"""Fit a part of a production job's steps, predict the rest; what its steps vary by.

    python experiments/validation/production-traces/run.py [--bootstrap 200] [--threads 2]

Reads every ops_*.parquet of production_traces in the folder PRISM_DATA, or in ../shared/data beside
the checkout. Writes results.json, splits.csv and pictures beside itself; nothing depends on a job's
name but the published slowdown that stands beside the replayed one.
"""

import argparse
import csv
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from figure import draw_overview

from prism.analyses.replay import replay
from prism.analyses.validate import validate
from prism.analyses.validation.trace import step_program
from prism.common.agreement import ks_statistic
from prism.distributions.distribution import constant
from prism.engine import LANES
from prism.models.fit import fit
from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.fit import fit_graph
from prism.plots.base import save_figure
from prism.plots.validation import draw_validation, plot_workers
from prism.simulation.execution.context import RunContext, cores
from prism.simulation.steps import run_blocks
from prism.simulation.tracemodel.graph import COMPUTE
from prism.traces import read_trace

HERE = Path(__file__).resolve().parent
SPLITS, SEED, REPLICATES = ("first-half", "even"), 1, 20_000
SHOWN = "even"  # the split in the overview
COPY_DRAWS = 2_000  # halves of the training part, for their expected KS
# what-if slowdowns of the traces' authors, arXiv:2505.05713, in the artifact's own README
PUBLISHED = {"AR": 1.973, "SE": 1.537, "ST": 1.179}
FIRST = 10  # steps printed of those measured
COMPARED = ("ks", "mean_error", "p95_error", "cv_ratio")


def find_traces():
    """List (name, path) of the jobs' traces; none where the measured data is not here."""
    default = HERE.parents[3] / "shared" / "data"
    folder = Path(os.environ.get("PRISM_DATA", default)) / "production_traces"
    return [(p.stem.removeprefix("ops_"), p) for p in sorted(folder.glob("ops_*.parquet"))]


# --------------------------------------------------------------------------- held-out steps
def validate_job(path, bootstrap, threads):
    """Validate both splits: by name, the dataset and its figures."""
    found = {}
    for split in SPLITS:
        result = validate(
            trace=path, train=split, replicates=REPLICATES, bootstrap=bootstrap, seed=SEED,
            threads=threads,
        )  # fmt: skip
        figures = result.figures()
        figures["copy_at_half_ks"] = copy_at_half(
            result.training.to_numpy(), result.measured.to_numpy()
        )
        figures["trace"] = path.name
        found[split] = (result, figures)
    return found


def copy_at_half(training, measured):
    """Return the KS that a copy of half of the training steps is expected to have."""
    rng = np.random.Generator(np.random.Philox(SEED))
    half = max(1, training.size // 2)
    return float(np.mean([
        ks_statistic(measured, rng.choice(training, half, replace=False)) for _ in range(COPY_DRAWS)
    ]))  # fmt: skip


def split_row(job, split, figures):
    """Flatten one validation to a row: full, none (independent sampling) and copy side by side."""
    row = {"job": job, "train": split}
    row |= {k: figures[k] for k in ("n_train", "n_measured", "n_effective")}
    sides = {
        "full": figures, "none": figures["baselines"]["independent"],
        "copy": figures["baselines"]["copy"],
    }  # fmt: skip
    row |= {f"{name}_{k}": side[k] for name, side in sides.items() for k in COMPARED}
    return row | {
        k: figures[k]
        for k in ("ks_critical_5pct", "ks_p_value", "ks_floor", "p95_floor", "p95_measured_se",
                  "cv_ratio_floor", "copy_at_half_ks")
    }  # fmt: skip


# --------------------------------------------------------------------------- what varies
def freeze_groups(model, compute, **fields):
    """Set fields of the distributions of compute ops, or of all others."""
    groups = tuple(
        g._replace(**fields) if (g.op_kind in COMPUTE) == compute else g for g in model.groups
    )
    return dataclasses.replace(model, groups=groups)


def freeze_profile(model, compute):
    """Let compute ops, or all others, take their mean over steps in every step."""
    which = np.array([(g.op_kind in COMPUTE) == compute for g in model.groups])
    profile = np.array(model.profile)
    profile[which] = 1.0
    return dataclasses.replace(model, profile=profile)


def freeze_ranks(model, lemons):
    """Let the slow workers, or all others, run as a typical worker does."""
    slow = np.zeros(model.rank.shape[1:], bool)
    for replica, stage, _ in model.lemons:
        slow[stage, replica] = True
    ones = np.ones_like(model.rank)
    which = np.broadcast_to(slow if lemons else ~slow, ones.shape)
    return dataclasses.replace(
        model, rank=np.where(which, ones, model.rank), follows=np.where(which, ones, model.follows)
    )


def freeze_both(model, freeze, **fields):
    """Freeze compute ops and all others."""
    return freeze(freeze(model, True, **fields), False, **fields)


# each sets one effect of a model to its mean; the order is that of tables and pictures
RANDOM = {
    "microbatch": lambda m: freeze_groups(m, True, content=0.0),
    "step": lambda m: freeze_both(m, freeze_profile),
    "rank step": lambda m: freeze_groups(m, True, rank_step=0.0),
    "residual": lambda m: freeze_both(m, freeze_groups, residual=constant()),
}
FIXED = {
    "rank": lambda m: freeze_ranks(m, lemons=False),
    "slow workers": lambda m: freeze_ranks(m, lemons=True),
}
PARTS = {  # of the step effect, which moves compute and all else in the same draw
    "step, compute only": lambda m: freeze_profile(m, True),
    "step, the rest only": lambda m: freeze_profile(m, False),
}


def frozen_but(model, kept):
    """Freeze every random effect except one; ranks stay as measured."""
    for name, freeze in RANDOM.items():
        model = model if name == kept else freeze(model)
    return model


def simulate_steps(model, threads):
    """Step times of the model on the traced cluster, steps apart, [replicate] s."""
    program = step_program(model, "full", SEED)
    times = run_blocks(program, range(-(-REPLICATES // LANES)), RunContext(SEED, threads))[0]
    return times.reshape(-1)[:REPLICATES].astype(np.float64)


def by_step(model):
    """Time of compute ops, and of all else, in each measured step relative to the median one."""
    totals = {"compute": 0.0, "rest": 0.0}
    for node, group, mean in zip(model.nodes, model.group, model.mean, strict=True):
        if group >= 0:
            totals["compute" if node.op_kind in COMPUTE else "rest"] += mean @ model.profile[group]
    order = np.argsort(model.steps)
    found = {k: (v[order] / np.median(v)).tolist() for k, v in totals.items()}
    correlation = np.corrcoef(found["compute"], found["rest"])[0, 1]
    return {"step": model.steps[order].tolist(), **found, "correlation": correlation}


def spread(times):
    """Mean, standard deviation and p95 [s], with the Monte Carlo error of the deviation."""
    parts = times[: times.size // 20 * 20].reshape(20, -1).std(axis=1, ddof=1)
    return {
        "mean": times.mean(), "std": times.std(ddof=1), "p95": np.quantile(times, 0.95),
        "std_se": parts.std(ddof=1) / np.sqrt(parts.size),
    }  # fmt: skip


def what_varies(path, threads):
    """Freeze one effect after another in a model of all steps; draws are the same throughout."""
    model = fit_graph(build_trace_graph(read_trace(path)), str(path))
    before = spread(simulate_steps(model, threads))
    nothing = spread(simulate_steps(frozen_but(model, None), threads))
    rows = []
    for name, freeze in (RANDOM | FIXED | PARTS).items():
        if name == "slow workers" and not model.lemons:
            continue
        after = spread(simulate_steps(freeze(model), threads))
        rows.append({
            "effect": name, "mean_without": after["mean"] / before["mean"],
            "std_without": after["std"] / before["std"],
            "std_without_se": after["std_se"] / before["std"],
            "std_alone": spread(simulate_steps(frozen_but(model, name), threads))["std"]
            / before["std"] if name in RANDOM else None,
        })  # fmt: skip
    return {"as_fitted": before, "nothing_random_mean": nothing["mean"],
            "nothing_random_std": nothing["std"], "by_step": by_step(model),
            "effects": rows}  # fmt: skip


def shares(path):
    """Share of the variance of log durations by component and op_kind, and intervals."""
    found = fit(path, seed=SEED).figures()
    effects = {k: v for k, v in found["effects"].items() if v is not None}
    return {
        "components": {k: v["by_op_kind"] for k, v in effects.items()},
        "lemons": found["lemons"], "cross_check": found["cross_check"],
        "step_correlation_steps": found["step_correlation_steps"],
    }  # fmt: skip


# --------------------------------------------------------------------------- all of it
def rounded(value):
    """Keep six significant digits of every number: the rest is the machine's."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def study(name, path, bootstrap, threads):
    """Everything about one job, and the datasets for its pictures."""
    replayed = replay(path)
    figures = {k: v for k, v in replayed.figures().items() if k != "by_worker"}
    figures["slowdown_published"] = PUBLISHED.get(name.partition("_")[0])
    validated = validate_job(path, bootstrap, threads)
    return {
        "replay": figures, "fit": shares(path), "varies": what_varies(path, threads),
        "splits": {k: figures for k, (_, figures) in validated.items()},
    }, {"replay": replayed, **{k: result for k, (result, _) in validated.items()}}  # fmt: skip


def draw_job(name, pictures):
    """One picture of each split, and the workers' heat map."""
    for split in SPLITS:
        save_figure(draw_validation(pictures[split]), HERE / f"{name}-{split}.png")
    save_figure(plot_workers(pictures["replay"]), HERE / f"{name}-workers.png")


def tell(name, results):
    """Print what the README quotes."""
    r, varies = results["replay"], results["varies"]
    print(f"\n{name}: replay mean {r['mean_error']:+.3%}, worst step {r['max_abs_error']:.3%}; "
          f"slowdown {r['slowdown']:.3f} (published {r['slowdown_published']}), same work "
          f"{r['slowdown_same_work']:.3f}; lemons {results['fit']['lemons']}; "
          f"ideal {r['ideal_mean']:.3f} s")  # fmt: skip
    for split, f in results["splits"].items():
        sides = {"full": f, "none": f["baselines"]["independent"], "copy": f["baselines"]["copy"]}
        cells = "; ".join(
            f"{k} KS {v['ks']:.3f} p95 {v['p95_error']:+.2%} CV x {v['cv_ratio']:.2f}"
            for k, v in sides.items()
        )
        print(f"  {split:10} {cells} | critical {f['ks_critical_5pct']:.3f} floor "
              f"{f['ks_floor']:.3f} p {f['ks_p_value']:.2f} p95 floor {f['p95_floor']:.2%} se "
              f"{f['p95_measured_se']:.2%} half a copy {f['copy_at_half_ks']:.3f}")  # fmt: skip
    for effect, kinds in results["fit"]["components"].items():
        text = ", ".join(f"{k} {v['cv']:.2%} ({v['share']:.0%})" for k, v in kinds.items())
        print(f"  {effect:12} {text}")
    base = varies["as_fitted"]
    print(
        f"  as fitted: mean {base['mean']:.4f} s, std {base['std']:.4f} +- {base['std_se']:.4f} s; "
        f"compute and rest of a step: r = {varies['by_step']['correlation']:.2f}"
    )
    for key in ("step", "compute", "rest"):
        print(f"    {key:8}" + "".join(f"{x:7.4g}" for x in varies["by_step"][key][:FIRST]))
    for row in varies["effects"]:
        alone = "" if row["std_alone"] is None else f"  alone {row['std_alone']:.3f}"
        print(f"  without {row['effect']:20} mean x {row['mean_without']:.4f}  std x "
              f"{row['std_without']:.3f} +- {row['std_without_se']:.3f}{alone}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bootstrap", type=int, default=200)
    parser.add_argument("--threads", type=int, default=cores())
    options = parser.parse_args()
    traces = find_traces()
    if not traces:
        print("no measured traces found; set PRISM_DATA to their folder", file=sys.stderr)
        return 0
    begin, everything, pictures = time.perf_counter(), {}, {}
    for name, path in traces:
        everything[name], pictures[name] = study(name, path, options.bootstrap, options.threads)
        tell(name, everything[name])
        draw_job(name, pictures[name])
    rows = [
        rounded(split_row(name, split, figures))
        for name, results in everything.items()
        for split, figures in results["splits"].items()
    ]
    with (HERE / "splits.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    report = {"seed": SEED, "replicates": REPLICATES, "bootstrap": options.bootstrap,
              "jobs": everything}  # fmt: skip
    (HERE / "results.json").write_text(json.dumps(rounded(report), indent=1, default=float) + "\n")
    draw_overview(everything, {k: v[SHOWN] for k, v in pictures.items()}, SHOWN, HERE / "overview")
    print(f"\n{time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
