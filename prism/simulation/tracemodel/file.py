"""Fitted models as files: a `TraceModel` to and from a netCDF dataset.

What has a number for every op, rank or step is an array with units; the graph's nodes and the op
groups' labels are one JSON text each.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.common.errors import PrismError
from prism.common.files import read_netcdf, told_broken
from prism.distributions.distribution import Distribution, constant
from prism.simulation.tracemodel.graph import Scope, TraceNode
from prism.simulation.tracemodel.model import OpGroup, TraceModel

if TYPE_CHECKING:
    import xarray as xr

SCHEMA = 1
NODE = [name for name in TraceNode._fields if name != "lags"]  # which are nodes of their own
ARRAYS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "mean": (
        ("node", "dp_rank"),
        "s",
        "mean time from the last arrival, rank factor taken out",
    ),
    "profile": (("op_group", "dp_rank", "step"), "1", "step factor, steps from fast to slow"),
    "weight": (("step",), "1", "probability of drawing each measured step"),
    "rank": (("op_kind", "stage", "dp_rank"), "1", "persistent factor of every traced worker"),
    "follows": (("op_kind", "stage", "dp_rank"), "1", "share of it that follows shared effects"),
    "rank_power": (("op_kind",), "1", "exponent of the rank distribution"),
    "group": (("node",), "1", "op group of every node, -1: none"),
}
_LAWS = ("rank_law", "content", "rank_step")


def model_to_dataset(model: TraceModel, attrs: dict[str, Any]) -> "xr.Dataset":
    """Lay a model into labelled arrays; `attrs` are its provenance."""
    import xarray as xr

    data: dict[str, Any] = {
        name: (dims, getattr(model, name), {"units": units, "long_name": text})
        for name, (dims, units, text) in ARRAYS.items()
    }
    nodes = [{k: getattr(n, k) for k in NODE} | {"scope": n.scope.name} for n in model.nodes]
    groups = [{**g._asdict(), "residual": _law_to(g.residual)} for g in model.groups]
    texts = {
        "nodes": (nodes, "the step's graph"),
        "groups": (groups, "what its ops have in common, with their distributions"),
        "laws": (
            {name: _law_to(getattr(model, name)) for name in _LAWS},
            "distributions of shared effects",
        ),
        "report": (model.report, "what the fit printed"),
    }
    for name, (value, text) in texts.items():
        data[name] = ((), json.dumps(value), {"units": "1", "long_name": text})
    scalars = {
        n: getattr(model, n)
        for n in ("n_stages", "n_replicas", "p2p", "correlation_steps", "correlation_share",
                  "measured_mean", "period_ratio")
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
    """Rebuild a model; raises PrismError where the dataset is none that is understood."""
    kind = dataset.attrs.get("kind")
    if kind == "steps":
        raise PrismError(
            f"{source}: a model of step times alone, without a step graph; a job needs one of a "
            "trace: prism fit TRACE -o MODEL.nc"
        )
    if kind != "trace" or dataset.attrs.get("schema") != SCHEMA:
        raise PrismError(
            f"{source}: kind {kind!r}, schema {dataset.attrs.get('schema')}; expected a trace "
            f"model of schema {SCHEMA}: fit the trace again, prism fit TRACE -o MODEL.nc"
        )
    text = {n: json.loads(str(dataset[n].values)) for n in ("nodes", "groups", "laws", "report")}
    nodes = tuple(
        TraceNode(**{**n, "scope": Scope(n["scope"]), "stages": tuple(n["stages"]),
                     "preds": tuple(n["preds"])})
        for n in text["nodes"]
    )  # fmt: skip
    groups = tuple(OpGroup(**{**g, "residual": _law_from(g["residual"])}) for g in text["groups"])
    arrays: dict[str, Any] = {name: np.asarray(dataset[name].values) for name in ARRAYS}
    laws: dict[str, Any] = {n: _law_from(text["laws"][n]) for n in _LAWS}
    attrs = dataset.attrs
    model = TraceModel(
        nodes=nodes, groups=groups, steps=np.asarray(dataset["step"].values),
        rank_kinds=tuple(str(k) for k in dataset["op_kind"].values), **laws, **arrays,
        n_stages=int(attrs["n_stages"]), n_replicas=int(attrs["n_replicas"]), p2p=str(attrs["p2p"]),
        correlation_steps=float(attrs["correlation_steps"]),
        correlation_share=float(attrs["correlation_share"]),
        measured_mean=float(attrs["measured_mean"]),
        period_ratio=float(attrs.get("period_ratio", 1.0)),  # older files lack it
        lemons=tuple((int(r), int(s), float(x)) for r, s, x in json.loads(attrs["lemons"])),
        report=text["report"], job=json.loads(attrs["job"]),
    )  # fmt: skip
    _check(model)
    return model


def _check(model: TraceModel) -> None:
    """Refuse what is no graph with durations."""
    n, kinds = len(model.nodes), len(model.rank_kinds)
    place, steps = (kinds, model.n_stages, model.n_replicas), model.steps.size
    shapes = {
        "mean": (n, model.n_replicas), "profile": (len(model.groups), model.n_replicas, steps),
        "weight": (steps,), "rank": place, "follows": place, "rank_power": (kinds,), "group": (n,),
    }  # fmt: skip
    for name, shape in shapes.items():
        values = getattr(model, name)
        if values.shape != shape:
            raise ValueError(f"{name} {values.shape} is not {shape}")
        if not np.isfinite(values).all() or (name != "group" and values.min(initial=0.0) < 0.0):
            raise ValueError(f"{name} holds negative or infinite values")
    if not (n and steps and model.weight.sum() > 0.0 and model.mean.max() > 0.0):
        raise ValueError("no step has a weight, or no op takes time")
    if model.group.dtype.kind != "i":
        raise ValueError("group holds no whole numbers")
    for replica, stage, _ in model.lemons:
        if not (0 <= replica < model.n_replicas and 0 <= stage < model.n_stages):
            raise ValueError(f"lemon (replica {replica}, stage {stage}) is no traced worker")
    for i, node in enumerate(model.nodes):
        if not all(0 <= p < i for p in node.preds):
            raise ValueError(f"node {i} comes before what it waits for")
        if not node.stages or not all(0 <= s < model.n_stages for s in node.stages):
            raise ValueError(f"node {i} is on stages {node.stages} of {model.n_stages}")
        if not (-1 if node.kind == "join" else 0) <= model.group[i] < len(model.groups):
            raise ValueError(f"node {i} is of group {model.group[i]}")


def load_model(path: str | Path) -> TraceModel:
    """Read a model from its file; raises PrismError where that is missing or something else."""
    if not Path(path).is_file():
        raise PrismError(f"{path}: no such model; prism fit TRACE -o MODEL.nc makes one")
    expected = "a model, which prism fit TRACE -o MODEL.nc makes"
    with told_broken(path, expected):
        return model_from_dataset(read_netcdf(path, expected), str(path))


def _law_to(law: Distribution) -> dict[str, Any]:
    """Lay a distribution into plain values; one without spread is empty."""
    if law.std == 0.0:
        return {}
    return {
        "family": law.family, "params": law.params, "loc": law.loc, "scale": law.scale,
        "knots_q": [round(q, 12) for q in law.knots_q], "knots_x": law.knots_x,
    }  # fmt: skip


def _law_from(plain: dict[str, Any]) -> Distribution:
    if not plain:
        return constant()
    fields = {k: tuple(plain[k]) for k in ("params", "knots_q", "knots_x")}
    law = Distribution(plain["family"], loc=plain["loc"], scale=plain["scale"], **fields)
    if not math.isfinite(law.mean):
        raise ValueError(f"distribution {plain['family']} without a mean")
    return law
