"""Fitted models as files: a `TraceModel` to and from a netCDF dataset.

What has a number for every op, rank or step is an array with units, distributions lie in the table
of a library's file; the graph's nodes and the op groups' labels are one JSON text each.
"""

import json
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.common.errors import PrismError
from prism.distributions.modelfile import ModelFile, Scalar, Spec, json_of
from prism.distributions.ranges import COUNT, FINITE, NON_NEGATIVE, POSITIVE, SAME, SHARE, Range
from prism.simulation.tracemodel.graph import Scope, TraceNode
from prism.simulation.tracemodel.model import OpGroup, TraceModel

if TYPE_CHECKING:
    import xarray as xr

NODE = [name for name in TraceNode._fields if name != "lags"]  # which are nodes of their own
PLACE = ("op_kind", "stage", "dp_rank")
ARRAYS = {
    "duration": Spec(("node", "dp_rank"), "s", "mean time from the last arrival, rank factor taken "
                     "out; of a source its lead, below 0", FINITE),
    "profile": Spec(("op_group", "dp_rank", "step"), "1", "step factor, steps from fast to slow"),
    "weight": Spec(("step",), "1", "probability of drawing each measured step"),
    "rank": Spec(PLACE, "1", "persistent factor of every traced worker"),
    "follows": Spec(PLACE, "1", "share of it that follows shared effects", SHARE),
    "rank_power": Spec(("op_kind",), "1", "exponent of the rank distribution"),
    "group": Spec(("node",), "1", "op group of every node, -1: none", Range(-1.0)),
}  # fmt: skip
FILE = ModelFile("trace", (3,), ARRAYS, "a model of a trace", "prism fit TRACE -o MODEL.nc")
DISTRIBUTIONS = {
    "rank_distribution": "rank",
    "content": "microbatch",
    "rank_step": "rank_step",
}  # entry of each
OF_GROUPS = {
    "mean": NON_NEGATIVE, "cv": NON_NEGATIVE, "drift": NON_NEGATIVE,
    "content": FINITE, "rank_step": FINITE,  # with the sign of the loading
}  # fmt: skip
SCALARS = {
    "n_stages": Scalar(int, COUNT), "n_replicas": Scalar(int, COUNT), "p2p": Scalar(str),
    "correlation_steps": Scalar(float), "correlation_share": Scalar(float, SHARE),
    "measured_mean": Scalar(float), "most_lead": Scalar(float),
}  # fmt: skip


def model_to_dataset(model: TraceModel, attrs: dict[str, Any]) -> "xr.Dataset":
    """Lay a model into labelled arrays; `attrs` are its provenance."""
    arrays = {name: getattr(model, name) for name in FILE.arrays if name != "duration"}
    distributions = {entry: getattr(model, name) for name, entry in DISTRIBUTIONS.items()}
    distributions |= {f"residual/{i}": g.residual for i, g in enumerate(model.groups)}
    nodes = [{k: getattr(n, k) for k in NODE} | {"scope": n.scope.name} for n in model.nodes]
    groups = [{k: v for k, v in g._asdict().items() if k != "residual"} for g in model.groups]
    texts = {
        "nodes": (nodes, "the step's graph"),
        "groups": (groups, "what its ops have in common"),
        "report": (model.report, "what the fit printed"),
    }
    scalars = {name: getattr(model, name) for name in SCALARS}
    more = {"job": json.dumps(model.job), "lemons": json.dumps(model.lemons)}
    coords = {"step": model.steps, "op_kind": list(model.rank_kinds)}
    arrays |= {"duration": model.mean}
    return FILE.lay_out(arrays, distributions, texts, coords, attrs | scalars | more)


def model_from_dataset(dataset: "xr.Dataset", source: str) -> TraceModel:
    """Rebuild a model; raises PrismError where the dataset is none that is understood."""
    if dataset.attrs.get("kind") == "steps":
        raise PrismError(
            f"{source}: a model of step times alone, without a step graph; a job needs one of a "
            f"trace: {FILE.command}"
        )
    FILE.check(dataset, source)
    distributions = FILE.distributions(dataset)
    nodes = tuple(
        TraceNode(**{**n, "scope": Scope(n["scope"]), "stages": tuple(n["stages"]),
                     "preds": tuple(n["preds"])})
        for n in json_of(dataset, "nodes", list)
    )  # fmt: skip
    groups = tuple(
        OpGroup(**g, residual=distributions[f"residual/{i}"])
        for i, g in enumerate(json_of(dataset, "groups", list))
    )
    arrays, attrs = FILE.values(dataset), dataset.attrs
    shared: dict[str, Any] = {name: distributions[entry] for name, entry in DISTRIBUTIONS.items()}
    model = TraceModel(
        nodes=nodes, groups=groups, mean=arrays.pop("duration"), **arrays, **shared,
        **FILE.scalars(dataset, SCALARS),
        steps=np.asarray(dataset["step"].values),
        rank_kinds=tuple(str(k) for k in dataset["op_kind"].values),
        lemons=tuple((int(r), int(s), float(x)) for r, s, x in json.loads(attrs["lemons"])),
        report=json_of(dataset, "report"), job=json.loads(attrs["job"]),
    )  # fmt: skip
    _check(model, dataset.sizes)
    return model


def load_model(path: str | Path) -> TraceModel:
    """Read a model from its file; raises PrismError where that is missing or something else."""
    return FILE.load(path, model_from_dataset)


def _check(model: TraceModel, sizes: Mapping[Hashable, int]) -> None:
    """Refuse what is no graph with durations."""
    n, n_groups = len(model.nodes), len(model.groups)
    for group in model.groups:
        for name, allowed in OF_GROUPS.items():
            allowed.check(f"{name} of {group.name}", getattr(group, name))
    named = {"dp_rank": model.n_replicas, "node": n, "op_group": n_groups, "stage": model.n_stages}
    for dim, size in named.items():
        if sizes[dim] != size:
            raise ValueError(f"arrays of {sizes[dim]} by {dim}, and {size} are named")
    if not (n and model.steps.size and model.mean.max() > 0.0):
        raise ValueError("no steps, or no op takes time")
    NON_NEGATIVE.check("the error of its mean step", model.mean_error)  # of its report
    for what in (model.weight.sum(), model.profile @ model.weight):
        if not np.allclose(what, 1.0, rtol=0.0, atol=SAME):
            raise ValueError("weights of steps whose sum is not 1, or step factors of another mean")
    if model.group.dtype.kind != "i":
        raise ValueError("group holds no whole numbers")
    for replica, stage, slowdown in model.lemons:
        POSITIVE.check("a lemon's slowdown", slowdown)
        if not (0 <= replica < model.n_replicas and 0 <= stage < model.n_stages):
            raise ValueError(f"lemon (replica {replica}, stage {stage}) is no traced worker")
    for i, node in enumerate(model.nodes):
        fits = (
            -1 <= node.continues < n
            and (node.continues >= 0 or (model.mean[i] >= 0.0).all())  # a lead can be below 0
            and all(0 <= p < i for p in node.preds)
            and bool(node.stages)
            and all(0 <= s < model.n_stages for s in node.stages)
            and (-1 if node.kind == "join" else 0) <= model.group[i] < n_groups
        )
        if not fits:
            raise ValueError(f"node {i} is out of place in its graph")
