"""Models of step times and programs of the engine: what cannot be is refused when it is read."""

import dataclasses
import math

import numpy as np
import pytest
import steps_made
import xarray as xr

import prism
from prism.distributions import modelfile
from prism.models.steptimes import likelihood
from prism.models.steptimes.model import FILE, SCALARS, load_step_model
from prism.simulation.execution.context import RunContext
from prism.simulation.jobwarnings import mean_doubts
from prism.simulation.prepare import prepare
from prism.simulation.program import check_finite
from prism.simulation.steps import run_blocks

JOB = {
    "model": {"durations": {"forward_s": [1.0, 1.1], "backward_s": 2.0}},
    "parallelism": {"pp": 2, "dp": 4, "microbatches": 4},
    "cluster": {"nodes": 1, "gpus_per_node": 8},
    "variability": {"effects": {"rank": {"cv": 0.02}, "stall": {"rate_per_hour": 1.0,
                    "duration_s": 1.0}}},
}  # fmt: skip


def spoilt(dataset, name, index, value):
    values = dataset[name].values.copy()
    values[index] = value
    return dataset.assign({name: (dataset[name].dims, values, dataset[name].attrs)})


def test_durations_whose_cube_is_no_number_are_simulated():
    job = JOB | {"model": {"durations": {"forward_s": [1e-308, 1.1], "backward_s": 2.0}}}
    found = prism.simulate(prism.load_job(job), replicates=64, seed=1)
    assert np.isfinite(found.step_time).all()


@pytest.fixture(scope="module")
def steps_model(tmp_path_factory):
    """A model of step times."""
    folder = tmp_path_factory.mktemp("steps")
    seconds = steps_made.made(shape=(60, 3), stalls=0.05)
    rows = [f"{r},{s},{seconds[s, r]}" for r in range(3) for s in range(60)]
    (folder / "steps.csv").write_text("\n".join(["run,step,step_s", *rows]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likelihood, "_CELLS", 0)  # the fewest repetitions behind an interval
        return prism.fit(folder / "steps.csv").to_xarray()


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A file that brings a dataset, without writing it, which takes longer than all else."""

    def give(dataset):
        (tmp_path / "x.nc").touch()
        monkeypatch.setattr(modelfile, "read_netcdf", lambda *_: dataset)
        return tmp_path / "x.nc"

    return give


def test_what_cannot_be_is_refused_through_a_file_too(steps_model, tmp_path):
    prism.save(steps_model, tmp_path / "x.nc")
    load_step_model(tmp_path / "x.nc")
    whole = xr.load_dataset(tmp_path / "x.nc", engine="h5netcdf")
    for changed in (spoilt(whole, "residuals", 0, math.nan), whole.assign_attrs(grain_s=1e12)):
        prism.save(changed, tmp_path / "x.nc")
        with pytest.raises(prism.PrismError, match="x.nc"):
            load_step_model(tmp_path / "x.nc")


@pytest.mark.parametrize("what", ["rise", "written to", "deviation 1", "more stalls"])
def test_no_model_of_steps_is_read_that_contradicts_itself(steps_model, given, what):
    dataset = steps_model.copy()
    if what == "rise":
        dataset = dataset.isel(step=slice(None, None, -1))
    elif what == "written to":
        dataset = dataset.assign_attrs(grain_s=1e12)
    elif what == "more stalls":
        dataset["stall_counts"] = dataset["stall_counts"] + 1e12
    else:
        dataset["residuals"] = 2.0 * dataset["residuals"]
    with pytest.raises(prism.PrismError, match=what):
        load_step_model(given(dataset))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e30])
def test_no_array_or_scalar_of_a_model_of_steps_is_read_that_cannot_be(steps_model, given, value):
    whole = steps_model
    load_step_model(given(whole))
    names = [name for name in FILE.arrays if whole[name].size]
    scalars = [name for name, scalar in SCALARS.items() if scalar.read is float]
    assert len(names) > 6 and len(scalars) > 3
    for name in names + scalars:
        changed = (
            spoilt(whole, name, (0,) * whole[name].ndim, value)
            if name in names
            else whole.assign_attrs({name: value})
        )
        with pytest.raises(prism.PrismError, match=f"x.nc.*{name}|{name}"):
            load_step_model(given(changed))


def test_the_engine_refuses_what_is_not_finite():
    """Each array of floats of a step, with one NaN."""
    program = prepare(prism.load_job(JOB), 1).program
    step, n = program.arrays(track=True), 0
    check_finite(step)
    for part, arrays in step._asdict().items():
        for field in getattr(arrays, "_fields", [None]):
            values = np.array(arrays if field is None else getattr(arrays, field))
            if values.dtype.kind != "f" or not values.size:
                continue
            values.reshape(-1)[-1] = math.nan
            changed = values if field is None else arrays._replace(**{field: values})
            with pytest.raises(prism.PrismError, match=part if field is None else field):
                check_finite(step._replace(**{part: changed}))
            n += 1
    assert n > 8
    spread = program.stalls._replace(duration=math.nan)
    with pytest.raises(prism.PrismError, match="duration"):
        run_blocks(dataclasses.replace(program, stalls=spread), range(1), RunContext(1))


def test_a_mean_step_below_the_ideal_one_is_told():
    """Negative control: a mean within six standard errors of it is not."""
    found = prism.simulate(prism.load_job(JOB), replicates=256, seed=1).to_xarray()
    assert not [*mean_doubts(found, 0.02)]
    assert not [*mean_doubts(found.assign(ideal_step_time=found.step_time.mean() * 1.01), 0.02)]
    assert [*mean_doubts(found.assign(ideal_step_time=found.step_time.mean() * 1.2), 0.02)]
