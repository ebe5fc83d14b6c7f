"""The answer of a validation: whether a prediction can be distinguished from a measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prism import plots
from prism.analyses.validate import Validation
from prism.common.errors import option
from prism.common.text import format_count, format_share, percent_change
from prism.present.answer import Answer, Errors, Picture
from prism.present.cells import Cell, Column, Figure, Json, Table, change, duration
from prism.present.tables import Rule, find

SIGNIFICANT = 0.05
SPLITS = {"first-half": "the first half of its steps", "even": "every other of its steps"}
COLUMNS = (
    ("copy", "copy of training"), ("line", "line in microbatches"),
    ("independent", "independent sampling"),
)  # fmt: skip
FIGURES = (
    ("mean_error", "error of the mean"), ("p50_error", "error of p50"),
    ("p95_error", "error of p95"), ("p99_error", "error of p99"),
    ("cv_ratio", "CV, predicted / measured"), ("ks", "KS distance"),
)  # fmt: skip
DETAILS = (
    ("p95_error_same_n", "error of p95 of samples as large as the measured one"),
    ("ks_aligned", "KS distance, medians aligned"), ("wasserstein", "Wasserstein distance"),
)  # fmt: skip


def validation_answer(result: Validation) -> Answer:
    """Make the answer of a validation."""
    numbers = result.figures()
    what = "time-to-train" if numbers.get("quantity") == "time_to_train" else "step time"
    subject = str(numbers.get("job") or _name(numbers.get("trace") or numbers.get("measured")))
    return Answer(
        title="Predicted against measured",
        subject=subject,
        head=_head(numbers),
        question=_question(numbers, what, subject),
        findings=find(numbers, RULES),
        tables=(_table("", numbers, FIGURES), _table("More figures", numbers, DETAILS, True)),
        figures=numbers,
        warnings=tuple(numbers.get("warnings") or ()),
        assumptions=tuple(_assumptions(numbers)),
        facts=tuple(
            (label, cell) for key, label in FIGURES
            if key in ("p50_error", "p95_error")
            and isinstance(cell := _figure(key, numbers.get(key)), Figure)
        ),
        pictures=(Picture(
            "validation",
            f"Predicted and measured {what} of {subject}: distribution functions and quantiles",
            lambda: plots.draw_validation(result),
            "On the left distribution functions, on the right predicted against measured "
            "quantiles; on the dashed line they agree. The band is what the prediction does over "
            "refits.", _errors(numbers),
        ),),
    )  # fmt: skip


def _name(path: Any) -> str:
    return Path(str(path)).name if path else "a recording"


def _head(numbers: Json) -> str:
    """Say how much was measured, and how much the prediction is based on."""
    unit = "runs" if numbers.get("quantity") == "time_to_train" else "steps"
    head = [f", {format_count(numbers['n_measured'])} measured {unit}"]
    if numbers.get("n_effective") is not None:
        head[0] += f" (effective sample size {numbers['n_effective']:.1f})"
    if numbers.get("n_train"):
        head.append(f"{format_count(numbers['n_train'])} to train on")
    if numbers.get("seed") is not None:
        head.append(f"seed {numbers['seed']}")
    return ", ".join(head)


def _question(numbers: Json, what: str, subject: str) -> str:
    n, trace, train = int(numbers["n_measured"]), numbers.get("trace"), numbers.get("train")
    if trace:
        split = SPLITS.get(str(train), f"{train} of its steps")
        return (
            f"Fitted on {split}, does the prediction of {_name(trace)} differ from the "
            f"{format_count(n)} that were held out ({what})?"
        )
    of = f"{format_count(n, 'measured value')} of {_name(numbers.get('measured'))}"
    return f"Does the prediction of {subject} differ from {of} ({what})?"


def _verdict(numbers: Json) -> str:
    """Tell what the p-value says: ``differ``, ``few`` or ``alike``; nothing where there is none."""
    p_value, n = numbers.get("ks_p_value"), int(numbers.get("bootstrap") or 0)
    if p_value is None or p_value <= SIGNIFICANT:
        return "" if p_value is None else "differ"
    return "few" if 0 < n and p_value <= 1.0 / (n + 1) else "alike"  # as little as so few can show


def _tested(numbers: Json) -> dict[str, Cell]:
    """Write the figures of the test, and how many repetitions it had."""
    return {
        "ks": f"{numbers['ks']:.3f}", "p": f"{numbers['ks_p_value']:.3g}",
        "n": str(int(numbers.get("bootstrap") or 0)), "option": option("bootstrap"),
    }  # fmt: skip


def _p95(numbers: Json) -> dict[str, Cell]:
    """Write the error of p95, against that of the training part and of the measurement."""
    floor, se = numbers.get("p95_floor"), numbers.get("p95_measured_se")
    text, error = percent_change(numbers["p95_error"]), abs(numbers["p95_error"])
    if floor is not None:
        side = "no more than" if error <= abs(floor) else "more than"
        text += f", {side} training and measured part differ ({format_share(floor, 2)})"
    if se is not None:
        side = "within" if error <= 2.0 * se else "beyond"
        text += f"; {side} two standard errors of the measured p95 ({format_share(se, 2)} each)"
    return {"error": text}


def _has_p95(numbers: Json) -> bool:
    return numbers.get("p95_error") is not None


def _off(numbers: Json) -> str:
    """List errors whose intervals leave out that there is none."""
    off = [
        f"{name} ({percent_change(numbers[key], numbers[f'{key}_ci'])})"
        for name, key in (("mean", "mean_error"), ("p50", "p50_error"), ("p95", "p95_error"))
        if (ends := numbers.get(f"{key}_ci")) and not ends[0] <= 0.0 <= ends[1]
    ]
    if (ends := numbers.get("cv_ratio_ci")) and not ends[0] <= 1.0 <= ends[1]:
        off.append(f"CV ({numbers['cv_ratio']:.2f} times, {ends[0]:.2f} to {ends[1]:.2f})")
    return ", ".join(off)


def _detectable(numbers: Json) -> dict[str, str]:
    """Say how large an error as few values would have shown."""
    seen = numbers.get("detectable_80") or {}
    runs, n = numbers.get("n_runs") or 1, numbers["n_measured"]
    known = [f"{name} {format_share(seen[name], 2)}"
             for name in ("mean", "p50", "p95") if seen.get(name) is not None]  # fmt: skip
    if seen.get("cv") is not None:
        known.append(f"CV a factor of {1.0 + seen['cv']:.2g}")
    unknown = " and ".join(name for name in ("p50", "p95") if seen.get(name) is None)
    return {
        "of": f"{format_count(n, 'value')} of {format_count(runs, 'run')}",
        "known": ", ".join(known),
        "unknown": unknown and f"; {unknown} not tested, too few values",
    }


RULES = (
    Rule("distribution", "answer", lambda n: _verdict(n) == "differ",
         "Prediction and measurement differ (KS {ks}, p = {p}).", _tested),
    Rule("distribution", "answer", lambda n: _verdict(n) == "few",
         "Prediction and measurement lie further apart than in any of {n} simulated repetitions, "
         f"too few to say that they differ: {{option}} {1.0 / SIGNIFICANT:.0f} or more "
         "(KS {ks}, p = {p}).", _tested),
    Rule("distribution", "answer", lambda n: _verdict(n) == "alike",
         "Prediction and measurement are statistically indistinguishable as distributions "
         "(KS {ks}, p = {p}).", _tested),
    Rule("distribution", "answer",
         lambda n: not _verdict(n) and None not in (n.get("ks"), n.get("ks_critical_5pct")),
         "KS {ks} is {side} the {critical} that a known distribution exceeds in 5 % of cases; no "
         "p-value without --bootstrap.",
         lambda n: {"ks": f"{n['ks']:.3f}", "critical": f"{n['ks_critical_5pct']:.3f}",
                    "side": "above" if n["ks"] > n["ks_critical_5pct"] else "not above"}),
    Rule("p95", "answer", _has_p95, "The predicted p95 is off by {error}.", _p95),
    Rule("errors", "answer", lambda n: _has_p95(n) and bool(_off(n)),
         "Off by more than chance: {off}.", lambda n: {"off": _off(n)}),
    Rule("detectable", "warning", lambda n: _has_p95(n) and not _detectable(n)["known"],
         "{of} cannot bound any error.", _detectable),
    Rule("detectable", "answer", lambda n: _has_p95(n) and bool(_detectable(n)["known"]),
         "Errors that {of} would miss with 20 % probability: {known}{unknown}.", _detectable),
)  # fmt: skip


def _assumptions(numbers: Json) -> list[str]:
    """Say what the p-value and the prediction take as known."""
    out = []
    if numbers.get("ks_p_value") is not None:
        refit = "refitted" if numbers.get("ks_p_value_refit") else "not refitted"
        out.append(f"p-value from repeating the comparison in simulation, the model {refit}")
    if numbers.get("dependence") == "none":
        out.append("ops are independent of each other (dependence: none)")
    return [*out, *(numbers.get("notes") or ())]


def _table(
    title: str, numbers: Json, figures: tuple[tuple[str, str], ...], details: bool = False
) -> Table:
    """Lay out the prediction and the baselines, one column each."""
    baselines = numbers.get("baselines") or {}
    found = [numbers, *(baselines[key] for key, _ in COLUMNS if baselines.get(key))]
    heads = [label for key, label in COLUMNS if baselines.get(key)]
    columns = (
        Column(right=False), Column("prediction"), *(Column(head, "baselines") for head in heads),
    )  # fmt: skip
    rows = tuple(
        (label, *(_figure(key, each.get(key)) for each in found))
        for key, label in figures if any(each.get(key) is not None for each in found)
    )  # fmt: skip
    return Table(title, columns, rows, details=details)


def _figure(key: str, value: float | None) -> Cell:
    if value is None:
        return None
    if key == "wasserstein":
        return duration(value, 0.01 * value if value > 0 else None)
    return change(value) if "_error" in key else Figure(value, f"{value:.3f}")


def _errors(numbers: Json) -> Errors:
    """Write how far draws and the measurement itself may be off."""
    drawn = numbers.get("replicates")
    text = format_count(drawn, "predicted value") if drawn else "that of the predicted values"
    if numbers.get("bootstrap"):
        least = 1.0 / (int(numbers["bootstrap"]) + 1)
        text += f"; p-value from {format_count(numbers['bootstrap'])} simulated repetitions, so no "
        text += f"less than {least:.2g}"
    data = format_count(numbers["n_measured"], "measured value")
    if numbers.get("n_effective") is not None:
        data += f", effective sample size {numbers['n_effective']:.1f}"
    if numbers.get("p95_measured_se") is not None:
        data += f"; standard error of their p95 {format_share(numbers['p95_measured_se'], 2)}"
    return Errors(text, data)
