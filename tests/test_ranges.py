"""Figures and distributions of libraries and models: what cannot be is refused when it is read."""

import dataclasses
import math

import numpy as np
import pytest
import steps_made
import xarray as xr

import prism
from prism import PrismError, load_library, save
from prism.distributions import modelfile
from prism.distributions.library import from_dataset, library_names, to_dataset
from prism.distributions.ranges import KINDS, figure_range
from prism.jobs.job import job_from_dict
from prism.models.steptimes import likelihood
from prism.models.steptimes.model import FILE, SCALARS, load_step_model
from prism.simulation.jobwarnings import mean_doubts
from prism.simulation.prepare import prepare
from prism.simulation.program import check_finite
from prism.simulation.steps import run_blocks
from prism.traces import read_step_times

JOB = {
    "model": {"durations": {"forward_s": [1.0, 1.1], "backward_s": 2.0}},
    "parallelism": {"pp": 2, "dp": 4, "microbatches": 4},
    "cluster": {"nodes": 1, "gpus_per_node": 8},
    "variability": {"effects": {"rank": {"cv": 0.02}, "stall": {"rate_per_hour": 1.0,
                    "duration_s": 1.0}}},
}  # fmt: skip


def without_tables(dataset):
    return dataset.drop_dims([name for name in dataset.coords if name != "entry"])


@pytest.fixture(scope="module")
def dataset():
    return without_tables(to_dataset(load_library("h100-stressed")))


@pytest.fixture(scope="module")
def figures(dataset):
    """Each figure of a library in a set of its own, which can be read."""
    rows = np.flatnonzero(dataset.family.values == "scalar")
    found = {str(dataset.entry.values[row]): dataset.isel(entry=[row]) for row in rows}
    for alone in found.values():
        from_dataset(alone, "x")
    return found


@pytest.fixture(scope="module")
def tables():
    """The tables of kernels of a library without its other entries."""
    found = to_dataset(load_library("h100-healthy")).isel(entry=slice(0))
    assert from_dataset(found, "x").tables
    return found


def spoilt(dataset, name, index, value):
    values = dataset[name].values.copy()
    values[index] = value
    return dataset.assign({name: (dataset[name].dims, values, dataset[name].attrs)})


@pytest.mark.parametrize("name", library_names())
def test_every_shipped_set_is_read(name):
    assert load_library(name).entries


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e30])
def test_no_figure_is_read_that_cannot_be(figures, value):
    assert len(figures) > 40
    for name, alone in figures.items():
        with pytest.raises(ValueError, match=name):
            from_dataset(spoilt(alone, "mean", 0, value), "x")


def test_ranges_are_by_kind():
    for name, worst, best in (
        ("nominal/gemm_efficiency_max", 0.0, 1.0),
        ("nominal/some_new_efficiency", 1.01, 0.5),
        ("nominal/derate_eager", 0.0, 1.098),
        ("run/largest_gpus_fsdp", 0.0, 128.0),
        ("rank/node_share", 1.1, 1.0),
        ("rank/memory_loading", 11.0, 0.0),
        ("regime/factor", 0.9, 1.0),
        ("run/cv", 0.3, 0.0),
        ("mean/some kernel", -1e-9, 0.0),
    ):
        allowed = figure_range(name)
        allowed.check(name, best)
        with pytest.raises(ValueError, match="expected"):
            allowed.check(name, worst)
    assert len(KINDS) < 15


def test_no_distribution_is_read_that_is_not_the_one_that_was_written(dataset):
    """Each number of each, spoilt: refused, but for what leaves mean and deviation as they are."""
    counts = {"refused": 0, "read": 0}
    families = dataset.family.values
    for row in np.flatnonzero(families != "scalar"):
        alone = dataset.isel(entry=[row])
        from_dataset(alone, "x")
        for name in ("params", "quantile_probability", "quantile_value"):
            used = np.flatnonzero(~np.isnan(alone[name].values[0]))
            for column in {*used[:1], *used[-1:], *used[used.size // 2 : used.size // 2 + 1]}:
                for value in (math.nan, math.inf, -1.0, 1e30):
                    with pytest.raises(ValueError, match=str(dataset.entry.values[row])):
                        from_dataset(spoilt(alone, name, (0, column), value), "x")
                    counts["refused"] += 1
    assert counts["refused"] > 300


@pytest.mark.parametrize("name", ["mean", "std"])
def test_a_distribution_of_another_mean_or_deviation_is_refused(dataset, name):
    row = int(np.flatnonzero(dataset.family.values == "empirical")[0])
    for value in (0.9, math.nan):
        with pytest.raises(ValueError, match=name if name == "mean" else "deviation"):
            from_dataset(spoilt(dataset, name, row, value), "x")


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0, 1e30])
def test_no_table_of_kernels_is_read_without_rising_sizes(tables, value):
    dataset = tables
    sizes = [name for name in map(str, dataset.coords) if name != "entry"]
    assert len(sizes) > 8
    for name in sizes:
        grid = dataset[name].values.copy()
        grid[grid.size // 2] = value
        with pytest.raises(ValueError, match=name.rpartition("_")[2]):
            from_dataset(dataset.assign_coords({name: (name, grid)}), "x")


def test_no_table_of_kernels_is_read_with_sizes_of_another_name(tables):
    dataset = tables
    name = next(str(x) for x in dataset.coords if str(x).endswith("_batch"))
    with pytest.raises(ValueError, match="unknown size"):
        from_dataset(dataset.rename({name: "batches"}), "x")


def test_durations_whose_cube_is_no_number_are_simulated():
    job = JOB | {"model": {"durations": {"forward_s": [1e-308, 1.1], "backward_s": 2.0}}}
    step = prepare(job_from_dict(job), 1)
    assert np.isfinite(run_blocks(step.program, range(1), 1)[0]).all()


def test_stalls_in_every_step_are_no_rare_ones():
    """As many an hour as make the probability of one in a step 1: nothing is warned of."""
    often = JOB["variability"] | {"effects": {"stall": {"rate_per_hour": 1e9, "duration_s": 1e-3}}}
    job = job_from_dict(JOB | {"variability": often, "run": {"steps": 50}})
    result = prism.estimate(job, replicates=64, seed=1)
    assert np.isfinite(float(result.step_time.mean()))


def test_a_spoilt_library_is_refused_with_file_figure_and_range(tmp_path, dataset, run):
    file = tmp_path / "own.nc"
    row = int(np.flatnonzero(dataset.entry.values == "stall/rate_per_hour")[0])
    save(spoilt(dataset, "mean", row, math.nan), file)
    words = ["estimate", "pipeline-8x32", "--set", f"variability.library={file}"]
    status, out, err = run(*words)
    assert status == 2 and not out
    assert str(file) in err and "stall/rate_per_hour" in err and "at most" in err


@pytest.fixture(scope="module")
def steps_model(tmp_path_factory):
    """A model of step times."""
    folder = tmp_path_factory.mktemp("steps")
    seconds = steps_made.made(shape=(60, 3), stalls=0.05)
    rows = [f"{r},{s},{seconds[s, r]}" for r in range(3) for s in range(60)]
    (folder / "steps.csv").write_text("\n".join(["run,step,step_s", *rows]))
    assert read_step_times(folder / "steps.csv").seconds.size == 180
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likelihood, "_CELLS", 0)  # the fewest repetitions behind an interval
        return prism.fit(folder / "steps.csv")


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A file that brings a dataset, without writing it, which takes longer than all else."""

    def give(dataset):
        (tmp_path / "x.nc").touch()
        monkeypatch.setattr(modelfile, "read_netcdf", lambda *_: dataset)
        return tmp_path / "x.nc"

    return give


def test_what_cannot_be_is_refused_through_a_file_too(steps_model, tmp_path):
    save(steps_model, tmp_path / "x.nc")
    load_step_model(tmp_path / "x.nc")
    whole = xr.load_dataset(tmp_path / "x.nc", engine="h5netcdf")
    for changed in (spoilt(whole, "residuals", 0, math.nan), whole.assign_attrs(grain_s=1e12)):
        save(changed, tmp_path / "x.nc")
        with pytest.raises(PrismError, match="x.nc"):
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
    with pytest.raises(PrismError, match=what):
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
        with pytest.raises(PrismError, match=f"x.nc.*{name}|{name}"):
            load_step_model(given(changed))


def test_the_engine_refuses_what_is_not_finite():
    """Each array of floats of a step, with one NaN."""
    program = prepare(job_from_dict(JOB, name="x"), 1).program
    step, n = program.arrays(track=True), 0
    check_finite(step)
    for part, arrays in step._asdict().items():
        for field in getattr(arrays, "_fields", [None]):
            values = np.array(arrays if field is None else getattr(arrays, field))
            if values.dtype.kind != "f" or not values.size:
                continue
            values.reshape(-1)[-1] = math.nan
            changed = values if field is None else arrays._replace(**{field: values})
            with pytest.raises(PrismError, match=part if field is None else field):
                check_finite(step._replace(**{part: changed}))
            n += 1
    assert n > 8
    spread = program.stalls._replace(duration=math.nan)
    with pytest.raises(PrismError, match="duration"):
        run_blocks(dataclasses.replace(program, stalls=spread), range(1), 1)


def test_a_mean_step_below_the_ideal_one_is_told():
    """Negative control: a mean within six standard errors of it is not."""
    found = prism.simulate(job_from_dict(JOB, name="x"), replicates=256, seed=1)
    assert not [*mean_doubts(found, 0.02)]
    assert not [*mean_doubts(found.assign(ideal_step_time=found.step_time.mean() * 1.01), 0.02)]
    assert [*mean_doubts(found.assign(ideal_step_time=found.step_time.mean() * 1.2), 0.02)]
