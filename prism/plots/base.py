"""What all plots share: the style and its colours, axes of distributions, legends, saving."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.style
import numpy as np
import xarray as xr
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, MaxNLocator, PercentFormatter
from numpy.typing import ArrayLike

from prism.common.arrays import Array, Index
from prism.common.errors import PrismError
from prism.common.results import Result
from prism.common.text import format_duration, time_unit, visible


# ----------------------------------------------------------- empirical distribution function
class Cdf(NamedTuple):
    """An empirical distribution function on a grid."""

    x: Array  # [point] values, ascending, in the unit of the sample
    p: Array  # [point] share of the sample at or below x
    se: Array  # [point] standard error of p


def empirical_cdf(
    sample: ArrayLike, cluster_idx: ArrayLike | None = None, n_points: int = 400
) -> Cdf:
    """Empirical distribution function of a sample [replicate] with a pointwise standard error.

    Between the smallest and the largest value, at n_points equally spaced ranks, or all of them
    where they are fewer; values are independent without `cluster_idx` [replicate].

    With K clusters of n_k values, c_k of which are at or below x, p = sum c_k / sum n_k and its
    variance is that of a ratio estimator, ``K/(K-1) sum (c_k - p n_k)^2 / (sum n_k)^2``. With one
    value per cluster this is p (1 - p) / (n - 1). Cochran, Sampling Techniques, 3rd ed. (1977),
    section 3.12.
    """
    values = np.asarray(sample, dtype=np.float64).ravel()
    n = values.size
    if n == 0 or not np.isfinite(values).all():
        raise ValueError("empirical_cdf needs at least one value, all of them finite")
    order = np.argsort(values, kind="stable")
    values = values[order]
    rank = np.unique(np.linspace(0, n - 1, min(n, n_points)).round().astype(np.int64))
    x = values[rank]
    count = np.searchsorted(values, x, side="right")
    p = count / n
    if cluster_idx is None:
        return Cdf(x, p, np.sqrt(p * (1.0 - p) / max(n - 1, 1)))
    _, cluster = np.unique(np.asarray(cluster_idx).ravel(), return_inverse=True)
    return Cdf(x, p, _cluster_se(count, p, cluster[order]))


def _cluster_se(count: Index, p: Array, cluster: Index) -> Array:
    """Take the standard error of p [point] from the clusters of the sorted values [replicate]."""
    n_per_cluster = np.bincount(cluster)
    n_clusters = n_per_cluster.size
    if n_clusters < 2:
        return np.full(p.size, np.nan)
    below = np.zeros(n_clusters)
    se = np.empty(p.size)
    done = 0
    for point, upto in enumerate(count):
        below += np.bincount(cluster[done:upto], minlength=n_clusters)
        done = upto
        spread = np.sum((below - p[point] * n_per_cluster) ** 2)
        se[point] = np.sqrt(n_clusters / (n_clusters - 1) * spread) / cluster.size
    return se


Json = Mapping[str, Any]

STYLES = ("light", "dark")
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, OLIVE, GREY = (f"C{i}" for i in range(8))
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
LINE_STYLES = ("-", "--", "-.", ":")
PERCENTILES = (50, 95, 99)
NAMES = {"step_time": "step time", "time_to_train": "time-to-train"}
LONGEST_NAME = 60  # letters of a name in a picture


def style(name: str = "light") -> AbstractContextManager[None]:
    """Use a style of prism's for all that is drawn within.

    Parameters
    ----------
    name : str
        ``light`` or ``dark``. Without it pictures are light, and axes that a plot is given keep
        what they have; ``matplotlib.style.use("prism.plots.light")`` is the same for good.

    Raises
    ------
    PrismError
        An unknown name.

    Examples
    --------
    >>> with prism.plots.style("dark"):  # doctest: +SKIP
    ...     ax = prism.plots.plot_step_time(result)
    """
    if name not in STYLES:
        raise PrismError(f"style {name!r}: expected one of {', '.join(STYLES)}")
    return matplotlib.style.context(f"prism.plots.{name}")


def styled(plot: Callable[..., Axes]) -> Callable[..., Axes]:
    """Draw a result, in the light style where neither axes nor a style of prism's are given."""

    @functools.wraps(plot)
    def draw(*args: Any, **kwargs: Any) -> Axes:
        args = tuple(map(_plain, args))
        kwargs = {name: _plain(value) for name, value in kwargs.items()}
        given = any(isinstance(value, Axes) for value in (*args, *kwargs.values()))
        own = rcParams["svg.hashsalt"] == "prism"  # as both styles have it
        with nullcontext() if given or own else style():
            return plot(*args, **kwargs)

    return draw


def _plain(value: Any) -> Any:
    """Give the Dataset of a result, also of one among others; anything else as it is."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value.to_xarray() if isinstance(value, Result) else value


class StyledFigure(Figure):
    """A figure that keeps its style until it is drawn, when its ticks are made."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")
        self._style: Any = {key: rcParams[key] for key in rcParams if key != "backend"}

    @contextmanager
    def _styled(self) -> Iterator[None]:
        """Draw names in any script and of any length, control characters made visible."""
        with rc_context(self._style), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # glyphs, and room for the axes
            for axes in self.axes:
                for axis in (axes.xaxis, axes.yaxis):
                    formatter = axis.get_major_formatter()
                    if isinstance(formatter, FixedFormatter):  # it writes the labels again
                        formatter.seq = [visible(str(name)) for name in formatter.seq]
            for text in self.findobj(Text):
                text.set_text(visible(text.get_text()))
            yield

    def draw(self, renderer: Any) -> None:
        """Draw it in its style."""
        with self._styled():
            super().draw(renderer)

    def lay_out(self) -> None:
        """Give everything its place, once for all formats; to save it would draw it, too."""
        engine = self.get_layout_engine()
        assert engine is not None
        with self._styled():
            engine.execute(self)


def new_axes(ax: Axes | None, width: float = 7.2, height: float = 4.4) -> Axes:
    """Give the axes, or those of a new figure that no global state knows [inch]."""
    return StyledFigure(width, height).add_subplot() if ax is None else ax


def side_by_side(height: float) -> tuple[Axes, Axes]:
    """Give axes of a new figure: distributions, and what they differ in [inch]."""
    left, right = StyledFigure(11.6, height).subplots(1, 2, width_ratios=(1.45, 1.0))
    return left, right


def save_figure(ax: Axes, *paths: str | Path) -> None:
    """Write the figure of some axes, in the formats that the suffixes name; all laid out alike.

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
    layout = figure.get_layout_engine()
    with rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
        if isinstance(figure, StyledFigure) and layout is not None:
            figure.lay_out()
            figure.set_layout_engine(None)
        for path in paths:
            figure.savefig(path, metadata=clean.get(Path(path).suffix))
            figure.set_layout_engine(None)  # for the next; None means none by these settings alone
        figure.set_layout_engine(layout)


def ink() -> str:
    """Colour of text and of lines that belong to no curve."""
    return str(rcParams["text.color"])


def shorten(text: str) -> str:
    """Cut the middle of a name that fits no legend; what tells names apart is often at the end."""
    half = LONGEST_NAME // 2
    return text if len(text) <= LONGEST_NAME else f"{text[: half - 3]}...{text[-half:]}"


def legend_above(ax: Axes, title: str = "", ncols: int = 1) -> None:
    """Put title and legend above the axes, where no curve can run into them."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(
            loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2, ncols=ncols,
            title=title or None, alignment="left",
        )  # fmt: skip
    else:
        ax.set_title(title)


def name_rows(ax: Axes, names: Sequence[str]) -> None:
    """Name the rows of a plot from top to bottom."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0, pad=7)
    ax.grid(visible=False, axis="y")
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))


def title_of(result: xr.Dataset, what: str) -> str:
    """Name of the job and size of the sample."""
    name = str(result.attrs.get("job_name", ""))
    return f"{name}, {what}" if name else what


# ----------------------------------------------------------------------------- distributions
class Mark(NamedTuple):
    """A time on the axis of a distribution: ideal or deadline [s]."""

    time: float
    text: str
    colour: str
    line: bool = False


def draw_cdf(
    ax: Axes, sample: Array, scale: float, colour: str, label: str, line_style: str = "-",
    cluster: Array | None = None, error: bool = True,
) -> None:  # fmt: skip
    """Draw a distribution function, with its band of two standard errors by cluster draw."""
    curve = empirical_cdf(sample / scale, cluster, n_points=200)
    x, p = np.r_[curve.x[:1], curve.x], np.r_[0.0, curve.p]
    steps = "steps-post" if curve.x.size == sample.size else "default"
    ax.plot(x, p, line_style, color=colour, drawstyle=steps, label=label, zorder=3)
    if error:
        se = np.r_[0.0, np.nan_to_num(curve.se)]
        low, high = np.clip(p - 2.0 * se, 0.0, 1.0), np.clip(p + 2.0 * se, 0.0, 1.0)
        ax.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0.0, zorder=1)


def mark_percentiles(
    ax: Axes, sample: Array, scale: float, percentiles: Sequence[int] = PERCENTILES
) -> None:
    """Mark percentiles on the curve; a p99 close to p95 is named to its right."""
    for percentile in percentiles:
        place = float(np.percentile(sample, percentile)) / scale, percentile / 100.0
        ax.plot(*place, "o", color=ink(), zorder=4)
        centred = percentile == 95  # on a steep curve a name to its right or left is on others
        ax.annotate(
            f"p{percentile}", place, xytext=(0 if centred else 4, -5), va="top",
            ha="center" if centred else "left",
            textcoords="offset points", fontsize=8, zorder=4,
        )  # fmt: skip


def finish_cdf(
    ax: Axes, name: str, samples: Sequence[Array], marks: Sequence[Mark] = (),
    inside: Sequence[float] = (), title: str = "", y_label: str = "cumulative probability",
) -> None:  # fmt: skip
    """End the axis near p99, with what lies beyond counted, and mark times.

    Marks farther from the samples than their range are named at the edge, since the axis would
    squeeze the curve; times of `inside` are always on it [s].
    """
    unit, scale = time_unit(float(np.median(samples[0])))
    low = min([*inside, *(float(sample.min()) for sample in samples)])
    high = max([*inside, *(float(np.quantile(sample, 0.99)) for sample in samples)])
    # a constant sample would otherwise be looked at through a microscope
    widen = 0.5 * max(0.0, 2e-4 * abs(high) - (high - low))
    low, high = low - widen, high + widen
    ends, width = [low, high], high - low
    for mark in marks:
        if not low - width <= mark.time <= high + width:
            _name_beyond(ax, mark.text, left=mark.time < low)
            continue
        ends.append(mark.time)
        x = mark.time / scale
        if mark.line:
            ax.axvline(x, color=mark.colour, linestyle="--", lw=1.2, zorder=2, label=mark.text)
        else:  # below the curve, wherever that runs
            ax.plot(x, 0.0, "^", color=mark.colour, markersize=8, clip_on=False, zorder=5,
                    label=mark.text)  # fmt: skip
    margin = 0.06 * (max(ends) - min(ends))
    ax.set_xlim((min(ends) - margin) / scale, (max(ends) + margin) / scale)
    beyond = sum(int((sample > max(ends) + margin).sum()) for sample in samples)
    if beyond:
        _name_beyond(ax, f"{beyond:,} of {sum(map(len, samples)):,} beyond", left=False)
    ax.set_ylim(0.0, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_xlabel(f"{name} [{unit}]")
    ax.set_ylabel(y_label)
    legend_above(ax, title)


def _name_beyond(ax: Axes, text: str, left: bool) -> None:
    """Name what lies beyond an end of the axis, in the corner that a distribution leaves empty."""
    side = "left" if left else "right"
    above = sum(other.get_gid() == side for other in ax.texts)
    ax.text(
        0.02 if left else 0.98, 0.94 - 0.06 * above if left else 0.04 + 0.06 * above,
        f"\N{LEFTWARDS ARROW} {text}" if left else f"{text} \N{RIGHTWARDS ARROW}",
        transform=ax.transAxes, ha=side, fontsize=8, color=GREY, gid=side, zorder=5,
        bbox={"facecolor": ax.get_facecolor(), "edgecolor": "none", "pad": 1.0},
    )  # fmt: skip


def in_words(sample: Array, value: float) -> str:
    """Write a duration in days, hours and so on, with digits that the sample's spread shows."""
    return format_duration(value, _resolution(sample, value))


def in_unit(sample: Array, value: float) -> str:
    """Write a duration in the unit of the axis, with digits that the sample's spread shows."""
    unit, scale = time_unit(float(np.median(sample)))
    digits = max(0, -int(np.floor(np.log10(_resolution(sample, value) / scale))))
    return f"{value / scale:.{digits}f} {unit}"


def quantiles_text(sample: Array, variable: str, percentiles: Sequence[int] = (50, 95)) -> str:
    """Write percentiles of step times or times-to-train."""
    write = in_unit if variable == "step_time" else in_words
    found = ((p, float(np.percentile(sample, p))) for p in percentiles)
    return ", ".join(f"p{p} {write(sample, value)}" for p, value in found)


def _resolution(sample: Array, value: float) -> float:
    """Find the smallest difference that the sample's spread makes worth showing [s]."""
    return max(0.1 * float(np.std(sample)), 1e-5 * abs(value))
