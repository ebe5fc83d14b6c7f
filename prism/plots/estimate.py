"""Distributions of step time and time-to-train, one result or several."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from prism.common.cdf import empirical_cdf
from prism.common.text import format_duration, format_share, time_unit
from prism.plots.base import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    LINE_STYLES,
    RED,
    draw_cdf,
    finish_cdf,
    in_unit,
    in_words,
    mark_percentiles,
    mark_vertical,
    new_axes,
    title_of,
)
from prism.simulation.summary import apart, model_error_time


def plot_step_time(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Distribution function of the step time with its percentiles and the ideal step.

    Parameters
    ----------
    result : xarray.Dataset
        What ``simulate`` or ``estimate`` returns: ``step_time`` [replicate] in s, and where it
        has them ``cluster_idx``, ``step_effect`` [replicate] and ``ideal_step_time`` in s.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Returns
    -------
    matplotlib.axes.Axes
        The band is two Monte Carlo standard errors, by cluster; steps on one allocation and the
        means of allocations apart.

    Examples
    --------
    >>> import prism.plots
    >>> result = prism.estimate("pipeline-8x32", replicates=64, seed=1)
    >>> ax = prism.plots.plot_step_time(result)
    """
    ax = new_axes(ax)
    sample = result["step_time"].to_numpy()
    cluster = result["cluster_idx"].to_numpy() if "cluster_idx" in result else None
    unit, scale = time_unit(float(np.median(sample)))
    curve = empirical_cdf(sample / scale, cluster)
    draw_cdf(ax, curve, BLUE, label="step time")
    if cluster is not None and "step_effect" in result and np.unique(cluster).size > 1:
        labels = ("within a cluster draw", "means of cluster draws")
        for label, part, colour, style in zip(
            labels, apart(result), (GREEN, RED), LINE_STYLES[1:], strict=False
        ):
            draw_cdf(ax, empirical_cdf(part / scale), colour, label=label, line_style=style)
        ax.legend(loc="lower right", frameon=False, fontsize=9)
    if "ideal_step_time" in result:
        ideal = float(result["ideal_step_time"])
        mark_vertical(ax, curve, ideal / scale, f"ideal {in_unit(sample, ideal)}", GREY)
    mark_percentiles(ax, sample, scale, in_unit)
    finish_cdf(ax, f"step time [{unit}]", "cumulative probability")
    ax.set_title(title_of(result, f"{sample.size:,} steps"), fontsize=10, loc="left")
    return ax


def plot_time_to_train(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Distribution function of the time-to-train with its percentiles and the deadline.

    Parameters
    ----------
    result : xarray.Dataset
        What ``estimate`` returns: ``time_to_train`` [run_replicate] in s, and where it has one
        ``deadline`` and ``ideal_time_to_train`` in s, ``run_cluster_idx`` [run_replicate].
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Returns
    -------
    matplotlib.axes.Axes
        The band is two Monte Carlo standard errors, by cluster.

    Examples
    --------
    >>> import prism.plots
    >>> result = prism.estimate("pipeline-8x32", replicates=64, seed=1)
    >>> ax = prism.plots.plot_time_to_train(result)
    """
    ax = new_axes(ax)
    sample = result["time_to_train"].to_numpy()
    unit, scale = time_unit(float(np.median(sample)))
    cluster = result["run_cluster_idx"].to_numpy() if "run_cluster_idx" in result else None
    curve = empirical_cdf(sample / scale, cluster)
    draw_cdf(ax, curve, GREEN, label="time-to-train")
    wrong = model_error_time(result)
    if wrong.any():
        calm = empirical_cdf((sample - wrong) / scale, cluster)
        label = "without model error"
        draw_cdf(ax, calm, BLUE, label=label, line_style=LINE_STYLES[1])
        ax.legend(loc="lower right", frameon=False, fontsize=9)
    mark_percentiles(ax, sample, scale, in_words)
    deadline = float(result["deadline"]) if "deadline" in result else float("nan")
    if np.isfinite(deadline):
        done = float(np.mean(sample <= deadline))
        text = f"deadline {format_duration(deadline)}: P(done) = {format_share(done)}"
        mark_vertical(ax, curve, deadline / scale, text, RED)
    if "ideal_time_to_train" in result:
        ideal = float(result["ideal_time_to_train"])
        mark_vertical(ax, curve, ideal / scale, f"ideal {format_duration(ideal)}", GREY)
    finish_cdf(ax, f"time-to-train [{unit}]", "probability that the run is done")
    ax.set_title(title_of(result, f"{sample.size:,} runs"), fontsize=10, loc="left")
    return ax


def plot_dependence(
    results: Mapping[str, xr.Dataset], ax: Axes | None = None, variable: str = "step_time"
) -> Axes:
    """Distribution functions of several results in one plot.

    Parameters
    ----------
    results : mapping of str to xarray.Dataset
        Label and result of each curve.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.
    variable : str
        ``step_time`` or ``time_to_train``.

    Returns
    -------
    matplotlib.axes.Axes
        The legend gives each curve's p50 and p95; bands are two Monte Carlo standard errors.

    Examples
    --------
    >>> import prism.plots
    >>> job = prism.load_job("pipeline-8x32")
    >>> jobs = {"16": job.replace("parallelism.microbatches=16"), "32": job}
    >>> results = {k: prism.simulate(job, replicates=64, seed=1) for k, job in jobs.items()}
    >>> ax = prism.plots.plot_dependence(results)
    """
    ax = new_axes(ax)
    middle = float(np.median(next(iter(results.values()))[variable].to_numpy()))
    unit, scale = time_unit(middle)
    write = in_unit if variable == "step_time" else in_words
    for i, (label, result) in enumerate(results.items()):
        sample = result[variable].to_numpy()
        key = "cluster_idx" if variable == "step_time" else "run_cluster_idx"
        cluster = result[key].to_numpy() if key in result else None
        p50, p95 = (write(sample, float(np.quantile(sample, q))) for q in (0.5, 0.95))
        draw_cdf(
            ax,
            empirical_cdf(sample / scale, cluster),
            COLOURS[i % len(COLOURS)],
            label=f"{label}: p50 {p50}, p95 {p95}",
            line_style=LINE_STYLES[i % len(LINE_STYLES)],
        )
    name = variable.replace("_", " ").replace("time to train", "time-to-train")
    finish_cdf(ax, f"{name} [{unit}]", "cumulative probability")
    # above the axes, where no curve can run into it
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, fontsize=9)
    return ax
