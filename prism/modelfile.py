"""Fitted models as files: a `TraceModel` to and from a netCDF dataset.

What has a number for every op, rank or step is an array with units; the graph's nodes and the op
groups' labels are one JSON text each. Left out: what a model means, see `prism.tracemodel`.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.distributions import Law, constant
from prism.errors import PrismError
from prism.tracegraph import TraceNode
from prism.tracegroups import Scope
from prism.tracemodel import OpGroup, TraceModel

if TYPE_CHECKING:
    import xarray as xr

SCHEMA = 1
ARRAYS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "mean": (
        ("node", "dp_rank"),
        "s",
        "mean duration from the last arrival, rank factor taken out",
    ),
    "profile": (("op_group", "dp_rank", "step"), "1", "step factor, steps from fast to slow"),
    "weight": (("step",), "1", "probability of drawing each measured step"),
    "rank": (("op_kind", "stage", "dp_rank"), "1", "persistent factor of every traced worker"),
    "follows": (("op_kind", "stage", "dp_rank"), "1", "share of it that follows shared effects"),
    "rank_power": (("op_kind",), "1", "exponent of the rank law"),
    "group": (("node",), "1", "op group of every node, -1: none"),
}
_LAWS = ("rank_law", "content", "rank_step")


def model_to_dataset(model: TraceModel, attrs: dict[str, Any]) -> "xr.Dataset":
    """Lay a model into labelled arrays.

    Parameters
    ----------
    model : TraceModel
    attrs : dict
        Provenance: version, commit, seed, inputs.
    """
    import xarray as xr

    data: dict[str, Any] = {
        name: (dims, getattr(model, name), {"units": units, "long_name": text})
        for name, (dims, units, text) in ARRAYS.items()
    }
    nodes = [n._replace(scope=n.scope.name)._asdict() for n in model.nodes]  # type: ignore[arg-type]
    groups = [{**g._asdict(), "residual": _law_to(g.residual)} for g in model.groups]
    texts = {
        "nodes": (nodes, "the step's graph"),
        "groups": (groups, "what its ops have in common, with their laws"),
        "laws": ({name: _law_to(getattr(model, name)) for name in _LAWS}, "laws of shared effects"),
        "report": (model.report, "what the fit printed"),
    }
    for name, (value, text) in texts.items():
        data[name] = ((), json.dumps(value), {"units": "1", "long_name": text})
    scalars = {
        n: getattr(model, n)
        for n in ("n_stages", "n_replicas", "p2p", "correlation_steps", "correlation_share",
                  "measured_mean")
    }  # fmt: skip
    coords = {"step": model.steps, "op_kind": list(model.rank_kinds)}
    return xr.Dataset(
        data, coords,
        attrs | scalars | {
            "kind": "trace", "schema": SCHEMA, "job": json.dumps(model.job),
            "lemons": json.dumps(model.lemons),
        },
    )  # fmt: skip


def model_from_dataset(dataset: "xr.Dataset", source: str) -> TraceModel:
    """Rebuild a model.

    Raises
    ------
    PrismError
        The dataset is no trace model of a version that is understood.
    """
    kind = dataset.attrs.get("kind")
    if kind != "trace" or dataset.attrs.get("schema") != SCHEMA:
        raise PrismError(
            f"{source}: kind {kind!r}, schema {dataset.attrs.get('schema')}; expected a trace model "
            f"of schema {SCHEMA}: fit the trace again, prism fit TRACE -o MODEL.nc"
        )
    text = {n: json.loads(str(dataset[n].values)) for n in ("nodes", "groups", "laws", "report")}
    nodes = tuple(
        TraceNode(**{**n, "scope": Scope(n["scope"]), "stages": tuple(n["stages"]),
                     "preds": tuple(n["preds"])})
        for n in text["nodes"]
    )  # fmt: skip
    groups = tuple(OpGroup(**{**g, "residual": _law_from(g["residual"])}) for g in text["groups"])
    arrays = {name: np.asarray(dataset[name].values) for name in ARRAYS}
    attrs = dataset.attrs
    return TraceModel(
        nodes=nodes, groups=groups, steps=np.asarray(dataset["step"].values),
        rank_kinds=tuple(str(k) for k in dataset["op_kind"].values),
        **{n: _law_from(text["laws"][n]) for n in _LAWS}, **arrays,
        n_stages=int(attrs["n_stages"]), n_replicas=int(attrs["n_replicas"]), p2p=str(attrs["p2p"]),
        correlation_steps=float(attrs["correlation_steps"]),
        correlation_share=float(attrs["correlation_share"]),
        measured_mean=float(attrs["measured_mean"]),
        lemons=tuple((int(r), int(s), float(x)) for r, s, x in json.loads(attrs["lemons"])),
        report=text["report"], job=json.loads(attrs["job"]),
    )  # fmt: skip


def load_model(path: str | Path) -> TraceModel:
    """Read a model from its file.

    Raises
    ------
    PrismError
        The file is missing, or holds something else.
    """
    import xarray as xr

    if not Path(path).is_file():
        raise PrismError(f"{path}: no such model; prism fit TRACE -o MODEL.nc makes one")
    try:
        with xr.open_dataset(path, engine="h5netcdf") as dataset:
            loaded = dataset.load()
        return model_from_dataset(loaded, str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrismError(
            f"{path}: not a model that can be read ({error}); prism fit TRACE -o MODEL.nc makes one"
        ) from error


def _law_to(law: Law) -> dict[str, Any]:
    """A law as plain values; one without spread is empty."""
    if law.std == 0.0:
        return {}
    return {
        "family": law.family, "params": law.params, "loc": law.loc, "scale": law.scale,
        "knots_q": [round(q, 12) for q in law.knots_q], "knots_x": law.knots_x,
    }  # fmt: skip


def _law_from(plain: dict[str, Any]) -> Law:
    if not plain:
        return constant()
    fields = {k: tuple(plain[k]) for k in ("params", "knots_q", "knots_x")}
    law = Law(plain["family"], loc=plain["loc"], scale=plain["scale"], **fields)
    if not math.isfinite(law.mean):
        raise ValueError(f"law {plain['family']} without a mean")
    return law
