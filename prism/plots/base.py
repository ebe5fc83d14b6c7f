"""What all plots share: colours, axes, the curve of a distribution and its marks, saving.

Colours are Okabe and Ito's, told apart by people who are colour-blind and in grey print.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, PercentFormatter
from matplotlib.transforms import blended_transform_factory

from prism.common.cdf import Cdf
from prism.common.text import format_duration, time_unit, visible

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


@contextmanager
def no_warnings() -> Iterator[None]:
    """Draw names in any script and of any length, without words on glyphs and room for the axes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def save_figure(ax: Axes, path: str | Path) -> None:
    """Write the figure of some axes, in the format that the suffix names.

    Examples
    --------
    >>> import prism.plots
    >>> result = prism.simulate("pipeline-8x32", replicates=64, seed=1)
    >>> prism.plots.save_figure(prism.plots.plot_step_time(result), "step_time.png")
    """
    figure = ax.get_figure(root=True)
    assert figure is not None
    # no date in the file: the same result gives the same bytes
    clean = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    show_names(figure)
    with rc_context({"svg.hashsalt": "prism"}), no_warnings():
        figure.savefig(path, metadata=clean.get(Path(path).suffix))


def show_names(figure: Figure) -> None:
    """Make the names in a figure visible text: XML takes no control characters."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            formatter = axis.get_major_formatter()
            if isinstance(formatter, FixedFormatter):  # it writes the labels again
                formatter.seq = [visible(str(name)) for name in formatter.seq]
    for text in figure.findobj(Text):
        if isinstance(text, Text):
            text.set_text(visible(text.get_text()))


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


def mark_percentiles(
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


def mark_vertical(ax: Axes, curve: Cdf, x: float, text: str, colour: str) -> None:
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


def resolution_of(sample: np.ndarray, value: float) -> float:
    """Find the smallest difference that the sample's spread makes worth showing [s]."""
    return max(0.1 * float(np.std(sample)), 1e-5 * abs(value))


def in_words(sample: np.ndarray, value: float) -> str:
    """Write a duration in days, hours and so on."""
    return format_duration(value, resolution_of(sample, value))


def in_unit(sample: np.ndarray, value: float) -> str:
    """Write a duration in the unit of the axis."""
    unit, scale = time_unit(float(np.median(sample)))
    digits = max(0, -int(np.floor(np.log10(resolution_of(sample, value) / scale))))
    return f"{value / scale:.{digits}f} {unit}"


def title_of(result: xr.Dataset, what: str) -> str:
    """Name of the job and size of the sample."""
    name = str(result.attrs.get("job_name", ""))
    return f"{name}, {what}" if name else what
