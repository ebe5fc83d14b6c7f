"""Fitted models where a job or its variability is named: the job that a model describes.

A calibrated model is a library and takes its place; a fitted trace stays a model, with its graph.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from prism.common.errors import PrismError
from prism.common.netcdf import check_sealed, wrap_corrupt_file
from prism.jobs.jobspec.yaml import ConfigLayer, display_path, key_paths

CALIBRATED = "calibrated"
STEPS = "steps"
MODELS = "trace", CALIBRATED
_ATTRS = "kind", "job", "base_library", "prism_schema"
_EXPECTED = "a model: prism fit TRACE -o MODEL.nc"


def model_attrs(path: str | Path) -> dict[str, str]:
    """Kind, job and base library of a fitted model's file; empty for anything else."""
    if isinstance(path, str | Path) and Path(path).suffix == ".nc" and Path(path).is_file():
        with suppress(PrismError):
            return _read_attrs(path)
    return {}


def is_step_model(path: str | Path) -> bool:
    """Say whether a file is a model of step times."""
    return model_attrs(path).get("kind") == STEPS


def _read_attrs(path: str | Path) -> dict[str, str]:
    import h5py

    check_sealed(path, _EXPECTED)
    with wrap_corrupt_file(path, _EXPECTED), h5py.File(path) as file:
        found = {k: file.attrs[k] for k in _ATTRS if k in file.attrs}
        return {k: v.decode() if isinstance(v, bytes) else str(v) for k, v in found.items()}


def job_of_model(path: Path) -> ConfigLayer:
    """Return the job that a fitted model describes, with the model itself as its variability."""
    shown = display_path(path)
    attrs = _read_attrs(path)
    if attrs.get("kind") == STEPS:
        raise PrismError(
            f"{shown}: a model of step times alone, which has no step graph; prism estimate and "
            "prism validate take it, all else needs a job, or a trace: prism fit TRACE -o MODEL.nc"
        )
    if attrs.get("kind") not in MODELS and "prism_schema" in attrs:
        raise PrismError(
            f"{shown}: a library of distributions, without a job; name it in one: prism estimate "
            f"JOB --set variability.library={shown}"
        )
    if attrs.get("kind") not in MODELS or "job" not in attrs:
        raise PrismError(
            f"{shown}: neither a job nor a fitted model; expected a YAML job, or {_EXPECTED}"
        )
    with wrap_corrupt_file(path, _EXPECTED):
        values: dict[str, Any] = json.loads(attrs["job"])
        own = values.get("variability", {})
        calibrated = {**own, "library": str(path)}
        traced = {"library": None, **own, "model": str(path)}
        values["variability"] = calibrated if attrs["kind"] == CALIBRATED else traced
        return ConfigLayer(values, dict.fromkeys(key_paths(values), shown))


def settle_calibrated(layer: ConfigLayer) -> None:
    """Put a calibrated model that is named as the variability's model in the library's place."""
    tree = layer.values.get("variability")
    name = tree.get("model") if isinstance(tree, dict) else None
    attrs = model_attrs(name) if isinstance(name, str) else {}
    if not isinstance(tree, dict) or attrs.get("kind") != CALIBRATED:
        return
    place = layer.places.get(("variability", "model"), "variability")
    base, named = attrs.get("base_library"), tree.get("library")
    if named not in (None, base, name):
        layer.problems.append(
            f"{place}: variability.model: {name} was calibrated over {base}, but "
            f"variability.library is {named}; expected {base}, or a calibration over {named}"
        )
    del tree["model"]
    tree["library"] = name
    layer.places[("variability", "library")] = place
