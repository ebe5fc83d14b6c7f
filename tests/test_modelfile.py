"""Models as files: the same model and the same simulated bits come back; foreign files do not."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from campaign import some
from pipeline_synth import Effects, Layout, as_trace, make_trace

import prism
from prism import PrismError, save
from prism.distributions import modelfile
from prism.distributions.library import from_dataset
from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.fit import fit_graph
from prism.simulation.steps import run_blocks
from prism.simulation.tracemodel.arrays import build_trace_graph_arrays, build_trace_program
from prism.simulation.tracemodel.file import load_model, model_from_dataset, model_to_dataset


@pytest.fixture(scope="module")
def model():
    effects = Effects(
        rank_sd=0.01, step_sd=0.02, content_sd=0.03, gap_s=0.002,
        lemons={(1, 0): 1.8},
    )  # fmt: skip
    frame, _ = make_trace(Layout(3, 2, 4, 30), effects, 1)
    fitted = fit_graph(build_trace_graph(as_trace(frame)))
    assert fitted.lemons
    fitted = dataclasses.replace(fitted, correlation_steps=7.5, correlation_share=0.8)
    return dataclasses.replace(fitted, report={"a": [1.5, None]}, job={"parallelism": {"dp": 3}})


def step_times(model, measured):
    graph = build_trace_graph_arrays(model, model.n_replicas)
    program = build_trace_program(model, graph, measured)
    return run_blocks(program, range(8), 5)[0]


def test_a_model_comes_back_and_simulates_to_the_same_bits(model, tmp_path):
    path = tmp_path / "model.nc"
    save(model_to_dataset(model, {"seed": "1"}), path)
    back = load_model(path)
    for field in dataclasses.fields(model):
        old, new = getattr(model, field.name), getattr(back, field.name)
        if isinstance(old, np.ndarray):
            assert new.dtype == old.dtype and np.array_equal(new, old), field.name
        elif field.name not in ("groups", "content", "rank_step", "rank_law"):
            assert new == old, field.name
    for measured in (True, False):
        assert np.array_equal(step_times(back, measured), step_times(model, measured))
    again, first = model_to_dataset(back, {}), model_to_dataset(model, {})
    xr.testing.assert_allclose(again, first, rtol=1e-12)
    assert again.attrs == first.attrs


def test_a_loading_has_either_sign(model, tmp_path):
    groups = tuple(g._replace(content=-0.01, rank_step=-0.02) for g in model.groups)
    save(model_to_dataset(dataclasses.replace(model, groups=groups), {}), tmp_path / "m.nc")
    assert {(g.content, g.rank_step) for g in load_model(tmp_path / "m.nc").groups} == {
        (-0.01, -0.02)
    }


def test_distributions_lie_in_the_table_of_a_library(model):
    entries = from_dataset(model_to_dataset(model, {}), "model").entries
    assert entries["rank"].law.std == pytest.approx(model.rank_law.std)
    assert entries["microbatch"].law.std == pytest.approx(model.content.std)
    residuals = [e for name, e in entries.items() if name.startswith("residual/")]
    assert [e.law.std for e in residuals] == pytest.approx([g.residual.std for g in model.groups])


def test_every_array_has_units_and_a_name(model):
    dataset = model_to_dataset(model, {})
    for name, variable in dataset.data_vars.items():
        assert variable.attrs.get("units") and variable.attrs.get("long_name"), name


def test_files_that_are_no_models_say_so(model, tmp_path):
    with pytest.raises(PrismError, match=r"missing\.nc: .*prism fit "):
        load_model(tmp_path / "missing.nc")
    with pytest.raises(PrismError, match=f"{tmp_path}: .*prism fit "):
        load_model(tmp_path)
    (tmp_path / "text.nc").write_text("not netCDF")
    (tmp_path / "empty.nc").write_bytes(b"")
    whole = tmp_path / "whole.nc"
    save(model_to_dataset(model, {}), whole)
    content = whole.read_bytes()
    for name, part in (("half.nc", content[: len(content) // 2]), ("head.nc", content[:600])):
        (tmp_path / name).write_bytes(part)
    for name in ("text.nc", "empty.nc", "half.nc", "head.nc"):
        with pytest.raises(PrismError, match=f"{name}: .*read"):
            load_model(tmp_path / name)
    other = tmp_path / "other.nc"
    xr.Dataset({"step_time": ("replicate", np.ones(3))}, attrs={"kind": "simulation"}).to_netcdf(
        other, engine="h5netcdf"
    )
    with pytest.raises(PrismError, match=r"other\.nc: kind 'simulation'"):
        load_model(other)


def damaged(dataset, name, change):
    """The dataset with one of its JSON texts changed."""
    value = json.loads(str(dataset[name].values))
    return dataset.assign({name: ((), json.dumps(change(value)), dataset[name].attrs)})


def with_first(rows, **changes):
    return [{**rows[0], **changes}, *rows[1:]]


DAMAGE = {
    "no nodes": lambda d: damaged(d, "nodes", lambda v: []),
    "a node fewer": lambda d: damaged(d, "nodes", lambda v: v[:-1]),
    "a field of nodes less": lambda d: damaged(
        d, "nodes", lambda v: [{k: n[k] for k in n if k != "stages"} for n in v]
    ),
    "a field of nodes more": lambda d: damaged(d, "nodes", lambda v: with_first(v, colour="red")),
    "a circle": lambda d: damaged(d, "nodes", lambda v: with_first(v, preds=[1])),
    "a stage too many": lambda d: damaged(d, "nodes", lambda v: with_first(v, stages=[9])),
    "no stage": lambda d: damaged(d, "nodes", lambda v: with_first(v, stages=[])),
    "text for nodes": lambda d: damaged(d, "nodes", lambda v: "nodes"),
    "no groups": lambda d: damaged(d, "groups", lambda v: []),
    "a distribution without parameters": lambda d: d.assign(
        family=("entry", np.full(d.sizes["entry"], "lognormal", object)),
        params=np.nan * d["params"],
    ),
    "an unknown distribution": lambda d: d.assign(
        family=("entry", np.full(d.sizes["entry"], "unheard", object))
    ),
    "no distributions": lambda d: d.isel(entry=slice(0, 0)),
    "a distribution fewer": lambda d: d.isel(entry=slice(0, -1)),
    "distributions of another name": lambda d: d.assign_coords(
        entry=[f"{name}x" for name in d["entry"].values]
    ),
    "no JSON": lambda d: d.assign(nodes=((), "{", {})),
    "no durations": lambda d: d.drop_vars("duration"),
    "durations that are NaN": lambda d: d.assign(duration=d["duration"] * np.nan),
    "negative durations": lambda d: d.assign(duration=-1.0 - d["duration"]),
    "infinite factors": lambda d: d.assign(profile=d["profile"] * np.inf),
    "durations of 0": lambda d: d.assign(duration=0.0 * d["duration"]),
    "weights of 0": lambda d: d.assign(weight=0.0 * d["weight"]),
    "unknown groups": lambda d: d.assign(group=d["group"] + 1000),
    "groups that are no whole numbers": lambda d: d.assign(group=d["group"].astype(float)),
    "replicas that differ": lambda d: d.isel(dp_rank=slice(0, 2)),
    "no replicas named": lambda d: d.assign_attrs(n_replicas="many"),
    "lemons of a kind": lambda d: d.assign_attrs(lemons="[1]"),
    "lemons elsewhere": lambda d: d.assign_attrs(lemons="[[99, 0, 2.0]]"),
    "job in no JSON": lambda d: d.assign_attrs(job="{"),
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_damaged_models_are_refused(model, tmp_path, monkeypatch, change):
    path = tmp_path / "damaged.nc"
    path.touch()  # whose content is given: writing each takes longer than all else
    found = change(model_to_dataset(model, {}))
    monkeypatch.setattr(modelfile, "read_netcdf", lambda *_: found)
    with pytest.raises(PrismError, match=r"damaged\.nc: .*read"):
        load_model(path)


def test_damage_is_refused_through_a_file_too(model, tmp_path):
    path = tmp_path / "damaged.nc"
    for what in {*some(DAMAGE, 28), "no distributions", "durations that are NaN"}:
        DAMAGE[what](model_to_dataset(model, {})).to_netcdf(path, engine="h5netcdf")
        with pytest.raises(PrismError, match=r"damaged\.nc: .*read"):
            load_model(path)


def test_a_model_of_another_schema_is_refused(model):
    dataset = model_to_dataset(model, {}).assign_attrs(schema=99)
    with pytest.raises(PrismError, match=r"new\.nc: .*schema 99; .*schema 1 or 2"):
        model_from_dataset(dataset, "new.nc")


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [("kernels", 8.136220287724427e-4, 2.5009941959965788e-5),
     ("pipeline", 0.2638354554073885, 1.8294640659709263e-3)],
)  # fmt: skip
def test_models_of_the_version_before_simulate_as_they_did(name, mean, std):
    """Their figures are those of that version."""
    path = Path(__file__).parent / "models_0_1" / f"{name}.nc"
    found = prism.estimate(path, replicates=256, seed=1)
    assert float(found.step_time.mean()) == pytest.approx(mean, rel=1e-12)
    assert float(found.step_time.std()) == pytest.approx(std, rel=1e-9)
    parts = {part["name"]: part["mean_share"] for part in prism.summary(found)["time_loss"]}
    assert sum(parts.values()) == pytest.approx(1.0) and parts["compute"] > 0.0
