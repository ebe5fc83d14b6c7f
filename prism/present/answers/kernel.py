"""The answer about one kernel or collective: its duration, rate, spread and source."""

from __future__ import annotations

from prism import plots
from prism.analyses.kernel import KernelRates
from prism.common.text import format_count, format_duration, format_share
from prism.present.answer import Answer, Errors, Picture
from prism.present.cells import Cell, Column, Figure, Json, Table, brief, pairs_table, share, words
from prism.present.tables import Rule, find

_TIMES = ("mean", "p5", "p50", "p95")
_BINARY = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_DECIMAL = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
ASSUMED = "assumption"  # begins the source of what is not measured on the device


def kernel_answer(result: KernelRates) -> Answer:
    """Make the answer about a kernel."""
    figures = result.figures()
    rate, of_peak = _rate(figures), figures.get("of_peak")
    mean = float(f"{figures['mean']:.3g}")
    head = f": {format_duration(mean)}, {words(rate)}"
    if of_peak is not None:
        head += f" ({format_share(of_peak, 2)} of peak)"
    subject = describe(figures)
    picture = Picture(
        "kernel", f"Rate of {figures['kind']} by size", lambda: plots.plot_kernel(result),
        "The rate along one size, the others as asked for; shaded where it was measured.",
        Errors("none: nothing is drawn at random", "of the tables' source"),
    )  # fmt: skip
    tables = [_durations(figures), _backends(figures), _sources(figures)]
    return Answer(
        title=f"Duration of one {figures['kind']}",
        subject=subject,
        head=head,
        question=f"What does {subject} take, and how does that vary?",
        findings=find(figures, RULES),
        tables=tuple(table for table in tables if table.rows),
        figures=figures,
        pictures=(picture,),
    )


def describe(figures: Json) -> str:
    """Name a kernel by its sizes and device."""
    kind, size = figures["kind"], {k: f"{v:.15g}" for k, v in figures["sizes"].items()}
    device = figures["device"]
    device = device.upper() if " " not in device else device
    if kind == "collective":
        hosts = f"{format_count(figures['sizes']['nodes'], 'node')} of {device}"
        message = f"{figures['op']} of {_bytes(figures['sizes']['bytes'])}"
        return f"{message} among {size['ranks']} GPUs on {hosts}"
    if kind == "memory":
        return f"memory, {_bytes(figures['sizes']['bytes'])} on {device}"
    more = f" {figures['dtype']}" + ", backward" * (figures["pass"] == "backward")
    if kind.endswith("gemm"):
        shape = " x ".join(size[name] for name in ("m", "n", "k"))
        what = f"{size['experts']} experts, {shape}" if "experts" in size else shape
    elif kind == "attention":
        heads, values = (f"{size[a]}" for a in ("heads", "head_dim"))
        if size["kv_heads"] != heads:
            heads += f"/{size['kv_heads']}"
        if size["v_head_dim"] != values:
            values += f"/{size['v_head_dim']}"
        what = f"attention, {size['batch']} x {heads} heads x {size['seq']} x {values}"
        window = f", window {figures['window']:g}" if figures["window"] else ""
        exact = ", deterministic" * (figures["deterministic"] and figures["pass"] == "backward")
        more = f", {figures['mask']}{window}{more}{exact}, {figures['backend']}"
    elif kind.endswith("norm"):
        what, more = f"{kind}, {size['rows']} x {size['columns']}", f"{more}, {figures['backend']}"
    else:
        what = f"{kind}, {size['tokens']} tokens x {size['heads']} heads x {size['head_dim']}"
    return f"{what}{more} on {device}"


def _bytes(n_bytes: float) -> str:
    """Write a message's size, in powers of two where it is a whole number of them."""
    for unit, scale in _BINARY:
        if n_bytes >= scale and n_bytes % scale == 0.0:
            return f"{n_bytes / scale:g} {unit}"
    unit, scale = next((pair for pair in _DECIMAL if n_bytes >= pair[1]), ("B", 1))
    return f"{n_bytes / scale:.4g} {unit}"


def _three(rate: float) -> str:
    return f"{float(f'{rate:.3g}'):,.10g}"


def _rate(row: Json) -> Figure:
    """Rate of a kernel, of a collective nccl-tests' bus bandwidth."""
    if "tflops" in row:
        return Figure(row["tflops"], f"{_three(row['tflops'])} TFLOP/s")
    key = "bus_bytes_per_s" if "bus_bytes_per_s" in row else "bytes_per_s"
    bus = " bus bandwidth" * (key == "bus_bytes_per_s")
    return Figure(row[key], f"{_three(row[key] / 1e9)} GB/s{bus}")


def _source(figures: Json) -> str:
    """Tell where figures of sizes that were not measured are from; nothing where they were."""
    assumed, measured = (figures["source"].startswith(text) for text in (ASSUMED, "measured:"))
    links = figures["kind"] == "collective" and not measured
    outside = "assumed" if assumed else "links" if links else "outside"
    above = figures.get("of_peak", 0.0) > 1.0
    return "above peak" if above else outside if figures["extrapolated"] else ""


RULES = (
    Rule("above_peak", "warning", lambda f: _source(f) == "above peak",
         "The rate is above the data sheet's: the table is off at these sizes."),
    Rule("extrapolated", "warning", lambda f: _source(f) == "assumed",
         "Not measured at these sizes on this device: an assumption, see the source."),
    Rule("extrapolated", "warning", lambda f: _source(f) == "links",
         "Not measured at these hosts and sizes: a model of the links, see the source."),
    Rule("extrapolated", "warning", lambda f: _source(f) == "outside",
         "These sizes lie outside of what was measured."),
)  # fmt: skip


def _durations(figures: Json) -> Table:
    rows: list[tuple[str, Cell]] = [(name, brief(figures[name])) for name in _TIMES]
    rows.append(("CV", share(figures["cv"])))
    if "bus_bytes_per_s" in figures:
        algorithm = figures["bytes_per_s"]
        rows.append(("bytes over time", Figure(algorithm, f"{_three(algorithm / 1e9)} GB/s")))
    return pairs_table("Duration", rows)


def _backends(figures: Json) -> Table:
    """Other implementations side by side; no rows where there is one only."""
    titles = ("mean", "p5", "p50", "p95", "CV", "rate", "of peak", "measured")
    rows = tuple(
        (
            row["backend"], *(brief(row[name]) for name in _TIMES), share(row["cv"]), _rate(row),
            share(row.get("of_peak")), "no" if row["extrapolated"] else "yes",
        )
        for row in figures.get("backends", ())
    )  # fmt: skip
    return Table("Backends", (Column(right=False), *map(Column, titles)), rows)


def _sources(figures: Json) -> Table:
    rows: list[tuple[str, Cell]] = [
        ("mean", figures["source"]),
        ("spread", figures["distribution_source"]),
        ("extrapolated", "yes" if figures["extrapolated"] else "no"),
        ("library", figures["library"]),
    ]
    return pairs_table("Source", rows)
