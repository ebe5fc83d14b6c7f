"""A model of kind `steps`: what was learnt from step times, as arrays and as a file.

Typical seconds by step, spread by time scale with repetitions that show how well it is known,
stalls, a beginning kept as measured, and what measured totals hold beside the steps.
"""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.common.arrays import Array, Index
from prism.distributions.modelfile import ModelFile, Scalar, Spec, json_of
from prism.distributions.ranges import COUNT, FINITE, POSITIVE, Range
from prism.models.steptimes.spread import Spread

if TYPE_CHECKING:
    import xarray as xr

PAUSE = ("pause_interval", "pause_first", "pause_s")
FILE = ModelFile(
    "steps",
    (3, 4),
    {
        "work": Spec(("step",), "s", "typical time of each step, stalls taken out", POSITIVE),
        "residuals": Spec(
            ("sample",), "1", "a step's own relative noise, unit standard deviation", FINITE
        ),
        "stall_s": Spec(("stall",), "s", "what each stall adds to the run"),
        "stall_counts": Spec(("run",), "1", "stalls of each run after the beginning"),
        "exposure_s": Spec(("run",), "s", "time of each run after the beginning"),
        "beginning_s": Spec(
            ("run", "early_step"), "s", "what early events add to each step", FINITE
        ),
        "pause_interval": Spec(
            ("pause",), "1", "steps from one periodic pause to the next", Range(1.0)
        ),
        "pause_first": Spec(
            ("pause",), "1", "steps of a run at the end of which the first is", Range(1.0)
        ),
        "pause_s": Spec(("pause",), "s", "what each adds to the run"),
        "repeats": Spec(("repeat", "part"), "1", "spread fitted to simulated repetitions"),
        "spread": Spec(("part",), "1", "spread by time scale; tau_s in seconds"),
    },
    "a model of step times",
    "prism fit STEPS -o MODEL.nc",
)
PARTS = tuple(f.name for f in fields(Spread))
SCALARS = {
    "has_profile": Scalar(bool), "mean_over": Scalar(int, COUNT), "n_runs": Scalar(int, COUNT),
    "n_steps": Scalar(int, COUNT), "step_error": Scalar(float), "offset_s": Scalar(float, FINITE),
    "offset_std_s": Scalar(float), "offset_skips": Scalar(int), "stall_threshold": Scalar(float),
    "grain_s": Scalar(float),
}  # fmt: skip


@dataclass(frozen=True)
class StepModel:
    """What step times alone tell of a job."""

    steps: Index  # [step] numbers of the steps that were seen
    # [step] typical time of each [s]; all equal where nothing shows that steps differ in work
    work: Array
    has_profile: bool  # whether they differ
    mean_over: int  # steps behind one value of ``steps``
    spread: Spread  # relative spread of single steps by time scale
    # [repeat, part] spreads fitted to simulated repetitions, as ``PARTS``: how well it is known
    repeats: Array
    residuals: Array  # [sample] distribution of a step's own noise, unit standard deviation
    # stalls after the beginning [s], their number by run, and the time behind that number [s]
    stall_s: Array
    stall_counts: Array
    exposure_s: Array
    # [run, early_step] what the events of the beginning add to each step [s], one row for each
    # measured run
    beginning_s: Array
    # total less the sum of steps [s], its spread, and the first steps a total leaves out
    offset_s: float
    offset_std_s: float
    offset_skips: int
    # runs, and values of a run, behind the model
    n_runs: int
    n_steps: int
    step_error: float  # relative standard error of the mean step, from the data
    stall_threshold: float  # relative deviation beyond which a step counts as stalled
    grain_s: float  # step of the clock that values were read from [s]; 0 for a fine one
    report: dict[str, Any]  # what the fit printed
    # [pause] periodic pauses: steps between them, steps at the end of which the first is, seconds
    pause_interval: Array = field(default_factory=lambda: np.empty(0))
    pause_first: Array = field(default_factory=lambda: np.empty(0))
    pause_s: Array = field(default_factory=lambda: np.empty(0))

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

    def paused_s(self, n_steps: Array) -> Array:
        """Seconds of periodic pauses in the first steps of a run, by their number."""
        n = np.asarray(n_steps, np.float64)[..., None]
        count = np.floor((n - self.pause_first) / np.maximum(self.pause_interval, 1.0)) + 1.0
        return np.asarray((np.maximum(count, 0.0) * self.pause_s).sum(axis=-1))

    def spreads(self) -> list[Spread]:
        """Spreads that the data would allow as well, from the repetitions.

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
    arrays = {name: getattr(model, name) for name in FILE.arrays}
    arrays["spread"] = list(model.spread.as_dict().values())
    texts = {"report": (model.report, "what the fit printed")}
    coords = {"step": model.steps, "part": list(PARTS)}
    scalars = {name: getattr(model, name) for name in SCALARS}
    return FILE.lay_out(arrays, {}, texts, coords, attrs | scalars)


def model_from_dataset(dataset: "xr.Dataset", source: str) -> StepModel:
    """Rebuild a model; raises PrismError where the dataset is none that is understood."""
    if FILE.check(dataset, source) == 3:  # without periodic pauses
        dataset = dataset.assign({name: ("pause", np.empty(0)) for name in PAUSE})
    arrays: dict[str, Any] = {k: np.float64(v) for k, v in FILE.values(dataset).items()}
    spread = dict(zip(PARTS, arrays.pop("spread").tolist(), strict=True))
    model = StepModel(
        steps=np.asarray(dataset["step"].values, np.int64), spread=Spread(**spread),
        **arrays, **FILE.scalars(dataset, SCALARS), report=json_of(dataset, "report"),
    )  # fmt: skip
    _check(model)
    return model


def _check(model: StepModel) -> None:
    """Refuse what makes no sense; raises ValueError."""
    stalls = model.stall_s.size or not model.stall_counts.sum()
    if not (model.work.size and model.residuals.size and stalls):
        raise ValueError("steps, residuals or stalls are missing")
    if model.stall_counts.sum() > model.n_runs * model.n_steps * model.mean_over:
        raise ValueError("more stalls than steps")
    if (np.diff(model.steps) <= 0).any():
        raise ValueError("the numbers of steps do not rise")
    if not 0.0 <= model.grain_s <= model.work.min():
        raise ValueError(f"steps of {model.work.min():g} s, written to {model.grain_s:g} s")
    noise = model.residuals
    if noise.any() and not np.allclose([noise.mean(), noise.std()], [0.0, 1.0], atol=1e-6):
        raise ValueError("residuals are not of mean 0 and standard deviation 1")
    spread = model.spread.as_dict()
    most = {"tau_s": math.inf}  # else relative: no steps above 0 differ by more than a hundredfold
    inside = all(0.0 <= value < most.get(name, 100.0) for name, value in spread.items())
    if not inside:
        raise ValueError(f"a spread of {spread}")
    if spread["drift"] > 0.0 and not spread["tau_s"] > 0.0:
        raise ValueError("a drift without a memory")


def load_step_model(path: str | Path) -> StepModel:
    """Read a model from its file; raises PrismError where it is missing or something else."""
    return FILE.load(path, model_from_dataset)
