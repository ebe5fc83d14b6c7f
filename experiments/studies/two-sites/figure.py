"""Plot what a second site costs against its bandwidth, from table.json."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import matplotlib.style
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from prism.plots.base import save_figure

matplotlib.style.use("prism.plots.light")

HERE = Path(__file__).parent


def is_seen(row):
    """Whether a row costs what a logarithmic axis can show, beyond its error."""
    return row["mean_change"] > max(2e-4, 2.0 * row["mean_change_se"])


def main():
    rows = json.loads((HERE / "table.json").read_text())
    figure, ax = plt.subplots(figsize=(9.5, 4.2), layout="constrained")
    ticks = sorted({row["tbits"] for row in rows if row["tbits"]})
    for way in dict.fromkeys(row["way"] for row in rows):
        points = [r for r in rows if r["way"] == way and r["km"] == 1000 and is_seen(r)]
        x = [r["tbits"] for r in points]
        label = way if points else f"{way}: no cost seen"
        line = ax.plot(x, [100.0 * r["mean_change"] for r in points], "o-", ms=4, label=label)
        for r in rows:
            if r["way"] == way and r["km"] == 4000 and is_seen(r):
                y = 100.0 * r["mean_change"]
                ax.plot(r["tbits"], y, "^", ms=6, mfc="none", color=line[0].get_color())
    ax.set(xscale="log", yscale="log", xlabel="out of each site, one direction (Tbit/s)")
    ax.set_ylabel("mean step over the same job in one site (+%)")
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.grid(alpha=0.3)
    title = "between the sites,\n1,000 km (triangles: 4,000 km)"
    ax.legend(title=title, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    ax.set_title("Llama 3 405B on two sites of 8,192 H100")
    save_figure(figure, HERE / "two-sites.png")


if __name__ == "__main__":
    main()
