"""Figures of a simulation or an estimate: spreads, their errors, probabilities, the run's parts."""

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtri, stdtrit

from prism.common.errors import PrismError, option
from prism.common.results import read_texts
from prism.simulation.energyfigures import energy_figures
from prism.simulation.results import (
    ENGINE,
    PARTS,
    TAIL_SAMPLES,
    read_group,
    read_libraries,
    read_memory,
)

if TYPE_CHECKING:
    import xarray as xr

QUANTILES = {"p5": 0.05, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
BETWEEN = ("between_cluster_std", "between_cluster_at_most")


def spread(values: NDArray[np.float64], cluster: NDArray[np.int64]) -> dict[str, Any]:
    """Summarise a sample [n] whose members of one cluster draw are alike, in its unit.

    The standard error of the mean is by cluster draw, its interval at 90 %, that of p95 at 95 %.
    What needs several draws is None with one; `p95_ci` is None too where it reaches beyond the
    sample. `between_cluster_at_most` is None but where the spread between draws is not
    distinguishable from zero at 5 %: its upper 95 % bound then.

    Notes
    -----
    The one-way layout by expected mean squares, test and bound by the F statistic: Searle, Casella
    and McCulloch, Variance Components (1992), section 3.6.
    """
    labels, index, counts = np.unique(cluster, return_inverse=True, return_counts=True)
    n, mean = labels.size, float(values.mean())
    means = np.bincount(index, values) / counts
    squares = np.bincount(index, (values - means[index]) ** 2)
    within = float(squares.sum() / max(1, values.size - n))
    std = float(values.std(ddof=1)) if values.size > 1 else 0.0
    error = _mean_error(counts, means, mean)
    between, at_most = _between(counts, means, mean, within)
    found = {
        "mean": mean, "std": std, "cv": std / mean if mean else 0.0,
        **_quantiles(values),
        "mean_se": error, "mean_ci90": _mean_interval(mean, error, n),
        "p95_ci": _p95_interval(values, index, counts),
        "within_cluster_std": float(np.sqrt(within)),
        "between_cluster_std": between, "between_cluster_at_most": at_most,
        "cluster_draws": n,
    }  # fmt: skip
    return _add_up(found)


def _quantiles(values: NDArray[np.float64], *names: str) -> dict[str, float]:
    """Quantiles by name; all of `QUANTILES` where none is named."""
    names = names or tuple(QUANTILES)
    found = np.quantile(values, [QUANTILES[name] for name in names])
    return dict(zip(names, map(float, found), strict=True))


def _add_up(found: dict[str, Any]) -> dict[str, Any]:
    """Make the spread that of its parts: a sample's own is too small by the few draws in it."""
    if found["between_cluster_std"] is not None:
        found["std"] = math.hypot(found["within_cluster_std"], found["between_cluster_std"])
        found["cv"] = found["std"] / found["mean"] if found["mean"] else 0.0
    return found


def _between(
    counts: NDArray[np.int64], means: NDArray[np.float64], mean: float, within: float
) -> tuple[float | None, float | None]:
    """Return the standard deviation between draws, and its upper bound where it may be zero."""
    n, size = counts.size, int(counts.sum())
    if n < 2:
        return None, None
    effective = (size - (counts**2).sum() / size) / (n - 1)  # of unequal counts
    square = float((counts * (means - mean) ** 2).sum() / (n - 1))

    def std(found: float) -> float:
        return math.sqrt(max(0.0, (found - within) / effective))

    if size == n:  # one value each: all of the spread is between them
        return std(square), None
    high, low = fdtri(n - 1, size - n, [0.95, 0.05])
    # means closer together than equal ones would be leave as much open as those
    at_most = std(max(square, within) / low) if square <= high * within else None
    return std(square), at_most


def _mean_error(counts: NDArray[np.int64], means: NDArray[np.float64], mean: float) -> float | None:
    """Return the standard error of the mean; cluster draws are the independent units."""
    n = counts.size
    if n < 2:
        return None
    deviations = counts * (means - mean)
    return float(np.sqrt(n / (n - 1) * (deviations**2).sum()) / counts.sum())


def _mean_interval(mean: float, error: float | None, n: int) -> list[float] | None:
    """90 % interval of a mean over n cluster draws, by Student's t."""
    if error is None:
        return None
    reach = float(stdtrit(n - 1, 0.95)) * error
    return [mean - reach, mean + reach]


def _p95_interval(
    values: NDArray[np.float64], index: NDArray[np.int64], counts: NDArray[np.int64]
) -> list[float] | None:
    """95 % interval of p95, with cluster draws as the independent units.

    The share of values up to the sample's p95 has a standard error by cluster draw; the interval
    lies between the quantiles that far on both sides: Woodruff (1952), "Confidence intervals for
    medians and other position measures", doi:10.1080/01621459.1952.10483443.
    """
    below = (values <= np.quantile(values, 0.95)).astype(np.float64)
    error = _mean_error(counts, np.bincount(index, below) / counts, float(below.mean()))
    if error is None:
        return None
    reach = float(stdtrit(counts.size - 1, 0.975)) * error
    if reach > 0.05:  # beyond the slowest value
        return None
    low, high = np.quantile(values, [max(0.0, 0.95 - reach), 0.95 + reach])
    return [float(low), float(high)]


def summarize_simulation(dataset: "xr.Dataset") -> dict[str, Any]:
    """Summarise what `simulate` returned, and `estimate` of a job; times in seconds."""
    job = read_group(dataset, "job")
    call = json.loads(dataset.attrs["call"])
    out: dict[str, Any] = {
        "job": dataset.attrs["job_name"],
        "seed": int(dataset.attrs["seed"]),
        "replicates": int(dataset.sizes["replicate"]),
        "world_size": job["world_size"],
        "ideal_step_time": float(dataset.ideal_step_time),
        "step_time": _step_spread(dataset),
    }
    if "exposed_communication" in dataset:
        out["exposed_communication"] = float(dataset.exposed_communication)
        out["exposed_communication_se"] = _known(float(dataset.exposed_communication_se))
    if "critical_path_time" in dataset:
        out["critical_path"] = _by_name(dataset, "critical_path_time")
    if PARTS.dim in dataset.dims:
        out["time_loss"] = PARTS.rows(dataset)
    if "slowdown_probability" in dataset:
        pairs = zip(dataset.threshold.values, dataset.slowdown_probability.values, strict=True)
        out["slowdown"] = {f"{t:.10g}": float(p) for t, p in pairs}
    if "mfu" in dataset:
        out["mfu"] = float(dataset.mfu)
        out["model_flops_per_gpu"] = float(dataset.model_flops_per_gpu)
        out |= {key: job[key] for key in ("global_batch", "tokens_per_step")}
        out["tokens_per_s"] = job["tokens_per_step"] / out["step_time"]["mean"]
        out["tokens_per_s_per_gpu"] = out["tokens_per_s"] / job["world_size"]
    if (memory := read_memory(dataset)) is not None:
        out["memory"] = memory
    if "time_to_train" in dataset:
        out |= _run_summary(dataset, call)
    if library := read_group(dataset, "library"):
        out["library"] = library | {"others": read_libraries(dataset, out["step_time"])}
    if framework := read_group(dataset, "framework"):
        out["framework"] = framework | {"others": _by_name(dataset, "framework_others")}
    if error := read_group(dataset, "model_error"):
        out["model_error"] = error | {"class": error["class"] or ""}
    if error := read_group(dataset, "data_error"):
        out["data_error"] = error
    replicas = read_group(dataset, "replicas")
    out["warnings"] = read_texts(dataset, "warnings")
    out["engine"] = {
        str(name).removeprefix(ENGINE): np.asarray(cost).item()
        for name, cost in dataset.attrs.items() if str(name).startswith(ENGINE)
    }  # fmt: skip
    out["replicas"] = replicas and replicas | {"reason": replicas["reason"] or ""}
    out["wall_seconds"] = float(dataset.attrs["wall_seconds"])
    return out


def _by_name(dataset: "xr.Dataset", name: str) -> dict[str, float]:
    """Return a variable's values by the names along its dimension; none where it is not there."""
    if name not in dataset:
        return {}
    values = dataset[name]
    return dict(zip(values[values.dims[0]].values.tolist(), values.values.tolist(), strict=True))


def _steady(dataset: "xr.Dataset") -> dict[str, Any]:
    """Summarise steps without the step effect, as runs rest on them."""
    steady = np.asarray(dataset.step_time, np.float64) / np.asarray(dataset.step_effect)
    return spread(steady, np.asarray(dataset.cluster_idx))


def _step_spread(dataset: "xr.Dataset") -> dict[str, Any]:
    """Summarise steps; what all GPUs share in a step says nothing of how clusters differ."""
    steps = np.asarray(dataset.step_time, np.float64)
    found, steady = spread(steps, np.asarray(dataset.cluster_idx)), _steady(dataset)
    found = _add_up(found | {key: steady[key] for key in BETWEEN})
    one, allocations = apart(dataset)
    found["one_allocation"] = _quantiles(one)
    found["allocations"] = None
    if allocations.size >= TAIL_SAMPLES / 0.05:  # enough of them for the 5th and the 95th
        found["allocations"] = _quantiles(allocations, "p5", "p50", "p95")
    return found


def apart(dataset: "xr.Dataset") -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return steps of a job on one allocation [replicate], and mean steps of allocations [cluster].

    An allocation is a cluster draw: the nodes that a job gets. Steps are taken about the mean of
    their own draw; means of draws are without the noise of the few steps behind each. In seconds.
    """
    steps = np.asarray(dataset.step_time, np.float64)
    _, index, counts = np.unique(dataset.cluster_idx, return_inverse=True, return_counts=True)
    means = np.bincount(index, steps) / counts
    steady = steps / np.asarray(dataset.step_effect)
    quiet = np.bincount(index, steady) / counts
    between, seen = _steady(dataset)[BETWEEN[0]], float(quiet.std(ddof=1)) if quiet.size > 1 else 0
    keep = between / seen if between and seen else 0.0
    middle = float(steps.mean())
    return steps - means[index] + middle, middle + keep * (quiet - quiet.mean())


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def run_spread(dataset: "xr.Dataset", runs: NDArray[np.float64]) -> dict[str, Any]:
    """Summarise runs; their errors hold those of the simulated steps that they rest on."""
    wrong = model_error_time(dataset)
    if wrong.any():
        return _with_model_error(dataset, runs, wrong)
    out = spread(runs, np.asarray(dataset.run_cluster_idx))
    if "completed" in json.loads(dataset.attrs["call"]):
        return out  # it takes its mean step from its own steps
    step = _steady(dataset)
    n, scale = step["cluster_draws"], out["mean"] / step["mean"]
    out["cluster_draws"] = min(n, out["cluster_draws"])
    if step["mean_se"] is None:
        return out | dict.fromkeys(("mean_se", "mean_ci90", "p95_ci", *BETWEEN))
    # few runs on each cluster hardly tell how these differ, their steps do
    between, within = scale * step["between_cluster_std"], out["within_cluster_std"]
    if n >= runs.size:  # one run each
        within = max(0.0, out["std"] ** 2 - between**2) ** 0.5
    shared = scale * step["mean_se"] * max(1.0, n / runs.size) ** 0.5
    error, at_most = float(np.hypot(shared, within / np.sqrt(runs.size))), step[BETWEEN[1]]
    out |= {
        "mean_se": error, "mean_ci90": _mean_interval(out["mean"], error, n),
        "within_cluster_std": within, "between_cluster_std": between,
        "between_cluster_at_most": None if at_most is None else scale * at_most,
    }  # fmt: skip
    if out["p95_ci"] is not None:
        noise = 1.96 * scale * step["within_cluster_std"] / dataset.sizes["replicate"] ** 0.5
        (low, high), p95 = out["p95_ci"], out["p95"]
        out["p95_ci"] = [
            p95 - float(np.hypot(p95 - low, noise)), p95 + float(np.hypot(high - p95, noise))
        ]  # fmt: skip
    return _add_up(out)


def model_error_time(dataset: "xr.Dataset") -> NDArray[np.float64]:
    """Return what the model's own error adds to every run [s]."""
    names = [str(name) for name in dataset.term.values] if "run_term_time" in dataset else []
    if "model_error" not in names:
        return np.zeros(dataset.sizes["run_replicate"])
    return np.asarray(dataset.run_term_time[:, names.index("model_error")], np.float64)


def _with_model_error(
    dataset: "xr.Dataset", runs: NDArray[np.float64], wrong: NDArray[np.float64]
) -> dict[str, Any]:
    """Summarise runs the model of which may be wrong: its error apart from the other parts.

    Errors of mean and p95 hold the draws of the model's error, too, which are one per run.
    """
    calm = dataset.assign(
        run_term_time=dataset.run_term_time.where(dataset.term != "model_error", 0.0)
    )
    out, whole = run_spread(calm, runs - wrong), spread(runs, np.arange(runs.size))
    std = float(wrong.std(ddof=1)) if wrong.size > 1 else 0.0
    out |= {key: whole[key] for key in ("mean", *QUANTILES)}
    out |= {"model_error_std": std, "std": math.hypot(out["std"], std)}
    out["cv"] = out["std"] / out["mean"]
    if out["mean_se"] is not None:
        shared = 1.96 * out["mean_se"]  # of the steps behind all runs
        out["mean_se"] = math.hypot(out["mean_se"], std / math.sqrt(runs.size))
        out["mean_ci90"] = _mean_interval(out["mean"], out["mean_se"], out["cluster_draws"])
        if whole["p95_ci"] is not None:
            p95, (low, high) = out["p95"], whole["p95_ci"]
            out["p95_ci"] = [
                p95 - math.hypot(p95 - low, shared), p95 + math.hypot(high - p95, shared)
            ]  # fmt: skip
    return out


def run_terms(dataset: "xr.Dataset", runs: NDArray[np.float64]) -> dict[str, Any]:
    """Say what delays a run and what makes it vary, as far as the result tells."""
    out: dict[str, Any] = {}
    if "run_term_time" not in dataset:
        return out
    if "ettr" in dataset:
        out["ettr"] = float(dataset.ettr.mean())
        out["failures"] = float(dataset.run_failures.mean())
    out |= failure_model(dataset)
    times = np.asarray(dataset.run_term_time, np.float64)
    names = [str(name) for name in dataset.term.values]
    drawn = "run_cluster_idx" in dataset and "step_effect" in dataset
    cluster = np.asarray(dataset.run_cluster_idx) if drawn else np.arange(runs.size)
    shares, share_errors = _variance_shares(times, names, cluster)
    plain = ("ideal_steps", "completed_steps")
    used = [i for i, name in enumerate(names) if name not in plain and times[:, i].any()]
    out["delay_by_term"] = {names[i]: float(times[:, i].mean()) for i in used}
    out["delay_by_term_se"] = {names[i]: _error_of(times[:, i], cluster) for i in used}
    if "slow_steps" in out["delay_by_term_se"] and drawn and "completed_steps" not in names:
        step_s, ideal = _steady(dataset)["mean_se"], float(dataset.ideal_step_time)
        scale = float(dataset.ideal_time_to_train) / ideal
        out["delay_by_term_se"]["slow_steps"] = None if step_s is None else scale * step_s
    varied = used if shares.any() else []
    out["variance_by_term"] = {names[i]: float(shares[i]) for i in varied}
    out["variance_by_term_se"] = {names[i]: share_errors[i] for i in varied}
    if checkpoint := read_group(dataset, "checkpoint"):
        if "best_interval" in checkpoint:
            out["best_checkpoint_interval"] = checkpoint.pop("best_interval")
        out["checkpoint"] = checkpoint
    return out


def failure_model(dataset: "xr.Dataset") -> dict[str, Any]:
    """Say what stops a run, and what is assumed of it."""
    found = read_group(dataset, "failure_model")
    if "assumed" in found:
        found["assumed"] = (found["assumed"] or "").split()
    return {"failure_model": found} if found else {}


def _variance_shares(
    times: NDArray[np.float64], names: Sequence[str], cluster: NDArray[np.int64]
) -> tuple[NDArray[np.float64], list[float | None]]:
    """Shares of the variance of runs by term, from their times [run, term], and their errors.

    Zero where nothing varies. The model's error is drawn apart from all else: its variance counts
    as it is, so that what few runs have of both by chance is no share of the others. As in
    `_with_model_error`.
    """
    wrong = np.array([name == "model_error" for name in names])
    off = times - times.mean(axis=0)
    products = off * np.where(wrong, off, (off @ ~wrong)[:, None])
    whole = products.sum(axis=1)
    mean = float(whole.mean()) or 1.0
    shares = products.mean(axis=0) / mean
    errors = (products - shares * whole[:, None]) / mean  # to first order, as of a ratio
    return shares, [_error_of(column, cluster) for column in errors.T]


def _error_of(values: NDArray[np.float64], cluster: NDArray[np.int64]) -> float | None:
    """Return the standard error of the mean of a sample [n], by cluster draw."""
    _, index, counts = np.unique(cluster, return_inverse=True, return_counts=True)
    return _mean_error(counts, np.bincount(index, values) / counts, float(values.mean()))


def _run_summary(dataset: "xr.Dataset", call: dict[str, Any]) -> dict[str, Any]:
    runs = np.asarray(dataset.time_to_train, np.float64)
    out: dict[str, Any] = {
        "run_replicates": int(runs.size),
        "steps": int(dataset.attrs["steps"]),
        "time_to_train": run_spread(dataset, runs),
    }
    out |= run_end(dataset, call, runs) | run_progress(dataset)
    out |= run_terms(dataset, runs)
    if "cost" in dataset:
        cost = np.asarray(dataset.cost, np.float64)
        out["cost"] = {"mean": float(cost.mean()), **_quantiles(cost, "p50", "p95")}
    return out | energy_figures(dataset)


def run_progress(dataset: "xr.Dataset") -> dict[str, Any]:
    """Say what is done of a run in progress, when the rest is, and whether steps deviate."""
    from datetime import datetime, timedelta

    completed, reading, departure = (
        read_group(dataset, name) for name in ("completed", "reading", "departure")
    )
    if not completed:
        return {}
    written = reading.pop("written")
    for name, bounds in (("change_ci", ("change_low", "change_high")),
                         ("step_range", ("step_first", "step_last"))):  # fmt: skip
        pair = [departure.pop(bound, None) for bound in bounds]
        departure |= {name: None if None in pair else pair} if departure else {}
    out: dict[str, Any] = {
        "completed": completed | {"written": written, "taken": reading},
        "departure": departure or None,
    }
    left = np.asarray(dataset.time_left, np.float64)
    of_left = {f"p{q}": float(np.quantile(left, q / 100.0)) for q in (5, 10, 50, 90, 95)}
    out["time_left"] = {"mean": float(left.mean()), "std": float(left.std())} | of_left
    try:
        ends = {key: datetime.fromisoformat(written) + timedelta(seconds=seconds)
                for key, seconds in of_left.items()}  # fmt: skip
    except OverflowError:  # beyond the calendar
        ends = {}
    return out | {"finish": {key: end.isoformat(timespec="seconds") for key, end in ends.items()}}


def run_end(
    dataset: "xr.Dataset", call: dict[str, Any], runs: NDArray[np.float64]
) -> dict[str, Any]:
    """Say by which date runs [s] end, and how probably by the deadline, where these are asked.

    A run in progress ends counted from when its steps were written, where no start is given.
    """
    import datetime

    out: dict[str, Any] = {}
    if "deadline" in dataset:
        deadline = float(dataset.deadline)
        probability = float((runs <= deadline).mean())
        out["finish_by"] = {"deadline": deadline, "probability": probability}
    probability = float(call["probability"])
    begin = call.get("start")
    if not begin and "reading_written" in dataset:
        begin = dataset.reading_written.item()
        runs = np.asarray(dataset.time_left, np.float64)
    if begin:
        seconds = float(np.quantile(runs, probability))
        start = datetime.datetime.fromisoformat(begin)
        try:
            end = start + datetime.timedelta(seconds=seconds)
        except OverflowError as error:
            raise PrismError(
                f"{option('start')} {begin}: the run ends {seconds / 86400.0:.3g} days "
                f"later, beyond the year 9999; leave the start out, or lower {option('steps')}"
            ) from error
        out["finish_date"] = {
            "probability": probability,
            "date": end.isoformat(timespec="seconds"),
        }
    return out
