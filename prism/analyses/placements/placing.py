"""The typed result of `prism place`: placements, alternatives, what a slow node costs by its place.

Rows of a table may be subtracted: all ran on the same draws. Lists of stages are words in a table.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.cluster.nodemap import Placement
from prism.common.errors import PrismError
from prism.common.results import (
    Columns,
    Field,
    Result,
    pack_figures,
    pack_texts,
    read_figures,
    read_texts,
)
from prism.jobs.hostfiles import (
    COLUMNS,
    as_ranges,
    host_order,
    launcher_files,
    placement_csv,
    slot_rows,
)
from prism.simulation.results import job_of

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]

MOST_NUMBERS = 5  # commas between numbers; where there are more, how many numbers there are is said
NO_SLACK, MOST_SLACK = 5e-4, 1.0
"""Slack below which there is none, and up to which it is looked for [1]."""
SAME_NODES = {"all_in_one_replica": "all in one replica", "random": "placed at random, mean"}
"""Alternatives that place the same nodes elsewhere, and what they are called."""
HEALTHY = "if the slow nodes were as fast as the others"
OBJECTIVES = {"time_to_train": "time-to-train"}
STEPS = ("mean", "p50", "p95", "p99", "objective")  # times of a row that are of its own work

_TIMES = (
    Field("mean", "s", "mean step"),
    Field("p50", "s", "p50 of the step"),
    Field("p95", "s", "p95 of the step"),
    Field("p99", "s", "p99 of the step"),
    Field("p95_se", "s", "standard error of p95"),
    Field("objective", "s", "what is to be small"),
    Field("objective_se", "s", "its standard error"),
    Field("saved", "1", "share of the current objective that is saved", form="gain", interval=True),
    Field("p50_saved", "1", "share of the current p50 that is saved", form="gain", interval=True),
    Field("p95_saved", "1", "share of the current p95 that is saved", form="gain", interval=True),
    Field("run_saved", "s", "mean time saved over the run's steps", interval=True),
)
PLACEMENTS = Columns("placement", (
    Field("name", "text"),
    Field("stages", "text", "stages of its slow nodes"),
    Field("replicas", "text", "replicas of its slow nodes"),
    *_TIMES,
    Field("nominal", "s", "deterministic step"),
    Field("hosts_changed", "count", "slots that get another node"),
))  # fmt: skip
ALTERNATIVES = Columns("alternative", (
    Field("name", "text"),
    Field("label", "text", "what is done"),
    Field("impossible", "text", "why it cannot be done"),
    Field("work", "1", "tokens of a step over those as is"),
    *_TIMES,
    Field("n_placements", "count", "random placements"),
    Field("p5_of_objective", "s", "p5 of the objective over placements"),
    Field("p95_of_objective", "s", "p95 of the objective over placements"),
), prefix="alternative_")  # fmt: skip
STAGES = Columns("stage", (
    Field("stage", "count", "stage", "stages"),
    Field("slack", "1", "how much slower a node may be before the step is longer"),
    Field("cost", "s", "cost of the slowest node there"),
), prefix="stage_")  # fmt: skip
_KINDS = ("compute", "memory", "network", "other")
SLOW_NODES = Columns("slow_node", (
    Field("node", "count", "node"),
    Field("host", "text", "its name"),
    *(Field(kind, "1", f"its factor on durations: {kind}") for kind in _KINDS),
    *(
        field for when in ("before", "after") for field in (
            Field(f"{when}_slot", "count", f"its slot {when}; -1: none"),
            Field(f"{when}_stages", "text", f"its stages {when}"),
            Field(f"{when}_replicas", "text", f"its replicas {when}"),
        )
    ),
), prefix="slow_node_")  # fmt: skip
FIGURES = (
    Field("best", "text", "the placement that is chosen"),
    Field("worst", "text", "the longest one"),
    Field("current", "text", "the placement as it is"),
    Field("objective", "text", "what is minimised"),
    Field("tolerance", "1", "share of the objective that does not matter"),
    Field("p_correct", "1", "P(no placement is better by more than the tolerance)"),
    Field("worst_over_best_p50", "1", "p50 of the worst placement over that of the best"),
    Field("worst_over_best_p95", "1", "p95 of the worst placement over that of the best"),
    Field("keep_segments", "count", "slots that stay in one rack"),
    Field("steps", "count", "steps of the run"),
    Field("alike_step", "s", "deterministic step with all nodes alike"),
    Field("n_candidates", "count", "placements simulated"),
    Field("n_screened", "count", "placements looked at"),
    Field("method", "text", "how they were found"),
    Field("replicates", "count", "steps of the best placement"),
    Field("wall_seconds", "s", "elapsed time of the call"),
)


class Placing(Result):
    """Placements of slow nodes, the alternatives, and what a slow node costs by its place.

    Examples
    --------
    >>> import prism
    >>> result = prism.place("pipeline-8x32", slow_nodes=1, slowdown=1.2, seed=1)
    >>> result.placements.p95.idxmin()
    'current'
    >>> list(result.hosts.columns), list(result.host_files())
    (['node', 'host', 'first_rank', 'stages', 'replicas'], ['hosts.csv', 'hostfile.txt'])
    """

    def is_whole(self) -> bool:
        """See `Result.is_whole`."""
        return "summary" not in self.attrs

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        data = self.dataset
        others = {row.pop("name"): row for row in self._alternatives}
        return {
            "job": data.attrs["job_name"], "seed": int(data.attrs["seed"]),
            **read_figures([f for f in FIGURES if f.name != "objective"], data),
            "objective": data.attrs["objective"], "action": self.action,
            "placements": self._placements, "healthy": others.pop("healthy"),
            "alternatives": others, "stage_slack": self._stages,
            "slot_cost": data.slot_cost.values.tolist() if "slot_cost" in data else [],
            "slow_nodes": self._slow_nodes, "notes": read_texts(data, "notes"),
        }  # fmt: skip

    @property
    def by_heat(self) -> bool:
        """Whether its slow nodes are the slow GPUs of every node."""
        return "heat" in json.loads(self.attrs["call"])

    # ------------------------------------------------------------------------------ tables
    @property
    def placements(self) -> "pd.DataFrame":
        """Placements that were simulated, the best first, times in seconds."""
        return PLACEMENTS.frame(PLACEMENTS.rows(self.dataset))

    @property
    def alternatives(self) -> "pd.DataFrame":
        """What else could be done about the slow nodes, the largest gain first; in seconds."""
        rows = [row for row in self._alternatives if row["name"] != "healthy"]
        return ALTERNATIVES.frame(sorted(rows, key=lambda row: -row.get("saved", -np.inf)))

    @property
    def stages(self) -> "pd.DataFrame":
        """Slack of every stage [1], and what one slow node costs there [s]."""
        return STAGES.frame(self._stages)

    @property
    def slow_nodes(self) -> "pd.DataFrame":
        """The slow nodes, and where they are before and after."""
        return SLOW_NODES.frame(SLOW_NODES.rows(self.dataset))

    @property
    def hosts(self) -> "pd.DataFrame":
        """The best placement: node, host name, first rank, stages and replicas of every slot."""
        import pandas as pd

        rows = slot_rows(*self._slots(None))
        return pd.DataFrame(rows, columns=list(COLUMNS)).set_index(COLUMNS[0])

    def host_files(self, placement: str | None = None) -> dict[str, str]:
        """Write a placement, by default the best, as ``prism place -o`` does: text by file's name.

        ``hosts.csv``, which a job takes as ``cluster.hosts``, ``hostfile.txt``, and where hosts
        have names those of launchers: ``slurm_hostfile.txt``, ``openmpi_hostfile.txt``,
        ``mpich_hostfile.txt``, ``rankfile.txt``.
        """
        hosts, groups, per_node, names = self._slots(placement)
        csv = placement_csv(hosts, groups, per_node, names)
        if self.by_heat:  # parts of nodes, which launchers do not know
            return {"hosts.csv": csv}
        return {
            "hosts.csv": csv,
            "hostfile.txt": host_order(hosts, names),
            **launcher_files(hosts, names, per_node),
        }

    def _slots(
        self, placement: str | None
    ) -> tuple[list[int], list[list[tuple[int, int]]], int, dict[int, str]]:
        """Node and (replica, stage) pairs of every slot, GPUs of a node, host names by node."""
        data = self.dataset
        name = self.attrs["best"] if placement is None else placement
        if name not in data.placement.values:
            known = ", ".join(map(str, data.placement.values))
            raise PrismError(f"placement {name}: expected one of {known}")
        order = [int(node) for node in data["hosts"].sel(placement=name).values]
        listed = map(str, data["host"].values) if "host" in data.coords else ()
        names = {node: host for node, host in enumerate(listed) if host}
        slots = Placement(job_of(data))
        return order, slots.slot_groups(), slots.gpus_per_node, names

    # -------------------------------------------------------------------------------- rows
    @cached_property
    def _placements(self) -> list[dict[str, Any]]:
        rows, data = PLACEMENTS.rows(self.dataset), self.dataset
        moved = {}
        if "tier" in data.dims:
            moved = dict(zip(data.placement.values, data["moved_between"].values, strict=True))
        for row in rows:
            row |= {key: _numbers(row[key]) for key in ("stages", "replicas")}
            counts = zip(data.tier.values, moved[row["name"]], strict=True) if moved else ()
            row["moved_between"] = {str(tier): int(n) for tier, n in counts if n}
        return rows

    @property
    def _alternatives(self) -> list[dict[str, Any]]:
        rows = [
            {key: value for key, value in row.items() if value is not None}
            for row in ALTERNATIVES.rows(self.dataset)
        ]
        for row in rows:
            work = row.get("work", 1.0)
            if work != 1.0:
                row |= {f"{key}_same_work": row[key] / work for key in STEPS}
        return rows

    @cached_property
    def _stages(self) -> list[dict[str, Any]]:
        return STAGES.rows(self.dataset) if STAGES.dim in self.dataset.coords else []

    @cached_property
    def _slow_nodes(self) -> list[dict[str, Any]]:
        out = []
        for row in SLOW_NODES.rows(self.dataset):
            node = {key: row.get(key) for key in ("node", *_KINDS)}
            for when in ("before", "after"):
                slot, stages, replicas = (
                    row.get(f"{when}_{key}") for key in ("slot", "stages", "replicas")
                )
                node[when] = None if slot is None else {
                    "slot": slot, "stages": _numbers(stages), "replicas": _numbers(replicas)
                }  # fmt: skip
            out.append(node | ({"host": row["host"]} if row.get("host") else {}))
        return out

    def entry(self, which: str) -> dict[str, Any]:
        """Find the ``best``, ``worst`` or ``current`` placement."""
        name = self.attrs[which]
        return next(row for row in self._placements if row["name"] == name)

    @cached_property
    def options(self) -> list[dict[str, Any]]:
        """List placements and alternatives with their labels: as is, then the best first.

        What is impossible comes last.
        """
        found: list[dict[str, Any]] = []
        for which, text in (("current", "as is"), ("best", "best"), ("worst", "worst")):
            row = self.entry(which)
            # one of these may be another of them
            if not any(other["name"] == row["name"] for other in found):
                found.append({**row, "label": with_place(text, row)})
        alone = len(self._slow_nodes) == 1
        found += [
            row for row in self._alternatives
            if not (alone and row["name"] == "all_in_one_replica")
        ]  # fmt: skip
        return found[:1] + sorted(found[1:], key=lambda row: -row.get("saved", -np.inf))

    @cached_property
    def better(self) -> list[dict[str, Any]]:
        """List what is better than any placement by more than the tolerance, the best first.

        For the same work, and surely: all of its interval saves more than the best placement.
        """
        moved = max(0.0, float(self.entry("best")["saved"]))
        least = moved + self.dataset["tolerance"].item()
        names = {row["name"] for row in self._alternatives} - {*SAME_NODES, "healthy"}
        return [
            row for row in self.options
            if row["name"] in names and row.get("saved", 0.0) > least
            and row["saved_ci"][0] > moved
        ]  # fmt: skip

    @property
    def action(self) -> str:
        """What to do: the best alternative where one is better, else the best placement."""
        return str(self.better[0]["name"] if self.better else self.attrs["best"])

    @property
    def objective_name(self) -> str:
        """Name what is minimised: p95, mean, time-to-train."""
        name = str(self.attrs["objective"])
        return OBJECTIVES.get(name, name)


def make_placing(
    found: Mapping[str, Any], attrs: Mapping[str, Any], names: Mapping[int, str]
) -> Placing:
    """Lay what `prism.analyses.placements.answer` found into a result."""
    import xarray as xr

    placements = [
        {**row, **{key: _words(row[key]) for key in ("stages", "replicas")}}
        for row in found["placements"]
    ]
    nodes = []
    for node in found["slow_nodes"]:
        row = {key: node[key] for key in ("node", *_KINDS)} | {"host": names.get(node["node"])}
        for when in ("before", "after"):
            if node[when]:
                places = ((key, _words(node[when][key])) for key in ("stages", "replicas"))
                row |= {f"{when}_slot": node[when]["slot"]}
                row |= {f"{when}_{key}": text for key, text in places}
        nodes.append(row)
    others = [
        {"name": "healthy", "label": HEALTHY, **found["healthy"]},
        *({"name": name, "label": SAME_NODES.get(name), **row}
          for name, row in found["alternatives"].items()),
    ]  # fmt: skip
    text = "node of every slot, in rank order"
    data: dict[str, Any] = {
        "hosts": (("placement", "slot"), found["hosts"], {"units": "1", "long_name": text})
    }
    coords: dict[str, Any] = {}
    if tiers := list(dict.fromkeys(t for row in placements for t in row["moved_between"])):
        moved = [[row["moved_between"].get(tier, 0) for tier in tiers] for row in placements]
        text = "slots whose new node is in another unit of the network"
        data["moved_between"] = (("placement", "tier"), moved, {"units": "1", "long_name": text})
        coords["tier"] = tiers
    if found["slot_cost"]:
        text = "cost of one slow node by where it is"
        cost = np.array(found["slot_cost"])
        data["slot_cost"] = (("stage", "dp_rank"), cost, {"units": "s", "long_name": text})
    if names:
        listed = [names.get(node, "") for node in range(max(*names, int(found["hosts"].max())) + 1)]
        coords["host"] = ("node", listed, {"long_name": "host name of every node"})
    figures = [field for field in FIGURES if field.name != "objective"]
    parts = [
        PLACEMENTS.pack(placements), ALTERNATIVES.pack(others), SLOW_NODES.pack(nodes),
        pack_figures(figures, found), pack_texts(notes=found["notes"]), xr.Dataset(data, coords),
    ]  # fmt: skip
    if found["stage_slack"]:
        parts.append(STAGES.pack(found["stage_slack"]))
    named = {which: found[which] for which in ("best", "worst", "current", "objective")}
    return Placing(xr.merge(parts).assign_attrs({**attrs, "kind": "placement", **named}))


def _words(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _numbers(text: str | None) -> list[int]:
    return [int(word) for word in (text or "").split()]


def with_place(text: str, row: Row) -> str:
    """Add the stages and replicas of the slow nodes to what a placement is called."""
    if not row.get("stages"):
        return text
    stages, replicas = (numbered(word, row[f"{word}s"]) for word in ("stage", "replica"))
    return f"{text}: {stages}, {replicas}"


def numbered(word: str, numbers: Iterable[int]) -> str:
    """Write the numbers of stages or replicas, or how many there are.

    Examples
    --------
    >>> numbered("stage", [3, 0, 1]), numbered("replica", range(0, 20, 2))
    ('stages 0-1, 3', '10 replicas')
    """
    found = sorted(set(numbers))
    text = as_ranges(found, ", ")
    if text.count(",") > MOST_NUMBERS:
        return f"{len(found)} {word}s"
    return f"{word}{'s' * (len(found) > 1)} {text}"


def same_work(row: Row, key: str) -> float | None:
    """Give a quantile, mean or objective for the work of one step as is [s]; None without one."""
    value = row.get(f"{key}_same_work", row.get(key))
    return None if value is None else float(value)
