"""What changes in a recording, as warnings and in the report of a fit."""

from typing import Any

import numpy as np

from prism.common.text import format_count, format_duration, format_share
from prism.simulation.runs.parts import HOUR_S

Row = dict[str, Any]


def warn(row: Row) -> str:
    """Say a change as a warning."""
    place = ", ".join(f"{key} {row[key]}" for key in ("run", "rank", "dp_rank", "stage")
                      if key in row)  # fmt: skip
    first, last = row["first_step"], row["last_step"]
    steps = f"steps {first} to {last}" if first < last else f"step {first}"
    if "n_steps" in row:
        steps += f" ({row['n_steps']} of {row['of_steps']})"
    what = {
        "pause": "every {interval_steps} steps {duration_s:.3g} s more, {n} times in " + steps,
        "warm_up": "warm-up: up to {times} in " + steps,
        "ramp": "a ramp over " + steps + ", {times} before",
        "spread": "{ratio:.3g} times the spread of other steps in " + steps,
        "phase": "another phase, {times} (mean {mean}), in " + steps,
        "interval": "{times} in " + steps,
    }[row["kind"]].format(
        **row, times=_times(row.get("ratio", 1.0)),
        mean=format_duration(row["duration_s"] / row.get("n_steps", 1)),
    )  # fmt: skip
    end = {
        "pause": "left out as evaluations or checkpoints; run.evaluation adds them",
        "ramp": "left out with what is before",
        "phase": "left out, the last phase is fitted",
    }.get(row["kind"], "left out")
    if row["kept"] is not None:
        end = {
            "beginning": "kept as the beginning of a run",
            "pause": "in runs as pauses, not in the noise of steps",
            "compared": "kept: part of what is compared",
            "shown": "not in the effective sample size",
        }.get(row["kept"], "kept: too few rest")
    if "skip" in row:
        end += f"; --skip {row['skip']} leaves out as many"
    return ": ".join(filter(None, (place, f"{what}; {end}")))


def _times(ratio: float) -> str:
    word, more = ("slower", ratio) if ratio >= 1.0 else ("faster", 1.0 / ratio)
    if more < 1.1:
        return f"{format_share(more - 1.0, 2)} {word}"
    return f"{more:.3g} times {word}"


def report_changes(report: Row, rows: list[Row], seconds: float, workers: int = 1) -> Row:
    """Add what changes to the report of a fit, with a warning for each."""
    said = [warn(row) for row in rows]
    episodes = _fail_slow(rows, seconds, workers)
    if episodes is not None:
        values = ", ".join(f"{key}: {float(f'{x:.3g}'):g}" for key, x in episodes.items())
        nodes = (
            "one node" if workers == 1 else f"a node for each of {format_count(workers, 'worker')}"
        )
        said.append(
            f"slow intervals are not in what is fitted; in a job file, with {nodes}, they are "
            f"variability.effects.fail_slow: {{{values}}}"
        )
    warnings = [*said, *report["warnings"]]
    return {**report, "changes": rows, "fail_slow": episodes, "warnings": warnings}


def _fail_slow(rows: list[Row], seconds: float, workers: int) -> Row | None:
    """Slow intervals in the words of a job file's fail_slow; None where there are none."""
    slow = [row for row in rows if row["kind"] == "interval" and row["ratio"] > 1.0]
    if not slow:
        return None
    length = np.array([row["duration_s"] for row in slow])
    return {
        "rate_per_1000_node_days": 1000.0 * len(slow) / (workers * seconds / (24.0 * HOUR_S)),
        "factor": float(np.average([row["ratio"] for row in slow], weights=length)),
        "duration": float(length.mean()),
    }  # fmt: skip
