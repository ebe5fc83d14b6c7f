"""Picture of one kernel's rate along a size, and where it was measured."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, StrMethodFormatter

from prism.common.arrays import Array
from prism.common.text import format_duration
from prism.plots.base import COLOURS, GREY, ink, legend_above, new_axes, styled

_RATES = {
    "tflops": (1.0, "rate [TFLOP/s]"), "bus_bytes_per_s": (1e-9, "bus bandwidth [GB/s]"),
    "bytes_per_s": (1e-9, "rate [GB/s]"),
}  # fmt: skip
_SIZES = {"nvlink_domain_gpus": "NVLink domain", "network_gbit": "Gbit/s of a GPU"}
_SAME = {"kv_heads": "heads", "v_head_dim": "head_dim"}  # not worth a word where they are
_ROW = 4  # entries of a legend in one row
_LINE = 66  # letters of a title that fit
_AXES = {"m": "m, rows", "seq": "sequence length", "bytes": "bytes"}


@styled
def plot_kernel(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Rate of a kernel along its main size, a line a backend, dashed where nothing was measured.

    Of what ``prism kernel -o DIR`` writes. What was measured of the first backend is shaded, the
    size asked for marked.

    Examples
    --------
    >>> import prism.plots
    >>> ax = prism.plots.plot_kernel(prism.load("here"))  # doctest: +SKIP
    """
    ax = new_axes(ax)
    key = next(name for name in _RATES if name in result)
    scale, label = _RATES[key]
    size = np.asarray(result["size"].values, np.float64)
    rate = scale * np.asarray(result["rate"].values, np.float64)
    measured = np.asarray(result["measured"].values, bool)
    _shade(ax, size, measured[0])
    names = [str(name) for name in result["backend"].values]
    for i, name in enumerate(names):
        _line(ax, size, rate[i], measured[i], COLOURS[i % len(COLOURS)], name, 3.0 - 0.1 * i)
    main = str(result["size"].attrs["name"])
    given = dict(zip(map(str, result["given_size"].values), result["given"].values, strict=True))
    mean = float(result["mean"].values[0])
    ax.plot(
        given[main], scale * float(result[key].values[0]), "o", color=ink(), markersize=7, zorder=5,
        label=f"asked for: {format_duration(float(f'{mean:.3g}'))}",
    )  # fmt: skip
    if not measured.all():
        ax.plot([], [], "--", color=GREY, lw=1.3, label="not measured")
    if "of_peak" in result:
        peak = scale * float(result[key].values[0] / result["of_peak"].values[0])
        ax.axhline(peak, linestyle=":", color=GREY, lw=1.3, label="peak of the data sheet")
    _size_axis(ax, main, size)
    ax.set_ylim(bottom=0.0)
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    ax.set_ylabel(label)
    others = {
        name: float(value)
        for name, value in given.items()
        if name != main and value != given.get(_SAME.get(name, ""))
    }
    n = len(ax.get_legend_handles_labels()[0])
    legend_above(ax, _title(result, others), ncols=n if n <= _ROW else -(-n // 2))
    return ax


def _shade(ax: Axes, size: Array, measured: Array) -> None:
    """Shade the sizes that were measured."""
    where = np.flatnonzero(measured)
    if where.size:
        ax.axvspan(
            size[where[0]], size[where[-1]], color=GREY, alpha=0.14, linewidth=0.0, zorder=0,
            label="measured",
        )  # fmt: skip


def _line(
    ax: Axes, size: Array, rate: Array, measured: Array, colour: str, name: str, zorder: float
) -> None:
    """Draw a backend's rate, dashed where it is not measured."""
    ax.plot(size, rate, "--", color=colour, lw=1.3, zorder=zorder)
    shown = np.where(measured, rate, np.nan)
    ax.plot(size, shown, color=colour, zorder=zorder, label=name or "rate")


def _size_axis(ax: Axes, main: str, size: Array) -> None:
    ax.set_xscale("log", base=2)
    low, high = (int(np.floor(np.log2(end) + 1e-9)) for end in (size[0], size[-1]))
    every = -(-(high - low) // 8)
    ticks = [2.0**i for i in range(low + (-low) % every, high + 1, every)]
    if main == "bytes":
        ax.set_xticks(ticks, [_binary(tick) for tick in ticks])
    else:
        ax.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    ax.set_xlabel(_AXES.get(main, main))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(size[0], size[-1])


def _binary(n_bytes: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:g} {unit}"
    return f"{n_bytes:g} B"


def _title(result: xr.Dataset, others: Mapping[str, float]) -> str:
    about = result.attrs
    said = (about.get("op") or about["kernel"], about.get("mask"), about.get("dtype"))
    back = ", backward" if about.get("pass") == "backward" else ""
    device = str(about["device"])
    device = device.upper() if " " not in device else device
    sizes = ", ".join(f"{_SIZES.get(name, name)} {size:g}" for name, size in others.items())
    title = f"{' '.join(str(word) for word in said if word)}{back} on {device}"
    apart = ": " if len(title) + len(sizes) < _LINE else "\n"
    return f"{title}{apart}{sizes}" if sizes else title
