"""Burn-in tables: how slow each node is, from times or rates measured on each of its GPUs.

One row per run of one GPU. A GPU is as slow as its median run, a node as its slowest GPU, and the
median node is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.cluster.nodes.hosts import Measured
from prism.common.errors import PrismError
from prism.traces.choose import (
    PER_SECOND,
    check_column,
    check_groups,
    groups_among,
    several_columns,
)
from prism.traces.rawtable import RawTable

# names of the column that tells the GPUs of a node apart; the first that is there
GPU_COLUMNS = ("gpu_id", "gpu_index", "gpu_uuid", "uuid", "local_rank", "device_id", "device",
               "rank", "gpu")  # fmt: skip
# last words of the name of a column in which more is faster
RATES = ("tflops", "gflops", "flops", "tbps", "gbps", "bandwidth", "busbw", "algbw")
UNKNOWN = ("", "-1", "nan", "none", "null", "unknown")  # names of no node


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
    gpu_column = next((name for name in GPU_COLUMNS if name in table.columns), None)
    chosen = table.frame.iloc[rows]
    keys_and_blanks = [
        name
        for name in chosen.columns
        if name in (node_column, gpu_column) or chosen[name].isna().all()
    ]
    rest = replace(table, frame=table.frame.drop(columns=keys_and_blanks))
    column = _measurement(rest, column, where, rows)
    check_groups(rest, column, where, rows)
    values, nodes = table.numbers(column), table.texts(node_column).astype(object)
    rows, notes = _usable(table, node_column, nodes, column, values, rows)
    cost = values if _is_time(column) else 1.0 / np.where(values > 0.0, values, np.nan)
    frame = pd.DataFrame({"node": nodes[rows], "cost": cost[rows], "row": rows})
    frame["gpu"] = table.texts(gpu_column).astype(object)[rows] if gpu_column else ""
    by_gpu = frame.groupby(["node", "gpu"], sort=False)["cost"]
    by_node = by_gpu.median().groupby(level="node", sort=False)
    slowdown, n_gpus = by_node.max(), by_node.size()
    slowdown /= slowdown.median()
    each = f"their slowest of {_few(n_gpus)} GPUs" if gpu_column else "the median of their rows"
    notes.append(
        f"{column} of {len(slowdown):,} nodes: {each}, {_few(by_gpu.size())} runs each, over that "
        f"of the median node: {slowdown.min():.3g} to {slowdown.max():.3g}"
    )
    if gpu_column is None:
        notes.append(
            "no column identifies the GPU within a node, so a slow one may not be found; "
            f"expected one of {', '.join(GPU_COLUMNS[:4])}"
        )
    elif n_gpus.max() != gpus_per_node:
        notes.append(
            f"nodes of {n_gpus.max()} GPUs were measured, the cluster's have {gpus_per_node} "
            "(cluster.gpus_per_node)"
        )
    first = frame.groupby("node", sort=False)["row"].min()
    factors = {str(node): {kind: float(factor)} for node, factor in slowdown.items()}
    return Measured(factors, lambda node: table.locate(int(first[node])), notes)


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
        notes.append(f"{(~known).sum():,} of {rows.size:,} rows are of no known node; skipped")
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
    return "_" in column and _last_word(column) in PER_SECOND


def _tells(column: str) -> bool:
    """Whether a column's name says what it measures."""
    return _is_time(column) or _last_word(column) in RATES


def _measurement(
    table: RawTable, column: str | None, where: Mapping[str, str], rows: NDArray[np.int64]
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
    found = [name for name in table.columns if _tells(name) and numeric(table.frame[name])]
    if len(found) == 1:
        return found[0]
    if not found:
        raise PrismError(
            f"{table.source}: neither slowdowns nor measurements among the columns "
            f"{table.listing}; expected `node, slowdown`, or a time or rate per GPU whose name "
            "ends with its unit, such as gemm_ms or gemm_tflops"
        )
    raise several_columns(table, "measurement", found, groups_among(table, rows, set(where)))
