"""A training job's ops, recorded on its ranks, as the tidy table that every command reads.

Names and classes are those of production pipeline traces, and collectives name their group, so
that `prism fit`, `replay` and `validate --trace` take the table as it is. Left out: the profiler's
own traces, which are written beside it where asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.common.errors import PrismError

if TYPE_CHECKING:
    import pandas as pd

KINDS = {
    "forward-compute": ("forward", "compute"),
    "backward-compute": ("backward", "compute"),
    "forward-send": ("transfer", "p2p"),
    "forward-recv": ("transfer", "p2p"),
    "backward-send": ("transfer", "p2p"),
    "backward-recv": ("transfer", "p2p"),
    "grads-all-reduce": ("all_reduce", "dp_all_reduce"),
    "optimizer-clip-main-grad": ("all_reduce", "world_all_reduce"),
    "optimizer": ("optimizer", "optimizer"),
    "loss-all-reduce": ("all_reduce", "world_all_reduce"),
    "log": ("other", ""),
}
"""Name of an op: (op_kind, kernel_class)."""

_GROUPS = {"dp_all_reduce": "dp0", "world_all_reduce": "world", "p2p": "pp0"}


def read_ops(folder: Path, ranks: int, pipeline: bool) -> pd.DataFrame:
    """Bring all ranks' ops together."""
    import pandas as pd

    frames = []
    for rank in range(ranks):
        with np.load(folder / f"rank{rank}.npz") as found:
            frames.append(pd.DataFrame({name: found[name] for name in found.files}))
        frames[-1]["rank"] = rank
    if any(frame.empty for frame in frames):
        raise PrismError("no whole step was recorded; raise --steps or --limit")
    last = min(int(frame["step"].max()) for frame in frames)
    ops = pd.concat(frames, ignore_index=True)
    ops = ops[ops["step"] <= last]
    names = ops["name"].astype(str)
    of_class = names.map({name: kind[1] for name, kind in KINDS.items()})
    table = pd.DataFrame(
        {
            "op_kind": names.map({name: kind[0] for name, kind in KINDS.items()}),
            "kernel_class": of_class,
            "name": names,
            "rank": ops["rank"],
            "dp_rank": 0 if pipeline else ops["rank"],
            "stage": ops["rank"] if pipeline else 0,
            "microbatch": ops["microbatch"],
            "step": ops["step"],
            "group": of_class.map(_GROUPS).fillna(""),
            "start_s": np.round((ops["start"] - ops["start"].min()) * 1e-9, 9),
            "duration_s": np.round((ops["end"] - ops["start"]) * 1e-9, 9),
            "bytes": ops["bytes"],
        }
    )
    return table.sort_values(["step", "rank", "start_s"], kind="stable").reset_index(drop=True)


def step_times(table: pd.DataFrame) -> pd.DataFrame:
    """Time of each step, from its first op's begin to its last op's end over all ranks."""
    end = table["start_s"] + table["duration_s"]
    steps = table["step"]
    seconds = end.groupby(steps).max() - table["start_s"].groupby(steps).min()
    return seconds.rename("step_s").reset_index()


def summarize_ops(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Figures of every op by name: n, mean, p50, p99 [s], CV, and its share of a rank's step."""
    whole = float(step_times(table)["step_s"].sum()) * table["rank"].nunique()
    rows = []
    for name, part in table.groupby("name", sort=False):
        seconds = part["duration_s"].to_numpy()
        rows.append(
            {
                "name": str(name),
                "op_kind": KINDS[str(name)][0],
                "n": int(seconds.size),
                "mean": float(seconds.mean()),
                "p50": float(np.quantile(seconds, 0.5)),
                "p99": float(np.quantile(seconds, 0.99)),
                "cv": float(seconds.std() / seconds.mean()),
                "step_share": float(seconds.sum()) / whole,
            }
        )
    return rows
