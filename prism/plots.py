"""Plots of results: ``(data, ax=None) -> Axes``.

Nothing is simulated here and no figure becomes global state; without ``ax`` a figure of its own
is made, which ``ax.figure.savefig`` writes. Colours are Okabe and Ito's, told apart by people
who are colour-blind and in grey print.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from matplotlib.transforms import blended_transform_factory

from prism.cdf import Cdf, empirical_cdf
from prism.schedule import Schedule, Slots, action_times, play_schedule
from prism.text import format_duration, format_share, time_unit

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#555555",
)
YELLOW = "#F0E442"
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, "#56B4E9")
LINE_STYLES = ("-", "--", "-.", ":")
PERCENTILES = (50, 95, 99)


def plot_step_time(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Distribution function of the step time with its percentiles and the ideal step.

    Parameters
    ----------
    result : xarray.Dataset
        What ``simulate`` or ``estimate`` returns: ``step_time`` [replicate] in s, and where it
        has them ``cluster_idx`` [replicate] and ``ideal_step_time`` in s.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Returns
    -------
    matplotlib.axes.Axes
        The band is two Monte Carlo standard errors, by cluster.
    """
    ax = new_axes(ax)
    sample = result["step_time"].to_numpy()
    cluster = result["cluster_idx"].to_numpy() if "cluster_idx" in result else None
    unit, scale = time_unit(float(np.median(sample)))
    curve = empirical_cdf(sample / scale, cluster)
    draw_cdf(ax, curve, BLUE, label="step time")
    if "ideal_step_time" in result:
        ideal = float(result["ideal_step_time"])
        _vertical(ax, curve, ideal / scale, f"ideal {in_unit(sample, ideal)}", GREY)
    _mark_percentiles(ax, sample, scale, in_unit)
    finish_cdf(ax, f"step time [{unit}]", "probability that a step takes no longer")
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
    """
    ax = new_axes(ax)
    sample = result["time_to_train"].to_numpy()
    unit, scale = time_unit(float(np.median(sample)))
    cluster = result["run_cluster_idx"].to_numpy() if "run_cluster_idx" in result else None
    curve = empirical_cdf(sample / scale, cluster)
    draw_cdf(ax, curve, GREEN, label="time-to-train")
    _mark_percentiles(ax, sample, scale, in_words)
    deadline = float(result["deadline"]) if "deadline" in result else float("nan")
    if np.isfinite(deadline):
        done = float(np.mean(sample <= deadline))
        text = f"deadline {format_duration(deadline)}: P(done) = {format_share(done)}"
        _vertical(ax, curve, deadline / scale, text, RED)
    if "ideal_time_to_train" in result:
        ideal = float(result["ideal_time_to_train"])
        _vertical(ax, curve, ideal / scale, f"ideal {format_duration(ideal)}", GREY)
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
    finish_cdf(ax, f"{name} [{unit}]", "probability of no longer")
    # above the axes, where no curve can run into it
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, fontsize=9)
    return ax


def plot_schedule(
    schedule: Schedule, durations: Mapping[str, float] | None = None, ax: Axes | None = None
) -> Axes:
    """Draw a pipeline schedule as a Gantt chart, one row per stage.

    Parameters
    ----------
    schedule : Schedule
        The actions of each stage.
    durations : mapping of str to float, optional
        Duration of F, of a whole backward (B) and of its weight half where it is split (W), in any
        one unit; 1, 2 and 1 where None.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Returns
    -------
    matplotlib.axes.Axes
        Numbers are microbatches; later model chunks are lighter.
    """
    schedule, given = Schedule(schedule), {"F": 1.0, "B": 2.0, "W": 1.0, **(durations or {})}
    slots = Slots(given["F"], given["B"], given["W"])
    starts, lengths = play_schedule(schedule, *slots), action_times(schedule, slots)
    n_stages = len(schedule)
    end = max(s[-1] + length[-1] for s, length in zip(starts, lengths, strict=True))
    ax = new_axes(ax, (min(16.0, max(7.0, 0.14 * end / slots.forward)), 1.4 + 0.3 * n_stages))
    colours = {"F": BLUE, "B": ORANGE, "I": YELLOW, "W": GREEN}
    names = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
    seen: set[str] = set()
    for stage, row in enumerate(schedule):
        split = schedule.split_of(stage)
        for action, start, length in zip(row, starts[stage], lengths[stage], strict=True):
            late = action.kind == "B" and (action.chunk, action.microbatch) in split
            kind = "I" if late else action.kind
            ax.barh(
                stage,
                length,
                left=start,
                height=0.86,
                color=colours[kind],
                alpha=1.0 - 0.6 * action.chunk / schedule.n_chunks,
                edgecolor="white",
                linewidth=0.4,
                label=names[kind] if kind not in seen and not action.chunk else None,
            )
            if action.chunk == 0:
                seen.add(kind)
    _number_actions(ax, schedule, starts, lengths, end)
    ax.set_ylim(n_stages - 0.5, -0.5)
    ax.set_xlim(0.0, end)
    ax.set_yticks(range(n_stages), [f"stage {stage}" for stage in range(n_stages)])
    ax.set_xlabel("time [forward of one chunk]" if durations is None else "time")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, frameon=False, fontsize=9)
    return ax


def save_figure(ax: Axes, path: str | Path) -> None:
    """Write the figure of some axes, in the format that the suffix names."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    # no date in the file: the same result gives the same bytes
    clean = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with rc_context({"svg.hashsalt": "prism"}):
        figure.savefig(path, metadata=clean.get(Path(path).suffix))


def _number_actions(
    ax: Axes,
    schedule: Schedule,
    starts: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[float]],
    end: float,
) -> None:
    """Write the microbatch into each action that is wide enough for its number."""
    inches = ax.figure.get_window_extent().width / ax.figure.dpi * 0.88 / end
    widest = max(len(str(action.microbatch)) for row in schedule for action in row)
    for stage, row in enumerate(schedule):
        for action, start, length in zip(row, starts[stage], lengths[stage], strict=True):
            text = str(action.microbatch)
            if length * inches < 0.058 * widest:
                continue
            middle = start + 0.5 * length
            dark = action.kind == "F" and action.chunk == 0
            colour = "white" if dark else "black"
            ax.text(middle, stage, text, ha="center", va="center", fontsize=6.0, color=colour)


def new_axes(ax: Axes | None, size: tuple[float, float] = (7.2, 4.4)) -> Axes:
    """Give the axes, or those of a new figure on white that no global state knows."""
    if ax is not None:
        return ax
    figure = Figure(figsize=size, layout="constrained", facecolor="white", dpi=150)
    return figure.add_subplot()


def draw_cdf(ax: Axes, curve: Cdf, colour: str, label: str, line_style: str = "-") -> None:
    """One distribution function with its band of two standard errors."""
    x = np.concatenate([curve.x[:1], curve.x])
    p = np.concatenate([[0.0], curve.p])
    ax.plot(x, p, color=colour, linestyle=line_style, linewidth=1.8, label=label, zorder=3)
    se = np.concatenate([[0.0], np.nan_to_num(curve.se)])
    low, high = np.clip(p - 2.0 * se, 0.0, 1.0), np.clip(p + 2.0 * se, 0.0, 1.0)
    ax.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0.0, zorder=1)


def _mark_percentiles(
    ax: Axes, sample: np.ndarray, scale: float, write: Callable[[np.ndarray, float], str]
) -> None:
    """Points on the curve at the percentiles, each with its value beside it."""
    for percentile in PERCENTILES:
        p = percentile / 100.0
        value = float(np.quantile(sample, p))
        ax.plot(value / scale, p, "o", color="black", markersize=4.5, zorder=4)
        ax.annotate(
            f"p{percentile}  {write(sample, value)}",
            (value / scale, p),
            # p99 hangs below its point and p95 lower still, or the two would meet
            xytext=(9, {50: -3, 95: -12, 99: -7}[percentile]),
            textcoords="offset points",
            fontsize=9,
            zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8},
        )


def _vertical(ax: Axes, curve: Cdf, x: float, text: str, colour: str) -> None:
    """Draw a labelled vertical line; one far from the curve is only told, at the edge."""
    low, high = float(curve.x[0]), float(curve.x[-1])
    near = max(3.0 * (high - low), 1e-3 * abs(high))
    if not low - near <= x <= high + near:
        tell_beyond(ax, text, colour, left=x < low)
        return
    ax.axvline(x, color=colour, linestyle="--", linewidth=1.2, zorder=2)
    where = blended_transform_factory(ax.transData, ax.transAxes)
    ax.annotate(
        text,
        (x, 0.03),
        xycoords=where,
        xytext=(-4, 0),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="bottom",
        fontsize=9,
        color=colour,
    )


def tell_beyond(ax: Axes, text: str, colour: str, left: bool) -> None:
    """Name something that lies so far out that a line would squeeze the curve."""
    side = "left" if left else "right"
    above = sum(other.get_gid() == side for other in ax.texts)
    ax.text(
        0.02 if left else 0.98,
        0.92 - 0.06 * above if left else 0.04 + 0.06 * above,  # corners a CDF leaves empty
        f"\N{LEFTWARDS ARROW} {text}" if left else f"{text} \N{RIGHTWARDS ARROW}",
        transform=ax.transAxes,
        ha=side,
        fontsize=9,
        color=colour,
        gid=side,
        zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8},
    )


def finish_cdf(ax: Axes, x_label: str, y_label: str) -> None:
    """Axes of a distribution function."""
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    ax.set_ylim(0.0, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    low, high = ax.get_xlim()
    # a constant sample would otherwise be looked at through a microscope
    widen = max(0.0, 2e-4 * abs(high) - (high - low)) / 2.0
    low, high = low - widen, high + widen
    # room for the label left of the first line and right of the last percentile
    ax.set_xlim(low - 0.06 * (high - low), high + 0.16 * (high - low))
    ax.ticklabel_format(axis="x", useOffset=False)
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _resolution(sample: np.ndarray, value: float) -> float:
    """Find the smallest difference that the sample's spread makes worth showing [s]."""
    return max(0.1 * float(np.std(sample)), 1e-5 * abs(value))


def in_words(sample: np.ndarray, value: float) -> str:
    """Write a duration in days, hours and so on."""
    return format_duration(value, _resolution(sample, value))


def in_unit(sample: np.ndarray, value: float) -> str:
    """Write a duration in the unit of the axis."""
    unit, scale = time_unit(float(np.median(sample)))
    digits = max(0, -int(np.floor(np.log10(_resolution(sample, value) / scale))))
    return f"{value / scale:.{digits}f} {unit}"


def title_of(result: xr.Dataset, what: str) -> str:
    """Name of the job and size of the sample."""
    name = str(result.attrs.get("job_name", ""))
    return f"{name}, {what}" if name else what
