"""Models as files: what was fitted comes back with the same bits; what is none is refused."""

import json

import numpy as np
import pytest
import xarray as xr
from campaign import some
from drawn_steps import draw_steps
from pipeline_synth import Effects, Layout, make_trace

import prism

EFFECTS = Effects(
    rank_sd=0.01, step_sd=0.02, content_sd=0.03, gap_s=0.002, lemons={(1, 0): 1.8}
)  # of 6 traced workers one


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the model of a made-up trace, and the truth."""
    folder = tmp_path_factory.mktemp("model")
    frame, truth = make_trace(Layout(3, 2, 4, 30), EFFECTS, 1)
    frame = frame.rename(columns={"start": "start_s", "duration": "duration_s"})
    frame.to_csv(folder / "trace.csv", index=False)
    prism.save(prism.fit(folder / "trace.csv", seed=0), folder / "m.nc")
    return folder / "m.nc", truth


def job_over(path, **changes):
    return prism.load_job(path).replace({f"variability.{k}": v for k, v in changes.items()})


def estimated(job, replicates=6400):
    return prism.summary(prism.estimate(job, replicates=replicates, seed=1))


@pytest.mark.parametrize("ranks", ["measured", "drawn"])
def test_a_model_comes_back_and_simulates_to_the_same_bits(made, tmp_path, ranks):
    path, _ = made
    again = tmp_path / "again.nc"
    prism.save(prism.load(path), again)
    xr.testing.assert_identical(*(prism.load(file).to_xarray() for file in (again, path)))
    steps = [draw_steps(job_over(p, ranks=ranks), 256, 1).step_time.values
             for p in (path, again)]  # fmt: skip
    np.testing.assert_array_equal(*steps)
    assert prism.summary(prism.load(again)) == prism.summary(prism.load(path))


def test_the_job_that_a_model_describes(made):
    job = prism.load_job(made[0])
    p = job.parallelism
    assert (p.pp, p.dp, p.microbatches, job.world_size) == (2, 3, 4, 6)
    assert job.variability.model == str(made[0]) and job.variability.library is None


def test_measured_ranks_give_the_trace_s_steps(made):
    """`variability.model` and `ranks`: 30 measured steps, their mean to 1 %, spread to 50 %."""
    path, truth = made
    based = prism.load_job({"base": str(path), "run": {"steps": 5}})
    for job in (job_over(path), job_over(path, ranks="measured"), based):
        step = estimated(job)["step_time"]
        assert step["mean"] == pytest.approx(truth.step_times.mean(), rel=0.01)
        measured = truth.step_times.std() / truth.step_times.mean()
        assert 0.5 * measured < step["cv"] < 1.5 * measured
    found = prism.summary(prism.load(path))
    (lemon,) = found["lemons"]
    assert (lemon["replica"], lemon["stage"]) == (1, 0)
    assert lemon["slowdown"] == pytest.approx(1.8, rel=0.03)


def test_drawn_ranks_are_slow_as_often_as_the_traced_ones(made):
    """One worker in six, each of six of the job: some are slow in 67 % of 400 cluster draws."""
    path, truth = made
    found = estimated(job_over(path, ranks="drawn"), 64 * 400)
    share = 1.0 - (5.0 / 6.0) ** 6
    error = np.sqrt(share * (1.0 - share) / 400)
    assert found["slowdown"]["1.2"] == pytest.approx(share, abs=4.5 * error)
    assert found["step_time"]["p50"] > 1.3 * found["ideal_step_time"]
    same = estimated(job_over(path), 640)  # negative control: measured ones are always the same
    assert same["step_time"]["between_cluster_std"] < 0.01 * same["step_time"]["mean"]


def test_files_that_are_no_models_say_so(made, tmp_path):
    whole = made[0].read_bytes()
    (tmp_path / "folder.nc").mkdir()
    for name, content in (
        ("text.nc", b"not netCDF"), ("empty.nc", b""), ("half.nc", whole[: len(whole) // 2]),
        ("head.nc", whole[:600]), ("flipped.nc", whole[:4000] + b"\xff" + whole[4001:]),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
    result = xr.Dataset({"step_time": ("replicate", np.ones(3))}, attrs={"kind": "simulation"})
    result.to_netcdf(tmp_path / "result.nc", engine="h5netcdf")
    names = ("missing", "folder", "text", "empty", "half", "head", "flipped", "result")
    for name in names:
        with pytest.raises(prism.PrismError, match=f"{name}.nc"):
            prism.simulate(prism.load_job(tmp_path / f"{name}.nc"), 64, 1)
        use = {"variability.model": str(tmp_path / f"{name}.nc")}
        with pytest.raises(prism.PrismError, match=f"{name}.nc"):
            prism.simulate(prism.load_job("pipeline-8x32", use), 64, 1)


def damages(dataset):
    """The model without a part, or with one that cannot be: name, dataset."""
    for name, array in dataset.data_vars.items():
        yield f"no {name}", dataset.drop_vars(name)
        if array.dtype.kind == "f" and array.ndim and name not in ("params", "knots_q", "knots_x"):
            for what, factor in (("not a number", np.nan), ("infinite", np.inf)):
                yield f"{name} {what}", dataset.assign({name: dataset[name] * factor})
        elif array.ndim == 0 and array.dtype.kind in "OU" and name != "report":
            for text in ("{", "[]", '"x"', "[1]"):
                yield f"{name} {text}", dataset.assign({name: ((), text, array.attrs)})
            rows = json.loads(str(dataset[name].values))
            yield f"{name} of one fewer", dataset.assign({name: ((), json.dumps(rows[:-1]), {})})
    for name in ("n_replicas", "n_stages", "lemons", "job", "correlation_share"):
        yield f"{name} of words", dataset.assign_attrs({name: "many"})
    yield "another schema", dataset.assign_attrs(schema=99)
    yield "lemons elsewhere", dataset.assign_attrs(lemons="[[99, 0, 2.0]]")
    for dim in ("entry", "dp_rank", "step"):
        yield f"{dim} fewer", dataset.isel({dim: slice(0, -1)})


def test_damaged_models_are_refused(made, tmp_path):
    taken, cases = [], list(damages(prism.load(made[0]).to_xarray()))
    for what, broken in some(cases, 3):
        path = tmp_path / "damaged.nc"
        prism.save(broken, path)
        try:
            prism.simulate(prism.load_job(path), 64, 1)
            taken.append(what)
        except prism.PrismError as error:
            assert "damaged.nc" in str(error), what
    assert len(cases) > 40 and not taken


@pytest.mark.parametrize("schema", [1, 2])
def test_models_of_earlier_versions_are_refused_with_the_command_that_refits(
    run, made, tmp_path, schema
):
    path = tmp_path / "old.nc"
    prism.save(prism.load(made[0]).to_xarray().assign_attrs(schema=schema), path)
    for command in ("estimate", "timeline"):
        status, out, err = run(command, path)
        assert (status, out) == (2, "") and err.count("\n") == 1
        assert "old.nc" in err and "prism fit" in err


@pytest.fixture(scope="module")
def steps_model(tmp_path_factory):
    """Step times, and a model of them."""
    times = tmp_path_factory.mktemp("steps") / "steps.csv"
    times.write_text(
        "step,step_s\n" + "".join(f"{i},{2.0 + 0.01 * (i * 7 % 11)}\n" for i in range(60))
    )
    return times, prism.fit(times, seed=0).to_xarray().load()


@pytest.mark.parametrize("text", ["1.5", "[]", "null", "{"])
def test_a_model_of_steps_whose_report_is_none_is_refused(run, tmp_path, steps_model, text):
    times, model = steps_model
    broken = model.copy()
    broken["report"] = ((), text, broken["report"].attrs)
    prism.save(broken, tmp_path / "broken.nc")
    for words in (("estimate", "broken.nc"), ("validate", "broken.nc", "--measured", times)):
        status, out, err = run(words[0], tmp_path / words[1], *words[2:], "--json", "-q")
        assert (status, out) == (2, "") and "broken.nc" in err and "internal" not in err
