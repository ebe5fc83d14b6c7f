"""Runs in a sweep, and the failure rate from which another policy is the better one."""

import json

import pytest
from scipy.optimize import brentq

import prism

STEP, STEPS, WRITE, NODES = 3.0, 400_000, 2.0, 16
RATE, DAY = "run.failures.per_1000_node_days", 86400.0
EVERY, POLICY = "run.checkpoint.interval_steps", "run.failures.policy"


def job(cv=0.05, **failures):
    return prism.load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"microbatches": 1, "dp": NODES},
        "cluster": {"nodes": NODES, "gpus_per_node": 1},
        "variability": {"library": "none", "effects": {"rank": {"cv": cv}}},
        "run": {"steps": STEPS, "checkpoint": {"interval_steps": 100, "write_s": WRITE},
                "failures": {"per_1000_node_days": 10.0, "restart": "5min"} | failures},
    })  # fmt: skip


def swept(job, vary, **options):
    return prism.sweep(job, vary, **{"replicates": 1024, "seed": 1} | options)


def test_checkpoints_change_places_at_the_rate_of_the_closed_form():
    """To first order 2 C / (tau1 tau2); exactly where (exp(rate (tau + C)) - 1) / tau are equal."""
    short, long = 100, 400
    rates = [15.0, 30.0, 60.0, 120.0, 240.0]
    found = swept(job(cv=0.0), {EVERY: [short, long], RATE: rates}).figures()
    (even,) = found["break_even"]
    per_s = NODES / 1000.0 / DAY
    first = 2.0 * WRITE / (short * long * STEP**2) / per_s

    def waste(rate, every):
        return (2.718281828459045 ** (rate * per_s * (every * STEP + WRITE)) - 1.0) / every

    exact = brentq(lambda rate: waste(rate, short) - waste(rate, long), 1.0, 1000.0)
    assert exact == pytest.approx(first, rel=0.02) and rates[1] < exact < rates[3]
    assert even["rate_low"] < exact < even["rate_high"]
    assert even["rate_high"] - even["rate_low"] < 0.1 * exact
    assert even["rate"] == pytest.approx(exact, rel=0.03)
    assert even["mttf"] == pytest.approx(1.0 / (even["rate"] * per_s))
    assert (even["below"][-3:], even["above"][-3:]) == ("400", "100")


def test_three_intervals_have_two_break_evens_in_order():
    rates = [5.0, 10.0, 20.0, 80.0, 160.0]
    result = swept(job(cv=0.0), {RATE: rates, EVERY: [100, 200, 800]})
    first, second = result.figures()["break_even"]
    assert first["above"] == second["below"] and first["rate_high"] < second["rate_low"]
    per_s = NODES / 1000.0 / DAY
    for even, product in ((first, 200 * 800), (second, 100 * 200)):
        assert even["rate"] == pytest.approx(2.0 * WRITE / (product * STEP**2) / per_s, rel=0.1)
        assert even["rate_low"] < even["rate"] < even["rate_high"]
    assert result.break_even.rate.tolist() == [first["rate"], second["rate"]]
    assert result.settings.time_to_train_mean.is_monotonic_increasing
    answer = prism.answer(result)
    assert [f.code for f in answer.findings] == ["break_even"]
    (table,) = [table for table in answer.tables if table.title == "Break-even"]
    assert [row[2].value for row in table.rows] == [first["rate"], second["rate"]]


def test_a_policy_that_is_never_worse_has_no_break_even():
    """Without a spare, a replica less for a while is shorter than waiting for the repair."""
    result = swept(job(spares=0, repair="12h"), {RATE: [0, 4, 16], POLICY: ["replace", "shrink"]})
    (even,) = result.figures()["break_even"]
    assert even["rate"] is None and even["mttf"] is None
    assert (even["rate_low"], even["rate_high"]) == (4.0, 16.0)  # at 0 they are the same
    assert even["below"] == even["above"] and even["below"].endswith("shrink")


def test_nothing_is_said_between_policies_that_are_the_same():
    """Spares that are always enough: shrink never acts."""
    (even,) = swept(job(spares=1000), {RATE: [4, 16, 64], POLICY: ["replace", "shrink"]}).figures()[
        "break_even"
    ]
    assert even["rate"] is None


def test_runs_are_those_of_estimate_and_steps_are_simulated_once():
    base = job()
    found = swept(base, {EVERY: [50, 100, 400]}).figures()
    assert (found["objective"], found["clusters"], found["best"]) == ("time_to_train", 16, 0)
    assert "break_even" not in found
    assert [row["own"] for row in found["rows"]].count(True) == 1
    for row in found["rows"]:
        alone = prism.estimate(base.replace({EVERY: row[EVERY]}), replicates=1024, seed=1)
        expected = {k: v for k, v in alone.figures()["time_to_train"].items() if k != "p95_ci"}
        assert row["time_to_train"].items() >= expected.items()
    means = [row["time_to_train"]["mean"] for row in found["rows"]]
    assert means == sorted(means)
    assert found["rows"][0]["best_change"] is None
    share = means[-1] / means[0] - 1.0
    assert found["rows"][-1]["best_change"] == pytest.approx(share, rel=1e-3)


def test_other_keys_beside_the_runs_keep_their_objective():
    found = swept(job(), {"parallelism.microbatches": [1, 2], EVERY: [100, 400]}).figures()
    assert found["objective"] == "p95" and found["clusters"] == 32
    runs = {(r["parallelism.microbatches"], r[EVERY]): r["time_to_train"] for r in found["rows"]}
    assert runs[2, 100]["p50"] == pytest.approx(runs[1, 100]["p50"], rel=0.05)  # the same work


def test_runs_that_cannot_be_are_refused_and_files_keep_the_rest(run, tmp_path):
    path, out = tmp_path / "job.yaml", tmp_path / "out"
    path.write_text("""
model: {durations: {forward_s: 1.0, backward_s: 2.0}}
parallelism: {microbatches: 1, dp: 4}
cluster: {nodes: 4, gpus_per_node: 1}
variability: {library: none}
run: {steps: 5000, checkpoint: {interval: 5min, write_s: 2}, failures: {restart: 1min}}
""")
    words = ("--replicates", 128, "--seed", 1, "-q")
    status, text, err = run(
        "sweep", path, "--vary", f"{RATE}=10,100,1e7", "--vary",
        "run.checkpoint.interval=1min,5min", "--json", "-o", out, *words,
    )  # fmt: skip
    assert status == 0, err
    found = json.loads(text)
    assert (len(found["rows"]), len(found["refused"])) == (4, 2) and found["break_even"]
    assert all("run.failures" in row["reason"] for row in found["refused"])
    kept = prism.load(out / "result.nc")
    assert {k: found[k] for k in kept.figures() if k != "warnings"} == {
        k: v for k, v in kept.figures().items() if k != "warnings"
    }
    for variable in kept.to_xarray().data_vars.values():
        words_alone = variable.dtype.kind in "OUT"
        assert variable.attrs["long_name"] and (words_alone or variable.attrs["units"])
    status, text, err = run("sweep", path, "--vary", f"{RATE}=1e6,1e7", *words)
    assert (status, text) == (2, "") and "run.failures" in err and "Traceback" not in err
