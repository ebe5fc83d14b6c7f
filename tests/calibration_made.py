"""Step times of made-up machines with known figures, for calibrations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from drawn_steps import draw_steps
from numpy.typing import NDArray

import prism

Array = NDArray[np.float64]
BASE = "h100-healthy"


def small_job(tp: int, pp: int, dp: int, microbatches: int, **more: Any) -> prism.Job:
    """Four layers of Llama 3 8B on some nodes of 8 GPUs, modelled kernel by kernel.

    Locked to a clock at which power is ample: under the limit the speed of compute follows the
    mix, which a calibration's factors do not know.
    """
    return prism.load_job({
        "model": {"name": "llama3-8b", "n_layers": 4},
        "parallelism": {"tp": tp, "pp": pp, "dp": dp, "microbatches": microbatches,
                        "data_parallel": "zero1"},
        "cluster": {"nodes": tp * pp * dp // 8, "clock_mhz": 1300.0},
        "variability": {"library": BASE, "host_scale": 1e-9,
                        "effects": {"rank": {"lemon_fraction": 0.0}}},
        "run": {"steps": 100, "failures": "none"},
    }).replace(more)  # fmt: skip


@dataclass(frozen=True)
class Truth:
    """What a made-up machine does; a calibration is to find it."""

    compute: float = 1.0
    communication: float = 1.0
    rank_cv: float | None = None  # the library's
    relative: float = 0.0  # of all ranks in a step, a share of it
    fixed_s: float = 0.0  # of all ranks in a step, a time
    model_error: float = 0.0  # of a size's durations, drawn anew for each size

    def steps(self, job: prism.Job, seed: int, runs: int = 10) -> Array:
        """Steps [run, 64] s of a job, each run on GPUs of its own.

        What all ranks share in a step is drawn here and not by prism.
        """
        rng = np.random.default_rng([seed, job.world_size])
        a, b = {"time": self.compute}, {"time": self.communication}
        scale = {"compute": a, "memory": a, "nvlink": b, "network": b}
        off = {"step": {"cv": 0.0}, "stall": {"rate_per_hour": 0.0}, "jitter": {"mean_s": 0.0}}
        own = {} if self.rank_cv is None else {"variability.effects.rank.cv": self.rank_cv}
        quiet = {f"variability.effects.{name}": x for name, x in off.items()}
        changed = job.replace({"cluster.scale": scale, **quiet, **own})
        drawn = draw_steps(changed, 64 * runs, int(rng.integers(1 << 30)), threads=1)
        steps = drawn.step_time.values.reshape(runs, 64).astype(np.float64)
        steps = steps * np.exp(self.model_error * rng.standard_normal())
        steps = steps * (1.0 + self.relative * rng.standard_normal(steps.shape))
        return np.asarray(steps + self.fixed_s * rng.standard_normal(steps.shape))


def write_steps(path: Path, steps: Array, column: str = "step_s", **columns: Any) -> Path:
    """Write steps [run, step] as a table."""
    n_runs, n = steps.shape
    run, step = np.repeat(np.arange(n_runs), n), np.tile(np.arange(n), n_runs)
    table = {"run": run, "step": step, column: steps.ravel(), **columns}
    pd.DataFrame(table).to_csv(path, index=False)
    return path
