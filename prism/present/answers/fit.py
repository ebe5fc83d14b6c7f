"""The answer of a fit: what makes durations differ, how well the model holds, what stays open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from prism.common.text import format_count
from prism.models.fitted import Model
from prism.present.answer import Answer
from prism.present.answers.stepmodel import (
    Parts,
    calibrated_parts,
    effects_table,
    interval,
    steps_parts,
)
from prism.present.cells import (
    Cell,
    Column,
    Figure,
    Json,
    Table,
    change,
    count,
    duration,
    lines_table,
    number,
    share,
    spread,
    words,
)
from prism.present.tables import Rule, find

MOST_KERNELS, MOST_IN_DETAILS = 10, 200
"""Kernels shown by default and in detail, those with the largest share of the time first."""
MOST_EFFECTS, MOST_WORKERS = 2, 5
LONGEST_NAME = 40
TITLES = {
    "steps": "Model of step times",
    "calibrated": "Calibrated job",
    "library": "Library of distributions",
}
NOT_IDENTIFIABLE = "Not identifiable from this input"
CHECKED = {
    "measured": "measured",
    "model": "fitted model",
    "resampled": "measured steps, resampled",
    "ideal": "ideal, every effect at 1",
}
OPEN = Rule(
    "not_identifiable", "info", lambda n: n.get("not_identifiable"),
    f"{NOT_IDENTIFIABLE}: {{names}}.",
    lambda n: {"names": "; ".join(x.partition(": ")[0] for x in n["not_identifiable"])},
)  # fmt: skip


def fit_answer(model: Model) -> Answer:
    """Make the answer of a fit: a model of a trace, of step times, a calibrated job, a library."""
    numbers = model.figures()
    kind = str(numbers.get("kind", "trace"))
    inputs = dict.fromkeys(Path(str(source)).name for source in numbers.get("inputs") or ())
    subject = ", ".join(inputs) or "a recording"
    makers = {"steps": steps_parts, "calibrated": calibrated_parts}
    maker = _collectives if "collectives" in numbers else makers.get(kind, _trace)
    head, rules, tables = maker(numbers)
    if numbers.get("seed") is not None:
        head.append(f"seed {numbers['seed']}")
    apart = tuple(text.partition(": ")[::2] for text in numbers.get("not_identifiable") or ())
    tables += [
        Table(NOT_IDENTIFIABLE, (Column(right=False),) * 2, apart, details=True),
        lines_table("Notes on the input", numbers.get("notes")),
    ]
    return Answer(
        title=TITLES.get(kind, "Model of a trace"),
        subject=subject,
        head=f": {', '.join(head)}" if head else "",
        question=f"What does {subject} say about durations, and about what makes them differ?",
        findings=find(numbers, (*rules, OPEN)),
        tables=tuple(table for table in tables if table.rows),
        figures=numbers,
        warnings=tuple(numbers.get("warnings") or ()),
    )


# ------------------------------------------------------------------- of a trace, or of kernels
def _trace(numbers: Json) -> Parts:
    layout = [("steps", "step"), ("dp_size", "replica"), ("stages", "stage")]
    if any("kernel_class" in kernel for kernel in numbers.get("kernels") or ()):
        layout = [("steps", "step"), ("stages", "rank")]  # of profiled kernels a stage is a rank
    head = [format_count(numbers[key], unit) for key, unit in layout if key in numbers]
    return head, RULES, [
        _effects(numbers),
        _step_times(numbers),
        _classes(numbers),
        *_kernels(numbers.get("kernels") or ()),
        _effects_by_kind(numbers),
    ]  # fmt: skip


def _largest(numbers: Json) -> str:
    """Name the effects that most of the variance of durations is due to."""
    effects = numbers.get("effects") or {}
    found = {name: e["share"] for name, e in effects.items() if e.get("share")}
    largest = sorted(found, key=lambda name: -found[name])[:MOST_EFFECTS]
    return ", ".join(f"{words(share(found[name]))} {_label(name)}" for name in largest)


def _label(name: str) -> str:
    return name.replace("_", "-") + (" effect" if name != "residual" else "")


def _errors(numbers: Json) -> dict[str, Cell]:
    """Hold the model's step times against the measured ones."""
    measured, model = (numbers["cross_check"][of] for of in ("measured", "model"))
    errors = {key: change(model[key] / measured[key] - 1.0) for key in ("mean", "p95")}
    cv = measured.get("cv")
    return errors | {"cv": f", CV {model['cv'] / cv:.2f} times the measured one" if cv else ""}


def _slow_workers(numbers: Json) -> dict[str, Cell]:
    """Name workers that are slower than their peers by far."""
    slow = sorted(numbers["lemons"], key=lambda worker: -worker["slowdown"])
    named = (
        f"replica {w['replica']} stage {w['stage']} ({w['slowdown']:.3g} times as slow)"
        for w in slow[:MOST_WORKERS]
    )
    more = len(slow) - MOST_WORKERS
    return {"workers": ", ".join(named), "more": f" and {more} more" if more > 0 else ""}


RULES = (
    Rule("no_model", "answer", lambda n: n.get("why_no_model"),
         "No model, a library of distributions only: {why}.",
         lambda n: {"why": n["why_no_model"]}),
    Rule("largest_effects", "answer", _largest, "Variance of durations: {effects}.",
         lambda n: {"effects": _largest(n)}),
    Rule("model_error", "answer", lambda n: n.get("cross_check"),
         "Model against measured step times: mean {mean}, p95 {p95}{cv}.", _errors),
    Rule("slow_workers", "warning", lambda n: n.get("lemons"),
         "Slower than their peers, left out of the rank effect: {workers}{more}.", _slow_workers),
)  # fmt: skip
"""What a trace, or kernels, say."""


def _effects(numbers: Json) -> Table:
    effects = {n: e for n, e in (numbers.get("effects") or {}).items() if e["cv"] is not None}
    order = sorted(effects, key=lambda name: -(effects[name]["share"] or 0.0))
    columns = (Column("CV"), Column("90 % interval"), Column("of variance"))
    return effects_table({n.replace("_", "-"): effects[n] for n in order}, ("share",), columns)


def _effects_by_kind(numbers: Json) -> Table:
    rows = tuple(
        (name.replace("_", "-"), kind, share(e["cv"]), interval(e.get("ci")), share(e["share"]))
        for name, effect in (numbers.get("effects") or {}).items()
        for kind, e in (effect.get("by_op_kind") or {}).items()
        if e["cv"]
    )
    columns = (Column("effect", right=False), Column("kind of op", right=False), Column("CV"),
               Column("90 % interval"), Column("of variance"))  # fmt: skip
    return Table("Effects by kind of op", columns, rows, details=True)


def _step_times(numbers: Json) -> Table:
    rows = []
    for key, found in (numbers.get("cross_check") or {}).items():
        figures = found if isinstance(found, Mapping) else {"mean": found}
        times = (figures.get(name) for name in ("mean", "p50", "p95"))
        rows.append((CHECKED.get(key, key), *(_time(t, numbers) for t in times),
                     spread(figures) if "cv" in figures else None))  # fmt: skip
    heads = map(Column, ("mean", "p50", "p95", "CV, ± 95 %"))
    return Table("Step time", (Column(right=False), *heads), tuple(rows))


def _time(seconds: float | None, numbers: Json) -> Cell:
    """Write a step time with the digits that the spread makes worth showing."""
    like = numbers["cross_check"]["measured"]
    fine = max(0.02 * (like.get("cv") or 0.0), 1e-4) * like["mean"]
    return duration(seconds, fine, like["mean"])


def _classes(numbers: Json) -> Table:
    rows = tuple(
        (row["name"], count(row["n"]), share(row["cv"]), share(row["step_share"]))
        for row in sorted(numbers.get("classes") or (), key=lambda row: -row["step_share"])
    )
    columns = (Column(right=False), Column("n"), Column("CV"), Column("of the time"))
    notes = ("CV: of durations over the mean of their kernel",)
    return Table("Classes of kernels", columns, rows, notes)


def _kernels(kernels: Sequence[Json]) -> list[Table]:
    """Lay out kernels, the longest ones by default."""
    heads = ("n", "mean", "CV", "p99/p50", "distribution", "of the time")
    columns = (Column(right=False), *(Column(head, right=head != "distribution") for head in heads))
    rows = tuple(map(_kernel, kernels[:MOST_IN_DETAILS]))
    notes: tuple[str, ...] = ()
    more = len(kernels) - MOST_KERNELS
    if more > 0:
        left = sum(kernel["step_share"] for kernel in kernels[MOST_KERNELS:])
        part = f"{words(share(left))} of the time"
        notes = (
            f"{format_count(more)} more ({part}): --details lists them, --json has whole names",
        )
    shown = Table("Kernels", columns, rows[:MOST_KERNELS], notes)
    return [shown, Table("Further kernels", columns, rows[MOST_KERNELS:], details=True)]


def _kernel(kernel: Json) -> tuple[Cell, ...]:
    return (
        shorten(str(kernel["name"])),
        count(kernel["n"]),
        duration(kernel["mean"], 1e-3 * kernel["mean"]),
        share(kernel["cv"]),
        number(kernel["p99_p50"], ".3f"),
        kernel["distribution"],
        share(kernel.get("step_share")),
    )


def shorten(name: str, longest: int = LONGEST_NAME) -> str:
    """Leave out the middle of a long name: both ends tell kernels apart; the JSON has it whole.

    Examples
    --------
    >>> shorten("void at::native::vectorized_elementwise_kernel<4, float>", 30)
    'at::native::ve...nel<4, float>'
    """
    name = name.removeprefix("void ")
    if len(name) <= longest:
        return name
    tail = (longest - 3) // 2
    return f"{name[: longest - 3 - tail]}...{name[-tail:]}"


# ------------------------------------------------------------------------------ of collectives
def _collectives(numbers: Json) -> Parts:
    rows = tuple(map(_collective, numbers["collectives"]))
    heads = ("hosts", "GPUs", "n", "", "90 %", "GB/s", "90 %", "residual", "CV")
    groups = ("", "", "", "latency", "latency", "bus bandwidth", "bus bandwidth", "", "")
    columns = (Column(right=False), *map(Column, heads, groups))
    lines = ["cluster:", "  links:"]
    for tier, link in numbers["links"].items():
        values = ", ".join(f"{key}: {value:g}" for key, value in link.items())
        lines.append(f"    {tier}: {{{values}}}")
    notes = (
        "time = latency + bytes on the bus / bus bandwidth; residual: largest relative deviation "
        "from it; CV: of repeats",
    )
    return [], (), [
        Table("Collectives", columns, rows, notes),
        lines_table("For a job's file", lines if numbers["links"] else ()),
    ]  # fmt: skip


def _collective(row: Json) -> tuple[Cell, ...]:
    low, high = row["latency_ci"]
    slow, fast = row["bus_ci"]
    bus = row["bus_bytes_per_s"]
    worst = max((abs(x) for x in row["off_the_line"].values()), default=None)
    return (
        row["name"], count(row["hosts"]), count(row["gpus"] or None), count(row["n"]),
        duration(row["latency_s"], 1e-3 * row["latency_s"]),
        f"{1e6 * low:.3g} to {1e6 * high:.3g} us",
        None if bus is None else Figure(bus, f"{bus / 1e9:.4g}"),
        None if slow is None else f"{slow / 1e9:.4g} to {fast / 1e9:.4g}",
        share(worst), share(row["repeat_cv"]),
    )  # fmt: skip
