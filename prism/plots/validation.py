"""Plots of what a trace taught: predicted against measured, and where a step is slow.

``(data, ax=None) -> Axes`` as in `prism.plots`. Nothing is predicted or replayed here.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from prism.common.text import time_unit
from prism.plots.base import (
    BLUE,
    GREY,
    ORANGE,
    finish_cdf,
    in_unit,
    in_words,
    new_axes,
    tell_beyond,
)

Array = NDArray[np.float64]

_CURVE_POINTS = 600
_MOST_ANNOTATED = 128  # cells; more numbers than these cannot be read
_WIDEST_ANNOTATED = 12  # columns


def plot_validation(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Distribution functions: predicted with its band, measured, training, independent sampling.

    Parameters
    ----------
    result : xarray.Dataset
        What ``validate`` returns, all in s: ``measured`` [measured_idx], ``predicted``
        [replicate], and where it has them ``training`` [training_idx], ``predicted_independent``
        [replicate], ``cdf_time``, ``cdf_lo`` and ``cdf_hi`` [point].
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Returns
    -------
    matplotlib.axes.Axes
        The band is what the prediction's distribution function did over refits.

    Examples
    --------
    >>> import prism.plots
    >>> found = prism.validate(trace="experiments/samples/trace.csv", train="first-half", seed=1)
    >>> ax = prism.plots.plot_validation(found)
    """
    ax = new_axes(ax)
    measured, predicted = _values(result, "measured"), _values(result, "predicted")
    unit, scale = time_unit(float(np.median(measured)))
    shown = [measured, np.quantile(predicted, [0.005, 0.995])]
    if "cdf_time" in result:
        x = _values(result, "cdf_time") / scale
        lo, hi = result["cdf_lo"].to_numpy(), result["cdf_hi"].to_numpy()
        ax.fill_between(x, lo, hi, color=BLUE, alpha=0.18, linewidth=0.0, zorder=1)
    if "training" in result:
        training = _values(result, "training")
        shown.append(training)
        _steps(ax, training / scale, GREY, f"training, n = {training.size}", 1.1)
    low, high = float(min(map(np.min, shown))), float(max(map(np.max, shown)))
    if "predicted_independent" in result:
        _draw_independent(ax, _values(result, "predicted_independent"), scale, low, high)
    _curve(ax, predicted / scale, BLUE, f"predicted, p95 {_p95(result, predicted)}")
    text = f"measured, n = {measured.size}, p95 {_p95(result, measured)}"
    _steps(ax, measured / scale, "black", text, 1.6)
    margin = 0.02 * (high - low)
    ax.set_xlim((low - margin) / scale, (high + margin) / scale)
    what = _quantity(result)
    finish_cdf(ax, f"{what} [{unit}]", "cumulative probability")
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, fontsize=9, ncols=1)
    return ax


def plot_quantiles(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Predicted against measured quantiles, with the line on which they agree.

    Parameters
    ----------
    result : xarray.Dataset
        As for `plot_validation`.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Returns
    -------
    matplotlib.axes.Axes
        One point per measured value, at the rank (i - 1/2) / n. Bars are the band over refits.

    Examples
    --------
    >>> import prism.plots
    >>> found = prism.validate(trace="experiments/samples/trace.csv", train="first-half", seed=1)
    >>> ax = prism.plots.plot_quantiles(found)
    """
    ax = new_axes(ax, (4.6, 4.4))
    measured, predicted = np.sort(_values(result, "measured")), _values(result, "predicted")
    unit, scale = time_unit(float(np.median(measured)))
    p = (np.arange(measured.size) + 0.5) / measured.size
    y = np.quantile(predicted, p)
    shown = [measured, y]
    if "cdf_time" in result:
        x = _values(result, "cdf_time")
        # the quantile at p of the lowest function is the highest
        highest = np.interp(p, result["cdf_lo"].to_numpy(), x)
        lowest = np.interp(p, result["cdf_hi"].to_numpy(), x)
        ax.vlines(measured / scale, lowest / scale, highest / scale, color=BLUE, alpha=0.25, lw=3)
    low, high = float(min(map(np.min, shown))), float(max(map(np.max, shown)))
    if "predicted_independent" in result:
        other = np.quantile(_values(result, "predicted_independent"), p)
        inside = bool(np.any((other >= low) & (other <= high)))
        label = "independent sampling" if inside else "independent sampling (outside)"
        ax.plot(measured / scale, other / scale, "o", mfc="none", mec=ORANGE, ms=4, label=label)
    ax.plot(measured / scale, y / scale, "o", color=BLUE, ms=4.5, label="predicted", zorder=4)
    margin = max(0.04 * (high - low), 1e-4 * abs(high))
    ends = np.array([low - margin, high + margin]) / scale
    ax.plot(ends, ends, color=GREY, linestyle="--", linewidth=1.0, zorder=2)
    ax.set_xlim(*ends)
    ax.set_ylim(*ends)
    ax.set_aspect("equal")
    _finish(ax)
    ax.set_xlabel(f"measured quantile [{unit}]")
    ax.set_ylabel(f"predicted quantile [{unit}]")
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, fontsize=9)
    return ax


def draw_validation(result: xr.Dataset) -> Axes:
    """Draw both pictures of a validation side by side; the first one's axes.

    Examples
    --------
    >>> import prism.plots
    >>> found = prism.validate(trace="experiments/samples/trace.csv", train="first-half", seed=1)
    >>> ax = prism.plots.draw_validation(found)
    """
    figure = Figure(figsize=(11.6, 4.8), layout="constrained", facecolor="white", dpi=150)
    grid = figure.add_gridspec(1, 2, width_ratios=(1.45, 1.0))
    left, right = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    plot_validation(result, left)
    plot_quantiles(result, right)
    return left


def plot_replay(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Replayed against measured step times, with the line on which they agree.

    Parameters
    ----------
    result : xarray.Dataset
        What ``replay`` returns: ``measured_step_time`` and ``replayed_step_time`` [step] in s,
        and where it has one ``ideal_step_time`` in s.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Examples
    --------
    >>> import prism.plots
    >>> replayed = prism.replay("experiments/samples/trace.csv")
    >>> ax = prism.plots.plot_replay(replayed)
    """
    ax = new_axes(ax, (5.4, 5.0))
    measured = _values(result, "measured_step_time")
    replayed = _values(result, "replayed_step_time")
    unit, scale = time_unit(float(np.median(measured)))
    both = np.concatenate([measured, replayed])
    margin = max(0.05 * float(np.ptp(both)), 1e-4 * float(both.max()))
    ends = np.array([both.min() - margin, both.max() + margin]) / scale
    ax.plot(ends, ends, color=GREY, linestyle="--", linewidth=1.0, zorder=2, label="equal")
    ax.plot(measured / scale, replayed / scale, "o", color=BLUE, ms=5, alpha=0.8, zorder=3)
    for step, x, y in _outliers(result, measured, replayed):
        ax.annotate(
            f"step {step}",
            (x / scale, y / scale),
            xytext=(6, -3),
            textcoords="offset points",
            fontsize=8,
        )
    ax.set_xlim(*ends)
    ax.set_ylim(*ends)
    ax.set_aspect("equal")
    _finish(ax)
    ax.set_xlabel(f"measured step time [{unit}]")
    ax.set_ylabel(f"replayed step time [{unit}]")
    title = f"{measured.size} step{'s' if measured.size != 1 else ''}"
    if "ideal_step_time" in result:
        title += f"; ideal {in_unit(both, float(result['ideal_step_time']))}"
    ax.set_title(title, fontsize=10, loc="left")
    return ax


def plot_workers(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Heat map of how much each worker slows the step.

    Parameters
    ----------
    result : xarray.Dataset
        What ``replay`` returns: ``slowdown_by_worker`` [dp_rank, stage], step time as measured
        over the step time with only this worker at its mean.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Examples
    --------
    >>> import prism.plots
    >>> replayed = prism.replay("experiments/samples/trace.csv")
    >>> ax = prism.plots.plot_workers(replayed)
    """
    values = result["slowdown_by_worker"].transpose("stage", "dp_rank")
    cells = values.to_numpy().astype(np.float64)
    n_stages, n_replicas = cells.shape
    ax = new_axes(ax, (min(13.0, 2.6 + 0.5 * max(n_replicas, 5)), 1.7 + 0.42 * max(n_stages, 2)))
    known = cells[np.isfinite(cells)]
    # a scale of at least 2 %, so that a healthy cluster does not look ill
    high = max(1.02, float(known.max())) if known.size else 1.02
    low = min(1.0, float(known.min())) if known.size else 1.0
    image = ax.imshow(cells, cmap="Blues", vmin=low, vmax=high, aspect="auto")
    if cells.size <= _MOST_ANNOTATED and n_replicas <= _WIDEST_ANNOTATED:
        digits = 3 if high < 1.1 else 2
        for (row, column), value in np.ndenumerate(cells):
            dark = value > low + 0.6 * (high - low)
            ax.text(
                column,
                row,
                f"{value:.{digits}f}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark else "black",
            )
    _label_cells(ax, result)
    ax.set_title("step time / step time with this worker at its mean", fontsize=10, loc="left")
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.colorbar(image, ax=ax, label="slowdown", fraction=0.06, pad=0.02)
    return ax


def _label_cells(ax: Axes, result: xr.Dataset) -> None:
    """Name the rows and columns of the heat map, not more than fit."""
    for axis, name, label in ((ax.xaxis, "dp_rank", "replica (dp rank)"), (ax.yaxis, "stage", "")):
        n = result.sizes[name]
        labels = result[name].to_numpy() if name in result.coords else np.arange(n)
        every = max(1, -(-n // 32))
        word = "stage " if name == "stage" else ""
        axis.set_ticks(np.arange(0, n, every), [f"{word}{labels[i]}" for i in range(0, n, every)])
        axis.set_label_text(label)
    rows, columns = result.sizes["stage"], result.sizes["dp_rank"]
    ax.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    ax.grid(which="minor", color="0.8", linewidth=0.5)
    ax.tick_params(which="both", length=0)
    ax.spines[:].set_visible(False)


def _outliers(
    result: xr.Dataset, measured: Array, replayed: Array
) -> list[tuple[int, float, float]]:
    """Name up to three steps whose replay is more than 1 % off."""
    steps = result["step"].to_numpy() if "step" in result.coords else np.arange(measured.size)
    error = np.abs(replayed / measured - 1.0)
    worst = np.argsort(error)[::-1][:3]
    return [
        (int(steps[i]), float(measured[i]), float(replayed[i])) for i in worst if error[i] > 0.01
    ]


def _draw_independent(ax: Axes, sample: Array, scale: float, low: float, high: float) -> None:
    """Draw independent sampling dashed; where it lies outside, only tell of it at the edge."""
    p50, p95 = (in_unit(sample, float(np.quantile(sample, q))) for q in (0.5, 0.95))
    middle = float(np.median(sample))
    if low <= middle <= high:
        _curve(ax, sample / scale, ORANGE, f"independent sampling, p95 {p95}", "--")
        return
    # axes limits are set later; the arrow says on which side it is
    tell_beyond(ax, f"independent: p50 {p50}", ORANGE, left=middle < low)


def _curve(ax: Axes, sample: Array, colour: str, label: str, style: str = "-") -> None:
    """Draw the distribution function of a large sample."""
    p = np.linspace(0.0, 1.0, _CURVE_POINTS)
    ax.plot(np.quantile(sample, p), p, style, color=colour, linewidth=1.8, label=label, zorder=3)


def _steps(ax: Axes, sample: Array, colour: str, label: str, width: float) -> None:
    """Draw the distribution function of a small sample as steps."""
    x = np.sort(sample)
    p = np.arange(1, x.size + 1) / x.size
    ax.step(
        np.concatenate([x[:1], x]),
        np.concatenate([[0.0], p]),
        where="post",
        color=colour,
        linewidth=width,
        label=label,
        zorder=4,
    )


def _finish(ax: Axes) -> None:
    """Axes of a plot of times against times."""
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5))
    ax.ticklabel_format(useOffset=False)
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _quantity(result: xr.Dataset) -> str:
    """Name what was validated."""
    name = str(result.attrs.get("quantity", "step_time"))
    return "time-to-train" if name == "time_to_train" else "step time"


def _p95(result: xr.Dataset, sample: Array) -> str:
    """Write a sample's 95th percentile."""
    write = in_words if _quantity(result) == "time-to-train" else in_unit
    return write(sample, float(np.quantile(sample, 0.95)))


def _values(result: xr.Dataset, name: str) -> Array:
    """Return a variable as float64."""
    return np.asarray(result[name].to_numpy(), dtype=np.float64)
