"""Steps of sizes not measured, from the steps of one or two other sizes of the same job.

    python experiments/validation/mlperf-scale/other_scales.py [KIND ...]

Reads mlperf in the folder PRISM_DATA, or in ../shared/data beside the checkout. For every training
set the job's library is calibrated and the steps of other sizes are drawn, beside a copy of the
nearest size and a straight line in microbatches. Writes other_scales.csv; where kinds are named
(required, check, evaluations, assumptions), only their rows are made anew. Exits 1 where a
required bar is missed. The pictures are figure.py's.
"""

import csv
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd

from prism.common.agreement import ks_statistic
from prism.common.resultfiles import save
from prism.distributions.library import load_library
from prism.jobs.job import load_job
from prism.models.calibration.fit import calibrate
from prism.models.calibration.model import communication_share, load_calibration
from prism.models.calibration.predict import draw_steps
from prism.simulation.steps import simulate
from prism.traces import StepTimes

HERE = Path(__file__).resolve().parent
TABLE = HERE / "other_scales.csv"
FOLDER = Path(os.environ.get("PRISM_DATA", HERE.parents[3] / "shared" / "data")) / "mlperf"
WARM_UP = 5  # steps of each run that are dropped
SETTLED = 90  # steps after which no run of these systems is slow from its start (tails.py)
SEED, PROCESSES, REPETITIONS = 0, 2, 1_000
TIE, P50_BAR, P95_BAR = 0.003, 0.02, 0.03
LEVELS = (0.5, 0.95)
# device of prism, library: H200's and B200's cases start from that of the nearest device
DEVICES = {
    "H100": ("h100", "h100-healthy"), "H200": ("h200", "h100-healthy"),
    "GB200": ("gb200", "gb200-healthy"), "B200": ("b200", "gb200-healthy"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A training set and the sizes it predicts; names are those of systems.csv."""

    name: str
    benchmark: str
    training: tuple[str, ...]
    targets: tuple[str, ...]
    kind: str = "required"
    overrides: tuple[str, ...] = ()

    @property
    def keeps_evaluations(self):
        """Whether steps with an evaluation in their gap stay in, in training and in the test."""
        return self.kind == "evaluations"


EOS, EOS_DFW = "eos_n{}_ngc23.09_nemo", "eos-dfw_n{}_ngc23.09_nemo"
CARINA, TYCHE = "carina_ngpu{}_ngc25.04_nemo", "tyche_ngpu{}_ngc25.04_nemo"
H100, NEBIUS = "eos-dfw_n{}_ngc25.01_nemo", "nebius_soperator_8xH200_n{}_ngc25.01_nemo"
COREWEAVE, DGX = "coreweave_hgxh100_n{}_ngc23.04_pytorch", "dgxh100_n{}_nemo"
FLORIDA = "hpg.dgxb200x8.n{}"
GPT3, LLAMA = "gpt3", "llama31_405b"


def _named(pattern, *numbers):
    return tuple(pattern.format(n) for n in numbers)


REQUIRED = (
    Case("GPT-3 v3.1", GPT3, (EOS.format(64), EOS_DFW.format(512)), _named(EOS_DFW, 768, 1024)),
    Case("GPT-3 v3.1", GPT3, _named(EOS, 64, 96), _named(EOS_DFW, 512, 768, 1024)),
    Case("Llama GB200", LLAMA, _named(CARINA, 512, 1024), _named(CARINA, 1536, 2048, 2496)),
    Case("Llama H100", LLAMA, _named(H100, 64), _named(H100, 256)),
)
CHECKS = (
    Case("Llama H100", LLAMA, _named(H100, 64), _named(H100, 304, 320)),
    Case("GPT-3 v3.0 NVIDIA", GPT3, _named(DGX, 64), _named(DGX, 96)),
    Case("GPT-3 v3.0 CoreWeave", GPT3, _named(COREWEAVE, 96, 192), _named(COREWEAVE, 448)),
    Case("GPT-3 v3.0 CoreWeave", GPT3, _named(COREWEAVE, 96), _named(COREWEAVE, 192)),
    Case("Llama H200 Nebius", LLAMA, _named(NEBIUS, 64), _named(NEBIUS, 128)),
    Case("Llama GB200 tyche", LLAMA, _named(TYCHE, 256), _named(TYCHE, 512)),
    Case("Llama B200 Florida", LLAMA, _named(FLORIDA, "32"), _named(FLORIDA, "56")),
    Case("Llama GB200, tyche from carina", LLAMA, _named(CARINA, 512, 1024), _named(TYCHE, 512)),
)
ASSUMED = {
    "Llama GB200, megatron, 72":
        ("cluster.placement=megatron", "cluster.nvlink_domain_gpus=72"),
    "Llama GB200, ddp": ("parallelism.data_parallel=ddp",),
}  # fmt: skip
CASES = (
    *REQUIRED,
    *(replace(c, kind="check") for c in CHECKS),
    *(replace(c, kind="evaluations") for c in REQUIRED),
    *(replace(REQUIRED[2], name=name, kind="assumptions", overrides=said)
      for name, said in ASSUMED.items()),
)  # fmt: skip
KINDS = tuple(dict.fromkeys(c.kind for c in CASES))


# ---------------------------------------------------------------------------- measured, and jobs
def read_runs(system, benchmark, keeps_evaluations=False):
    """Give the measured steps of a system without its warm-up, as `StepTimes`."""
    chosen = [("system", "==", system), ("benchmark", "==", benchmark)]
    table = pd.read_parquet(FOLDER / "step_times.parquet", filters=chosen)
    parts = []
    for name, run in table.groupby("run", observed=True):
        run = run.sort_values("log_idx").reset_index(drop=True).iloc[WARM_UP:]
        run = run[np.isfinite(run.step_s) & (keeps_evaluations | ~run.crosses_eval)]
        parts.append((run.step_s.to_numpy(np.float64), run.index.to_numpy(),
                      np.full(len(run), str(name))))  # fmt: skip
    seconds, steps, runs = (np.concatenate(p) for p in zip(*parts, strict=True))
    return StepTimes(seconds, steps, runs, system, "step_s")


def read_system(system, benchmark):
    """Give a system's row of systems.csv."""
    systems = pd.read_csv(FOLDER / "systems.csv")
    (row,) = systems[(systems.system == system) & (systems.benchmark == benchmark)].itertuples()
    return row


def job_of(system, benchmark, *overrides):
    """Make a system's job: the shipped one of its benchmark and GPU, in the published layout."""
    row = read_system(system, benchmark)
    device, library = next(v for k, v in DEVICES.items() if k in row.accelerator)
    base = "gpt3-175b-512" if benchmark == GPT3 else "llama31-405b-h100-512"
    if device == "gb200":
        base = "llama31-405b-gb200-512"
    layout = {
        f"parallelism.{k}": int(getattr(row, k))
        for k in ("tp", "cp", "pp", "vpp", "dp") if np.isfinite(getattr(row, k))
    }  # fmt: skip
    size = 1 if np.isnan(row.mbs) else int(row.mbs)  # blank: 1, as in the other rounds
    settings = {
        **layout, "parallelism.microbatch_size": size,
        "parallelism.microbatches": int(row.minibs_per_dp) // size,
        "cluster.nodes": int(row.nodes), "cluster.gpus_per_node": int(row.gpus_per_node),
        "cluster.device": device, "variability.library": library,
    }  # fmt: skip
    return load_job(base, [*(f"{k}={v}" for k, v in settings.items()), *overrides])


# ------------------------------------------------------------------------------- a case's rows
def run_case(case):
    """Calibrate, draw each target's steps and set them beside both baselines; a row a target."""
    measured = [
        (job_of(s, case.benchmark, *case.overrides),
         read_runs(s, case.benchmark, case.keeps_evaluations))
        for s in case.training
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibrated.nc"
        save(calibrate(measured, {}, SEED, threads=1), path)
        library, calibration = load_library(path), load_calibration(path)
        stated = [
            calibration.mean_error(
                communication_share(
                    simulate(
                        job_of(t, case.benchmark, *case.overrides, f"variability.model={path}"),
                        64,
                        SEED,
                    )
                )
            )
            for t in case.targets
        ]
    factors = calibration.report["factors"]
    common = {
        "kind": case.kind, "case": case.name,
        "trained_on": " + ".join(f"{s.world_size:,}" for s in calibration.sizes),
        "compute_factor": factors["compute"]["value"],
        "communication_factor": factors["communication"]["value"],
        "communication_library_share": factors["communication"]["library_share"],
    }  # fmt: skip
    counts = [s.microbatches for s in calibration.sizes]
    rows = []
    for target, error in zip(case.targets, stated, strict=True):
        job = job_of(target, case.benchmark, *case.overrides)
        times = read_runs(target, case.benchmark, case.keeps_evaluations)
        count = job.parallelism.microbatches
        near = calibration.nearest(job.world_size).steps_s
        straight = near * calibration.line(count) / np.median(near)
        drawn = draw_steps(job, library, SEED + 1, 1)
        rows.append(common | {
            "system": target, "gpus": job.world_size, "microbatches": count,
            "stated_error": error, "bracketed": min(counts) <= count <= max(counts),
            **describe(times, drawn),
            **errors_of("prism", drawn.ravel(), times), **errors_of("copy", near, times),
            **errors_of("line", straight, times),
        })  # fmt: skip
    return rows


def describe(times, drawn):
    """Give what was measured, its errors, and the Monte Carlo error of what was drawn."""
    of_runs = [times.seconds[times.run == name] for name in np.unique(times.run)]
    p = np.quantile(times.seconds, LEVELS)
    rng = np.random.default_rng(SEED)
    picks = rng.integers(0, len(of_runs), (REPETITIONS, len(of_runs)))
    again = [np.quantile(np.concatenate([of_runs[i] for i in pick]), LEVELS) for pick in picks]
    single = np.array([np.quantile(x, LEVELS) for x in of_runs])
    clusters = rng.integers(0, len(drawn), (REPETITIONS, len(drawn)))
    drawn_again = [np.quantile(drawn[pick], LEVELS) for pick in clusters]
    error, spread = np.std(again, axis=0) / p, np.ptp(single, axis=0) / p
    monte_carlo = np.std(drawn_again, axis=0) / np.quantile(drawn, LEVELS)
    rest = times.seconds[times.step >= SETTLED]
    late = np.quantile(drawn, LEVELS) / np.quantile(rest, LEVELS) - 1.0
    return {
        "n": times.seconds.size, "runs": len(of_runs), "p50_s": p[0], "p95_s": p[1],
        **_both("se", error), **_both("run_spread", spread), **_both("prism_mc", monte_carlo),
        **_both("prism_settled", late),
    }  # fmt: skip


def errors_of(name, predicted, times):
    """Give a prediction's errors of p50 and p95 (predicted / measured - 1) and its KS."""
    error = np.quantile(predicted, LEVELS) / np.quantile(times.seconds, LEVELS) - 1.0
    return {**_both(name, error), f"{name}_ks": ks_statistic(times.seconds, predicted)}


def _both(name, values):
    return {f"{name}_p50": float(values[0]), f"{name}_p95": float(values[1])}


# ---------------------------------------------------------------------------------- bars, output
def missed(row):
    """Name the bars that a row misses."""
    bars = {"p50": P50_BAR, "p95": P95_BAR}
    out = []
    for which, bar in bars.items():
        own = abs(row[f"prism_{which}"])
        best = min(abs(row[f"{name}_{which}"]) for name in ("copy", "line"))
        if own > best + TIE:
            out.append(f"{which}: {own:.2%} where a baseline has {best:.2%}")
        if row["bracketed"] and own > bar:
            out.append(f"{which}: {own:.2%}, over {bar:.0%}")
    return out


def print_rows(rows):
    """Print a table: errors of p50 and p95 in percent, and KS."""
    kind = None
    for row in rows:
        if row["kind"] != kind:
            kind = row["kind"]
            print(f"\n{kind}: error of p50, of p95 [%], and KS\n{'':53s}{'bracketed':>9s}"
                  f"{'prism':>18s}{'copy':>22s}{'line':>22s}{'measured +-':>15s}")  # fmt: skip
        label = f"{row['case']}: {row['trained_on']} -> {row['gpus']:,}"
        text = f"{label:58s}{'yes' if row['bracketed'] else 'no':>4s}"
        for name in ("prism", "copy", "line"):
            text += (f"{100 * row[f'{name}_p50']:+9.2f}{100 * row[f'{name}_p95']:+8.2f}"
                     f"{row[f'{name}_ks']:5.2f}")  # fmt: skip
        text += f"{100 * row['se_p50']:8.2f}{100 * row['se_p95']:6.2f}"
        found = missed(row)
        print(text + ("  missed: " + "; ".join(found) if found else ""), flush=True)


def model_error(rows):
    """Error of the model's mean for one size, beside what is measured, and its 90 % interval [1].

    A predicted size errs against a training size by the errors of both, so by the square root of
    two times one; by case, since the sizes of one case err together.
    """
    rows = [r for r in rows if r["kind"] in ("required", "check")]
    squares = {}
    for row in rows:
        error = np.log1p(row["prism_p50"]) ** 2 - row["se_p50"] ** 2 - row["prism_mc_p50"] ** 2
        squares.setdefault((row["case"], row["trained_on"]), []).append(0.5 * error)
    of_case = np.array([np.mean(v) for v in squares.values()])
    picks = np.random.default_rng(SEED).integers(0, of_case.size, (REPETITIONS, of_case.size))
    low, high = np.quantile(of_case[picks].mean(axis=1), [0.05, 0.95])
    return np.sqrt([of_case.mean(), low, high])


def print_model_error(rows):
    """Print the model's own error, and how often the stated error holds what was measured."""
    error, low, high = model_error(rows)
    print(f"\nmodel error of one size: {error:.2%} (90 %: {low:.2%} to {high:.2%})")
    known = [r for r in rows if np.isfinite(r.get("stated_error", np.nan))]
    inside = [
        abs(np.log1p(r["prism_p50"])) < 1.645 * np.hypot(r["stated_error"], r["se_p50"])
        for r in known
    ]
    print(f"within the stated 90 % interval: {sum(inside)} of {len(inside)} sizes")


def read_rows():
    """Read the table that is there."""
    if not TABLE.exists():
        return []
    return pd.read_csv(TABLE).to_dict("records")


def write_rows(rows):
    """Write the table, in the cases' order."""
    order = [(c.kind, c.name) for c in CASES]
    rows = sorted(
        rows, key=lambda r: (order.index((r["kind"], r["case"])), r["trained_on"], r["gpus"])
    )
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            row = {k: v for k, v in row.items() if v == v}  # rows that are kept lack a figure
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return rows


def main():
    kinds = sys.argv[1:] or list(KINDS)
    if unknown := set(kinds) - set(KINDS):
        print(f"{', '.join(sorted(unknown))}: no such kind; expected {', '.join(KINDS)}")
        return 2
    if not FOLDER.is_dir():
        print(f"no measured data in {FOLDER}; set PRISM_DATA")
        return 0
    rows = [r for r in read_rows() if r["kind"] not in kinds]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(run_case, c) for c in CASES if c.kind in kinds]
        for k, done in enumerate(as_completed(jobs), 1):
            rows += done.result()
            print(f"{k} of {len(jobs)} cases", file=sys.stderr, flush=True)
    rows = write_rows(rows)
    print_rows(rows)
    print_model_error(rows)
    return int(any(missed(r) for r in rows if r["kind"] == "required"))


if __name__ == "__main__":
    sys.exit(main())
