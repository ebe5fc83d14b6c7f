"""prism compare: size of its tests, what it refuses, its words, and what it takes to see an effect.

Sizes and power with enough repetitions are in experiments/verification/compare.py.
"""

import json

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import prism
from prism.analyses.compare import compare, summarize_compare
from prism.analyses.comparisons.distance import distance
from prism.analyses.comparisons.errors import Sample, error_of_means
from prism.analyses.comparisons.figures import FIGURES, influences, leave_one_out
from prism.analyses.comparisons.longrun import long_run
from prism.analyses.comparisons.power import Side, needed, power_at
from prism.analyses.comparisons.quantity import compare_figures, cosines_of, holm
from prism.models.steptimes.spread import ar1

REPEATS = 30


def series(n, rng, rho=0.0, cv=0.02):
    x = ar1((n, 1), -np.log(rho), rng)[:, 0] if rho else rng.standard_normal(n)
    return 2.0 * np.exp(cv * x)


def sample(n_runs, n, rng, effect=0.0, rho=0.0):
    values = [series(n, rng, rho) * np.exp(effect * rng.standard_normal()) for _ in range(n_runs)]
    return Sample(
        np.concatenate(values), np.repeat(np.arange(n_runs), n), np.tile(np.arange(n), n_runs),
        "runs" if n_runs > 1 else "steps",
    )  # fmt: skip


def write(path, values, runs=None):
    """Write step times [run, step]."""
    lines = ["run,step,step_s"]
    for r, row in enumerate(np.atleast_2d(values)):
        name = r if runs is None else runs[r]
        lines += [f"{name},{i},{x:.9f}" for i, x in enumerate(row)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def rejections(make, pairing=None):
    """Share of p-values below 5 %, of the mean, p50, the spread, KS, and of naive tests."""
    rng = np.random.default_rng(5)
    rows = []
    for k in range(REPEATS):
        a, b = make(rng), make(rng)
        found = compare_figures(a, b, pairing, 0.01)
        ks = distance(a, b, pairing, cosines_of(a, b, found.of_a, found.of_b, pairing), k, 199)
        p = [found.figures[name]["p_value"] for name in ("mean", "p50", "std")]
        p += [1.0 if ks.p_value is None else ks.p_value]
        p += [stats.ttest_ind(a.values, b.values).pvalue, stats.ks_2samp(a.values, b.values).pvalue]
        rows.append([x < 0.05 for x in p])
    return np.mean(rows, axis=0)


# 30 repetitions at 5 %: more than 6 (20 %) come with a chance of 6e-4, and the seed is fixed
@pytest.mark.parametrize(
    "make",
    [
        lambda rng: sample(1, 500, rng, rho=0.9),
        lambda rng: sample(5, 100, rng, effect=0.01, rho=0.5),
    ],
    ids=["autocorrelated", "run-effect"],
)
def test_no_difference_is_found_where_there_is_none_and_naive_tests_find_one(make):
    found = rejections(make)
    assert (found[:4] <= 0.2).all()
    assert (found[4:] >= 0.4).all()  # the negative control: independent steps assumed


def test_interval_holds_a_real_difference():
    rng = np.random.default_rng(2)
    held = []
    for _ in range(REPEATS):
        a, b = sample(6, 20, rng, effect=0.005), sample(6, 20, rng, effect=0.005)
        b = Sample(1.02 * b.values, b.unit, b.step, b.kind)
        for name in ("mean", "p50"):
            low, high = compare_figures(a, b, None, 0.01).figures[name]["relative_ci"]
            held.append(low < 0.02 < high)
    assert 0.8 <= np.mean(held)


def test_long_run_variance_of_an_ar1_series():
    """Its mean varies (1 + rho)/(1 - rho) times as much as that of independent values."""
    rng = np.random.default_rng(3)
    rho, n = 0.8, 4_000
    x = ar1((n, 60), -np.log(rho), rng)
    found = (long_run(x).parts ** 2).sum(axis=0).mean() * n
    assert found == pytest.approx((1 + rho) / (1 - rho), rel=0.15)
    assert found > 5.0 * x.var()  # the negative control: that of independent values


def test_clusters_are_the_independent_units():
    rng = np.random.default_rng(4)
    unit = np.repeat(np.arange(200), 16)
    x = (rng.standard_normal(200)[unit] + 0.1 * rng.standard_normal(unit.size))[:, None]
    found = error_of_means(Sample(x[:, 0], unit, np.arange(unit.size), "clusters"), x - x.mean())
    assert found.variance[0] == pytest.approx(1.01 / 200, rel=0.25)
    assert found.within[0] < 0.05 * found.variance[0]


def test_few_and_unlike_runs_count_as_leaving_each_out_does():
    """Mean and spread of runs of 20 to 200 steps against a jackknife by brute force."""
    rng = np.random.default_rng(12)
    runs = [series(n, rng) * np.exp(0.05 * rng.standard_normal()) for n in (20, 50, 80, 200)]
    x = np.concatenate(runs)
    unit = np.repeat(np.arange(4), [r.size for r in runs])
    made = Sample(x, unit, np.arange(x.size), "runs")
    of = leave_one_out(x, unit, influences(x, np.full(3, 0.01)))
    found = error_of_means(made, np.nan_to_num(of), floor=False).variance
    rest = [np.concatenate(runs[:r] + runs[r + 1 :]) for r in range(4)]
    for name, figure in (("mean", np.mean), ("std", lambda y: x.mean() * np.log(y.std()))):
        left = np.array([figure(y) / x.mean() for y in rest])
        brute = 0.75 * ((left - left.mean()) ** 2).sum()
        assert found[FIGURES.index(name)] == pytest.approx(brute, rel=1e-9)
    plain = error_of_means(made, influences(x, np.full(3, 0.01))[:, [4]], floor=False).variance
    assert plain[0] < 0.8 * found[4]  # the negative control: influences alone


def test_ks_exchanges_only_what_is_alike():
    """Stretches of one length of a short and a long run; runs cut to those of the other side."""
    rng = np.random.default_rng(13)
    found = distance(sample(1, 300, rng), sample(1, 3_000, rng), None, (16, 16), 1, 99)
    assert found.units == 8 + 1  # stretches of 375 steps, as the long run's memory allows
    assert found.p_value is None
    found = distance(sample(1, 300, rng), sample(1, 3_000, rng), None, (16, 160), 1, 99)
    assert found.units == 7 + 78 and found.p_value is not None  # of 38 steps
    long = sample(6, 400, rng, effect=0.05)
    short = Sample(long.values[long.step < 40], np.repeat(np.arange(6), 40),
                   np.tile(np.arange(40), 6), "runs")  # fmt: skip
    assert distance(short, long, None, (0, 0), 1, 99).p_value == 1.0


def test_a_percentile_that_few_runs_do_not_reach_is_not_planned_for():
    side = Side(1e-6, 99.0, 100, lambda wider: np.inf if wider > 2.0 else wider)
    assert needed([side, side], "runs", 0.01, 0.8) == 25  # 1/4 of 100 runs, errors twice as large
    assert needed([side._replace(stretch=None)] * 2, "runs", 0.01, 0.8) < 10


def test_planned_number_of_runs_has_the_power_that_was_asked_for():
    """The t test's own power, by simulation: normal runs of known spread."""
    sides = [Side(0.02**2, 1e6, 10**6)] * 2
    n = needed(sides, "runs", 0.01, 0.8)
    rng = np.random.default_rng(6)
    a, b = 0.02 * rng.standard_normal((2, 4_000, n))
    p = stats.ttest_ind(a, b + np.log1p(0.01), axis=1, equal_var=False).pvalue
    assert (p < 0.05).mean() == pytest.approx(0.8, abs=0.025)
    assert power_at(sides, "runs", 0.01, n) >= 0.8 > power_at(sides, "runs", 0.01, n - 1)


def test_holm_against_a_closed_case():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


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
    sharp = summarize_compare(compare(a, paired, seed=0))["quantities"]["step_time"]
    blunt = summarize_compare(compare(a, other, seed=0))
    assert sharp["paired_by"] == "cluster"
    assert sharp["figures"]["p50"]["verdict"] == "different"
    loose = blunt["quantities"]["step_time"]
    assert loose["paired_by"] is None and loose["figures"]["p50"]["verdict"] != "different"
    assert loose["figures"]["p50"]["detectable"] > 5 * sharp["figures"]["p50"]["detectable"]
    assert any("other seeds" in text for text in blunt["warnings"])


def test_the_same_result_twice_does_not_differ(results):
    found = summarize_compare(compare(results[0], results[0], seed=0))["quantities"]["step_time"]
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
        found = summarize_compare(compare(*pair, seed=0))["quantities"]["step_time"]
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


def test_output_is_shown_again(run, tmp_path, results):
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
        assert rows[key][5].value == row["p_adjusted"]
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
    assert summarize_compare(found)["job_differences"] == [
        {"key": "parallelism.pp", "a": 4, "b": 8}, {"key": "parallelism.vpp", "a": None, "b": 2},
    ]  # fmt: skip
    (sides,) = [table for table in prism.answer(found).tables if "differ" in table.title]
    assert sides.rows[-2:] == (("parallelism.pp", "4", "8"), ("parallelism.vpp", "not set", "2"))
    other["parallelism"] |= {f"key{i}": i for i in range(20)}
    pair[1] = results[0].assign_attrs(job=json.dumps(other))
    (sides,) = [t for t in prism.answer(compare(*pair, seed=0)).tables if "differ" in t.title]
    assert len(sides.rows) <= 13 and "12" in sides.notes[0]
    assert summarize_compare(compare(results[0], pair[1], seed=0))["job_differences"] == []


def test_totals_of_runs(tmp_path):
    rng = np.random.default_rng(10)
    files = []
    for k in range(2):
        file = tmp_path / f"{k}.csv"
        totals = 100.0 * (1 + 0.05 * k) * np.exp(0.01 * rng.standard_normal(12))
        lines = [f"{i},{x}" for i, x in enumerate(totals)]
        file.write_text("\n".join(["run,train_time_s", *lines]))
        files.append(file)
    found = summarize_compare(compare(*files, seed=0))["quantities"]
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
    job = prism.load_job("gpt3-175b-512", ["run.steps=300"])
    asked = {"replicates": 640, "run_replicates": 200}
    plain, wrong = (
        prism.estimate(job.replace(f"variability.model_error={x}"), seed=1, **asked)
        for x in (0, 0.2)
    )
    other = prism.estimate(job.replace("variability.model_error=0"), seed=2, **asked)
    found, same = (
        summarize_compare(compare(a, other, seed=0))["quantities"]["time_to_train"]["figures"]
        for a in (wrong, plain)
    )
    assert float(wrong.time_to_train.std()) > 5.0 * float(plain.time_to_train.std())
    for name in ("mean", "p50", "std"):
        assert found[name]["relative"] == pytest.approx(same[name]["relative"], abs=1e-3)
