"""Burn-in tables: how slow each node is, from times or rates measured on each of its GPUs.

One row per run of a GPU or of a node with a column per GPU, or per node the least and the most of
its GPUs. How slow a GPU is apart from the noise of its runs: `prism.cluster.nodes.shrinkage`. A
node is as slow as its slowest GPU, and the median node is 1. A node whose benchmark failed is
named, and not ranked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtri

from prism.cluster.nodemap import LEAST, MOST
from prism.cluster.nodes.hosts import Measured
from prism.cluster.nodes.measurements import (
    Measurement,
    choose_measurement,
    find_measurements,
    is_time,
)
from prism.cluster.nodes.shrinkage import LIKELY, Levels, separate
from prism.common.errors import PrismError
from prism.common.text import format_count, format_share
from prism.traces.choose import check_groups, groups_among
from prism.traces.columns import meaning
from prism.traces.file import RawTable

NODE_COLUMNS = ("node", "node_id", "node_name", "nodename", "host", "hostname", "host_name",
                "machine", "server", "instance")  # fmt: skip
# names of the column that tells the GPUs of a node apart; the first that is there and differs
GPU_COLUMNS = ("gpu_id", "gpu_index", "gpu_uuid", "uuid", "local_rank", "device_id", "device",
               "rank", "gpu")  # fmt: skip
UNKNOWN = ("", "-1", "nan", "none", "null", "unknown")  # names of no node
_OF_GPUS = ("min", "med", "median", "p50", "mean", "avg", "max")  # last words, of a node's GPUs
_CODES = ("return_code", "returncode", "exit_code", "exitcode", "retcode", "rc")
_STATES = ("status", "state", "result", "outcome", "passed", "pass", "success", "ok")
_BAD = re.compile(r"fail|err|abort|time_?out|timed out|kill|crash|false|no$|0$", re.I)
_METRICS = ("metric", "metric_name", "measurement", "test", "benchmark", "name")
_VALUES = ("value", "result", "score", "measured")
_CLOCK_CELL = re.compile(r"\s*(\d{4}[-/]\d\d?[-/]\d\d?|\d\d?:\d\d:\d\d|\w{3} \w{3} +\d)")
_SHOWN = 4
_FEWEST = 2  # runs of a GPU that a change is seen by
_FALSE_ALARMS = 0.01  # share of tables without a change in which one is found
_SD_OF_STEP = 1.4826 / 2.0**0.5  # standard deviation of noise over the median step between runs


def find_column(table: RawTable, names: tuple[str, ...]) -> str | None:
    """Find the first of some names among a table's columns, whatever their case."""
    lower = {name.lower().replace(" ", "_").replace("-", "_"): name for name in table.columns}
    return next((lower[name] for name in names if name in lower), None)


def read_burn_in(
    table: RawTable,
    node_column: str,
    rows: NDArray[np.int64],
    column: str | None,
    where: Mapping[str, str],
    kind: str,
    gpus_per_node: int,
) -> Measured:
    """Say how slow each node of a burn-in table is at one kind of work."""
    table = _metrics_as_columns(table)
    table, of_nodes = _slowest_of_nodes(table, column)
    gpu_column = _gpu_column(table, rows)
    nodes = table.texts(node_column).astype(object)
    states = _states(table)
    keys = {node_column, gpu_column, *_columns_of(table, NODE_COLUMNS), *states}
    clocks = [name for name in table.columns if _is_clock(table, name)]
    keys |= {*clocks, *_identifiers(table, nodes, rows)}
    blank = table.frame.iloc[rows].isna().all()
    left = [name for name in table.columns if name not in keys and not blank[name]]
    rest = replace(table, frame=table.frame[left])
    known = find_measurements(rest, left)
    chosen, notes = choose_measurement(
        rest, known, column, kind, groups_among(rest, rows, set(where)), of_nodes
    )
    check_groups(rest, chosen.name, where, rows)
    failed = _failed(table, states, chosen, rows)
    frame, more = _values(table, node_column, nodes, chosen, gpu_column, np.setdiff1d(rows, failed))
    frame["cost"] = np.log(frame["value"]) * (1.0 if is_time(chosen.name) else -1.0)
    frame, changed = _since_change(frame, _times(table, clocks))
    by_gpu = frame.groupby(["node", "gpu"], sort=False)
    has_gpus = gpu_column is not None or len(chosen.columns) > 1
    number = by_gpu.ngroup().to_numpy()
    found = separate(frame["cost"].to_numpy(), number, 1 if has_gpus else gpus_per_node)
    gpus = by_gpu.size().rename("runs").reset_index()
    gpus["level"], gpus["p_slow"] = found.level, found.p_slow
    by_node = gpus.groupby("node", sort=False)
    slowdown = np.exp(by_node["level"].max() - by_node["level"].max().median())
    one_each = chosen.name in of_nodes
    notes += _findings(chosen.name, gpus, slowdown, found, one_each, has_gpus) + more + changed
    if has_gpus:
        notes += _coverage(by_node.size(), gpus_per_node)
    elif not one_each and kind != "network":
        notes.append(
            "no column identifies the GPU within a node, so a slow one may not be found; "
            f"expected one of {', '.join(GPU_COLUMNS[:4])}"
        )
    first = pd.Series(rows, nodes[rows]).groupby(level=0, sort=False).first()
    first = first[[node.strip().lower() not in UNKNOWN for node in first.index]]
    factors = {
        node: {kind: float(slowdown[node])} if node in slowdown.index else {}
        for node in first.index
    }
    if lost := [node for node, factor in factors.items() if not factor]:
        notes.append(
            f"{format_count(len(lost), 'node')} without a result of {chosen.name}, not ranked, "
            f"taken as 1: {_named(lost)}"
        )
    if failed.size:
        notes.append(
            f"{format_count(failed.size, 'row')} left out, failed by return code or status: "
            f"{_named(nodes[failed])}"
        )
    return Measured(factors, lambda node: table.locate(int(first[node])), notes, True)


def _times(table: RawTable, clocks: list[str]) -> NDArray[np.float64] | None:
    """Return when each row was measured, in any unit; None where no column says it."""
    for name in clocks:
        when = table.coerced(name).to_numpy()
        if not table.is_numeric(name):
            cells = table.frame[name].astype(object)
            when = pd.to_datetime(cells, errors="coerce", utc=True, format="mixed")
            when = when.astype("int64").where(when.notna()).to_numpy(np.float64)
        if np.isfinite(when).all() and np.ptp(when) > 0.0:
            return np.asarray(when)
    return None


def _since_change(
    frame: pd.DataFrame, times: NDArray[np.float64] | None
) -> tuple[pd.DataFrame, list[str]]:
    """Keep the last third of the runs of a GPU where it differs from those before.

    By medians of normal noise, at a level that one table in a hundred without a change reaches.
    What all GPUs change by is no change of one, and is added to the runs before that are kept.
    """
    if times is None:
        return frame, []
    order = frame.assign(when=times[frame["row"]]).sort_values("when", kind="stable")
    noise, n_units = order.groupby(["node", "gpu"])["cost"].diff().abs().median(), 0
    found: list[tuple[tuple[str, str], float, float, pd.Index]] = []
    for unit, cost in order.groupby(["node", "gpu"], sort=False)["cost"]:
        late, n_units = len(cost) // 3, n_units + 1
        if late >= _FEWEST:
            shift = float(np.median(cost.iloc[-late:]) - np.median(cost.iloc[:-late]))
            sd = np.sqrt(0.5 * np.pi * (1.0 / late + 1.0 / (len(cost) - late)))
            found.append((unit, shift, sd * _SD_OF_STEP * noise, cost.index[:-late]))
    if not found:
        return frame, []
    common = float(np.median([shift for _, shift, *_ in found]))
    bound = -float(ndtri(0.5 * _FALSE_ALARMS / n_units))
    changed, gone, cost = [], list[int](), frame["cost"].copy()
    for (node, gpu), shift, sd, before in found:
        by = shift - common
        if abs(by) > max(bound * sd, 1e-9):
            gone += list(before)
            way = f"{format_share(abs(np.expm1(by)), 2)} {'slower' if by > 0 else 'faster'}"
            changed.append((-abs(by), f"{node}{f' GPU {gpu}' * bool(gpu)} {way}"))
        else:
            cost[before] += common
    if not changed:
        return frame, []
    shown = _named(text for _, text in sorted(changed))
    return frame.assign(cost=cost).drop(index=gone).reset_index(drop=True), [
        f"changed over time, so that the last third of their runs counts: {shown}"
    ]


def _coverage(n_gpus: pd.Series, gpus_per_node: int) -> list[str]:
    """Say where other numbers of GPUs were measured than nodes have."""
    notes, most = [], int(n_gpus.max())
    if most != gpus_per_node:
        notes.append(
            f"nodes of {format_count(most, 'GPU')} were measured, the cluster's have "
            f"{gpus_per_node} (cluster.gpus_per_node)"
        )
    if fewer := list(n_gpus.index[n_gpus < most]):
        notes.append(f"not all {most} GPUs have a value: {_named(fewer)}")
    return notes


def _values(
    table: RawTable, node_column: str, nodes: NDArray[np.object_], chosen: Measurement,
    gpu_column: str | None, rows: NDArray[np.int64],
) -> tuple[pd.DataFrame, list[str]]:  # fmt: skip
    """Give node, gpu, row and value, which must be above 0, of each measurement; with notes."""
    known = np.array([str(nodes[row]).strip().lower() not in UNKNOWN for row in rows], np.bool_)
    notes = []
    if not known.all():
        notes.append(
            f"{(~known).sum():,} of {format_count(rows.size, 'row')} of no known node skipped"
        )
    rows = rows[known]
    gpu = table.texts(gpu_column).astype(object) if gpu_column else np.full(len(nodes), "")
    parts = [
        pd.DataFrame({
            "node": nodes[rows], "gpu": label or gpu[rows], "row": rows,
            "value": table.numbers(column)[rows],
        })
        for label, column in chosen.columns.items()
    ]  # fmt: skip
    frame = pd.concat(parts, ignore_index=True)
    frame = frame[np.isfinite(frame["value"])].reset_index(drop=True)
    if not len(frame):
        raise PrismError(
            f"{table.source}: no row has both a {node_column} and a {chosen.name}; expected a row "
            "per run of a GPU"
        )
    wrong = frame[frame["value"] <= 0.0]
    if len(wrong):
        raise PrismError(
            f"{table.locate(int(wrong['row'].iloc[0]))}: {chosen.name} is "
            f"{wrong['value'].iloc[0]:g}, expected a number above 0; take the row out"
        )
    usual = float(frame["value"].median())
    far = frame[~(frame["value"] / usual).between(LEAST, MOST)]
    if len(far):
        raise PrismError(
            f"{table.locate(int(far['row'].iloc[0]))}: {chosen.name} is "
            f"{far['value'].iloc[0]:g}, the median {usual:g}: expected {LEAST:g} to {MOST:g} times "
            "that of a node that works; take the row out"
        )
    return frame, notes


def _findings(
    column: str,
    gpus: pd.DataFrame,
    slowdown: pd.Series,
    found: Levels,
    one_each: bool,
    by_gpu: bool,
) -> list[str]:
    """Say what was measured, how well, and which nodes are slow."""
    each = "the median of their rows"
    if by_gpu:
        each = f"their slowest of {_few(gpus.groupby('node').size())} GPUs"
    elif one_each:
        each = "their slowest GPU"
    bulk = "GPUs" if by_gpu else "nodes"
    run, spread = format_share(found.noise, 2), format_share(found.spread, 2)
    noise = f"noise of a run {run}, spread of the {bulk} {spread}"
    if not found.repeated:
        noise = f"no repeats, so all of the spread of {run} is taken for noise"
    runs = f"{_few(gpus['runs'])} run" + ("s" if gpus["runs"].max() > 1 else "")
    sense = "a time, more is slower" if is_time(column) else "a rate, more is faster"
    notes = [
        f"{column} ({sense}) of "
        f"{format_count(len(slowdown), 'node')}: {each}, {runs} each, over that "
        f"of the median node: {slowdown.min():.3g} to {slowdown.max():.3g} without noise; {noise}"
    ]
    slow = gpus[gpus["p_slow"] >= LIKELY].sort_values("level", ascending=False)
    shown = [
        f"{row.node}{f' GPU {row.gpu}' if by_gpu else ''} by "
        f"{format_share(np.expm1(row.level), 2)}, probability {row.p_slow:.2g}"
        for row in slow.head(_SHOWN).itertuples()
    ]
    more = f"; and {len(slow) - _SHOWN:,} more" if len(slow) > _SHOWN else ""
    notes.append(f"slow beyond noise: {'; '.join(shown) or 'no node'}{more}")
    return notes


def _slowest_of_nodes(table: RawTable, column: str | None) -> tuple[RawTable, list[str]]:
    """Replace what nodes' GPUs reach at least and at most by their slowest GPU; list the new names.

    That is ``X_min`` and ``X_max`` to ``X``, whose unit may be said by `column` alone.
    """
    frame, found = table.frame, []
    for stem in [str(name)[:-4] for name in frame if str(name).endswith("_min")]:
        if f"{stem}_max" not in frame:
            continue
        said = (
            column is not None and column.rpartition("_")[0] == stem and is_time(column) is not None
        )
        name = str(column) if said else stem
        slowest = frame[f"{stem}_max" if is_time(name) else f"{stem}_min"]
        frame = frame.drop(columns=[f"{stem}_{end}" for end in _OF_GPUS], errors="ignore")
        frame = frame.assign(**{name: slowest})
        found.append(name)
    return replace(table, frame=frame), found


def _few(counts: pd.Series) -> str:
    """Write a count, or the range of some."""
    low, high = int(counts.min()), int(counts.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _named(nodes: Iterable[object]) -> str:
    """Name some nodes, and count the others."""
    names = list(dict.fromkeys(map(str, nodes)))
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# ---------------------------------------------------------------------- columns of other meaning
def _columns_of(table: RawTable, names: tuple[str, ...]) -> list[str]:
    return [name for name in table.columns if name.lower().replace(" ", "_") in names]


def _states(table: RawTable) -> dict[str, bool]:
    """Find the columns that say how a run ended, and whether they do so by a return code."""
    last = {name: re.split(r"[/:]", _unranked(name).lower())[-1] for name in table.columns}
    codes = {name: True for name, word in last.items() if word in _CODES}
    return codes | {
        name: False for name, word in last.items() if word in _STATES and not table.is_numeric(name)
    }


def _unranked(name: str) -> str:
    return re.sub(r":\d+$", "", name)


def _failed(
    table: RawTable, states: Mapping[str, bool], chosen: Measurement, rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Find the rows whose benchmark ended with another code than 0, or a word for failure."""
    bad = np.zeros(rows.size, np.bool_)
    for name, is_code in states.items():
        if name.rpartition("/")[0] not in ("", chosen.benchmark):
            continue
        if is_code:
            bad |= table.coerced(name).fillna(0.0).to_numpy()[rows] != 0.0
        else:
            bad |= np.array([bool(_BAD.match(str(x))) for x in table.texts(name)[rows]], np.bool_)
    return rows[bad]


def _gpu_column(table: RawTable, rows: NDArray[np.int64]) -> str | None:
    """Find the column that tells the GPUs of a node apart; one value for all is a product name."""
    there = [name for of in GPU_COLUMNS if (name := find_column(table, (of,))) is not None]
    differ = [name for name in there if table.frame[name].iloc[rows].nunique() > 1]
    return next(iter(differ or there[:0]), None)


def _is_clock(table: RawTable, name: str) -> bool:
    """Whether a column says when a row was measured."""
    if table.is_numeric(name):
        return meaning(name).kind == "clock" and "mhz" not in name.lower()
    cells = table.frame[name].dropna()
    if cells.dtype.kind in "mM":
        return True
    return len(cells) > 0 and all(_CLOCK_CELL.match(str(cell)) for cell in cells.head(50))


def _identifiers(table: RawTable, nodes: NDArray[np.object_], rows: NDArray[np.int64]) -> list[str]:
    """List text columns that only name a node, or a part of one: serial numbers, addresses."""
    found = []
    for name in table.columns:
        cells = table.frame[name].iloc[rows]
        if table.is_numeric(name) or cells.nunique() < 2 or cells.dtype.kind in "bmM":
            continue
        of_value = pd.Series(nodes[rows], cells.index).groupby(cells.astype(str)).nunique()
        if of_value.max() == 1 and len(of_value) >= len(set(nodes[rows])):
            found.append(name)
    return found


def _metrics_as_columns(table: RawTable) -> RawTable:
    """Turn a table with a column of metrics' names and one of their values into one of columns."""
    metric, value = find_column(table, _METRICS), find_column(table, _VALUES)
    if metric is None or value is None or table.is_numeric(metric) or not table.is_numeric(value):
        return table
    frame = table.frame
    unit = find_column(table, ("unit", "units"))
    names = table.texts(metric).astype(object)
    if unit is not None:
        names = names + ["_" + cell.replace("/", "_per_") for cell in table.texts(unit)]
    columns = {name: frame[value].where(names == name) for name in dict.fromkeys(names)}
    drop = [name for name in (metric, value, unit) if name is not None]
    return replace(table, frame=frame.drop(columns=drop).assign(**columns))
