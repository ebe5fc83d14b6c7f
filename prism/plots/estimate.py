"""Distributions of step time and time-to-train, one result or several."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from prism.common.arrays import Array
from prism.common.text import format_count, format_duration, format_share, time_unit
from prism.plots.base import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    LINE_STYLES,
    NAMES,
    PERCENTILES,
    RED,
    Mark,
    draw_cdf,
    finish_cdf,
    in_unit,
    mark_percentiles,
    new_axes,
    quantiles_text,
    shorten,
    styled,
    title_of,
)
from prism.simulation.summary import apart, model_error_time

CLUSTERS = {"step_time": "cluster_idx", "time_to_train": "run_cluster_idx"}


@styled
def plot_step_time(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Distribution of the step time, with the ideal step.

    Of what ``simulate`` or ``estimate`` returns: ``step_time`` [replicate] in s, and where it has
    them ``cluster_idx``, ``step_effect`` [replicate] and ``ideal_step_time`` in s. Bands are two
    Monte Carlo standard errors, by cluster draw.

    Examples
    --------
    >>> import prism.plots
    >>> result = prism.estimate("pipeline-8x32", replicates=64, seed=1)
    >>> ax = prism.plots.plot_step_time(result)
    """
    ax = new_axes(ax)
    sample, cluster = _sample(result, "step_time"), _cluster(result, "step_time")
    _, scale = time_unit(float(np.median(sample)))
    text = quantiles_text(sample, "step_time", PERCENTILES)
    draw_cdf(ax, sample, scale, BLUE, f"step time: {text}", cluster=cluster)
    if cluster is not None and "step_effect" in result and np.unique(cluster).size > 1:
        within, between = apart(result)
        draw_cdf(ax, within, scale, GREEN, "within a cluster draw", "--")
        draw_cdf(ax, between, scale, RED, "means of cluster draws", "-.")
    mark_percentiles(ax, sample, scale)
    marks = []
    if "ideal_step_time" in result:
        ideal = float(result["ideal_step_time"])
        marks.append(Mark(ideal, f"ideal {in_unit(sample, ideal)}", GREY))
    finish_cdf(
        ax, "step time", [sample], marks, title=title_of(result, format_count(sample.size, "step"))
    )
    return ax


@styled
def plot_time_to_train(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Distribution of the time-to-train, with the deadline.

    Of what ``estimate`` returns: ``time_to_train`` [run_replicate] in s, and where it has one
    ``deadline`` and ``ideal_time_to_train`` in s, ``run_cluster_idx`` [run_replicate]. Bands are
    two Monte Carlo standard errors, by cluster draw.

    Examples
    --------
    >>> import prism.plots
    >>> result = prism.estimate("pipeline-8x32", replicates=64, seed=1)
    >>> ax = prism.plots.plot_time_to_train(result)
    """
    ax = new_axes(ax)
    sample, cluster = _sample(result, "time_to_train"), _cluster(result, "time_to_train")
    _, scale = time_unit(float(np.median(sample)))
    text = quantiles_text(sample, "time_to_train", PERCENTILES)
    draw_cdf(ax, sample, scale, GREEN, f"time-to-train: {text}", cluster=cluster)
    wrong = model_error_time(result)
    if wrong.any():
        draw_cdf(ax, sample - wrong, scale, BLUE, "without model error", "--", cluster)
    mark_percentiles(ax, sample, scale)
    marks = []
    if "ideal_time_to_train" in result:
        ideal = float(result["ideal_time_to_train"])
        marks.append(Mark(ideal, f"ideal {format_duration(ideal)}", GREY))
    if text := deadline_text(result):
        marks.append(Mark(float(result["deadline"]), text, RED, line=True))
    finish_cdf(
        ax, "time-to-train", [sample], marks,
        title=title_of(result, format_count(sample.size, "run")),
        y_label="probability that the run is done",
    )  # fmt: skip
    return ax


@styled
def plot_dependence(
    results: Mapping[str, xr.Dataset], ax: Axes | None = None, variable: str = "step_time"
) -> Axes:
    """Distributions of several results in one plot, a curve for each by its label.

    `variable` is ``step_time`` or ``time_to_train``. The legend gives p50 and p95; bands are two
    Monte Carlo standard errors.

    Examples
    --------
    >>> import prism.plots
    >>> job = prism.load_job("pipeline-8x32")
    >>> jobs = {"16": job.replace("parallelism.microbatches=16"), "32": job}
    >>> results = {k: prism.simulate(job, replicates=64, seed=1) for k, job in jobs.items()}
    >>> ax = prism.plots.plot_dependence(results)
    """
    ax = new_axes(ax)
    samples = [_sample(result, variable) for result in results.values()]
    _, scale = time_unit(float(np.median(samples[0])))
    for i, (label, result) in enumerate(results.items()):
        text = f"{shorten(label)}: {quantiles_text(samples[i], variable)}"
        colour, line_style = COLOURS[i % len(COLOURS)], LINE_STYLES[i % len(LINE_STYLES)]
        cluster = _cluster(result, variable)
        draw_cdf(ax, samples[i], scale, colour, text, line_style, cluster)
    finish_cdf(ax, NAMES[variable], samples)
    return ax


def deadline_text(result: xr.Dataset) -> str:
    """Name the deadline with its probability; empty where there is none."""
    deadline = float(result["deadline"]) if "deadline" in result else np.inf
    if not np.isfinite(deadline):
        return ""
    done = float(np.mean(result["time_to_train"].to_numpy() <= deadline))
    return f"deadline {format_duration(deadline)}: P(done) = {format_share(done)}"


def _sample(result: xr.Dataset, variable: str) -> Array:
    return np.asarray(result[variable].to_numpy(), np.float64)


def _cluster(result: xr.Dataset, variable: str) -> Array | None:
    """Return the cluster draw of each value, where known."""
    key = CLUSTERS[variable]
    return result[key].to_numpy() if key in result else None
