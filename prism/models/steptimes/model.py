"""A model of kind `steps`: what was learnt from step times, as arrays and as a file.

Typical seconds by step, spread by time scale with repetitions that show how well it is known,
stalls, a beginning kept as measured, and what measured totals hold beside the steps.
"""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.files import read_netcdf, told_broken
from prism.models.steptimes.spread import Spread

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[np.float64]
SCHEMA = 3

# name: (dims, units, long name)
ARRAYS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "work": (("step",), "s", "typical time of each step, stalls taken out"),
    "residuals": (("sample",), "1", "a step's own relative noise, unit standard deviation"),
    "stall_s": (("stall",), "s", "what each stall adds to the run"),
    "stall_counts": (("run",), "1", "stalls of each run after the beginning"),
    "exposure_s": (("run",), "s", "time of each run after the beginning"),
    "beginning_s": (("run", "early_step"), "s", "what early events add to each step"),
    "repeats": (("repeat", "part"), "1", "spread fitted to simulated repetitions"),
}
PARTS = tuple(f.name for f in fields(Spread))
_SCALARS = (
    "has_profile", "mean_over", "n_runs", "n_steps", "step_error", "offset_s", "offset_std_s",
    "offset_skips", "stall_threshold", "grain_s",
)  # fmt: skip


@dataclass(frozen=True)
class StepModel:
    """What step times alone tell of a job.

    Attributes
    ----------
    steps : int64 [step]
        Numbers of the steps that were seen.
    work : float64 [step]
        Typical time of each [s]; all equal where nothing shows that steps differ in work.
    has_profile : bool
        Whether they differ.
    mean_over : int
        Steps behind one value of ``steps``.
    spread : Spread
        Relative spread of single steps by time scale.
    repeats : float64 [repeat, part]
        Spreads fitted to simulated repetitions, as ``PARTS``: how well it is known.
    residuals : float64 [sample]
        Distribution of a step's own noise, unit standard deviation.
    stall_s, stall_counts, exposure_s
        Stalls after the beginning [s], their number by run, and the time behind that number [s].
    beginning_s : float64 [run, early_step]
        What the events of the beginning add to each step [s], one row for each measured run.
    offset_s, offset_std_s, offset_skips
        Total less the sum of steps [s], its spread, and the first steps a total leaves out.
    n_runs, n_steps : int
        Runs, and values of a run, behind the model.
    step_error : float
        Relative standard error of the mean step, from the data.
    stall_threshold : float
        Relative deviation beyond which a step counts as stalled.
    grain_s : float
        Step of the clock that values were read from [s]; 0 for a fine one.
    report : dict
        What the fit printed.
    """

    steps: NDArray[np.int64]
    work: Array
    has_profile: bool
    mean_over: int
    spread: Spread
    repeats: Array
    residuals: Array
    stall_s: Array
    stall_counts: Array
    exposure_s: Array
    beginning_s: Array
    offset_s: float
    offset_std_s: float
    offset_skips: int
    n_runs: int
    n_steps: int
    step_error: float
    stall_threshold: float
    grain_s: float
    report: dict[str, Any]

    @property
    def step_s(self) -> float:
        """Mean step without stalls [s]."""
        return float(self.work.mean())

    @property
    def run_known(self) -> bool:
        """Whether several runs tell how much runs differ."""
        return self.n_runs > 1

    @property
    def stall_rate(self) -> float:
        """Stalls per second after the beginning [1/s]."""
        exposure = float(self.exposure_s.sum())
        return float(self.stall_counts.sum()) / exposure if exposure > 0.0 else 0.0

    def spreads(self) -> list[Spread]:
        """Spreads that the data would allow as well, from the repetitions.

        Notes
        -----
        Basic bootstrap of logarithms: theta^2 / theta*, so that a part the repetitions find too
        small is drawn larger. A part that is 0 is drawn as repetitions of its absence show it; one
        that a repetition misses is as it was fitted.
        """
        out = []
        for row in self.repeats:
            again = dict(zip(PARTS, map(float, row), strict=True))
            values = {
                name: again[name] if value == 0.0
                else value**2 / again[name] if again[name] > 0.1 * value else value
                for name, value in self.spread.as_dict().items()
            }  # fmt: skip
            out.append(Spread(**values))
        return out or [self.spread]


def model_to_dataset(model: StepModel, attrs: dict[str, Any]) -> "xr.Dataset":
    """Lay a model into labelled arrays; `attrs` is the provenance."""
    import xarray as xr

    data: dict[str, Any] = {
        name: (dims, getattr(model, name), {"units": units, "long_name": text})
        for name, (dims, units, text) in ARRAYS.items()
    }
    for name, value in model.spread.as_dict().items():
        units, text = ("s", "memory of the drift") if name == "tau_s" else ("1", f"{name} spread")
        data[f"spread_{name}"] = ((), value, {"units": units, "long_name": text})
    plain = {"units": "1", "long_name": "what the fit printed"}
    data["report"] = ((), json.dumps(model.report), plain)
    coords = {"step": model.steps, "part": list(PARTS)}
    scalars = {name: _plain(getattr(model, name)) for name in _SCALARS}
    return xr.Dataset(data, coords, {**attrs, **scalars, "kind": "steps", "schema": SCHEMA})


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def model_from_dataset(dataset: "xr.Dataset", source: str) -> StepModel:
    """Rebuild a model.

    Raises
    ------
    PrismError
        The dataset is no model of step times of a version that is understood.
    """
    kind = dataset.attrs.get("kind")
    if kind != "steps" or dataset.attrs.get("schema") != SCHEMA:
        raise PrismError(
            f"{source}: kind {kind!r}, schema {dataset.attrs.get('schema')}; expected a model of "
            f"step times of schema {SCHEMA}; fit the steps again: prism fit STEPS -o MODEL.nc"
        )
    for name, (dims, _, _) in ARRAYS.items():
        if dataset[name].dims != dims:
            raise ValueError(f"{name} is by {dataset[name].dims}, not by {dims}")
    arrays: dict[str, Any] = {name: np.asarray(dataset[name].values, np.float64) for name in ARRAYS}
    spread = Spread(**{name: float(dataset[f"spread_{name}"]) for name in PARTS})
    scalars = {name: dataset.attrs[name] for name in _SCALARS}
    kinds: dict[str, Any] = {"has_profile": bool}
    whole = ("mean_over", "n_runs", "n_steps", "offset_skips")
    values = {
        name: kinds.get(name, int if name in whole else float)(value)
        for name, value in scalars.items()
    }
    model = StepModel(
        steps=np.asarray(dataset["step"].values, np.int64), spread=spread, **arrays, **values,
        report=json.loads(str(dataset["report"].values)),
    )  # fmt: skip
    _check(model)
    return model


def _check(model: StepModel) -> None:
    """Refuse what makes no sense; raises ValueError."""
    if model.work.size < 1 or not (model.work > 0.0).all() or not np.isfinite(model.work).all():
        raise ValueError("work holds times that are not above 0")
    for name in ARRAYS:
        if not np.isfinite(getattr(model, name)).all():
            raise ValueError(f"{name} holds numbers that are not finite")
    if not model.residuals.size or (model.stall_counts.sum() > 0 and not model.stall_s.size):
        raise ValueError("residuals or stalls are missing")
    spread = model.spread.as_dict()
    if not all(0.0 <= value < math.inf for value in spread.values()) or model.mean_over < 1:
        raise ValueError(f"a spread of {spread}, or values of no step")
    if spread["drift"] > 0.0 and not spread["tau_s"] > 0.0:
        raise ValueError("a drift without a memory")


def load_step_model(path: str | Path) -> StepModel:
    """Read a model from its file.

    Raises
    ------
    PrismError
        The file is missing, or holds something else.
    """
    if not Path(path).is_file():
        raise PrismError(f"{path}: no such model; prism fit STEPS -o MODEL.nc makes one")
    expected = "a model, which prism fit STEPS -o MODEL.nc makes"
    with told_broken(path, expected):
        return model_from_dataset(read_netcdf(path, expected), str(path))
