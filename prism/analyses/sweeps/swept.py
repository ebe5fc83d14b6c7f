"""The typed result of `prism sweep`: a row of figures by setting, and which of them are best."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.analyses.differences import pareto
from prism.common.results import (
    Columns,
    Field,
    Result,
    pack_figures,
    pack_texts,
    read_figures,
    read_texts,
)
from prism.simulation.summary import QUANTILES

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

MEASURES = ("p50", "p95", "mean")
BY_RUN = ("time_to_train", "done_by")
OBJECTIVES = (*MEASURES, *BY_RUN, "carbon")
CHOICES = {"fastest": "p50", "robust": "p95"}
BARE = ("data_parallel", "schedule")  # keys whose values say what they are

ROWS = Columns("setting", (
    Field("figures", "text", "full, screen (of a few cluster draws) or bound (not simulated)"),
    Field("own", "flag", "whether it is the job as it is"),
    Field("world_size", "count", "GPUs"),
    Field("likely_fits", "flag", "whether it is likely to fit, so that it may be chosen"),
    Field("work", "1", "tokens of a step over those of the job's"),
    Field("at_least", "s", "time that a step takes at least, for the tokens of one of the job's"),
    Field("ideal_step_time", "s", "step time with every effect at 1"),
    Field("clusters", "count", "cluster draws simulated"),
    Field("replicates", "count", "steps simulated"),
    Field("mfu", "1", "model flop per second and GPU over the device's peak"),
    Field("exposed_communication", "1", "share of the step that free communication would save"),
    Field("exposed_communication_se", "1", "its standard error, by cluster draw"),
    *(
        field for m, name in (("p50", "p50 of the step"), ("p95", "p95 of the step"),
                              ("mean", "mean step")) for field in (
            Field(m, "s", name),
            Field(f"{m}_se", "s", f"standard error of the {name}, by cluster draw"),
            Field(f"{m}_same_work", "s", f"{name}, for the tokens of one step of the job"),
            Field(f"{m}_change", "1", f"change of the {name} against the job's own setting"),
            Field(f"{m}_change_se", "1", "its standard error"),
        )
    ),
    Field("gpu_power_w", "W", "mean power of a GPU"),
    Field("gpu_kwh", "kWh", "energy of the GPUs in a step, without hosts or cooling"),
    Field("carbon_same_work", "kg", "CO2e of a step, making included, for the tokens of the job's"),
    Field("p_done", "1", "P(the run is done by its deadline)"),
    Field("tokens_per_second", "1/s", "tokens of the whole job per second, in the mean"),
    Field("best_change", "1", "change of the objective against the best setting"),
    Field("best_change_se", "1", "its standard error"),
    Field("indistinguishable_from_best", "flag", "whether that change is within its error"),
), numbered=True)  # fmt: skip
_TIMES = (
    Field("mean", "s", "mean of the samples"),
    Field("std", "s", "standard deviation"),
    Field("cv", "1", "coefficient of variation"),
    *(Field(q, "s", f"quantile at {p:g}", interval=q == "p95") for q, p in QUANTILES.items()),
    Field("mean_se", "s", "standard error of the mean, by cluster draw"),
    Field("mean_ci90_low", "s", "90 % interval of the mean: low"),
    Field("mean_ci90_high", "s", "90 % interval of the mean: high"),
    Field("within_cluster_std", "s", "standard deviation within a cluster draw"),
    Field("between_cluster_std", "s", "standard deviation between cluster draws"),
    Field("between_cluster_at_most", "s", "its upper 95 % bound where it may be zero"),
    Field("cluster_draws", "count", "cluster draws simulated"),
)
STEP_TIMES = Columns("setting", _TIMES, numbered=True, prefix="step_time_")
RUN_TIMES = Columns("setting", (
    *_TIMES, Field("model_error_std", "s", "standard deviation by the model's error"),
), numbered=True, prefix="time_to_train_")  # fmt: skip
BREAK_EVENS = Columns("break_even", (
    Field("below", "text", "setting of the other keys with the shortest mean run below the rate"),
    Field("above", "text", "the same above it"),
    Field("rate", "1/(1000 d)", "failures per 1,000 node-days; none within the range if missing"),
    Field("rate_low", "1/(1000 d)", "its 95 % interval: low; missing: below the range"),
    Field("rate_high", "1/(1000 d)", "its 95 % interval: high"),
    Field("mttf", "s", "mean time between failures of the whole job at that rate"),
), numbered=True, prefix="break_even_")  # fmt: skip
MEMORY = Columns("setting", (
    Field("stage", "count", "stage of the fullest GPU"),
    Field("gib", "GiB", "memory of the fullest GPU, estimated"),
    Field("allocated_gib", "GiB", "of it by the job's tensors"),
    Field("ci_gib_low", "GiB", "90 % interval: low"),
    Field("ci_gib_high", "GiB", "90 % interval: high"),
    Field("limit_gib", "GiB", "memory of a GPU that can be used"),
    Field("p_fits", "1", "probability that it fits, by the error of the estimate"),
), numbered=True, prefix="memory_")  # fmt: skip
NESTED = {"memory": MEMORY, "step_time": STEP_TIMES, "time_to_train": RUN_TIMES}
PAIRS = ("mean_ci90", "ci_gib")  # intervals that are two fields of a table and one of the JSON
FIGURES = (
    Field("objective", "text", "what rows are sorted by"),
    Field("layouts", "flag", "whether all layouts were asked for"),
    Field("min_p_fits", "1", "P(fits) below which a setting is not chosen"),
    Field("job_gpus", "count", "GPUs of the job"),
    Field("tokens_per_step", "count", "tokens of a step of the job"),
    Field("clusters_simulated", "count", "cluster draws over all settings"),
    Field("rank_clusters", "count", "cluster draws whose ranks alone were drawn"),
    Field("sweep_seconds", "s", "elapsed time of the call"),
    Field("cpu_seconds", "s", "time of the processor"),
    *(Field(f"p_correct_{name}", "1", f"P(no setting has a {of} better by 0.1 % than this)")
      for name, of in ({**CHOICES, "best": "objective"}).items()),
)  # fmt: skip
NAMES = {
    "job_gpus": "world_size",
    "clusters_simulated": "clusters",
    "sweep_seconds": "wall_seconds",
}
"""Figures whose variables have other names, as rows have variables of theirs."""


class Sweep(Result):
    """Settings of a job side by side.

    Examples
    --------
    >>> import prism
    >>> vary = {"parallelism.microbatches": [16, 32]}
    >>> result = prism.sweep("pipeline-8x32", vary, replicates=128, seed=1)
    >>> result.settings[["parallelism.microbatches", "p50"]].round().values.tolist()  # s
    [[32.0, 121.0], [16.0, 71.0]]
    """

    def is_whole(self) -> bool:
        """See `Result.is_whole`."""
        return "summary" not in self.attrs

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        found = read_figures(FIGURES, self.dataset)
        sure = {name: found.pop(f"p_correct_{name}", None) for name in (*CHOICES, "best")}
        chosen = self.choose()
        out = {
            "job": self.attrs["job_name"], "seed": int(self.attrs["seed"]), "varied": self.varied,
            **{NAMES.get(name, name): value for name, value in found.items()},
            "rows": self._rows, "refused": self._refused, **chosen,
            "p_correct": {name: p for name, p in sure.items() if p is not None},
            **{name: read_texts(self.dataset, name) for name in ("notes", "warnings")},
        }  # fmt: skip
        evens = BREAK_EVENS.rows(self.dataset)
        out |= {"break_even": evens} if evens else {}
        return out | ({"by_setting": self.by_setting} if self.by_hand else {})

    @property
    def settings(self) -> "pd.DataFrame":
        """Figures by setting, sorted by the objective: values of the varied keys, then `ROWS`."""
        import pandas as pd

        table = ROWS.frame(self._rows)
        keys = pd.DataFrame({key: [row[key] for row in self._rows] for key in self.varied})
        for name in (
            "memory_gib", "memory_limit_gib", "memory_p_fits",
            "time_to_train_mean", "time_to_train_mean_se", "time_to_train_p95",
        ):  # fmt: skip
            if name in self.dataset:
                table[name] = self.dataset[name].values
        return pd.concat([keys, table], axis=1).__finalize__(table)

    @property
    def break_even(self) -> "pd.DataFrame":
        """Failure rates from which another setting has the shortest mean run."""
        return BREAK_EVENS.frame(BREAK_EVENS.rows(self.dataset))

    @property
    def refused(self) -> "pd.DataFrame":
        """Settings that were refused, and why."""
        import pandas as pd

        return pd.DataFrame(self._refused, columns=[*self.varied, "reason"])

    @cached_property
    def varied(self) -> list[str]:
        """Keys of the job that differ."""
        return read_texts(self.dataset, "varied")

    @cached_property
    def by_hand(self) -> list[str]:
        """Keys that were varied by hand where layouts were too."""
        return read_texts(self.dataset, "by_hand")

    @cached_property
    def _rows(self) -> list[Row]:
        data = self.dataset
        rows = ROWS.rows(data)
        for name, columns in NESTED.items():
            nested = columns.rows(data) or [{}] * len(rows)
            for row, figures in zip(rows, nested, strict=True):
                known = any(value is not None for value in figures.values())
                row[name] = _joined(figures) if known else None
        if "memory_part" in data.dims:
            parts = data["memory_parts"].values
            for row, gib in zip(rows, parts, strict=True):
                named = zip(data["memory_part"].values, gib, strict=True)
                if row["memory"]:
                    row["memory"]["parts"] = {str(k): float(x) for k, x in named if x >= 0.0}
        values = {key: data[key.replace(".", "_")].values.tolist() for key in self.varied}
        return [
            {key: plain_value(values[key][i]) for key in self.varied} | row
            for i, row in enumerate(rows)
        ]

    @cached_property
    def _refused(self) -> list[dict[str, str]]:
        data = self.dataset
        if "refused" not in data.dims:
            return []
        names = [*self.varied, "reason"]
        columns = [data[f"refused_{name.replace('.', '_')}"].values for name in names]
        return [
            {name: str(text) for name, text in zip(names, row, strict=True) if text}
            for row in zip(*columns, strict=True)
        ]

    def choose(self, group: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Say which rows are fastest, robust, best by the objective, and on the frontier.

        Of those that are likely to fit, and of a group that was varied by hand; None where none is.
        """
        return choose(self._rows, str(self.attrs["objective"]), group)

    @property
    def by_setting(self) -> list[dict[str, Any]]:
        """Give the best layouts of every setting varied by hand."""
        found: list[dict[str, Any]] = []
        for row in self._rows:
            group = {key: row[key] for key in self.by_hand}
            if group not in found:
                found.append(group)
        grid = json.loads(self.attrs["call"])["vary"]  # whose order they keep
        places = {key: [plain_value(text) for text in grid[key]] for key in self.by_hand}
        found.sort(key=lambda group: [places[key].index(group[key]) for key in group])
        chosen = [self.choose(group) for group in found]
        names = (*CHOICES, "frontier")
        return [
            group | {name: best[name] for name in names}
            for group, best in zip(found, chosen, strict=True)
        ]

    @property
    def same_work_differs(self) -> bool:
        """Whether steps do unequal work, so that times are compared per token."""
        return any(abs(row["work"] - 1.0) > 1e-9 for row in self._rows)


def make_sweep(
    rows: Sequence[Row], refused: Sequence[Row], figures: Mapping[str, Any],
    texts: Mapping[str, Sequence[str]], attrs: Mapping[str, Any], break_even: Sequence[Row] = (),
) -> Sweep:  # fmt: skip
    """Lay rows, with the settings that were refused, into a result."""
    import xarray as xr

    varied = list(texts["varied"])
    coords: dict[str, Any] = {
        key.replace(".", "_"): ("setting", _column([row[key] for row in rows])) for key in varied
    }
    parts = [ROWS.pack(rows)]
    for name, columns in NESTED.items():
        if any(row[name] for row in rows):
            parts.append(columns.pack([_split(row[name] or {}) for row in rows]))
    data: dict[str, Any] = {}
    held = [(row["memory"] or {}).get("parts", {}) for row in rows]
    if named := list(dict.fromkeys(name for own in held for name in own)):
        gib = np.array([[own.get(name, -1.0) for name in named] for own in held])
        about = {"units": "GiB", "long_name": "memory by part; -1: none"}
        data["memory_parts"] = (("setting", "memory_part"), gib, about)
        coords["memory_part"] = named
    for name in (*varied, "reason") if refused else ():
        values = np.array([str(row.get(name, "")) for row in refused], object)
        about = {"long_name": f"of settings that were refused: {name}"}
        data[f"refused_{name.replace('.', '_')}"] = ("refused", values, about)
    known = {
        field.name: figures[NAMES.get(field.name, field.name)] for field in FIGURES
        if NAMES.get(field.name, field.name) in figures
    }  # fmt: skip
    parts += [BREAK_EVENS.pack(break_even)] if break_even else []
    parts += [xr.Dataset(data, coords), pack_figures(FIGURES, known), pack_texts(**texts)]
    named_attrs = {"kind": "sweep", "objective": figures["objective"]}
    return Sweep(xr.merge(parts).assign_attrs({**attrs, **named_attrs}))


def _split(row: Row) -> Row:
    """Put intervals that are no field's own into two fields."""
    return {**row, **{
        f"{name}_{end}": value for name in PAIRS if row.get(name)
        for end, value in zip(("low", "high"), row[name], strict=True)
    }}  # fmt: skip


def _joined(row: Row) -> Row:
    """Undo `_split`."""
    row = dict(row)
    for name in PAIRS:
        pair = [row.pop(f"{name}_{end}", None) for end in ("low", "high")]
        if f"{name}_low" in row or pair[0] is not None:
            row[name] = pair
    return row


def _column(values: list[Any]) -> list[Any]:
    """Numbers of one type as such, a mixture as text."""
    alike = {type(value) for value in values}
    return values if alike in ({int}, {float}) else [str(value) for value in values]


def plain_value(text: Any) -> Any:
    """Give a value as a number or a word where its text is one, else its text.

    Examples
    --------
    >>> plain_value("8"), plain_value("1e-3"), plain_value("fsdp"), plain_value("[1, 2]")
    (8, 0.001, 'fsdp', '[1, 2]')
    """
    if not isinstance(text, str):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def of_step(objective: str) -> str:
    """Name the figure of a step that settings are compared by under an objective."""
    return "mean" if objective in BY_RUN else objective


def choose(
    rows: Sequence[Row], objective: str, group: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Say which rows are fastest, robust, best by the objective, and on the frontier."""
    final = [
        i for i, row in enumerate(rows) if row["figures"] == "full" and row["likely_fits"]
        and all(row[key] == value for key, value in (group or {}).items())
    ]  # fmt: skip
    measures = {**CHOICES, "best": of_step(objective)}
    if not final:
        return {**dict.fromkeys(measures), "frontier": []}
    found: dict[str, Any] = {
        name: min(final, key=lambda i: float(rows[i][f"{measure}_same_work"]))
        for name, measure in measures.items()
    }
    if objective in BY_RUN:
        found["best"] = final[0]  # as rows are sorted
    both = np.array([[rows[i][f"{m}_same_work"] for m in CHOICES.values()] for i in final])
    return found | {"frontier": [final[k] for k in pareto(both)]}


def key_name(key: str) -> str:
    """Name a key of the job without its block: ``vpp``, ``network.latency_us``, ``step.cv``."""
    return ".".join(key.split(".")[1:][-2:]) or key


def label(row: Mapping[str, Any], varied: Sequence[str]) -> str:
    """Name a setting: ``tp 8 pp 16 dp 128``; a 1 is left out where many keys vary."""
    words = []
    for key in varied:
        if row[key] == 1 and len(varied) > 3 and key.startswith("parallelism."):
            continue
        name = key_name(key)
        words.append(str(row[key]) if name in BARE else f"{name} {row[key]}")
    return " ".join(words) or "as is"
