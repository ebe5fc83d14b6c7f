"""prism compare: its errors and sample sizes in closed form, what it refuses, its gate.

Sizes and power with enough repetitions are in experiments/checks/compare.py.
"""

import json
import math
from functools import cache
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats
from scipy.signal import lfilter

import prism

FIGURES = ("mean", "p50", "p95", "p99", "std", "cv")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(path, values, names=None):
    """Write step times [run, step]."""
    lines = ["run,step,step_s"]
    for r, row in enumerate(np.atleast_2d(values)):
        lines += [f"{r if names is None else names[r]},{i},{x:.9f}" for i, x in enumerate(row)]
    path.write_text("\n".join(lines) + "\n")
    return path


def compared(a, b, **options):
    """A comparison's summary, and its steps' part."""
    found = prism.summary(prism.compare(a, b, **{"seed": 0, **options}))
    return found, found["quantities"].get("step_time")


def levels(n, spread=0.02, mean=2.0, n_steps=20):
    """Runs whose steps all take about as long: normal levels, as evenly spread as can be."""
    z = stats.norm.ppf((np.arange(n) + 0.5) / n)[:, None]
    noise = np.random.default_rng(n).standard_normal((n, n_steps))  # else it looks like a clock's
    return mean * np.exp(spread * z + 1e-5 * (noise - noise.mean()))


def ar1(n, rho, rng):
    """A series of variance 1 whose values remember those before."""
    start = rng.standard_normal()
    shocks = math.sqrt(1.0 - rho * rho) * rng.standard_normal(n)
    return lfilter([1.0], [1.0, -rho], shocks, zi=[rho * start])[0]


# ------------------------------------------------------------------------------- closed forms
@pytest.mark.parametrize(("n_a", "n_b"), [(5, 5), (24, 8)])
def test_runs_are_compared_as_student_and_welch_do(tmp_path, n_a, n_b):
    """Error, interval, p-value, what can be seen and how many runs that takes, from n levels."""
    a, b = levels(n_a), levels(n_b, 0.03, 2.02)
    files = [write(tmp_path / f"{k}.csv", x) for k, x in (("a", a), ("b", b))]
    found, steps = compared(*files, effect=0.01)
    x, y = a.mean(axis=1), b.mean(axis=1)
    parts = [v.var(ddof=1) / v.size / v.mean() ** 2 for v in (x, y)]
    error, ratio = math.sqrt(sum(parts)), math.log(y.mean() / x.mean())
    dof = sum(parts) ** 2 / (parts[0] ** 2 / (n_a - 1) + parts[1] ** 2 / (n_b - 1))
    row = steps["figures"]["mean"]
    assert (row["a"], row["b"]) == pytest.approx((x.mean(), y.mean()))
    assert row["difference"] == pytest.approx(y.mean() - x.mean())
    assert row["relative"] == pytest.approx(math.expm1(ratio))
    wide = stats.t.isf(0.025, dof) * error
    ends = np.expm1([ratio - wide, ratio + wide])
    assert row["relative_ci"] == pytest.approx(ends, abs=0.1 * wide)
    absolute = 0.5 * np.diff(row["difference_ci"])[0]
    assert absolute == pytest.approx(2.0 * wide, rel=0.1)
    p = 2.0 * stats.t.sf(ratio / error, dof)
    assert row["p_value"] == pytest.approx(p, rel=0.2)
    seen = error * (stats.t.isf(0.025, dof) + stats.t.isf(0.2, dof))
    assert row["detectable"] == pytest.approx(math.expm1(seen), rel=0.1)
    assert steps["units"] == {"a": "runs", "b": "runs"}
    assert steps["n_units"] == {"a": n_a, "b": n_b} and steps["n"]["a"] == 20 * n_a
    assert steps["between_share"] == pytest.approx(1.0, abs=0.01)
    # a side's runs alike, as many as the power asks for
    for power, key in ((0.8, "0.8"), (0.9, "0.9")):
        n = row["needed"][key]
        rng = np.random.default_rng(6)
        each = (0.02, 0.03) * rng.standard_normal((3_000, n, 2))
        p = stats.ttest_ind(each[..., 0], each[..., 1] + np.log1p(0.01), axis=1, equal_var=False)
        tolerance = 0.05 if n_a > 10 else 0.12  # of the spread of five evenly spread levels
        assert (p.pvalue < 0.05).mean() == pytest.approx(power, abs=tolerance)


def test_figures_are_numpys_and_ks_is_scipys(tmp_path):
    rng = np.random.default_rng(12)
    a, b = (2.0 * np.exp(0.05 * rng.standard_normal((8, 50)) + shift) for shift in (0.0, 0.04))
    found, steps = compared(write(tmp_path / "a.csv", a), write(tmp_path / "b.csv", b))
    for side, values in (("a", a), ("b", b)):
        expected = [values.mean(), *np.quantile(values, [0.5, 0.95, 0.99]), values.std()]
        rows = [steps["figures"][name][side] for name in FIGURES]
        assert rows == pytest.approx([*expected, values.std() / values.mean()], rel=1e-7)
    ks = stats.ks_2samp(a.ravel(), b.ravel()).statistic
    assert steps["ks"]["distance"] == pytest.approx(ks) and steps["ks"]["p_value"] < 0.01
    assert steps["ks"]["units"] == 16
    # quantile by quantile: B less A, within a band that is at most as narrow as at one level
    result = prism.compare(tmp_path / "a.csv", tmp_path / "b.csv", seed=0)
    at = result["quantile"].to_numpy()
    shift = np.quantile(b, at) - np.quantile(a, at)
    np.testing.assert_allclose(result["step_time_shift"], shift, rtol=1e-6)
    np.testing.assert_allclose(result["step_time_quantile_a"], np.quantile(a, at), rtol=1e-7)
    middle = int(np.abs(at - 0.5).argmin())
    band = float((result["step_time_shift_hi"] - result["step_time_shift_lo"])[middle])
    assert band > np.ptp(steps["figures"]["p50"]["difference_ci"]) > 0.0
    # Holm: the k-th smallest of n p-values times n + 1 - k, never less than one before
    tests = {name: row["p_value"] for name, row in steps["figures"].items()}
    tests["ks"] = steps["ks"]["p_value"]
    known = sorted((p, name) for name, p in tests.items() if p is not None)
    rows, least = steps["figures"] | {"ks": steps["ks"]}, 0.0
    for k, (p, name) in enumerate(known):
        least = max(least, min(1.0, (len(known) - k) * p))
        assert rows[name]["p_adjusted"] == pytest.approx(least)
        if least < 0.05:
            assert rows[name]["verdict"] == "different"
        elif name != "ks":
            low, high = rows[name]["relative_ci"]
            same = -0.01 / 1.01 <= low and high <= 0.01
            assert rows[name]["verdict"] == ("same" if same else "open")
    assert rows["mean"]["verdict"] == "different" and rows["std"]["verdict"] == "open"


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_single_runs_count_what_they_remember(tmp_path, rho):
    """The mean of an AR(1) series varies (1 + rho)/(1 - rho) times as much as of independents."""
    rng = np.random.default_rng(3)
    n, halves, naive = 2_000, [], []
    for k in range(4):
        files = [write(tmp_path / f"{k}{side}.csv", 2.0 * np.exp(0.02 * ar1(n, rho, rng)))
                 for side in "ab"]  # fmt: skip
        with open(files[1]) as file:  # other step numbers: not paired step by step
            lines = file.read().splitlines()
        moved = [f"0,{10_000 + i},{line.split(',')[2]}" for i, line in enumerate(lines[1:])]
        files[1].write_text("\n".join([lines[0], *moved]) + "\n")
        steps = compared(*files)[1]
        assert steps["paired_by"] is None and set(steps["units"].values()) == {"steps"}
        halves.append(0.5 * np.ptp(steps["figures"]["mean"]["relative_ci"]))
        naive.append(1.96 * 0.02 * math.sqrt(2.0 / n))
    wide = math.sqrt((1 + rho) / (1 - rho))
    assert np.mean(halves) == pytest.approx(wide * np.mean(naive), rel=0.2)


def test_one_run_against_several_varies_as_they_do(tmp_path):
    """s sqrt(1 + 1/R), as in a prediction."""
    rng = np.random.default_rng(5)
    many = levels(6) * np.exp(0.001 * rng.standard_normal((6, 20)))
    one = 2.0 * np.exp(0.001 * rng.standard_normal(100))
    found, steps = compared(write(tmp_path / "m.csv", many), write(tmp_path / "o.csv", one))
    assert steps["units"] == {"a": "runs", "b": "steps"} and len(found["warnings"]) == 1
    assert steps["ks"]["p_value"] is None
    error = many.mean(axis=1).std(ddof=1) / many.mean() * math.sqrt(1 + 1 / 6)
    half = 0.5 * np.ptp(steps["figures"]["mean"]["relative_ci"])
    assert half == pytest.approx(stats.t.isf(0.025, 5) * error, rel=0.15)


def test_percentiles_that_few_runs_do_not_reach_are_not_tested(tmp_path):
    rng = np.random.default_rng(15)
    noise = np.exp(0.05 * rng.standard_normal((2, 4, 20)))
    few = [write(tmp_path / f"{k}.csv", levels(4, 0.05) * noise[k]) for k in range(2)]
    rows = compared(*few)[1]["figures"]
    assert rows["p99"]["p_value"] is rows["p99"]["verdict"] is None and rows["mean"]["p_value"]
    many = [write(tmp_path / f"{k}.csv", 2.0 * np.exp(0.02 * rng.standard_normal((40, 25))))
            for k in "cd"]  # fmt: skip
    steps = compared(*many)[1]
    share = 1.96 * (0.05 * 0.95 / 1_000) ** 0.5  # of independent values
    assert steps["figures"]["p95"]["needed"]["0.8"] >= 0.5 * 40 * (share / 0.05) ** 2
    assert steps["between_share"] < 0.6


def test_work_by_step_is_no_noise_between_runs(tmp_path):
    """A schedule that grows by 20 % widens no interval: runs, and single runs step by step."""
    rng = np.random.default_rng(8)
    work = 2.0 + 0.4 * np.arange(200) / 200
    for n, pairing in ((5, None), (1, "step")):
        noise = np.exp(0.005 * rng.standard_normal((2, n, 200)))
        files = [write(tmp_path / f"{n}{k}.csv", work * noise[k]) for k in range(2)]
        steps = compared(*files)[1]
        assert steps["figures"]["mean"]["detectable"] < 0.004 and steps["paired_by"] == pairing


# ------------------------------------------------------------------------------------ results
@cache
def simulated(seed, factor=1.0):
    """Steps of a job whose GPUs differ by 2 %, on 40 cluster draws; its kernels slower by some."""
    job = prism.load_job({
        "model": {"durations": {"forward_s": factor, "backward_s": 2.0 * factor}},
        "parallelism": {"microbatches": 4}, "run": {"steps": 300},
        "variability": {"library": None, "effects": {"rank": {"cv": 0.02},
                                                     "residual": {"cv": 0.02}}},
    })  # fmt: skip
    return prism.simulate(job, replicates=64 * 40, seed=seed)


def test_same_random_numbers_are_paired_and_see_more():
    a = simulated(1)
    for b, paired, verdict in ((simulated(1, 1.003), "cluster", "different"),
                               (simulated(2, 1.003), None, "open")):  # fmt: skip
        found, steps = compared(a, b)
        assert steps["paired_by"] == paired and steps["figures"]["p50"]["verdict"] == verdict
        assert len(found["warnings"]) == (paired is None)
        assert found["job_differences"] == [
            {"key": "model.durations.forward_s", "a": 1.0, "b": 1.003},
            {"key": "model.durations.backward_s", "a": 2.0, "b": 2.006},
        ]
        for name in ("mean", "p50"):
            low, high = steps["figures"][name]["relative_ci"]
            assert low <= 0.003 + 1e-6 and high >= 0.003 - 1e-6
    # unpaired, the error is that of the means of forty cluster draws
    means = [x.step_time.to_numpy().reshape(40, 64).mean(axis=1) for x in (a, b)]
    error = math.hypot(*(m.std(ddof=1) / m.mean() / math.sqrt(40) for m in means))
    half = 0.5 * np.ptp(steps["figures"]["mean"]["relative_ci"])
    assert half == pytest.approx(stats.t.isf(0.025, 78) * error, rel=0.12)
    answer = prism.answer(prism.compare(a, b, seed=0))
    codes = [(finding.code, finding.severity) for finding in answer.findings]
    assert codes == [("step_time", "answer"), ("step_time_sample_size", "advice")]


def test_the_same_result_twice_does_not_differ():
    found, steps = compared(simulated(1), simulated(1))
    rows = steps["figures"]
    assert {rows[name]["p_value"] for name in FIGURES} <= {1.0, None}
    assert rows["mean"]["p_value"] == 1.0 and len(found["warnings"]) == 1
    assert (steps["ks"]["distance"], steps["ks"]["p_value"]) == (0.0, 1.0)


@pytest.mark.parametrize("value", [np.nan, 0.0, -1.0])
def test_a_result_without_a_time_for_each_step_is_refused(value):
    broken = simulated(1).to_xarray().copy(deep=True)
    broken.step_time[7] = value
    with pytest.raises(prism.PrismError):
        prism.compare(broken, simulated(1), seed=0)


def test_an_error_of_the_model_is_no_difference_between_jobs():
    job = prism.load_job("pipeline-8x32", ["run.steps=300"])
    plain, wrong, other = (
        prism.estimate(job.replace(f"variability.model_error={x}"), replicates=640,
                       run_replicates=200, seed=seed)
        for x, seed in ((0, 1), (0.2, 1), (0, 2))
    )  # fmt: skip
    found, same = (
        compared(a, other)[0]["quantities"]["time_to_train"]["figures"] for a in (wrong, plain)
    )
    assert float(wrong.time_to_train.std()) > 5.0 * float(plain.time_to_train.std())
    for name in ("mean", "p50", "std"):
        assert found[name]["relative"] == pytest.approx(same[name]["relative"], abs=1e-3)


def test_output_is_shown_again_and_its_table_shows_the_json(run, tmp_path, empty_pictures):
    for name, result in (("a", simulated(1)), ("b", simulated(1, 1.003))):
        (tmp_path / name).mkdir()
        prism.save(result, tmp_path / name / "result.nc")
    status, out, _ = run("compare", "a", "b", "-o", "out", "-q", "--details", "--seed", 0)
    assert status == 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"result.nc", "summary.json", "compare.png", "compare.svg"}
    status, again, _ = run("show", "out/result.nc", "--details")
    assert status == 0 and again == out
    answer = prism.answer(prism.load(tmp_path / "out" / "result.nc"))
    found = answer.figures["quantities"]["step_time"]["figures"]
    (table,) = [table for table in answer.tables if table.title == "Step time"]
    rows = {row[0]: row for row in table.rows}
    for key in ("p50", "p95"):
        row, cells = found[key], [getattr(cell, "value", None) for cell in rows[key][1:4]]
        assert cells == [row["a"], row["b"], row["relative"]]
    (sides,) = [table for table in answer.tables if "differ" in table.title]
    assert len(sides.rows) <= 13


# ----------------------------------------------------------------------------------- measured
def test_two_groups_of_one_file_with_a_slow_start(run, tmp_path):
    rng = np.random.default_rng(9)
    rows = 2.0 * np.exp(0.02 * rng.standard_normal((4, 150)))
    rows[:, :3] *= 3.0
    lines = write(tmp_path / "steps.csv", rows).read_text().splitlines()
    table = [f"{lines[0]},system", *(f"{x},{'xxyy'[int(x[0])]}" for x in lines[1:])]
    (tmp_path / "steps.csv").write_text("\n".join(table))
    status, out, _ = run("compare", "steps.csv[system=x]", "steps.csv[system=y]", "--json")
    found = json.loads(out)
    assert status == 0 and found["quantities"]["step_time"]["n"] == {"a": 294, "b": 294}
    skipped = json.loads(run("compare", "steps.csv[system=x]", "steps.csv[system=y]", "--skip",
                             50, "--json")[1])  # fmt: skip
    assert skipped["quantities"]["step_time"]["n"] == {"a": 200, "b": 200}
    assert run("compare", "steps.csv[system]", "steps.csv")[0] == 2


def test_totals_of_runs(tmp_path):
    rng, files = np.random.default_rng(10), []
    for k in range(2):
        totals = 100.0 * (1 + 0.05 * k) * np.exp(0.01 * rng.standard_normal(12))
        rows = [f"{i},{x}" for i, x in enumerate(totals)]
        files.append(tmp_path / f"{k}.csv")
        files[-1].write_text("\n".join(["run,train_time_s", *rows]))
    found = compared(*files)[0]["quantities"]
    assert list(found) == ["time_to_train"]
    assert found["time_to_train"]["figures"]["mean"]["verdict"] == "different"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("llama3-405b-16k", "s.csv"), "prism estimate"),
        ((".", "s.csv"), "result.nc"),
        (("s.csv", "few.csv"), "20"),
        (("s.csv", "s.csv", "--effect", "2"), "100 %"),
        (("s.csv", "s.csv", "--skip", "95"), "5 steps"),
        (("s.csv", "none.csv"), "none.csv"),
        (("s.csv", "s.csv", "--junit", "x.xml"), "--fail-if-slower"),
        (("s.csv", "s.csv", "--fail-if-slower", "1%", "--junit", "no/x.xml"), "no"),
        (("s.csv", "s.csv", "--fail-if-slower", "1%", "--junit", "."), "folder"),
        (("s.csv", "s.csv", "--fail-if-slower", "-1%"), "-1%"),
        (("s.csv", "s.csv", "--false-alarm", "1%"), "--fail-if-slower"),
        (("s.csv", "s.csv", "--fail-if-slower", "1%", "--false-alarm", "60%"), "50 %"),
    ],
)
def test_bad_input_is_told(run, tmp_path, arguments, said):
    rng = np.random.default_rng(11)
    write(tmp_path / "s.csv", 2.0 + 0.02 * rng.standard_normal(100))
    write(tmp_path / "few.csv", 2.0 + 0.02 * rng.standard_normal(5))
    status, out, err = run("compare", *arguments)
    assert status == 2 and not out and said in err.replace("\n", " ")


# --------------------------------------------------------------------------------------- gate
@pytest.mark.parametrize(
    ("level", "spread", "limit", "verdict"),
    [(1.03, 0.002, "1%", "slower"), (1.03, 0.002, "5%", "not_slower"),
     (0.97, 0.002, "0", "not_slower"), (1.02, 0.02, "1%", "open"), (1.002, 0.02, "1%", "open")],
)  # fmt: skip
def test_a_gate_fails_where_the_interval_lies_beyond(run, tmp_path, level, spread, limit, verdict):
    """Five runs a side: of a spread of 2 % their means differ by 1.3 % in one standard error."""
    write(tmp_path / "a.csv", levels(5, spread, 2.0, 40))
    write(tmp_path / "b<.csv", levels(5, spread, 2.0 * level, 40))
    code, out, _ = run("compare", "a.csv", "b<.csv", "--fail-if-slower", limit, "--junit",
                       "gate.xml", "--seed", "1", "--json")  # fmt: skip
    gate = json.loads(out)["gate"]
    (check,) = gate["checks"]
    assert code == (1 if verdict == "slower" else 0)
    assert (gate["failed"], check["verdict"]) == (code == 1, verdict)
    assert check["relative"] == pytest.approx(level - 1.0, abs=1e-5)
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot().find("testsuite")
    assert suite.get("tests") == "1" and suite.get("failures") == str(int(code == 1))
    assert (suite.find("testcase/failure") is not None) == (code == 1)
    assert "b<.csv" in suite.find("testcase").get("name")


def test_a_gate_takes_the_spread_of_the_golden_runs(tmp_path):
    """s sqrt(1/R_A + 1/R_B) with R_A - 1 degrees of freedom, also where B varies less by chance."""
    a, b = levels(8, 0.01), levels(3, 0.0001, 2.02)
    files = [write(tmp_path / f"{k}.csv", x) for k, x in (("a", a), ("b", b))]
    for rate in (0.025, 0.2):
        found = compared(*files, fail_if_slower=0.0, false_alarm=rate)[0]["gate"]
        (check,) = found["checks"]
        level = a.mean(axis=1)
        error = level.std(ddof=1) / level.mean() * math.sqrt(1 / 8 + 1 / 3)
        low = math.log1p(check["relative"]) - stats.t.isf(rate, 7) * error
        assert check["relative_ci"][0] == pytest.approx(math.expm1(low), abs=0.1 * error)
        seen = (stats.t.isf(rate, 7) + stats.t.isf(0.2, 7)) * error
        assert check["detectable_80"] == pytest.approx(math.expm1(seen), rel=0.1)
        assert found["failed"] == (low > 0.0)


def test_false_alarms_come_at_the_rate_asked_for(tmp_path):
    """Five golden runs and two new ones that differ as they do; more alarms if steps counted."""
    rng, rate, n, alarms, naive = np.random.default_rng(17), 0.2, 40, 0, 0
    for _ in range(n):
        level = np.exp(0.005 * rng.standard_normal(7))
        values = 2.0 * level[:, None] * np.exp(0.01 * rng.standard_normal((7, 30)))
        a, b = write(tmp_path / "a.csv", values[:5]), write(tmp_path / "b.csv", values[5:])
        found = compared(a, b, fail_if_slower=0.0, false_alarm=rate)[0]
        alarms += found["gate"]["failed"]
        naive += stats.ttest_ind(values[5:].ravel(), values[:5].ravel(), alternative="greater",
                                 ).pvalue < rate  # fmt: skip
    error = math.sqrt(rate * (1.0 - rate) / n)
    assert alarms / n == pytest.approx(rate, abs=2.5 * error)
    assert naive / n > rate + 2.5 * error


def test_no_gate_without_a_limit(run, tmp_path):
    write(tmp_path / "a.csv", levels(5))
    code, out, _ = run("compare", "a.csv", "a.csv", "--json", "--seed", "1")
    assert code == 0 and "gate" not in json.loads(out)


def test_a_comparison_of_an_earlier_version_names_its_command(run, tmp_path):
    """Earlier ones lack what `--fail-if-slower` follows from."""
    times = np.random.default_rng(1).normal(1.0, 0.02, 100)
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("step_s\n" + "\n".join(map(str, times)))
    words = ("compare", tmp_path / "a.csv", tmp_path / "b.csv", "--seed", "1", "-q")
    assert run(*words, "-o", tmp_path / "out")[0] == 0
    result = prism.load(tmp_path / "out" / "result.nc").to_xarray().copy()
    assert run("show", tmp_path / "out")[0] == 0
    summary = json.loads(result.attrs["summary"])
    for quantity in summary["quantities"].values():
        del quantity["gate"]
    result.attrs["summary"] = json.dumps(summary)
    result.to_netcdf(tmp_path / "old.nc", engine="h5netcdf")
    status, _, err = run("show", tmp_path / "old.nc")
    assert status == 2 and "`prism compare`" in err


def test_steps_that_are_all_alike_have_no_spread_to_compare(tmp_path):
    """Without a division by a spread of 0."""
    (tmp_path / "steps.csv").write_text("step,step_s\n" + "".join(f"{i},2\n" for i in range(60)))
    prism.save(prism.fit(tmp_path / "steps.csv", seed=0), tmp_path / "m.nc")
    found = prism.estimate(tmp_path / "m.nc", steps=100, replicates=128, run_replicates=8, seed=1)
    assert float(found.step_time.std()) == 0.0
    prism.save(found, tmp_path / "a.nc")
    again = prism.compare(tmp_path / "a.nc", tmp_path / "a.nc", seed=1).figures()
    step = again["quantities"]["step_time"]
    assert {row["a"] - row["b"] for row in step["figures"].values() if row["a"]} == {0.0}
