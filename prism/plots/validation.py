"""Predicted against measured, replayed against measured, and the workers that slow a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from prism.common.arrays import Array
from prism.common.text import format_count, time_unit
from prism.plots.base import (
    BLUE,
    GREY,
    NAMES,
    ORANGE,
    Mark,
    draw_cdf,
    finish_cdf,
    in_unit,
    ink,
    legend_above,
    new_axes,
    quantiles_text,
    side_by_side,
    styled,
)

_MOST_NUMBERS = 12  # columns and rows; more numbers than in these cannot be read
_MOST_TICKS = 32


@styled
def plot_validation(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Distributions: predicted with its band, measured, training, independent sampling.

    Of what ``validate`` returns, all in s: ``measured`` [measured_idx], ``predicted`` [replicate],
    and where it has them ``training`` [training_idx], ``predicted_independent`` [replicate],
    ``cdf_time``, ``cdf_lo`` and ``cdf_hi`` [point]. The band is what the prediction's distribution
    did over refits.

    Examples
    --------
    >>> import prism.plots
    >>> found = prism.validate(trace="experiments/samples/trace.csv", bootstrap=19, seed=1)
    >>> ax = prism.plots.plot_validation(found)
    """
    ax = new_axes(ax)
    measured, predicted = _values(result, "measured"), _values(result, "predicted")
    variable = str(result.attrs.get("quantity", "step_time"))
    _, scale = time_unit(float(np.median(measured)))
    inside, marks = [measured.min(), measured.max()], []
    if "cdf_time" in result:
        x = _values(result, "cdf_time") / scale
        lo, hi = result["cdf_lo"].to_numpy(), result["cdf_hi"].to_numpy()
        ax.fill_between(x, lo, hi, color=BLUE, alpha=0.18, linewidth=0.0, zorder=1)
    text = f"predicted, {quantiles_text(predicted, variable, [95])}"
    draw_cdf(ax, predicted, scale, BLUE, text, error=False)
    text = f"measured, n = {measured.size}, {quantiles_text(measured, variable, [95])}"
    draw_cdf(ax, measured, scale, ink(), text, error=False)
    if "training" in result:
        training = _values(result, "training")
        inside += [training.min(), training.max()]
        draw_cdf(ax, training, scale, GREY, f"training, n = {training.size}", ":", error=False)
    if "predicted_independent" in result:
        alone = _values(result, "predicted_independent")
        middle, shown = float(np.median(alone)), [*inside, *np.quantile(predicted, [0.01, 0.99])]
        if min(shown) <= middle <= max(shown):
            text = f"independent sampling, {quantiles_text(alone, variable, [95])}"
            draw_cdf(ax, alone, scale, ORANGE, text, "--", error=False)
        else:
            text = f"independent sampling: {quantiles_text(alone, variable, [50])}"
            marks.append(Mark(middle, text, ORANGE))
    finish_cdf(ax, NAMES[variable], [predicted], marks, inside)
    return ax


@styled
def plot_quantiles(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Predicted against measured quantiles, with the line on which they agree.

    As of `plot_validation`: one point per measured value, at the rank (i - 1/2) / n. Bars are the
    band over refits.

    Examples
    --------
    >>> import prism.plots
    >>> found = prism.validate(trace="experiments/samples/trace.csv", bootstrap=19, seed=1)
    >>> ax = prism.plots.plot_quantiles(found)
    """
    ax = new_axes(ax, 4.6)
    measured, predicted = np.sort(_values(result, "measured")), _values(result, "predicted")
    _, scale = time_unit(float(np.median(measured)))
    p = (np.arange(measured.size) + 0.5) / measured.size
    y = np.quantile(predicted, p)
    if "cdf_time" in result:
        x = _values(result, "cdf_time")
        # the quantile at p of the lowest function is the highest
        highest = np.interp(p, result["cdf_lo"].to_numpy(), x)
        lowest = np.interp(p, result["cdf_hi"].to_numpy(), x)
        ax.vlines(measured / scale, lowest / scale, highest / scale, color=BLUE, alpha=0.25, lw=3)
    low, high = _square(ax, measured, y, "measured quantile", "predicted quantile", 0.04)
    if "predicted_independent" in result:
        other = np.quantile(_values(result, "predicted_independent"), p)
        if np.any((other >= low) & (other <= high)):
            ax.plot(measured / scale, other / scale, "o", mfc="none", color=ORANGE,
                    label="independent sampling")  # fmt: skip
    ax.plot(measured / scale, y / scale, "o", color=BLUE, label="predicted", zorder=4)
    legend_above(ax)
    return ax


@styled
def draw_validation(result: xr.Dataset) -> Axes:
    """Draw both pictures of a validation side by side; the first one's axes.

    Examples
    --------
    >>> import prism.plots
    >>> found = prism.validate(trace="experiments/samples/trace.csv", bootstrap=19, seed=1)
    >>> ax = prism.plots.draw_validation(found)
    """
    left, right = side_by_side(4.8)
    plot_validation(result, left)
    plot_quantiles(result, right)
    return left


@styled
def plot_replay(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Replayed against measured step times, with the line on which they agree.

    Of what ``replay`` returns: ``measured_step_time`` and ``replayed_step_time`` [step] in s, and
    where it has one ``ideal_step_time`` in s. Up to three steps whose replay is more than 1 % off
    are numbered.

    Examples
    --------
    >>> import prism.plots
    >>> ax = prism.plots.plot_replay(prism.replay("experiments/samples/trace.csv"))
    """
    ax = new_axes(ax, 5.4, 5.0)
    measured = _values(result, "measured_step_time")
    replayed = _values(result, "replayed_step_time")
    _, scale = time_unit(float(np.median(measured)))
    _square(ax, measured, replayed, "measured step time", "replayed step time", 0.05)
    ax.plot(measured / scale, replayed / scale, "o", color=BLUE, alpha=0.8, zorder=3)
    steps = result["step"].to_numpy() if "step" in result.coords else np.arange(measured.size)
    error = np.abs(replayed / measured - 1.0)
    for i in np.argsort(error)[::-1][:3]:
        if error[i] > 0.01:
            ax.annotate(f"step {steps[i]}", (measured[i] / scale, replayed[i] / scale),
                        xytext=(6, -3), textcoords="offset points", fontsize=8)  # fmt: skip
    title = format_count(measured.size, "step")
    if "ideal_step_time" in result:
        title += f"; ideal {in_unit(measured, float(result['ideal_step_time']))}"
    ax.set_title(title)
    return ax


@styled
def plot_workers(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Heat map of how much each worker slows the step.

    Of what ``replay`` returns: ``slowdown_by_worker`` [dp_rank, stage], step time as measured over
    the step time with only this worker at its mean.

    Examples
    --------
    >>> import prism.plots
    >>> replayed = prism.replay("experiments/samples/trace.csv")
    >>> ax = prism.plots.plot_workers(replayed)
    """
    cells = _values(result, "slowdown_by_worker", ("stage", "dp_rank"))
    n_stages, n_replicas = cells.shape
    ax = new_axes(ax, min(13.0, 2.6 + 0.5 * max(n_replicas, 5)), 1.7 + 0.42 * max(n_stages, 2))
    # a scale of at least 2 %, so that a healthy cluster does not look ill
    high = max(1.02, float(np.max(cells, initial=1.0, where=np.isfinite(cells))))
    low = float(np.min(cells, initial=1.0, where=np.isfinite(cells)))
    image = ax.imshow(cells, cmap="Blues", vmin=low, vmax=high, aspect="auto")
    if max(cells.shape) <= _MOST_NUMBERS:
        digits = 3 if high < 1.1 else 2
        for (row, column), value in np.ndenumerate(cells):
            colour = "white" if value > low + 0.6 * (high - low) else "black"
            ax.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=8,
                    color=colour)  # fmt: skip
    for axis, name, word in ((ax.xaxis, "dp_rank", ""), (ax.yaxis, "stage", "stage ")):
        n = result.sizes[name]
        labels = result[name].to_numpy() if name in result.coords else np.arange(n)
        shown = range(0, n, -(-n // _MOST_TICKS))
        axis.set_ticks(list(shown), [f"{word}{labels[i]}" for i in shown])
    ax.set_xlabel("replica (dp rank)")
    ax.grid(visible=False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title("step time / step time with this worker at its mean")
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.colorbar(image, ax=ax, label="slowdown", fraction=0.06, pad=0.02)
    return ax


def _square(
    ax: Axes, x: Array, y: Array, x_name: str, y_name: str, room: float
) -> tuple[float, float]:
    """Give both axes the same range and the line on which times agree; its ends [s]."""
    unit, scale = time_unit(float(np.median(x)))
    low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))
    margin = max(room * (high - low), 1e-4 * abs(high))
    low, high = low - margin, high + margin
    ends = low / scale, high / scale
    ax.plot(ends, ends, "--", color=GREY, linewidth=1.0, zorder=2)
    ax.set(xlim=ends, ylim=ends, xlabel=f"{x_name} [{unit}]", ylabel=f"{y_name} [{unit}]")
    ax.set_aspect("equal")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5))
    return low, high


def _values(result: xr.Dataset, name: str, dims: Sequence[str] = ()) -> Array:
    found = result[name].transpose(*dims) if dims else result[name]
    return np.asarray(found.to_numpy(), dtype=np.float64)
