"""Picture of a library's kernel tables: what matrix products and attention reach by size."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from prism.common.errors import PrismError
from prism.distributions.kerneltables import KernelTable
from prism.distributions.library import Library
from prism.plots.base import COLOURS, legend_above, new_axes, styled
from prism.workload.kernelcost import BACKENDS, NUMBER_BYTES, kernel_cost

_SIDES = np.geomspace(128.0, 32_768.0, 120)  # of square products
_SEQUENCES = np.geomspace(512.0, 32_768.0, 60)
_HEADS, _KEYS, _WIDTH = 32.0, 8.0, 128.0  # heads, those of keys, width of each
_TOKENS = 32_768.0  # of all sequences together


@styled
def plot_library(library: Library, kind: str = "gemm", ax: Axes | None = None) -> Axes:
    """Throughput of matrix products over their work, or of attention over the sequence.

    `kind` is ``gemm`` or ``attention``, of what ``load_library`` returns. Of products a point for
    each measured one, and a line for square ones; of causal attention in bfloat16 a line for each
    backend and pass (32 heads, 8 of keys, of 128; 32,768 tokens).

    Examples
    --------
    >>> import prism, prism.plots
    >>> ax = prism.plots.plot_library(prism.load_library("h100-healthy"))
    """
    if kind not in ("gemm", "attention"):
        raise PrismError(f"kind {kind!r}: expected gemm or attention")
    ax = new_axes(ax)
    ax.set_xscale("log")
    (_draw_products if kind == "gemm" else _draw_attention)(library, ax)
    ax.set_ylim(bottom=0.0)
    ax.set_ylabel("throughput [TFLOP/s]")
    return ax


def _draw_products(library: Library, ax: Axes) -> None:
    known = {**library.kernels, **library.tables}
    found = [number for number in NUMBER_BYTES if f"gemm/{number}" in known]
    for number, colour in zip(found, COLOURS, strict=False):
        table = known[f"gemm/{number}"]
        if isinstance(table, KernelTable) and "flop" in table.axes:
            ax.plot(table.axes["flop"], 1e-12 * table.rate, "o-", color=colour, label=number)
            continue
        if isinstance(table, KernelTable):
            grids = np.meshgrid(*(table.axes[axis] for axis in ("m", "n", "k")), indexing="ij")
            work, rate = 2.0 * np.prod(grids, axis=0).ravel(), 1e-12 * table.rate.ravel()
            ax.plot(work, rate, ".", color=colour, alpha=0.15, markersize=2, rasterized=True)
        costs = [kernel_cost(library, "gemm", dtype=number, m=x, n=x, k=x) for x in _SIDES]
        line = [1e-12 * cost.flop / cost.seconds for cost in costs]
        ax.plot(2.0 * _SIDES**3, line, color=colour, label=f"{number}, square")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda flop, _: f"1e{round(np.log10(flop))}"))
    ax.set_xlabel("work of one matrix product [flop]")
    legend_above(ax)


def _draw_attention(library: Library, ax: Axes) -> None:
    """Draw each backend that the library has, as far as its sequences reach."""
    known, lines = {**library.kernels, **library.tables}, []
    for backend, colour in zip(BACKENDS["attention"], COLOURS, strict=True):
        for backward in (False, True):
            name = f"attention/{backend}/bf16/causal/{'backward' if backward else 'forward'}"
            if name not in known:
                continue
            seqs = [seq for seq in _SEQUENCES if known[name].covers(seq=seq)]
            costs = [
                kernel_cost(library, "attention", backend=backend, backward=backward,
                            batch=max(1.0, _TOKENS / seq), seq=seq, heads=_HEADS, kv_heads=_KEYS,
                            head_dim=_WIDTH)
                for seq in seqs
            ]  # fmt: skip
            rates = [1e-12 * cost.flop / cost.seconds for cost in costs]
            ax.plot(seqs, rates, "--" if backward else "-", color=colour)
            lines += [(backend, colour, "-")] * (not backward)
    if lines:
        lines += [("forward", "0.5", "-"), ("backward", "0.5", "--")]
    handles = [Line2D([], [], color=colour, ls=style) for _, colour, style in lines]
    ax.legend(
        handles, [name for name, _, _ in lines], loc="lower left", bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2, ncols=4, alignment="left",
    )  # fmt: skip
    ticks = [512, 1024, 2048, 4096, 8192, 16_384, 32_768]
    ax.set_xticks(ticks, [f"{seq:,}" for seq in ticks])
    ax.minorticks_off()
    ax.set_xlabel("sequence [tokens]")
