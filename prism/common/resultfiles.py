"""Files of results and fitted models: netCDF, written whole and read whole.

What is in an estimate is `prism.simulation.results`'s affair, what is in another kind that of its
analysis.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prism.common.errors import PrismError
from prism.common.netcdf import read_netcdf, write_netcdf

if TYPE_CHECKING:
    import xarray as xr

    from prism.common.results import Result


class Kind(NamedTuple):
    """A kind of result: the command that writes it, its class, and what makes its answer.

    The command is in the module of its name in `prism.cli.commands`; the class is named
    ``module:class`` of `prism`, the function ``module:function`` of `prism.present.answers`. All
    are imported when they are called.
    """

    command: str
    maker: str
    result: str

    @property
    def is_model(self) -> bool:
        """Whether it is a model that `prism fit` wrote."""
        return self.command == "fit"

    def answer(self, dataset: "xr.Dataset") -> Any:
        """Make the `prism.present.answer.Answer` of a result."""
        return _imported(f"present.answers.{self.maker}")(self.typed(dataset))

    def result_class(self) -> "type[Result]":
        """Import the class of its results."""
        found: type[Result] = _imported(self.result)
        return found

    def typed(self, dataset: "xr.Dataset") -> "Result":
        """Make the typed result of a Dataset; PrismError for one of an earlier version."""
        result = self.result_class()(dataset)
        if not result.is_whole():
            raise PrismError(
                f"a result of an earlier version; make it anew with `prism {self.command}`"
            )
        return result


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"prism.{module}"), attribute)


_ESTIMATE = Kind("estimate", "estimate:estimate_answer", "simulation.estimated:Estimate")
_MODEL = Kind("fit", "fit:fit_answer", "models.fitted:Model")
KINDS = {
    "simulation": _ESTIMATE,
    "estimate": _ESTIMATE,
    "steps_estimate": Kind(
        "estimate", "estimate:estimate_answer", "models.steptimes.estimate:StepsEstimate"),
    "ranking": Kind("rank", "rank:rank_answer", "analyses.rank:Ranking"),
    "placement": Kind("place", "place:place_answer", "analyses.placements.placing:Placing"),
    "sweep": Kind("sweep", "sweep:sweep_answer", "analyses.sweeps.swept:Sweep"),
    "timeline": Kind("timeline", "timeline:timeline_answer", "analyses.timeline:Timeline"),
    "trace": _MODEL,
    "calibrated": _MODEL,
    "steps": _MODEL,
    "replay": Kind("replay", "replay:replay_answer", "analyses.replay:Replay"),
    "validation": Kind("validate", "validate:validation_answer", "analyses.validate:Validation"),
    "measurement": Kind("measure", "measure:measurement_answer", "measuring.command:Measurement"),
    "comparison": Kind("compare", "compare:compare_answer", "analyses.compare:Comparison"),
    "class_comparison": Kind(
        "compare", "classes:classes_answer", "analyses.comparisons.profile:ClassComparison"),
    "explanation": Kind("explain", "explain:explain_answer", "analyses.explain:Explanation"),
    "watch": Kind("watch", "watch:watch_answer", "analyses.watch:Forecast"),
    "kernel": Kind("kernel", "kernel:kernel_answer", "analyses.kernel:KernelRates"),
}  # fmt: skip
"""Every kind of result and model, by the ``kind`` of its dataset, in the order of work."""

GONE = {
    "measured_step": "prism measure step, which trained a model of its own, is gone; record steps "
    "of your job with torch.profiler (docs/own-trace.md has the lines) and give the traces to "
    "prism fit TRACE",
}
"""Kinds of earlier versions, and what there is in their place."""


def kind_of(dataset: "xr.Dataset") -> str | None:
    """Tell the kind of a result or model; None where it is none of `KINDS`.

    Raises PrismError: it is of a kind that is gone.
    """
    kind = dataset.attrs.get("kind")
    if kind in GONE:
        file = dataset.encoding.get("source")
        raise PrismError(f"{f'{file}: ' if file else ''}{GONE[kind]}")
    if kind is None and "job" in dataset.attrs:  # a file of the first versions, without a kind
        of_variable = ("total_order", "ranking"), ("time_to_train", "estimate"), (
            "step_time", "simulation")  # fmt: skip
        kind = next((k for variable, k in of_variable if variable in dataset), None)
    return str(kind) if str(kind) in KINDS else None


def answer(result: "Result | xr.Dataset") -> Any:
    """Make the answer of any result or model: what its command prints, and a notebook shows.

    Parameters
    ----------
    result : Result or xarray.Dataset
        What a function of prism returned, or `load`.

    Returns
    -------
    prism.present.answer.Answer
        Findings, tables, pictures and warnings; ``json()`` gives all figures.

    Raises
    ------
    PrismError
        It is no result of prism.

    Examples
    --------
    >>> import prism
    >>> answer = prism.answer(prism.estimate("pipeline-8x32", replicates=64, seed=1))
    >>> "time_to_train" in [finding.code for finding in answer.findings]
    True
    """
    dataset = dataset_of(result)
    kind = kind_of(dataset)
    if kind is None:
        raise PrismError("no result of prism; expected what one of its functions returned")
    return KINDS[kind].answer(dataset)


def dataset_of(result: Any) -> "xr.Dataset":
    """Give the Dataset of a result, or one as it is; raises PrismError for anything else."""
    import xarray as xr

    dataset = result if isinstance(result, xr.Dataset) else getattr(result, "dataset", None)
    if isinstance(dataset, xr.Dataset):
        return dataset
    raise PrismError(
        f"{type(result).__name__}: no result of prism; expected what one of its functions returned"
    )


def summary(result: "Result | xr.Dataset") -> dict[str, Any]:
    """Summarise any result as the JSON object that its command prints; times in seconds.

    Parameters
    ----------
    result : Result or xarray.Dataset
        What a function of prism returned, or `load`.

    Returns
    -------
    dict
        As each command's page in `docs/` describes it.

    Raises
    ------
    PrismError
        It is no result of prism.

    Examples
    --------
    >>> import prism
    >>> figures = prism.summary(prism.simulate("pipeline-8x32", replicates=64, seed=1))
    >>> round(figures["ideal_step_time"])  # s
    117
    """
    return dict(answer(result).json())


def save(result: "Result | xr.Dataset", path: str | os.PathLike[str]) -> None:
    """Write a result as netCDF: to a temporary name first, then renamed.

    Parameters
    ----------
    result : Result or xarray.Dataset
        What a function of prism returned.
    path : path
        File to write, such as ``result.nc``.

    Raises
    ------
    PrismError
        The file cannot be written.

    Examples
    --------
    >>> import prism
    >>> prism.save(prism.simulate("pipeline-8x32", replicates=64, seed=1), "result.nc")
    """
    write_netcdf(dataset_of(result), path)


def load(path: str | os.PathLike[str]) -> "Result":
    """Read any result, or a model of ``prism fit``: a file, or the folder of its result.nc.

    Parameters
    ----------
    path : path
        File, or folder that ``-o`` of a command wrote.

    Returns
    -------
    Result
        As it was saved.

    Raises
    ------
    PrismError
        The file is missing or not a prism result.

    Examples
    --------
    >>> import prism
    >>> prism.save(prism.simulate("pipeline-8x32", replicates=64, seed=1), "result.nc")
    >>> prism.load("result.nc").step_time.sizes["replicate"]
    64
    """
    loaded = load_dataset(path)
    return KINDS[str(kind_of(loaded))].typed(loaded)


def load_dataset(path: str | os.PathLike[str]) -> "xr.Dataset":
    """Read the Dataset of a result or model; see `load`."""
    file = Path(path) / "result.nc" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise PrismError(f"{file}: no such result; prism estimate JOB -o DIR writes result.nc")
    loaded = read_netcdf(file, "a result.nc, which prism estimate JOB -o DIR writes")
    if kind_of(loaded) is not None:
        return loaded
    way = "; prism.load_library opens it" if "prism_schema" in loaded.attrs else ""
    raise PrismError(f"{file}: a netCDF file, but not a prism result (no kind, no job){way}")
