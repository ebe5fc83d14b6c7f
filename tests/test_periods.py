"""Steps of profiler traces as periods of the device: jobs whose host may lead, and a measured one.

`deviceprogram` says when each activity ran, and when it would have with other kernels or hosts.
"""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import programs_made as made
import pytest
from deviceprogram import simulate

import prism

DATA = Path(os.environ.get("PRISM_DATA", "data"))
APART_S = {"eight_ranks": np.linspace(-0.05, 0.05, 8), "two_streams": (0.0, 0.03)}
NOISE = {"host_cv": 0.05}  # with the usual 10 % the means of so few steps are known to .5 %


@cache
def simulated(name, **scales):
    program = made.PROGRAMS[name](**NOISE)
    return simulate(program, 8 if name == "eight_ranks" else 14, **scales)


def truth(run):
    return dict(enumerate(run.periods.tolist(), 1))


def replayed(path, **options):
    """Periods that `prism.replay` measures, having replayed each within .5 %."""
    found = prism.replay(path, **options)
    seconds = found.measured_step_time.values
    assert found.replayed_step_time.values == pytest.approx(seconds, rel=5e-3)
    return dict(zip(found.step.values.tolist(), seconds.tolist(), strict=True))


def fitted(path, model):
    found = prism.fit(path, seed=1)
    prism.save(found, model)
    return prism.summary(found)


def estimated(model, **scales):
    """Mean step [s], CV, and the share of launch gaps."""
    job = prism.load_job(model).replace({f"variability.{k}": v for k, v in scales.items()})
    found = prism.summary(prism.estimate(job, replicates=256, seed=1))
    share = {part["name"]: part["mean_share"] for part in found["time_loss"]}
    return found["step_time"]["mean"], found["step_time"]["cv"], share["launch_gaps"]


def edited(paths, edit):
    """Change or drop the events of each file in its place."""
    for path in paths:
        document = json.loads(path.read_bytes())
        document["traceEvents"] = [e for event in document["traceEvents"] if (e := edit(event))]
        path.write_text(json.dumps(document))
    return paths


def on_device(event):
    return event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")


@pytest.mark.parametrize("name", made.PROGRAMS)
def test_a_model_knows_the_period_and_what_would_change_it(tmp_path, name):
    run, model = simulated(name), tmp_path / "model.nc"
    paths = run.write(tmp_path, clock_offset_s=APART_S.get(name, ()))
    assert replayed(paths) == pytest.approx(truth(run), rel=5e-4)
    lead = (run.ends.max(axis=1)[:-1, None] - run.begins[1:-1]).mean()
    assert fitted(paths, model)["lead"]["mean"] == pytest.approx(lead, abs=5e-3 * run.period())
    mean, _, idle = estimated(model)
    assert mean == pytest.approx(run.period(), rel=5e-3)
    assert idle == pytest.approx(run.gap_share(2, since="start"), abs=0.01)
    for scales, other in (
        ({"kernel_scale": 0.7}, simulated(name, kernel_scale=0.7)),
        ({"host_scale": 2.0}, simulated(name, launch_scale=2.0)),
    ):
        assert estimated(model, **scales)[0] == pytest.approx(other.period(2), rel=5e-3)


@pytest.mark.parametrize(("depth", "rel"), [(1 << 20, 5e-3), (1024, 0.04)])
def test_a_device_bound_job_becomes_host_bound(tmp_path, depth, rel):
    """In a full queue the host's time is known to the gap between kernels, 6 % of a launch here."""
    job = made.device_bound(depth=depth, **NOISE)
    fitted(simulate(job, 14).write(tmp_path), tmp_path / "model.nc")
    expected, faster = (simulate(job, 14, kernel_scale=s).period(2) for s in (0.1, 0.05))
    assert expected == pytest.approx(faster, rel=1e-3)
    assert estimated(tmp_path / "model.nc", kernel_scale=0.1)[0] == pytest.approx(expected, rel=rel)


@pytest.mark.parametrize(
    ("marks", "name"),
    [("none", name) for name in made.PROGRAMS]  # whose rhythm is another each
    + [("optimizer", name) for name in ("device_bound", "host_bound", "mixed", "two_streams")],
)
def test_steps_without_marks_have_the_same_periods(tmp_path, marks, name):
    run = simulated(name)
    found = replayed(run.write(tmp_path, marks))  # what follows the optimizer is the next step's
    assert list(found.values()) == pytest.approx(run.periods, rel=5e-4)


def test_steps_without_marks_are_the_same_on_ranks_whose_clocks_are_apart(tmp_path):
    run = simulated("two_streams")
    found = replayed(run.write(tmp_path, "none", clock_offset_s=APART_S["two_streams"]))
    assert list(found.values()) == pytest.approx(run.periods, rel=5e-4)


def test_a_host_that_is_behind_its_device_adds_no_idle_time(tmp_path):
    run = simulate(made.host_bound(kernel_cv=0.0, host_cv=0.0, step_cv=0.0), 8)
    fitted(run.write(tmp_path, "none"), tmp_path / "model.nc")
    idle = estimated(tmp_path / "model.nc")[2]
    assert idle == pytest.approx(run.gap_share(2, since="start"), abs=1e-3)


def test_where_gradients_are_zeroed_a_step_begins(tmp_path):
    run = simulated("mixed")

    def edit(event):  # no mark is left but an annotation where each step began
        if event["name"].startswith("ProfilerStep"):
            return {**event, "name": "Optimizer.zero_grad#AdamW.zero_grad", "dur": 5.0}
        return not event["name"].startswith("Optimizer.step") and event

    paths = edited(run.write(tmp_path), edit)
    assert replayed(paths) == pytest.approx(truth(run), rel=5e-4)
    fitted(paths, tmp_path / "model.nc")  # where the last one ends on the host, nothing says
    assert estimated(tmp_path / "model.nc")[0] == pytest.approx(run.period(), rel=5e-3)


@pytest.mark.parametrize("marks", ["profiler", "optimizer", "none"])
@pytest.mark.parametrize("name", ["device_bound", "host_bound"])
def test_kernels_of_steps_before_the_first_mark_change_nothing(tmp_path, name, marks):
    run = simulated(name)
    found = list(replayed(run.write(tmp_path, marks, first_step_recorded=6)).values())
    assert found == pytest.approx(run.periods[-len(found) :], rel=5e-4) and len(found) >= 7


def test_a_step_that_the_recording_broke_off_is_left_out(tmp_path):
    run = simulated("two_streams")
    late = 1e6 * (1.0 + run.ends[-1].max() - 0.3 * run.period())
    paths = edited(run.write(tmp_path), lambda e: not (on_device(e) and e["ts"] > late) and e)
    assert replayed(paths) == pytest.approx(dict(list(truth(run).items())[:-1]), rel=5e-4)


@pytest.mark.parametrize("alone", [False, True])
def test_one_recorded_step_makes_a_model_with_a_warning(tmp_path, alone):
    """Its time is its period where the end of the step before was recorded, or else its span."""
    run = simulate(made.device_bound(depth=1 << 20, **NOISE), 14)  # a full queue is no host time
    own = [call for call in run.calls[0] if call.step == 13]
    first = own[0].correlation if alone else 0
    paths = run.write(tmp_path, first_step_recorded=13)
    edited(paths, lambda e: e["args"].get("correlation", 1e6) >= first and e)
    span = own[-1].made[-1].end - own[0].made[0].start
    expected = span if alone else run.periods[-1]
    assert prism.replay(paths).measured_step_time.values == pytest.approx([expected], rel=5e-4)
    found = fitted(paths, tmp_path / "model.nc")
    assert found["steps"] == 1 and any("h100" in warning for warning in found["warnings"])
    mean, cv, _ = estimated(tmp_path / "model.nc")
    assert mean == pytest.approx(expected, rel=0.03) and 0.001 < cv < 0.1


@pytest.mark.parametrize("options", [{"skip": 4}, {"steps": "5:9"}])
def test_steps_that_are_chosen_keep_their_periods(tmp_path, options):
    run, kept = simulated("host_bound"), range(5, 10) if "steps" in options else range(4, 14)
    found = replayed(run.write(tmp_path), **options)
    assert found == pytest.approx({step: truth(run)[step] for step in kept}, rel=5e-4)


def test_a_chosen_step_of_a_host_that_leads_is_replayed(tmp_path):
    assert len(replayed(simulated("device_bound").write(tmp_path), skip=4)) == 10


def test_a_longer_kernel_lengthens_its_period_alone(tmp_path):
    run = simulated("device_bound")
    at, expected = 1e6 * (1.0 + run.activities(0)[187 * 7 + 100].start), truth(run)
    expected[7] += 2e-3

    def edit(event):
        if not on_device(event) or event["ts"] < at - 0.01:
            return event
        name = "dur" if event["ts"] < at + 0.01 else "ts"
        return {**event, name: event[name] + 2_000.0}

    assert replayed(edited(run.write(tmp_path), edit)) == pytest.approx(expected, rel=5e-5)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA}; set PRISM_DATA")
def test_a_measured_job(tmp_path):
    """It was measured without a profiler schedule, and has no marks but the optimizer's."""
    path, model = DATA / "h100_device" / "eager_trace.json.gz", tmp_path / "model.nc"
    periods_ms = [268.5, 267.5, 287.1, 267.3, 268.2, 274.9, 278.1]
    assert [1e3 * s for s in replayed(path).values()] == pytest.approx(periods_ms, abs=0.06)
    step = fitted(path, model)["step_time"]
    assert (step["mean"], step["cv"]) == pytest.approx((0.2731, 0.027), rel=0.02)
    mean, _, idle = estimated(model)
    assert mean == pytest.approx(step["mean"], rel=5e-3) and idle == pytest.approx(0.024, abs=0.005)
