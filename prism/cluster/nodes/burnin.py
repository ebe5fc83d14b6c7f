"""Burn-in tables: how slow each node is, from times or rates measured on each of its GPUs.

One row per run of one GPU, or per node the least and the most of its GPUs. How slow a GPU is apart
from the noise of its runs: `prism.cluster.nodes.shrinkage`. A node is as slow as its slowest GPU,
and the median node is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.cluster.nodes.hosts import Measured
from prism.cluster.nodes.shrinkage import LIKELY, Levels, separate
from prism.common.errors import PrismError
from prism.common.text import format_count, format_share
from prism.traces.choose import check_column, check_groups, groups_among
from prism.traces.columns import meaning, several_columns
from prism.traces.file import RawTable

NODE_COLUMNS = ("node", "node_id", "node_name", "host", "hostname", "machine")
# names of the column that tells the GPUs of a node apart; the first that is there
GPU_COLUMNS = ("gpu_id", "gpu_index", "gpu_uuid", "uuid", "local_rank", "device_id", "device",
               "rank", "gpu")  # fmt: skip
# last words of the name of a column in which more is faster
RATES = ("tflops", "gflops", "flops", "tbps", "gbps", "bandwidth", "busbw", "algbw")
UNKNOWN = ("", "-1", "nan", "none", "null", "unknown")  # names of no node
_OF_GPUS = (
    "min",
    "med",
    "median",
    "p50",
    "mean",
    "avg",
    "max",
)  # last words, of all GPUs of a node
_SHOWN = 4


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
    table, of_nodes = _slowest_of_nodes(table, column)
    gpu_column = next((name for name in GPU_COLUMNS if name in table.columns), None)
    chosen = table.frame.iloc[rows]
    keys_and_blanks = [
        name
        for name in chosen.columns
        if name in (*NODE_COLUMNS, node_column, gpu_column) or chosen[name].isna().all()
    ]
    rest = replace(table, frame=table.frame.drop(columns=keys_and_blanks))
    column = _measurement(rest, column, where, rows, of_nodes)
    check_groups(rest, column, where, rows)
    values, nodes = table.numbers(column), table.texts(node_column).astype(object)
    rows, notes = _usable(table, node_column, nodes, column, values, rows)
    frame = pd.DataFrame({"node": nodes[rows], "row": rows})
    frame["gpu"] = table.texts(gpu_column).astype(object)[rows] if gpu_column else ""
    by_gpu = frame.groupby(["node", "gpu"], sort=False)
    cost = np.log(values[rows]) * (1.0 if _is_time(column) else -1.0)
    found = separate(cost, by_gpu.ngroup().to_numpy(), 1 if gpu_column else gpus_per_node)
    gpus = by_gpu.size().rename("runs").reset_index()
    gpus["level"], gpus["p_slow"] = found.level, found.p_slow
    by_node = gpus.groupby("node", sort=False)
    slowdown = np.exp(by_node["level"].max() - by_node["level"].max().median())
    n_gpus = by_node.size()
    one_each = column in of_nodes
    notes += _findings(column, gpus, slowdown, found, one_each, gpu_column is not None)
    if gpu_column is None and not one_each:
        notes.append(
            "no column identifies the GPU within a node, so a slow one may not be found; "
            f"expected one of {', '.join(GPU_COLUMNS[:4])}"
        )
    elif gpu_column is not None and n_gpus.max() != gpus_per_node:
        notes.append(
            f"nodes of {format_count(n_gpus.max(), 'GPU')} were measured, the cluster's have "
            f"{gpus_per_node} "
            "(cluster.gpus_per_node)"
        )
    first = frame.groupby("node", sort=False)["row"].min()
    factors = {str(node): {kind: float(factor)} for node, factor in slowdown.items()}
    return Measured(factors, lambda node: table.locate(int(first[node])), notes)


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
    notes = [
        f"{column} of {format_count(len(slowdown), 'node')}: {each}, {_few(gpus['runs'])} runs "
        "each, over that "
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
        said = column is not None and column.rpartition("_")[0] == stem and _tells(column)
        name = str(column) if said else stem
        slowest = frame[f"{stem}_max" if _is_time(name) else f"{stem}_min"]
        frame = frame.drop(columns=[f"{stem}_{end}" for end in _OF_GPUS], errors="ignore")
        frame = frame.assign(**{name: slowest})
        found.append(name)
    return replace(table, frame=frame), found


def _usable(
    table: RawTable,
    node_column: str,
    nodes: NDArray[np.object_],
    column: str,
    values: NDArray[np.float64],
    rows: NDArray[np.int64],
) -> tuple[NDArray[np.int64], list[str]]:
    """Keep the rows with a node and a value, which must be above 0; say how many are left out."""
    known = np.array([str(node).strip().lower() not in UNKNOWN for node in nodes[rows]])
    notes = []
    if not known.all():
        notes.append(
            f"{(~known).sum():,} of {format_count(rows.size, 'row')} of no known node skipped"
        )
    rows = rows[known & np.isfinite(values[rows])]
    if not rows.size:
        raise PrismError(
            f"{table.source}: no row has both a {node_column} and a {column}; expected a row per "
            "run of a GPU"
        )
    wrong = rows[values[rows] <= 0.0]
    if wrong.size:
        raise PrismError(
            f"{table.locate(int(wrong[0]))}: {column} is {values[wrong[0]]:g}, expected a number "
            "above 0; take the row out"
        )
    return rows, notes


def _few(counts: pd.Series) -> str:
    """Write a count, or the range of some."""
    low, high = int(counts.min()), int(counts.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _last_word(column: str) -> str:
    return column.rpartition("_")[2].lower()


def _is_time(column: str) -> bool:
    """Tell a time, of which more is slower, from a rate."""
    found = meaning(column)
    return "_" in column and bool(found.unit) and found.kind in ("duration", "none")


def _tells(column: str) -> bool:
    """Whether a column's name says what it measures."""
    is_rate = meaning(column).kind == "rate" or _last_word(column) in RATES
    return is_rate or _is_time(column)


def _measurement(
    table: RawTable,
    column: str | None,
    where: Mapping[str, str],
    rows: NDArray[np.int64],
    of_nodes: Sequence[str],
) -> str:
    """Find the one time or rate, or refuse with the candidates."""
    if column is not None:
        check_column(table, column, "--column")
        if not _tells(column):
            raise PrismError(
                f"{table.source}: the name of column {column!r} does not say whether more is "
                f"slower or faster; end it with a unit, such as {column}_ms or {column}_tflops"
            )
        return column
    numeric = pd.api.types.is_numeric_dtype
    found = [
        name
        for name in table.columns
        if (_tells(name) or name in of_nodes) and numeric(table.frame[name])
    ]
    if len(found) == 1 and _tells(found[0]):
        return found[0]
    if not found:
        raise PrismError(
            f"{table.source}: neither slowdowns nor measurements among the columns "
            f"{table.listing}; expected `node, slowdown`, or a time or rate per GPU whose name "
            "ends with its unit, such as gemm_ms or gemm_tflops"
        )
    raise several_columns(table.source, "measurement", found, groups_among(table, rows, set(where)))
