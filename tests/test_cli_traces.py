"""Commands that take measurements: options reach the analyses, files and JSON hold what these give.

Whether the analyses are right is tested beside them.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from pipeline_synth import Effects, Layout, make_trace, write_tidy

import prism


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A tidy table of ops with a slow worker, whose path has what a terminal may take as markup."""
    effects = Effects(step_sd=0.02, content_sd=0.02, lemons={(1, 0): 1.5}, gap_s=0.002)
    frame, _ = make_trace(Layout(3, 2, 2, 16), effects, 1)
    return write_tidy(frame, tmp_path_factory.mktemp("table") / "ops[3].csv")


@pytest.fixture
def step_times(tmp_path):
    """A file of step times: two groups, of which b is slower."""
    path = tmp_path / "steps.csv"
    rows = [f"{t},{i},{scale * (1.0 + 0.1 * (i % 3))}" for t, scale in (("a", 1), ("b", 2))
            for i in range(9)]  # fmt: skip
    path.write_text("trace,step,step_s\n" + "\n".join(rows) + "\n")
    return path


def numbers_in(value):
    """Walk all numbers of a JSON."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, int | float):
        yield value


def figures(text):
    """The only line of an answer in JSON."""
    assert text.count("\n") == 1
    return json.loads(text)


def shown_numbers(answer):
    cells = [c for t in answer.tables for row in t.rows for c in row if hasattr(c, "value")]
    return {cell.value for cell in cells}


@pytest.mark.parametrize("command", ["fit", "replay", "validate"])
def test_every_command_takes_the_common_options(run, command):
    status, out, _ = run(command, "--help")
    assert status == 0
    for option in ("--json", "--seed", "--threads", "-q, --quiet", "-o, --output"):
        assert option in out


# ----------------------------------------------------------------------------------------- fit
def test_fit_writes_a_model_that_can_be_shown(run, table, tmp_path):
    model = tmp_path / "m.nc"
    status, out, err = run("fit", table, "-o", model, "--seed", "3", "--json")
    found = figures(out)
    dataset = prism.fit(table, 3)
    expected = prism.summary(dataset)
    assert status == 0 and found == expected
    assert prism.load(model).attrs["kind"] == "trace" and str(model) in err
    assert all(warning.split()[0] in err for warning in found["warnings"])
    shown = figures(run("show", model, "--json")[1])
    assert shown == {"kind": "model", "model_kind": "trace", "summary": found}
    answer = prism.answer(dataset)
    codes = [finding.code for finding in answer.findings]
    assert codes == ["largest_effects", "model_error", "slow_workers", "not_identifiable"]
    assert shown_numbers(answer) <= set(numbers_in(answer.json()))
    status, text, err = run("fit", table, "--seed", "3")
    assert status == 0 and "[3]" in text and "MODEL.nc" in err
    names = [row["name"] for row in found["kernels"][:5]]
    assert all(name in text for name in names)
    assert len(run("fit", table, "--seed", "3", "--details")[1]) > 1.2 * len(text)


def test_a_screen_shows_the_longest_kernels_by_names_that_differ(tmp_path):
    rows = [(s, "compute", f"{'k' * 80}{i}", s + 0.02 * i, 0.001 * (30 - i))
            for s in range(4) for i in range(25)]  # fmt: skip
    names = ["step", "op_kind", "name", "start", "duration"]
    path = write_tidy(pd.DataFrame(rows, columns=names), tmp_path / "many.csv")
    answer = prism.answer(prism.fit(path, 1))
    shown = [table for table in answer.tables if not table.details]
    assert sum(len(table.rows) + 2 for table in shown) < 40
    names = [
        [str(row[0]) for row in table.rows if "k" * 9 in str(row[0])] for table in answer.tables
    ]
    first, *rest = [of_table for of_table in names if of_table]
    found = [name for of_table in (first, *rest) for name in of_table]
    assert 5 <= len(first) <= 10 and len(found) == 25
    assert len(set(found)) == 25 and max(map(len, found)) <= 60  # both ends are kept


@pytest.mark.parametrize(
    "arguments, named",
    [
        ((), "INPUT"),
        (("--calibrate", "job.yaml"), "job.yaml"),
        (("ops.csv", "--calibrate", "job.yaml=steps.csv"), "ops.csv"),
        (("--calibrate", "a=b", "--first-steps", "9"), "--first-steps"),
        (("ops.csv", "-o", "."), "folder"),
        (("ops.csv", "-o", "model"), "model.nc"),
        (("ops.csv", "-o", "missing/m.nc"), "missing"),
        (("ops.csv", "-o", "taken/m.nc"), "taken"),
        (("ops.csv", "-o", "ops.csv"), "ops.csv"),
        (("broken.csv",), "broken.csv:3"),
    ],
)
def test_fit_refuses_with_a_way_out(run, table, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    (tmp_path / "ops.csv").write_bytes(table.read_bytes())
    (tmp_path / "broken.csv").write_text("op_kind,step,duration_s\nforward,0,1.0\nforward,1,x\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    status, out, err = run("fit", *arguments)
    assert (status, out) == (2, "") and named in err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# -------------------------------------------------------------------------------------- replay
def test_replay_writes_result_and_plots(run, table, tmp_path, empty_pictures):
    folder = tmp_path / "out"
    status, out, _ = run("replay", table, "-o", folder, "--json")
    found = figures(out)
    dataset = prism.replay(table)
    assert status == 0 and found == prism.summary(dataset)
    answer = prism.answer(dataset)
    shown = {found[key] for key in ("measured_mean", "ideal_mean", "slowdown_same_work")}
    assert shown | {max(found["by_op_kind"].values())} <= shown_numbers(answer)
    fewer = prism.answer(dataset.to_xarray().drop_vars("slowdown_by_worker"))
    assert [picture.stem for picture in fewer.pictures] == ["replay"]
    assert [finding["code"] for finding in found["findings"]] == ["stragglers", "reproduction"]
    names = {file.name for file in folder.iterdir()}
    pictures = {f"{stem}.{kind}" for stem in ("replay", "slowdown_by_worker")
                for kind in ("png", "svg")}  # fmt: skip
    assert names == {"result.nc", "summary.json"} | pictures
    shown = figures(run("show", folder / "result.nc", "--json")[1])
    assert shown == {"kind": "replay", "summary": found}
    fewer = figures(run("replay", table, "--skip", 4, "--json")[1])
    assert (found["steps"], fewer["steps"]) == (16, 12)
    some = figures(run("replay", table, "--steps", "2:5", "--json")[1])
    assert some["steps"] == 4
    status, text, _ = run("replay", table, "--details")
    assert status == 0 and len(text) > 500


def test_step_times_are_refused_where_ops_are_needed(run, step_times):
    status, out, err = run("replay", step_times)
    assert (status, out) == (2, "") and f"--measured {step_times}" in err


# ------------------------------------------------------------------------------------ validate
@pytest.mark.parametrize(
    "train, more",
    [
        ("8", {"bootstrap": 4}),
        ("first-half", {"dependence": "none", "bootstrap": 1}),
        ("even", {"bootstrap": 1}),
    ],
)
@pytest.mark.usefixtures("small_pools", "empty_pictures")
def test_validate_passes_its_options_on(run, table, tmp_path, train, more):
    options = {"train": train, "replicates": 128, "seed": 0} | more
    flags = [x for key, value in options.items() for x in (f"--{key}", value)]
    folder = tmp_path / "out"
    status, out, _ = run("validate", "--trace", table, *flags, "-o", folder, "--json")
    found = figures(out)
    dataset = prism.validate(trace=table, **options)
    findings = found.pop("findings")  # which name options as they are given
    expected = prism.summary(dataset)
    assert status == 0 and found == {key: expected[key] for key in found}
    assert {"distribution", "p95"} <= {finding["code"] for finding in findings}
    assert (found["n_train"], found["n_measured"]) == (8, 8)
    assert found["dependence"] == more.get("dependence", "full")
    assert {"copy", "independent"} <= set(found["baselines"])
    assert {file.name for file in folder.iterdir()} == {
        "result.nc", "summary.json", "validation.png", "validation.svg",
    }  # fmt: skip
    shown = figures(run("show", folder / "result.nc", "--json")[1])
    assert shown == {"kind": "validation", "summary": found | {"findings": findings}}
    answer = prism.answer(dataset)
    assert {found["ks"], found["p95_error"], found["baselines"]["copy"]["ks"]} <= shown_numbers(
        answer
    )


@pytest.mark.usefixtures("small_pools")
def test_validate_chooses_among_step_times(run, step_times, table, tmp_path):
    model = tmp_path / "m.nc"
    prism.save(prism.fit(table, 1), model)
    few = ("--replicates", 128, "--seed", 1, "--json")
    for given in (
        (model, "--measured", step_times),
        ("--measured", step_times, "--model", model),
    ):
        status, out, _ = run("validate", *given, *few, "--column", "step_s", "--where", "trace=a")
        found = figures(out)
        assert status == 0 and found["n_measured"] == 9
    slower = figures(
        run("validate", model, "--measured", step_times, *few, "--where", "trace=b")[1]
    )
    ratio = (1.0 + slower["mean_error"]) / (1.0 + found["mean_error"])
    assert ratio == pytest.approx(0.5)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ((), "--trace"),
        (("pipeline-8x32",), "--measured"),
        (("--measured", "s.csv"), "--measured"),
        (("job", "--trace", "t.csv"), "--trace"),
        (("--trace", "t.csv", "--measured", "s.csv"), "--trace"),
        (("--trace", "t.csv", "--train", "half"), "first-half"),
        (("--trace", "t.csv", "--train", "0"), "--train"),
        (("--trace", "t.csv", "--column", "a"), "--column"),
        (("--trace", "t.csv", "--where", "a=b"), "--where"),
        (("--trace", "t.csv", "--quantity", "time_to_train"), "time_to_train"),
        (("--trace", "t.csv", "--totals", "a.csv:b"), "--totals"),
        (("job", "--measured", "s.csv", "--where", "trace"), "column=value"),
        (("job", "--measured", "s.csv", "--train", "even"), "--train"),
    ],
)
def test_validate_refuses_with_a_way_out(run, table, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_bytes(table.read_bytes())
    status, out, err = run("validate", *arguments)
    assert (status, out) == (2, "") and named in err


VALIDATION = {
    "n_train": 16, "n_measured": 16, "n_effective": 12.4, "ks": 0.31, "ks_critical_5pct": 0.327,
    "ks_p_value": 0.43, "p95_error": 0.012, "p95_measured_se": 0.005, "p95_floor": 0.069,
}  # fmt: skip


@cache
def validated():
    """Make a result whose figures `verdict` sets."""
    sample = Path(__file__).parents[1] / "experiments" / "samples" / "trace.csv"
    return prism.validate(trace=sample, bootstrap=0, replicates=100, seed=1).to_xarray()


def verdict(code, **change):
    """What a finding says of some figures, numbers apart."""
    made = validated().copy(deep=True)
    for name, value in (VALIDATION | change).items():
        value = np.nan if value is None else value
        if made[name].dims:  # the prediction is the first of its table, before the baselines
            made[name][0] = value
        else:
            made[name] = (), value
    found = {finding.code: finding.text for finding in prism.answer(made).findings}
    return re.sub(r"[-+]?[\d.]+", "#", found[code])


@pytest.mark.parametrize(
    "code, one, other, same",
    [
        ("distribution", {"ks_p_value": 0.05}, {"ks_p_value": 0.01}, True),
        ("distribution", {"ks_p_value": 0.05}, {"ks_p_value": 0.051}, False),
        ("distribution", {"ks_p_value": 0.051}, {"ks_p_value": 0.9}, True),
        # of five repetitions none can be below 5 %
        ("distribution", {"ks_p_value": 1 / 6, "bootstrap": 5}, {"ks_p_value": 1 / 6}, False),
        ("distribution", {"ks_p_value": 2 / 6, "bootstrap": 5}, {"ks_p_value": 2 / 6}, True),
        ("distribution", {"ks_p_value": None}, {"ks_p_value": None, "ks": 0.32}, True),
        ("distribution", {"ks_p_value": None}, {"ks_p_value": None, "ks": 0.33}, False),
        ("p95", {"p95_error": -0.07}, {"p95_error": -0.06}, False),
        ("p95", {"p95_error": 0.011}, {"p95_error": 0.009}, False),
        ("p95", {"p95_error": -0.06}, {"p95_error": 0.011}, True),
        ("p95", {}, {"p95_floor": None}, False),
    ],
)
def test_findings_change_where_the_figures_cross_a_limit(code, one, other, same):
    assert (verdict(code, **one) == verdict(code, **other)) == same


# ---------------------------------------------------------------------------------------- show
def test_show_trace_tells_its_kinds_of_op(run, tmp_path):
    rows = [(kind, step, 10.0 * step + i, 0.5 + 0.1 * step) for step in range(3)
            for i, kind in enumerate(("forward", "backward", "all_reduce"))]  # fmt: skip
    path = write_tidy(
        pd.DataFrame(rows, columns=["op_kind", "step", "start", "duration"]), tmp_path / "ops.csv"
    )
    status, out, _ = run("show", path, "--json")
    found = figures(out)
    assert (status, found["kind"], found["format"], found["n_ops"]) == (0, "trace", "tidy", 9)
    assert (found["n_steps"], found["steps"]) == (3, [0, 2])
    assert found["step_span_mean"] == pytest.approx(2.6)
    ops = {row["op_kind"]: row for row in found["ops"]}
    assert ops["forward"]["mean"] == pytest.approx(0.6)
    assert ops["forward"]["share"] == pytest.approx(1 / 3)
    assert ops["all_reduce"]["includes_waiting"] and not ops["forward"]["includes_waiting"]
    assert "600.0 ms" in run("show", path)[1]
    assert run("show", path, "--set", "a=b")[0] == 2


def test_show_chooses_among_step_times(run, step_times):
    status, _, err = run("show", step_times)
    assert status == 2 and "--where" in err
    for group, mean in (("a", 1.1), ("b", 2.2)):
        found = figures(run("show", step_times, "--where", f"trace={group}", "--json")[1])
        assert (found["kind"], found["n"], found["n_runs"]) == ("step_times", 9, 1)
        assert found["mean"] == pytest.approx(mean)
    status, out, _ = run("show", step_times, "--where", "trace=a")
    assert status == 0 and "1.1" in out
    assert run("show", "pipeline-8x32", "--column", "step_s")[0] == 2


def test_show_of_an_unknown_netcdf_file_names_what_it_holds(run, tmp_path):
    prism.save(xr.Dataset({"what": ("x", np.ones(1))}), tmp_path / "a.nc")
    status, _, err = run("show", tmp_path / "a.nc")
    assert status == 2 and "what" in err and "prism fit" in err


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 99, b"{", b"a,b\n1,2\n", b"PAR1xx"])
@pytest.mark.parametrize("name", ["trace", "trace.csv", "trace.json"])
def test_show_of_garbage_is_status_2(run, tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    status, out, err = run("show", tmp_path / name)
    assert (status, out) == (2, "") and name in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["show", "estimate", "timeline"])
def test_parquet_without_its_reader_is_not_called_text(run, tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    (tmp_path / "steps.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    status, out, err = run(command, tmp_path / "steps.parquet")
    assert (status, out) == (2, "") and "pip install 'pyarrow" in err
