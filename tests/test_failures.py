"""Failures of a run that says nothing of them, and checkpoints whose cost nobody states."""

import csv
import time
from math import sqrt

import numpy as np
import pytest

import prism
from prism import load_job

RATE = 1000 * 419 / (2_048 * 54)  # of nodes of 8 GPUs, per 1,000 node-days
FEW = {"replicates": 128, "seed": 1}


def tiny(**run):
    """One GPU that steps for weeks."""
    return load_job({
        "model": {"n_layers": 2, "hidden_size": 256, "ffn_size": 512, "n_heads": 4,
                  "n_kv_heads": 4, "vocab_size": 512, "seq_len": 128},
        "parallelism": {"dp": 16, "microbatches": 64}, "cluster": {"nodes": 2},
        "variability": {"model_error": 0.0, "host_scale": 1e-9}, "run": run,
    })  # fmt: skip


def figures(job, **options):
    return prism.summary(prism.estimate(job, **FEW | options))


def codes(job, **options):
    from prism import answer

    found = answer(prism.estimate(job, **FEW | options)).findings
    return {finding.code: finding.text for finding in found}


def test_a_run_has_failures_at_the_published_rate():
    found = figures(tiny(steps=500_000_000), run_replicates=2_000)
    days = found["time_to_train"]["mean"] / 86_400
    assert days > 20
    expected = RATE / 1000 * 2 * days
    assert found["failures"] == pytest.approx(expected, abs=5 * sqrt(expected / 2_000))
    assert found["failure_model"]["per_1000_node_days"] == pytest.approx(RATE)
    assert "2407.21783" in found["failure_model"]["source"]
    assert found["failure_model"]["assumed"] == ["rate", "down", "checkpoint"]
    assert found["failure_model"]["checkpoint_interval"] == pytest.approx(600.0, rel=0.01)
    # each costs a restart and half of an interval
    lost = 1.0 - found["ettr"]
    assert lost == pytest.approx(found["failures"] * 900.0 / 86_400 / days, rel=0.1)
    assert "best_checkpoint_interval" not in found


def test_the_rate_is_per_gpu():
    """Four GPUs fail half as often as eight, also where a rate is left open."""
    for run in ({}, {"failures": {"restart": "5min"}}):
        job = tiny(steps=10, **run)
        half = job.replace({"cluster.gpus_per_node": 4, "cluster.nodes": 4})
        assert job.failures.per_1000_node_days == pytest.approx(RATE)
        assert half.failures.per_1000_node_days == pytest.approx(RATE / 2)
        long = ["run.steps=2000000000"]
        mean = [figures(x.replace(*long), run_replicates=1000)["failures"] for x in (job, half)]
        assert mean[0] == pytest.approx(mean[1], rel=0.1) and mean[0] > 1.5


def test_none_takes_failures_out():
    job = tiny(steps=1_000_000, failures="none")
    found = figures(job)
    assert found["failure_model"] == {"per_1000_node_days": 0.0, "source": "run.failures"}
    assert not {"ettr", "failures"} & set(found)
    assert figures(tiny(steps=1_000_000).replace("run.failures=none")).keys() == found.keys()
    # and a later layer puts them back
    assert job.replace("run.failures=null").failures is not None
    assert job.replace("run.failures.restart=5min").failures.restart == 300.0
    assert load_job({"base": "llama3-405b-16k", "run": {"failures": "none"}}).failures is None
    # nothing is said of a run by it
    assert not tiny(failures="none").has_run and not tiny().has_run


def test_explicit_durations_have_none_unless_named():
    assert load_job("pipeline-8x32").failures is None
    assert figures("pipeline-8x32")["failure_model"]["source"] == "model.durations"
    named = load_job("pipeline-8x32", ["run.failures.per_1000_node_days=100"])
    assert figures(named)["failures"] > 0.0


def test_the_first_screen_says_what_is_assumed():
    said = codes(tiny(steps=1_000_000))["failures"]
    assert "3.79" in said and "2407.21783" in said and "10 min" in said and "none" in said
    given = {"failures": {"per_1000_node_days": 5, "restart": 60}}
    stated = {"checkpoint": {"interval": "1h", "write_s": 1}}
    assert "failures" not in codes(tiny(steps=1000, **given, **stated))
    assert "1 h" not in codes(tiny(steps=1_000_000, **given))["failures"]
    assert "failures" in codes(tiny(steps=1000, failures="none"))
    assert "failures" not in codes(tiny())  # no run


def test_an_hour_is_hardly_touched():
    calm, failing = (
        figures(tiny(steps=40_000, **run), run_replicates=1_000)["time_to_train"]
        for run in ({"failures": "none"}, {})
    )
    for key in ("mean", "p50", "p95"):
        assert failing[key] == pytest.approx(calm[key], rel=5e-3)


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_an_interval_is_best_only_where_its_cost_is_stated(mode):
    often = {"per_1000_node_days": 2_000}
    every = {"interval_steps": 500_000, "mode": mode}
    job = tiny(steps=20_000_000, failures=often, checkpoint=every)
    found = figures(job, run_replicates=100)
    assert "best_checkpoint_interval" not in found
    assert "checkpoint_interval" not in codes(job, run_replicates=100)
    assert found["checkpoint"]["interval_steps"] == 500_000
    stated = figures(job.replace("run.checkpoint.write_s=20"), run_replicates=400)
    young = sqrt(2 * 20 / (2_000 / 1000 * 2 / 86_400))
    assert stated["best_checkpoint_interval"] == pytest.approx(young, rel=0.05)
    steps = stated["checkpoint"]["best_interval_steps"]
    better = job.replace({"run.checkpoint": every | {"interval_steps": steps, "write_s": 20}})
    least = figures(better, run_replicates=400)["time_to_train"]
    saved = stated["time_to_train"]["mean"] - least["mean"]
    error = sqrt((stated["time_to_train"]["std"] ** 2 + least["std"] ** 2) / 400)
    assert abs(saved - stated["checkpoint"]["costs_more"]) < 4 * error
    # what storage can take: never begun before the last is written
    often = {"write_s": 900, "interval_steps": 100_000}
    slow = job.replace({"run.checkpoint": often, "run.failures.per_1000_node_days": 2e4})
    slow = figures(slow, run_replicates=100)
    assert slow["best_checkpoint_interval"] >= 900.0


def test_imported_checkpoints_get_no_advice(tmp_path):
    """An import states how often, and not what one costs."""
    every = {"interval_steps": 1000, "mode": "async"}
    job = load_job({"base": "llama3-70b-fsdp-512", "run": {"checkpoint": every}})
    found = figures(job, steps=100_000, run_replicates=100)
    assert "best_checkpoint_interval" not in found and found["failures"] > 0.0


# --------------------------------------------------------------------------- from step times
@pytest.fixture(scope="module")
def steps_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    rng = np.random.default_rng(1)
    with open(folder / "steps.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["run", "step", "step_s"])
        for run in range(4):
            table.writerows([run, i, 10.0 * rng.normal(1.0, 0.01)] for i in range(300))
    path = folder / "model.nc"
    prism.save(prism.fit(str(folder / "steps.csv"), seed=0), path)
    return str(path)


def test_a_model_of_step_times_has_the_failures_of_its_gpus(steps_model):
    calm = figures(steps_model, steps=300_000, run_replicates=1_000)
    assert calm["failure_model"] == {"per_1000_node_days": 0.0, "source": "gpus"}
    assert "--gpus" in codes(steps_model, steps=3_000)["failures"] and "ettr" not in calm
    found = figures(steps_model, steps=300_000, run_replicates=1_000, gpus=1024)
    days = found["time_to_train"]["mean"] / 86_400
    expected = RATE / 1000 * 128 * days
    assert found["failures"] == pytest.approx(expected, abs=5 * sqrt(expected / 1_000))
    more = found["time_to_train"]["mean"] - calm["time_to_train"]["mean"]
    assert more == pytest.approx(expected * 900.0, rel=0.1)
    assert found["ettr"] == pytest.approx(1.0 - more / (86_400 * days), abs=1e-3)
    assert sum(found["variance_by_term"].values()) == pytest.approx(1.0, abs=0.01)
    assert "2407.21783" in codes(steps_model, steps=300_000, gpus=1024)["failures"]


def test_gpus_are_for_a_model_of_step_times(steps_model):
    with pytest.raises(prism.PrismError, match="gpus"):
        prism.estimate("pipeline-8x32", gpus=8)
    with pytest.raises(prism.PrismError, match="gpus"):
        prism.estimate(steps_model, gpus=0)


# -------------------------------------------------------------------------------- deadlines
def test_a_deadline_may_be_a_date():
    job, asked = tiny(steps=1000), {"start": "2026-12-01"}
    days = figures(job, deadline="45d", **asked)["finish_by"]
    assert figures(job, deadline="2027-01-15", **asked)["finish_by"] == days
    assert days["deadline"] == 45 * 86_400.0
    own = job.replace("run.deadline=2027-01-15T12:00", "run.start=2026-12-01")
    assert figures(own)["finish_by"]["deadline"] == 45.5 * 86_400.0
    # the start that is asked for counts
    assert figures(own, start="2027-01-01")["finish_by"]["deadline"] == 14.5 * 86_400.0
    assert figures(job, deadline=45.0)["finish_by"]["deadline"] == 45.0
    again = prism.load_job({"base": "pipeline-8x32", "run": {"deadline": "2027-01-15"}})
    assert prism.summary(prism.estimate(again, **FEW, **asked))["finish_by"]["deadline"] > 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"deadline": "45"}, "45d"), ({"deadline": "1e6"}, "unit"),
        ({"deadline": "2027-01-15"}, "start"),
        ({"deadline": "2027-01-15", "start": "2027-01-15"}, "not after"),
        ({"deadline": "2027-01-15T00:00+01:00", "start": "2027-01-01"}, "time zone"),
        ({"deadline": "2027-31-15", "start": "2027-01-01"}, "expected a date"),
        ({"deadline": "next week"}, "60d"),
    ],
)  # fmt: skip
def test_a_deadline_that_cannot_be_meant(asked, said):
    with pytest.raises(prism.PrismError, match=said):
        figures(tiny(steps=10), **asked)


def test_a_deadline_of_step_times_may_be_a_date(steps_model):
    found = figures(steps_model, steps=10, deadline="2027-01-15", start="2027-01-14")
    assert found["finish_by"]["deadline"] == 86_400.0


def test_a_run_that_never_ends_is_refused_soon():
    slow = {"rate_per_1000_node_days": 2e6, "duration": "1h", "detection": "10s", "replace": True}
    job = prism.load_job("pipeline-8x32").replace(
        {"variability.effects.fail_slow": slow, "run.failures": {"restart": 0}, "run.steps": 1000}
    )
    begin = time.process_time()
    with pytest.raises(prism.PrismError, match="events; lower the rates"):
        prism.estimate(job, replicates=64, run_replicates=100, seed=1)
    assert time.process_time() - begin < 20.0  # 300,000 events are minutes
