"""`prism compare`: whether two results or measurements differ; or a profile against a job.

Of samples: in mean, percentiles, spread and as whole distributions, with intervals that count what
is independent: clusters, runs, or stretches of a run longer than its memory. It also says how many
of them it takes to see an effect.
"""

import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from scipy.stats import t

import prism
from prism.analyses.comparisons.inputs import (
    RUNS,
    STEPS,
    Input,
    brought_together,
    describe,
    job_differences,
    read_input,
)
from prism.analyses.comparisons.profile import (
    ClassComparison,
    compare_classes,
    read_profile,
    refuse,
)
from prism.analyses.comparisons.quantity import (
    LEVEL,
    POWERS,
    Quantity,
    compare_quantity,
    holm,
    shared_variance,
)
from prism.common.arrays import Array
from prism.common.errors import PrismError, option
from prism.common.resampling import FIGURES, SHIFT_LEVELS
from prism.common.results import Columns, Field, Result, pack_texts, read_texts
from prism.common.text import format_count
from prism.jobs.job import Job
from prism.simulation.execution.context import Progress, fresh_seed

if TYPE_CHECKING:
    import os

    import pandas as pd

KIND = "comparison"
SCHEMA = 1
EFFECT = 0.01
FALSE_ALARM = 0.025
"""So that an alarm is where all of the 95 % interval that is printed lies beyond the limit."""
_SAMPLE_POINTS = 2_000  # values kept of each side for the pictures


def compare(
    a: "str | os.PathLike[str] | Result | xr.Dataset",
    b: "str | os.PathLike[str] | Result | xr.Dataset | Job",
    *,
    column: str | None = None,
    unit: str | None = None,
    pattern: str | None = None,
    where: Mapping[str, str] | None = None,
    effect: float = EFFECT,
    skip: int | None = None,
    steps: str | None = None,
    step_range: str | None = None,
    fail_if_slower: float | None = None,
    false_alarm: float = FALSE_ALARM,
    seed: int | None = None,
    progress: Progress | None = None,
) -> "Comparison | ClassComparison":
    """Compare two results or two measurements of step times; or a profile with a job.

    Parameters
    ----------
    a, b : path or xarray.Dataset
        A result of `prism.estimate`, its file or folder; or step times (CSV, parquet, a
        log), where ``FILE[key=value,...]`` keeps rows. Where each run has one value, these are its
        totals. Or a profiler's trace (a file or a folder), and a job (its file, the name of a
        shipped one): the step's time by kernel class, measured and predicted.
    column, unit, pattern, where, steps
        Choose from a table of step times, or find them in a log's lines, for both; steps, also of a
        profile, are ``A:B``, numbers of the first and the last.
    effect : float
        Relative difference that matters [1]: how many steps, runs or replicates see it is worked
        out, and differences that are surely smaller are called so.
    skip : int, optional
        First steps of each measured run, or of a profile, to leave out; those of runs that stick
        out where None.
    step_range : str, optional
        Of a profile: what the ranges that are steps are called; see `prism.analyses.replay`.
    fail_if_slower : float, optional
        Whether the mean of B is slower than that of A, the golden one, by more than this share [1]
        is decided too, for each quantity: ``gate`` of the summary. Where A has several runs, those
        of B are taken to vary as they do.
    false_alarm : float
        Chance of that where B is slower by just as much, or by 0 where nothing is allowed.
    seed : int, optional
        Of resamples and permutations; fresh where None.
    progress : callable, optional
        Called with quantities done and their number.

    Returns
    -------
    Comparison or ClassComparison
        `prism.summary` gives the figures.

    Examples
    --------
    >>> import prism
    >>> a, b = (prism.estimate("pipeline-8x32", replicates=256, seed=seed) for seed in (1, 2))
    >>> figures = prism.summary(prism.compare(a, b, seed=1))
    >>> figures["quantities"]["step_time"]["figures"]["p50"]["verdict"]
    'same'
    """
    if not 0.0 < effect < 1.0:
        raise PrismError(f"effect {effect:g}: expected a share between 0 and 1, such as 1% or 0.01")
    if fail_if_slower is not None and not 0.0 <= fail_if_slower < 1.0:
        raise PrismError(
            f"{option('fail_if_slower')} {fail_if_slower:g}: expected a share from 0 up to 1, such "
            "as 1% or 0.01"
        )
    if not 0.0 < false_alarm < 0.5:
        raise PrismError(
            f"{option('false_alarm')} {false_alarm:g}: expected a rate above 0 and below 50 %, "
            "such as 2.5% or 0.025"
        )
    one, other = (x.to_xarray() if isinstance(x, Result) else x for x in (a, b))
    profile = read_profile(one, other, step_range)
    if profile is not None:
        refuse({"column": column, "unit": unit, "pattern": pattern, "where": where,
                "fail_if_slower": fail_if_slower})  # fmt: skip
        return compare_classes(*profile, skip, steps)
    seed = fresh_seed() if seed is None else seed
    options = {"column": column, "unit": unit, "where": where, "pattern": pattern}
    first, second = (read_input(source, options, steps, seed) for source in (one, other))
    first, second, pairing, notes = brought_together(first, second, skip)
    names = [name for name in (STEPS, RUNS) if name in first.samples and name in second.samples]
    found: dict[str, Quantity] = {}
    for done, name in enumerate(names):
        shared = 0.0
        if name == RUNS and first.source == second.source == "simulated":
            shared = shared_variance(first.samples[STEPS], second.samples[STEPS], pairing)
        found[name] = compare_quantity(
            first.samples[name], second.samples[name], pairing, effect, seed, shared
        )
        if progress is not None:
            progress(done + 1, len(names))
    tests = [[*q.figures["p_value"], q.ks.p_value or np.nan] for q in found.values()]
    adjusted = holm(np.ravel(tests)).reshape(len(tests), -1)
    data: dict[str, Any] = {}
    quantities: dict[str, Any] = {}
    for (name, quantity), p in zip(found.items(), adjusted, strict=True):
        data |= _variables(name, quantity, p[:-1])
        quantities[name] = _units(quantity, p[-1])
    numbers = {
        "a": describe(first), "b": describe(second), "effect": effect, "level": LEVEL, "seed": seed,
        "fail_if_slower": fail_if_slower, "false_alarm": false_alarm, "quantities": quantities,
        "job_differences": job_differences(first, second),
    }  # fmt: skip
    said = pack_texts(
        notes=[*notes, *_notes(first, second)], warnings=_warnings(first, second, found)
    )
    coords = {
        "quantile": SHIFT_LEVELS, "figure": list(FIGURES), "side": ["a", "b"],
        "end": ["low", "high"], "power": list(POWERS),
    }  # fmt: skip
    attrs = {
        "kind": KIND, "schema": SCHEMA, "prism_version": prism.__version__, "seed": str(seed),
        "summary": json.dumps(numbers),
    }  # fmt: skip
    return Comparison(xr.Dataset(data, coords=coords, attrs=attrs).merge(said))


DIFFERENCES = Columns("difference", (
    Field("quantity", "text", "step_time or time_to_train"),
    Field("figure", "text", "mean, p50, p95 and so on"),
    Field("a", "", "of A, in its unit"),
    Field("b", "", "of B"),
    Field("relative", "1", "B over A, less 1", interval=True),
    Field("p_value", "1", "corrected for all tests (Holm)"),
    Field("verdict", "text", "different, same or open"),
), numbered=True)  # fmt: skip


class Comparison(Result):
    """Whether two results, or two measurements, differ."""

    def is_whole(self) -> bool:
        """Tell whether it has what a gate follows from, which earlier versions did not keep."""
        return '"gate"' in str(self.dataset.attrs.get("summary", '"gate"'))

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        return _figures(self.dataset)

    @cached_property
    def differences(self) -> "pd.DataFrame":
        """Each figure of A and B with the 95 % interval of their relative difference."""
        found = self.figures()["quantities"]
        rows = [
            {"quantity": name, "figure": figure, **row}
            for name, quantity in found.items() for figure, row in quantity["figures"].items()
        ]  # fmt: skip
        return DIFFERENCES.frame(rows)


def _figures(dataset: xr.Dataset) -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads(dataset.attrs["summary"])
    said = {name: read_texts(dataset, name) for name in ("notes", "warnings")}
    numbers |= {name: texts for name, texts in said.items() if name not in numbers}
    for name, quantity in numbers["quantities"].items():
        figures: dict[str, dict[str, Any]] = {str(x): {} for x in dataset["figure"].values}
        for key in _VARIABLES:
            for row, values in zip(figures.values(), dataset[f"{name}_{key}"].values, strict=True):
                row[key] = _plain(values)
        for row in figures.values():
            row["a"], row["b"] = row.pop("value")
            if row["needed"]:
                counts = [None if n is None else int(n) for n in row["needed"]]
                row["needed"] = dict(zip(map(str, POWERS), counts, strict=True))
        for row in (*figures.values(), quantity["ks"]):
            row["verdict"] = _verdict(row, numbers["effect"])
        quantity["figures"] = figures
    limit, rate = numbers.pop("fail_if_slower", None), numbers.pop("false_alarm", None)
    gates = {name: quantity.pop("gate") for name, quantity in numbers["quantities"].items()}
    if limit is not None:
        numbers["gate"] = _gate(numbers["quantities"], gates, limit, rate)
    return numbers


def _gate(
    quantities: Mapping[str, Any], errors: Mapping[str, Any], limit: float, rate: float
) -> dict[str, Any]:
    """Decide for each mean whether B is slower by more than a share, at a rate of false alarms."""
    checks = []
    for name, quantity in quantities.items():
        row, of = quantity["figures"]["mean"], errors[name]
        ratio, error = math.log1p(row["relative"] or 0.0), of["error"]
        far, seen = (float(t.isf(level, of["dof"])) * error for level in (rate, 1.0 - POWERS[0]))
        low, high = math.expm1(ratio - far), math.expm1(ratio + far)
        verdict = "slower" if low > limit else "not_slower" if high <= limit else "open"
        check = {"quantity": name, "figure": "mean", "verdict": verdict, "a": row["a"]}
        check |= {key: row[key] for key in ("b", "relative")}
        checks.append(check | {
            "relative_ci": [low, high], "spread_from": of["spread_from"],
            "detectable_80": math.expm1(math.log1p(limit) + far + seen),
        })  # fmt: skip
    failed = any(check["verdict"] == "slower" for check in checks)
    return {"fail_if_slower": limit, "false_alarm": rate, "failed": failed, "checks": checks}


def _plain(values: Any) -> Any:
    """Write numbers as JSON has them: null where nothing is known."""
    if np.isnan(values).all():
        return None
    if np.ndim(values):
        return [_plain(x) for x in values]
    return float(values) if np.isfinite(values) else None


def _units(quantity: Quantity, p_adjusted: float) -> dict[str, Any]:
    """Say what is independent in either side, and what KS finds."""
    sides = {"a": quantity.a, "b": quantity.b}
    return {
        "units": {key: x.kind for key, x in sides.items()},
        "n_units": {key: x.n_units for key, x in sides.items()},
        "n": {key: int(x.values.size) for key, x in sides.items()},
        "paired_by": quantity.pairing, "between_share": quantity.between_share,
        "gate": quantity.gate._asdict(),
        "ks": quantity.ks._asdict() | {"p_adjusted": _plain(p_adjusted)},
    }  # fmt: skip


def _verdict(row: Mapping[str, Any], effect: float) -> str | None:
    """Say ``different``, ``same`` to within the effect, or ``open``; None where not tested."""
    if row["p_adjusted"] is None:
        return None
    if row["p_adjusted"] < LEVEL:
        return "different"
    low, high = row.get("relative_ci") or (-math.inf, math.inf)
    return "same" if -effect / (1.0 + effect) <= low and high <= effect else "open"


def _notes(a: Input, b: Input) -> list[str]:
    """Say what was done to either side, and in what they are unlike."""
    notes = list(dict.fromkeys([*a.notes, *b.notes]))
    if a.job and b.job and a.job != b.job:
        notes.append(f"other jobs: A is {a.job}, B is {b.job}")
    if a.source == b.source == "simulated":
        lengths = {int(x.figures.get("steps_per_run", 0)) for x in (a, b)} - {0}
        if len(lengths) > 1:
            notes.append("runs of other lengths: time_to_train compares "
                         f"{' and '.join(f'{n:,}' for n in sorted(lengths))} steps")  # fmt: skip
    return notes


def _warnings(a: Input, b: Input, found: Mapping[str, Quantity]) -> list[str]:
    """Say what the comparison cannot tell."""
    out = []
    if {a.source, b.source} == {"simulated", "measured"}:
        out.append(
            "a simulation against a measurement: this only says whether they differ; prism "
            "validate says how well the job predicts, with its own p-value"
        )
    if all(np.array_equal(q.a.values, q.b.values) for q in found.values()):
        out.append("A and B hold the same values: the same file, or a copy")
    steps = found.get(STEPS)
    single = [x for x in "ab" if steps and getattr(steps, x).kind == "steps"]
    if single:
        who = f"side {single[0].upper()}"
        rest = "It is taken to vary as the runs of the other side do"
        if len(single) == 2:
            who, rest = "either side", (
                "What follows is about these two runs, not about two versions; measure several "
                "runs of each"
            )  # fmt: skip
        elif {a.source, b.source} != {"measured"}:
            rest = "What follows is about this run, not about its version; measure several"
        out.append(
            f"one run on {who}: what runs of one version differ by cannot be seen from it. {rest}"
        )
    if a.source == b.source == "simulated" and a.seed != b.seed:
        out.append(
            f"other seeds ({a.seed} and {b.seed}): with one --seed both are simulated with the "
            "same random numbers, and far smaller differences are seen"
        )
    few = [x.n_units for x in (steps.a, steps.b) if x.kind == "runs"] if steps else []
    if few and min(few) < 4 and not single:
        out.append(
            f"{format_count(min(few), 'run')} on a side: their own spread is hardly known, so "
            "intervals are wide"
        )
    return out


def _variables(name: str, quantity: Quantity, p_adjusted: Array) -> dict[str, Any]:
    """Lay figures, distribution functions and the shift by quantile into variables."""
    p = np.linspace(0.0, 1.0, _SAMPLE_POINTS)
    data: dict[str, Any] = {}
    for side, sample in (("a", quantity.a), ("b", quantity.b)):
        values = sample.values
        kept = np.sort(values) if values.size <= _SAMPLE_POINTS else np.quantile(values, p)
        data[f"{name}_{side}"] = (
            f"{name}_{side}_value", kept, {"units": "s", "long_name": f"{name} of {side.upper()}"}
        )  # fmt: skip
    for key, values in quantity.shift.items():
        data[f"{name}_{key}"] = ("quantile", values, {"units": "s", "long_name": _SHIFT[key]})
    for key, (dims, units, text) in _VARIABLES.items():
        values = p_adjusted if key == "p_adjusted" else quantity.figures[key]
        data[f"{name}_{key}"] = (dims, values, {"units": units, "long_name": text})
    return data


_SHIFT = {
    "quantile_a": "quantile of A",
    "shift": "quantile of B less that of A",
    "shift_lo": "lower end of its simultaneous 95 % band",
    "shift_hi": "upper end of its simultaneous 95 % band",
}
_VARIABLES = {
    "value": (("figure", "side"), "s; of the CV 1", "figure of either side"),
    "difference": (("figure",), "s; of the CV 1", "figure of B less that of A"),
    "difference_ci": (("figure", "end"), "s; of the CV 1", "its 95 % interval"),
    "relative": (("figure",), "1", "figure of B over that of A, less 1"),
    "relative_ci": (("figure", "end"), "1", "its 95 % interval"),
    "p_value": (("figure",), "1", "p-value of no difference"),
    "p_adjusted": (("figure",), "1", "the same, corrected for all tests (Holm)"),
    "detectable": (("figure",), "1", "relative difference seen with 80 % power"),
    "needed": (("figure", "power"), "1", "runs, cluster draws or steps a side to see the effect"),
}
