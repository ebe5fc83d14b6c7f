"""prism compare: size of its tests, what it refuses, its words, and what it takes to see an effect.

Sizes and power with enough repetitions are in experiments/verification/compare.py.
"""

import itertools
import json
from xml.etree import ElementTree

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import prism
from prism import compare
from prism.analyses.comparisons.bootstrap import (
    FIGURES,
    RESAMPLES,
    Sample,
    in_blocks,
    resample,
)
from prism.analyses.comparisons.distance import distance
from prism.analyses.comparisons.quantity import compare_figures, compare_quantity, holm
from prism.simulation.runs.drift import ar1

REPEATS = 30


def series(n, rng, rho=0.0, cv=0.02):
    x = ar1(-np.log(rho) * np.arange(n), 1, rng)[:, 0] if rho else rng.standard_normal(n)
    return 2.0 * np.exp(cv * x)


def sample(n_runs, n, rng, effect=0.0, rho=0.0):
    values = [series(n, rng, rho) * np.exp(effect * rng.standard_normal()) for _ in range(n_runs)]
    return Sample(
        np.concatenate(values), np.repeat(np.arange(n_runs), n), np.tile(np.arange(n), n_runs),
        "runs" if n_runs > 1 else "steps",
    )  # fmt: skip


def clusters(n, rng, lanes=16):
    """Simulated steps [s] of two sides on the same clusters, with noise of their own."""
    level = np.exp(0.02 * rng.standard_normal(n))[:, None]
    unit = np.repeat(np.arange(n), lanes)
    return [
        Sample((6.0 * level * np.exp(0.005 * rng.standard_normal((n, lanes)))).ravel(), unit, unit,
               "clusters")
        for _ in range(2)
    ]  # fmt: skip


def find(a, b, pairing=None, seed=0, resamples=RESAMPLES):
    """Both sides in their units, and figures by name."""
    a, b = in_blocks(a, b, pairing)
    of_a, of_b = (
        resample(x, np.random.default_rng([seed, 0 if pairing else k]), resamples)
        for k, x in enumerate((a, b))
    )
    found = compare_figures(a, b, of_a, of_b, pairing, 0.01, 0.0)
    return (
        a,
        b,
        {name: {key: values[k] for key, values in found.items()} for k, name in enumerate(FIGURES)},
    )


def write(path, values, runs=None):
    """Write step times [run, step]."""
    lines = ["run,step,step_s"]
    for r, row in enumerate(np.atleast_2d(values)):
        name = r if runs is None else runs[r]
        lines += [f"{name},{i},{x:.9f}" for i, x in enumerate(row)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


# 40 repetitions at 5 %: more than 7 (17.5 %) come with a chance of 1e-3, and the seed is fixed
@pytest.mark.parametrize(
    ("make", "pairing", "dependent"),
    [
        (lambda rng: [sample(1, 500, rng) for _ in "ab"], None, False),
        (lambda rng: [sample(1, 500, rng, rho=0.9) for _ in "ab"], None, True),
        (lambda rng: [sample(4, 100, rng, effect=0.01, rho=0.5) for _ in "ab"], None, True),
        (lambda rng: [clusters(16, rng)[0] for _ in "ab"], None, True),
        (lambda rng: clusters(16, rng), "cluster", False),
    ],
    ids=["independent", "autocorrelated", "run-effect", "clusters", "paired"],
)
def test_no_difference_is_found_where_there_is_none_and_naive_tests_find_one(
    make, pairing, dependent
):
    rng, rows, seen = np.random.default_rng(5), [], []
    for k in range(40):
        a, b, found = find(*make(rng), pairing, k, 200)
        ks = distance(a, b, pairing, k, 99).p_value
        rows.append([found[name]["p_value"] < 0.05 for name in ("mean", "p50", "std")])
        rows[-1] += [ks is not None and ks < 0.05]
        seen.append(stats.ttest_ind(a.values, b.values).pvalue < 0.05)
    assert (np.mean(rows, axis=0) <= 0.175).all()
    assert np.mean(seen) >= 0.4 if dependent else np.mean(seen) <= 0.175  # the negative control


@pytest.mark.parametrize("n_units", [3, 8])
def test_the_error_of_a_mean_over_few_units_is_the_unbiased_one(n_units):
    """s / sqrt(R), by a closed form; a percentile bootstrap would make it sqrt(1 - 1/R) of that."""
    x = np.random.default_rng(3).standard_normal(n_units) + 5.0
    made = Sample(x, np.arange(n_units), np.zeros(n_units, int), "runs")
    found = resample(made, np.random.default_rng(4)).deviations[:, 0].std()
    assert found == pytest.approx(x.std(ddof=1) / n_units**0.5, rel=0.1)


def test_figures_of_resamples_are_those_of_their_values():
    rng = np.random.default_rng(12)
    x = rng.standard_normal(90) + 5.0
    unit = np.repeat(np.arange(3), (20, 50, 20))
    found = resample(Sample(x, unit, unit, "runs"), rng)
    expected = [x.mean(), *np.quantile(x, [0.5, 0.95, 0.99]), x.std(), x.std() / x.mean()]
    assert found.own[:6] == pytest.approx(expected, rel=1e-12)
    seen = np.unique(np.round(found.deviations[:, 1], 9))
    drawn = [
        np.median(np.concatenate([x[unit == u] for u in units]))
        for units in itertools.combinations_with_replacement(range(3), 3)
    ]
    drawn = np.unique(np.round(drawn, 9))  # each of them, and no other
    assert (seen - seen[0]) / np.ptp(seen) == pytest.approx((drawn - drawn[0]) / np.ptp(drawn))


def test_interval_holds_a_real_difference():
    rng = np.random.default_rng(2)
    held = []
    for k in range(REPEATS):
        a, b = sample(6, 20, rng, effect=0.005), sample(6, 20, rng, effect=0.005)
        b = Sample(1.02 * b.values, b.unit, b.step, b.kind)
        found = find(a, b, None, k)[2]
        for name in ("mean", "p50"):
            low, high = found[name]["relative_ci"]
            held.append(low < 0.02 < high)
    assert 0.8 <= np.mean(held)


def test_blocks_hold_the_long_run_variance_of_an_ar1_series():
    """Its mean varies (1 + rho)/(1 - rho) times as much as that of independent values."""
    rng = np.random.default_rng(3)
    rho, n, found = 0.8, 4_000, []
    for _ in range(20):
        x = ar1(-np.log(rho) * np.arange(n), 1, rng)[:, 0]
        one = Sample(x, np.zeros(n, int), np.arange(n), "steps")
        blocks = in_blocks(one, one, None)[0]
        found.append(resample(blocks, rng, 200).deviations[:, 0].var() * n)
    assert np.mean(found) == pytest.approx((1 + rho) / (1 - rho), rel=0.15)
    assert np.mean(found) > 5.0 * x.var()  # the negative control: that of independent values


def test_one_run_against_several_varies_as_they_do():
    """Normal totals: s^2 (1 + 1/R) and R - 1 degrees of freedom, as in a prediction."""
    rng = np.random.default_rng(14)
    many, one = sample(6, 50, rng, effect=0.01), sample(1, 50, rng)
    found = find(many, one)[2]["mean"]
    means = many.values.reshape(6, 50).mean(axis=1)
    error = means.std(ddof=1) * (1 + 1 / 6) ** 0.5
    half = 0.5 * np.diff(found["difference_ci"])[0]
    assert half == pytest.approx(stats.t.isf(0.025, 5) * error, rel=0.1)
    assert half > 2.0 * stats.t.isf(0.025, 49) * one.values.std() / 50**0.5  # the control: alone


def test_ks_exchanges_only_what_is_alike():
    """Runs are cut to the steps of the other side's; blocks of two single runs are as long."""
    rng = np.random.default_rng(13)
    long = sample(6, 400, rng, effect=0.05)
    short = Sample(long.values[long.step < 40], np.repeat(np.arange(6), 40),
                   np.tile(np.arange(40), 6), "runs")  # fmt: skip
    assert distance(short, long, None, 1, 99).p_value == 1.0
    a, b = in_blocks(sample(1, 300, rng, rho=0.8), sample(1, 3_000, rng), None)
    assert 8 * a.n_units < b.n_units < 12 * a.n_units
    assert distance(a, b, None, 1, 99).units == a.n_units + b.n_units
    many = [Sample(rng.random(800), np.arange(800), np.arange(800), "clusters") for _ in "ab"]
    assert distance(*many, None, 1, 19).p_value > 0.0  # more ways than a float can hold
    assert distance(sample(3, 40, rng), sample(3, 40, rng), None, 1, 99).p_value is None


def test_planned_number_of_runs_has_the_power_that_was_asked_for():
    """The t test's own power, by simulation: normal runs of known spread."""
    rng = np.random.default_rng(6)
    pilot = [Sample(np.exp(0.02 * stats.norm.ppf((np.arange(400) + 0.5) / 400)), np.arange(400),
                    np.zeros(400, int), "runs") for _ in "ab"]  # fmt: skip
    n = int(find(*pilot)[2]["mean"]["needed"][0])
    for runs, least, most in ((n, 0.77, 0.85), (n - 12, 0.5, 0.75)):
        a, b = 0.02 * rng.standard_normal((2, 4_000, runs))
        p = stats.ttest_ind(a, b + np.log1p(0.01), axis=1, equal_var=False).pvalue
        assert least < (p < 0.05).mean() < most


def test_a_percentile_that_few_runs_do_not_reach_is_not_planned_for():
    rng = np.random.default_rng(15)
    found = find(*(sample(40, 25, rng, effect=0.002) for _ in "ab"))[2]
    share = 1.96 * (0.05 * 0.95 / 1_000) ** 0.5  # of independent values
    assert found["p95"]["needed"][0] >= 0.5 * 40 * (share / 0.05) ** 2
    assert found["p95"]["needed"][0] > found["mean"]["needed"][0]
    assert np.isnan(find(*(sample(4, 20, rng, effect=0.05) for _ in "ab"))[2]["p99"]["p_value"])


def test_most_of_the_variance_of_the_mean_is_between_runs_that_differ():
    rng = np.random.default_rng(16)
    shares = [
        compare_quantity(
            *(sample(40, 50, rng, effect=e) for _ in "ab"), None, 0.01, 0
        ).between_share
        for e in (0.02, 0.0)
    ]
    assert shares[0] > 0.95 and shares[1] < 0.6


def test_holm_against_a_closed_case():
    found = holm(np.array([0.01, 0.04, np.nan, 0.03, 0.005]))
    assert found == pytest.approx([0.03, 0.06, np.nan, 0.06, 0.02], nan_ok=True)


@pytest.fixture
def results():
    """Two simulated results of one seed, and one of another: B is 0.3 % slower."""

    def made(seed, factor):
        own = np.random.default_rng(seed)
        cluster = np.repeat(np.arange(60), 16)
        level = np.exp(0.02 * own.standard_normal(60))[cluster]
        steps = 6.0 * factor * level * np.exp(0.01 * own.standard_normal(cluster.size))
        return xr.Dataset(
            {"step_time": ("replicate", steps), "cluster_idx": ("replicate", cluster)},
            attrs={"seed": str(seed), "job_name": "made"},
        )

    return made(1, 1.0), made(1, 1.003), made(2, 1.003)


def test_same_random_numbers_are_paired_and_see_more(results):
    a, paired, other = results
    sharp = prism.summary(compare(a, paired, seed=0))["quantities"]["step_time"]
    blunt = prism.summary(compare(a, other, seed=0))
    assert sharp["paired_by"] == "cluster"
    assert sharp["figures"]["p50"]["verdict"] == "different"
    loose = blunt["quantities"]["step_time"]
    assert loose["paired_by"] is None and loose["figures"]["p50"]["verdict"] != "different"
    assert loose["figures"]["p50"]["detectable"] > 5 * sharp["figures"]["p50"]["detectable"]
    assert any("other seeds" in text for text in blunt["warnings"])


def test_the_same_result_twice_does_not_differ(results):
    found = prism.summary(compare(results[0], results[0], seed=0))["quantities"]["step_time"]
    p_values = {name: found["figures"][name]["p_value"] for name in FIGURES}
    assert p_values.pop("p99") is None  # 10 of 960 steps lie beyond it, and clusters cluster
    assert set(p_values.values()) == {1.0}
    assert found["ks"]["distance"] == 0.0 and found["ks"]["p_value"] == 1.0


@pytest.mark.parametrize("value", [np.nan, 0.0, -1.0])
def test_a_result_without_a_time_for_each_step_is_refused(results, value):
    broken = results[0].copy(deep=True)
    broken.step_time[7] = value
    with pytest.raises(prism.PrismError, match="made"):
        compare(broken, results[1], seed=0)


def test_one_run_each_says_nothing_about_versions(run, tmp_path):
    rng = np.random.default_rng(7)
    a = write(tmp_path / "a.csv", series(400, rng))
    b = write(tmp_path / "b.csv", 1.05 * series(400, rng))
    status, out, err = run("compare", a, b, "-q", "--json")
    numbers = json.loads(out)
    found = numbers["quantities"]["step_time"]
    assert status == 0 and found["figures"]["p50"]["verdict"] == "different"
    assert set(found["units"].values()) == {"steps"} and len(numbers["warnings"]) == 1
    assert [(f["code"], f["severity"]) for f in numbers["findings"]] == [("step_time", "answer")]
    many = write(tmp_path / "many.csv", [series(100, rng) for _ in range(6)])
    mixed = json.loads(run("compare", many, b, "-q", "--json")[1])
    assert mixed["quantities"]["step_time"]["units"] == {"a": "runs", "b": "steps"}
    assert len(mixed["warnings"]) == 1 and mixed["warnings"] != numbers["warnings"]


def test_work_by_step_is_no_noise_between_runs(tmp_path):
    """A schedule that grows by 20 % widens no interval: runs, and single runs step by step."""
    rng = np.random.default_rng(8)
    work = 1.0 + 0.2 * np.arange(200) / 200
    files = [
        write(tmp_path / f"{k}.csv", [work * series(200, rng, cv=0.005) for _ in range(n)])
        for k, n in enumerate((5, 5, 1, 1))
    ]
    for pair in (files[:2], files[2:]):
        found = prism.summary(compare(*pair, seed=0))["quantities"]["step_time"]
        assert found["figures"]["mean"]["detectable"] < 0.004
    assert found["paired_by"] == "step"


def test_two_groups_of_one_file_with_a_slow_start(run, tmp_path):
    rng = np.random.default_rng(9)
    rows = [series(150, rng) for _ in range(4)]
    for row in rows:
        row[:3] *= 3.0
    file = tmp_path / "steps.csv"
    write(file, rows, runs=["r0", "r1", "r2", "r3"])
    table = file.read_text().splitlines()
    system = {"r0": "x", "r1": "x", "r2": "y", "r3": "y"}
    file.write_text("\n".join(
        [table[0] + ",system"] + [f"{line},{system[line[:2]]}" for line in table[1:]]))  # fmt: skip
    status, out, _ = run("compare", f"{file}[system=x]", f"{file}[system=y]", "--json")
    numbers = json.loads(out)
    assert status == 0 and numbers["quantities"]["step_time"]["n"] == {"a": 294, "b": 294}
    assert "first 3 steps" in numbers["notes"][0]
    status, _, err = run("compare", f"{file}[system]", file)
    assert status == 2 and "column=value" in err


def test_output_is_shown_again(run, tmp_path, empty_pictures, results):
    for name, result in zip("ab", results, strict=False):
        (tmp_path / name).mkdir()
        prism.save(result, tmp_path / name / "result.nc")
    status, out, _ = run(
        "compare", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "-q", "--details"
    )
    assert status == 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"result.nc", "summary.json", "compare.png", "compare.svg"}
    status, again, _ = run("show", tmp_path / "out" / "result.nc", "--details")
    assert status == 0 and again == out


def test_the_answer_says_the_figures_of_the_json(results):
    answer = prism.answer(compare(results[0], results[1], seed=0))
    found = answer.figures["quantities"]["step_time"]["figures"]
    (table,) = [table for table in answer.tables if table.title == "Step time"]
    rows = {row[0]: row for row in table.rows}
    for key in ("p50", "p95"):
        row = found[key]
        assert [cell.value for cell in rows[key][1:4]] == [row["a"], row["b"], row["relative"]]
        assert rows[key][4].value == row["p_adjusted"]
    (finding,) = answer.findings
    assert (finding.code, finding.severity) == ("step_time", "answer")
    assert rows["p50"][3].text.lstrip("+") in finding.text


def test_what_is_left_open_comes_with_a_sample_size(results):
    answer = prism.answer(compare(results[0], results[2], seed=0))
    codes = [(finding.code, finding.severity) for finding in answer.findings]
    assert codes == [("step_time", "answer"), ("step_time_sample_size", "advice")]
    assert [table.details for table in answer.tables] == [False, False, True]


def test_keys_in_which_the_jobs_differ_are_listed(results):
    job = {"name": "made", "source": "a.yaml", "parallelism": {"pp": 4, "vpp": None}}
    other = {"name": "made", "source": "b.yaml", "parallelism": {"pp": 8, "vpp": 2}}
    pair = [
        results[0].assign_attrs(job=json.dumps(values)) for values in (job, other)
    ]  # fmt: skip
    found = compare(*pair, seed=0)
    assert prism.summary(found)["job_differences"] == [
        {"key": "parallelism.pp", "a": 4, "b": 8}, {"key": "parallelism.vpp", "a": None, "b": 2},
    ]  # fmt: skip
    (sides,) = [table for table in prism.answer(found).tables if "differ" in table.title]
    assert sides.rows[-2:] == (("parallelism.pp", "4", "8"), ("parallelism.vpp", "not set", "2"))
    other["parallelism"] |= {f"key{i}": i for i in range(20)}
    pair[1] = results[0].assign_attrs(job=json.dumps(other))
    (sides,) = [t for t in prism.answer(compare(*pair, seed=0)).tables if "differ" in t.title]
    assert len(sides.rows) <= 13 and "12" in sides.notes[0]
    assert prism.summary(compare(results[0], pair[1], seed=0))["job_differences"] == []


def test_totals_of_runs(tmp_path):
    rng = np.random.default_rng(10)
    files = []
    for k in range(2):
        file = tmp_path / f"{k}.csv"
        totals = 100.0 * (1 + 0.05 * k) * np.exp(0.01 * rng.standard_normal(12))
        lines = [f"{i},{x}" for i, x in enumerate(totals)]
        file.write_text("\n".join(["run,train_time_s", *lines]))
        files.append(file)
    found = prism.summary(compare(*files, seed=0))["quantities"]
    assert list(found) == ["time_to_train"]
    assert found["time_to_train"]["figures"]["mean"]["verdict"] == "different"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("llama3-405b-16k", "{steps}"), "prism estimate llama3-405b-16k -o DIR"),
        (("{folder}", "{steps}"), "without result.nc"),
        (("{steps}", "{few}"), "expected at least 20"),
        (("{steps}", "{steps}", "--effect", "2"), "less than 100 %"),
        (("{steps}", "{steps}", "--skip", "95"), "leaves 5 steps"),
        (("{steps}", "{missing}"), "no such"),
    ],
)
def test_bad_input_is_told(run, tmp_path, arguments, said):
    rng = np.random.default_rng(11)
    names = {
        "steps": write(tmp_path / "s.csv", series(100, rng)),
        "few": write(tmp_path / "few.csv", series(5, rng)),
        "folder": tmp_path, "missing": tmp_path / "none.csv",
    }  # fmt: skip
    status, out, err = run("compare", *(str(a).format(**names) for a in arguments))
    assert status == 2 and not out and said in err.replace("\n", " ")


def test_an_error_of_the_model_is_no_difference_between_jobs():
    job = prism.load_job("pipeline-8x32", ["run.steps=300"])
    asked = {"replicates": 640, "run_replicates": 200}
    plain, wrong = (
        prism.estimate(job.replace(f"variability.model_error={x}"), seed=1, **asked)
        for x in (0, 0.2)
    )
    other = prism.estimate(job.replace("variability.model_error=0"), seed=2, **asked)
    found, same = (
        prism.summary(compare(a, other, seed=0))["quantities"]["time_to_train"]["figures"]
        for a in (wrong, plain)
    )
    assert float(wrong.time_to_train.std()) > 5.0 * float(plain.time_to_train.std())
    for name in ("mean", "p50", "std"):
        assert found[name]["relative"] == pytest.approx(same[name]["relative"], abs=1e-3)


def measured(path, level, runs=5, spread=0.002, seed=0):
    """Write steps of runs whose level is a factor of 2 s."""
    rng = np.random.default_rng([seed, round(1e6 * level)])
    rows = ["run,step,step_s"]
    for run in range(runs):
        of_run = 2.0 * level * np.exp(spread * rng.standard_normal())
        rows += [f"{run},{k},{x:.6f}" for k, x in enumerate(of_run + 0.01 * rng.random(40))]
    path.write_text("\n".join(rows))
    return str(path)


@pytest.mark.parametrize(
    ("level", "limit", "verdict"),
    [(1.03, "1%", "slower"), (1.03, "5%", "not_slower"), (1.0003, "0", "open"),
     (0.97, "0", "not_slower")],
)  # fmt: skip
def test_a_gate_fails_where_the_interval_lies_beyond(run, tmp_path, level, limit, verdict):
    a, b = measured(tmp_path / "a.csv", 1.0), measured(tmp_path / "b<.csv", level)
    junit = tmp_path / "gate.xml"
    code, out, _ = run(
        "compare", a, b, "--fail-if-slower", limit, "--junit", junit, "--seed", "1", "--json"
    )
    gate = json.loads(out)["gate"]
    assert code == (3 if verdict == "slower" else 0)
    assert (gate["failed"], [c["verdict"] for c in gate["checks"]]) == (code == 3, [verdict])
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite.get("tests") == "1" and suite.get("failures") == str(int(code == 3))
    assert (suite.find("testcase/failure") is not None) == (code == 3)
    assert "b<.csv" in suite.find("testcase").get("name")


def test_a_gate_without_a_limit_is_none(run, tmp_path):
    a = measured(tmp_path / "a.csv", 1.0)
    code, out, _ = run("compare", a, a, "--json", "--seed", "1")
    assert code == 0 and "gate" not in json.loads(out)
    for given, said in (
        (("--junit", "x.xml"), "--fail-if-slower"),
        (("--fail-if-slower", "1%", "--junit", str(tmp_path / "no" / "x.xml")), "no folder"),
        (("--fail-if-slower", "1%", "--junit", str(tmp_path)), "folder"),
        (("--fail-if-slower", "-1%"), "-1%"),
    ):
        code, out, err = run("compare", a, a, *given)
        assert (code, out) == (2, "") and said in err


def test_a_gate_at_the_true_difference_rarely_fails():
    """A one-sided test at 2.5 %: of 100 pairs 1 % apart not over 6 % fail at 1 %."""
    rng, failed = np.random.default_rng(5), 0
    for seed in range(100):
        level = np.exp(0.003 * rng.standard_normal((2, 6))) * [[1.0], [1.01]]
        a, b = (Sample(x, np.arange(6), np.zeros(6, np.int64), "runs") for x in level)
        draws = [resample(x, np.random.default_rng([seed, k]), 200) for k, x in enumerate((a, b))]
        low = compare_figures(a, b, *draws, None, 0.01, 0.0)["relative_ci"][0][0]
        failed += low > 0.01
    assert failed <= 6
