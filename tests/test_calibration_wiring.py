"""Calibrated models where jobs, libraries and models are named; what is refused, and how."""

import json

import numpy as np
import pandas as pd
import pytest
from calibration_made import Truth, small_job, steps_of
from pipeline_synth import Effects, Layout, as_production, make_trace

import prism
from prism import PrismError, fit, fit_calibrated, load, load_job, load_library, save, simulate
from prism.simulation.variability import StallEffect, resolve_variability

JOB = """base: llama3-405b-8k
model: {{name: llama3-8b, n_layers: 4}}
parallelism: {{tp: {tp}, pp: 2, dp: {dp}, cp: 1, vpp: 1, microbatches: 4, sequence_parallel: {sp}}}
cluster: {{nodes: 2}}
run: {{steps: 200}}
{more}
"""
RATE = 40.0  # stalls per node and hour


def write_job(path, tp=1, dp=8, more=""):
    path.write_text(JOB.format(tp=tp, dp=dp, sp=str(tp > 1).lower(), more=more))
    return path


def write_steps(path, steps, **columns):
    n_runs, n = steps.shape
    run, step = np.repeat(np.arange(n_runs), n), np.tile(np.arange(n), n_runs)
    columns = {"run": run, "step": step, "step_s": steps.ravel(), **columns}
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder with two jobs, their steps, and the model that they give."""
    folder = tmp_path_factory.mktemp("calibrated")
    rng = np.random.default_rng(3)
    truth = Truth(1.4, 0.7, relative=0.02, fixed_s=0.002, stalls_per_node_hour=RATE)
    for name, tp, dp in (("a", 1, 8), ("b", 8, 1)):
        write_job(folder / f"{name}.yaml", tp, dp)
        job = small_job(tp, 2, dp, 4)
        write_steps(folder / f"{name}.csv", steps_of(truth, job, rng, 8)[0])
    model = fit_calibrated([(folder / "a.yaml", folder / "a.csv"),
                            (folder / "b.yaml", folder / "b.csv")], 0, threads=2)  # fmt: skip
    save(model, folder / "m.nc")
    return folder


def summarised(result):
    status, out, err = result
    assert status == 0, err
    return json.loads(out)


# -------------------------------------------------------------------------------------- named
def test_the_command_writes_what_the_library_gives(run, made, tmp_path):
    calibrate = [f"--calibrate={made / x}.yaml={made / x}.csv" for x in "ab"]
    summary = summarised(run("fit", *calibrate, "-o", tmp_path / "m.nc", "--seed", 0, "--json",
                             "-q", "--threads", 1))  # fmt: skip
    assert summary["kind"] == "calibrated"
    assert [size["job"] for size in summary["sizes"]] == ["a", "b"]
    assert summary["factors"]["compute"]["value"] == pytest.approx(1.4, rel=0.06)
    assert summary["stalls"]["n"] > 0
    written = load_library(tmp_path / "m.nc")
    assert written.entries == load_library(made / "m.nc").entries
    one, two = (load(folder / "m.nc").drop_attrs() for folder in (tmp_path, made))
    assert one.identical(two)  # on any threads


@pytest.mark.parametrize("way", ["set", "library", "yaml", "base"])
def test_a_model_is_named_in_any_place(made, tmp_path, way):
    model = made / "m.nc"
    job = write_job(tmp_path / "j.yaml", 2, 4)
    wanted = load_job(job, [f"variability.library={model}"])
    if way == "set":
        found = load_job(job, [f"variability.model={model}"])
    elif way == "library":
        found = load_job(write_job(job, 2, 4, f"variability: {{library: {model}}}"))
    elif way == "yaml":
        found = load_job(write_job(job, 2, 4, f"variability: {{model: {model}}}"))
    else:
        job.write_text(f"base: {model}\nparallelism: {{tp: 2, dp: 4, sequence_parallel: true}}\n")
        found = load_job(job)
    assert found.variability.library == str(model) and found.variability.model is None
    one, other = (simulate(x, 640, 5, 1).step_time.values for x in (wanted, found))
    np.testing.assert_array_equal(one, other)
    plain = simulate(load_job(write_job(job, 2, 4)), 640, 5, 1).step_time.values
    assert np.median(one) > 1.2 * np.median(plain)  # compute takes 1.4 times as long


def test_all_commands_take_a_model_for_a_job(run, made, tmp_path):
    model = made / "m.nc"
    options = ("--json", "-q", "--seed", 1)
    estimate = summarised(run("estimate", model, *options, "--replicates", 640,
                              "--run-replicates", 64))  # fmt: skip
    assert "data_error" in json.dumps(estimate)
    rank = summarised(run("rank", model, *options))
    assert rank["kernels"]
    place = summarised(run("place", model, *options, "--slow-nodes", 1, "--slowdown", 1.2))
    assert place["slow_nodes"]
    status, out, _ = run("show", model)
    assert status == 0 and "h100" in out
    assert summarised(run("show", model, "--json"))["model_kind"] == "calibrated"
    steps = made / "a.csv"
    options = (*options, "--replicates", 640, "--bootstrap", 20)
    validation = summarised(run("validate", made / "a.yaml", "--model", model, "--measured", steps,
                                *options))  # fmt: skip
    assert {"copy", "line"} <= validation["baselines"].keys()


def test_another_seed_is_another_fit(made):
    other = fit_calibrated([(made / f"{x}.yaml", made / f"{x}.csv") for x in "ab"], 8)
    assert prism.summary(other)["factors"] != prism.summary(load(made / "m.nc"))["factors"]


# -------------------------------------------------------------------------------- own effects
def test_what_a_job_sets_itself_wins(made, tmp_path):
    path, library = made / "m.nc", load_library(made / "m.nc")
    use = f"variability.model={path}"

    def resolved(*overrides):
        return resolve_variability(load_job(made / "a.yaml", [use, *overrides]), library)

    fitted = resolved()
    assert fitted.stall.entity == "job" and fitted.step.cv > 0.01
    nodes = load_job(made / "a.yaml").n_nodes
    rates = [library.value(f"stall/{name}_rate_per_hour") for name in ("job", "node")]
    assert fitted.stall.rate_per_hour == pytest.approx(rates[0] + nodes * rates[1])
    own = resolved("variability.effects.step.cv=0.07")
    assert own.step.cv == pytest.approx(0.07) and own.stall == fitted.stall
    own = resolved("variability.effects.stall.rate_per_hour=0.5",
                   "variability.effects.stall.duration_s=9")  # fmt: skip
    assert own.stall == StallEffect("rank", 0.5, 9.0, library.value("stall/duration_cv"))
    assert own.step == fitted.step
    own = resolved("variability.effects.stall.rate_per_hour=0")
    assert own.stall.rate_per_hour == 0.0
    own = resolved("variability.effects.stall.duration_s=9")
    assert own.stall == fitted.stall._replace(duration_s=9.0)


def test_a_time_that_all_steps_have_weighs_less_in_longer_steps(made):
    library = load_library(made / "m.nc")
    relative, fixed_s = (library.value(f"step/{x}") for x in ("relative", "fixed_s"))
    assert fixed_s > 0.0
    cvs = []
    for microbatches in (4, 40):
        job = load_job(made / "b.yaml", [f"parallelism.microbatches={microbatches}"])
        cvs.append(resolve_variability(job, library).step.cv)
    assert cvs[0] > cvs[1] > relative
    assert (cvs[0] ** 2 - relative**2) / (cvs[1] ** 2 - relative**2) == pytest.approx(
        (41 / 5) ** 2,
        rel=0.1,  # passes of the busiest stage
    )


# ------------------------------------------------------------------------------------ refused
def test_another_library_is_refused(made):
    job, model = made / "a.yaml", made / "m.nc"
    with pytest.raises(PrismError) as caught:
        load_job(job, ["variability.library=gb200-healthy", f"variability.model={model}"])
    for words in ("h100-healthy", "gb200-healthy", "expected", "variability.model"):
        assert words in str(caught.value)


def argument(job, steps):
    return f"--calibrate={job}={steps}"


@pytest.fixture
def bad(made, tmp_path):
    """Arguments of refused calibrations, with what their message says."""
    a, steps = made / "a.yaml", made / "a.csv"
    few = tmp_path / "few.csv"
    write_steps(few, np.full((1, 4), 0.4))
    other = write_job(tmp_path / "other.yaml", more="variability: {library: h100-stressed}")
    none = write_job(tmp_path / "none.yaml", more="variability: {library: none}")
    alone = write_job(tmp_path / "alone.yaml", more="variability: {dependence: none}")
    again = write_job(tmp_path / "again.yaml", more=f"variability: {{model: {made / 'm.nc'}}}")
    wide = tmp_path / "wide.csv"
    write_steps(wide, np.full((2, 40), 0.4) + np.linspace(0, 0.01, 40),
                system=np.repeat(["x", "y"], 40))  # fmt: skip
    return {
        "no job": ([argument("missing.yaml", steps)], "missing.yaml"),
        "no steps": ([argument(a, "missing.csv")], "missing.csv"),
        "no equals": ([f"--calibrate={a}"], "job=steps"),
        "bad bracket": ([argument(a, f"{wide}[system]")], "column=value"),
        "no column": ([argument(a, f"{wide}[machine=x]")], "machine"),
        "no rows": ([argument(a, f"{wide}[system=z]")], "z"),
        "few": ([argument(a, few)], "at least"),
        "two libraries": ([argument(a, steps), argument(other, steps)], "one library"),
        "no library": ([argument(none, steps)], "one library"),
        "alone": ([argument(alone, steps)], "expected full"),
        "twice": ([argument(again, steps)], "calibrated already"),
        "itself": ([argument(made / "m.nc", steps)], "calibrated already"),
    }  # fmt: skip


@pytest.mark.parametrize("case", [
    "no job", "no steps", "no equals", "bad bracket", "no column", "no rows", "few",
    "two libraries", "no library", "alone", "twice", "itself",
])  # fmt: skip
def test_bad_input_is_refused_in_one_message(run, bad, tmp_path, monkeypatch, case):
    arguments, words = bad[case]
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    status, out, err = run("fit", *arguments, "-o", "m.nc")
    assert (status, out) == (2, "")
    assert words in err and "Traceback" not in err
    assert err.lower().count("error") <= 1 and err.strip()
    assert sorted(tmp_path.iterdir()) == before


def test_a_job_over_a_fitted_trace_is_refused(run, made, tmp_path):
    frame, _ = make_trace(Layout(2, 2, 4, 24), Effects(content_sd=0.05, step_sd=0.02), 1)
    as_production(frame).to_csv(tmp_path / "ops.csv", index=False)
    save(fit(tmp_path / "ops.csv", 0), tmp_path / "trace.nc")
    status, out, err = run("fit", argument(tmp_path / "trace.nc", made / "a.csv"), "-o",
                           tmp_path / "m.nc")  # fmt: skip
    assert (status, out) == (2, "")
    assert "fitted trace" in err and not (tmp_path / "m.nc").exists()
