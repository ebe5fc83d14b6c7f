"""Commands that take measurements: what reaches the analyses, what is printed and written.

The analyses themselves are stood in for; their own tests say whether they are right.
"""

import importlib
import json
import sys
from types import ModuleType

import numpy as np
import pytest
import xarray as xr

import prism
from prism.common.errors import PrismError
from prism.common.resultfiles import save
from prism.present.answers import fit as fit_answers

FIT = {
    "inputs": ["ops.csv"],
    "kernels": [
        {"name": "forward stage 0", "n": 400, "mean": 0.25, "cv": 0.02, "p99_p50": 1.05}
        | {"law": "empirical", "ks": 0.03, "step_share": 0.9},
        {"name": "void gemm<float [4]>[/x]", "n": 3, "mean": 1e-5, "cv": None, "p99_p50": None}
        | {"law": None, "ks": None, "step_share": 0.1},
    ],
    "effects": {
        "rank": {"cv": 0.012, "ci": [0.008, 0.02], "share": 0.8}
        | {"by_op_kind": {"forward": {"cv": 0.012, "ci": [0.008, 0.02], "share": 0.8}}},
        "residual": {"cv": 0.003, "ci": [0.0028, 0.0032], "share": 0.2},
        "rank_step": {"cv": 0.0, "ci": [0.0, 0.002], "share": 0.0},
        "call": {"cv": None, "ci": [None, None], "share": None, "by_op_kind": {}},
    },
    "loadings": {"forward stage 0": {"step": 1.0, "microbatch": 0.5}},
    "cross_check": {"measured": {"n": 3, "mean": 10.0, "p50": 9.9, "p95": None, "cv": 0.02}},
    "lemons": [{"replica": 1, "stage": 0, "slowdown": 2.4}],
    "not_identifiable": ["node share: taken from the library h100-healthy"],
    "warnings": ["few steps"],
}
REPLAY = {
    "steps": 3,
    "mean_error": -0.002,
    "max_abs_error": 0.011,
    "measured_mean": 10.0,
    "replayed_mean": 9.98,
    "ideal_mean": 8.0,
    "slowdown": 1.2475,
    "slowdown_same_work": 1.2,
    "edges_recorded": 1200,
    "edges_inferred": 0,
    "by_op_kind": {"forward": 1.15, "transfer": 1.01},
    "by_worker": [{"dp_rank": 1, "stage": 0, "slowdown": 1.19}],
    "notes": ["[3] rows dropped"],
}
FIGURES = {"ks": 0.31, "ks_aligned": 0.2, "wasserstein": 0.05, "mean_error": 0.01, "cv_ratio": 0.9}
FIGURES |= {"p50_error": 0.004, "p95_error": 0.012, "p99_error": 0.02}
VALIDATION = {
    **FIGURES,
    **{"n_train": 16, "n_measured": 16, "n_effective": 12.4, "ks_critical_5pct": 0.327},
    **{"ks_p_value": 0.43, "p95_measured_se": 0.005, "ks_floor": 0.4, "p95_floor": 0.069},
    "dependence": "full",
    "baselines": {"copy": FIGURES, "independent": {**FIGURES, "ks": 0.71}},
}


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins for the analyses, and what they were called with."""
    seen = []

    def dataset(kind):
        step = np.array([10.0, 10.1, 10.2])
        names = {
            "model": {"mean": ("op", step)},
            "replay": {"measured_step_time": ("step", step), "replayed_step_time": ("step", step)},
            "validation": {"measured": ("measured_idx", step), "predicted": ("replicate", step)},
        }
        if kind == "model":
            return xr.Dataset(names[kind], attrs={"kind": "trace"})
        numbers = {"replay": REPLAY, "validation": VALIDATION}[kind]
        attrs = {"summary": json.dumps(numbers), "notes": json.dumps(numbers.get("notes"))}
        return xr.Dataset(names[kind], attrs=attrs | {"kind": kind, "source": "ops.csv"})

    def stand_in(name, kind):
        def call(*arguments, **options):
            seen.append((name, arguments, options))
            return dataset(kind)

        return call

    monkeypatch.setattr(importlib.import_module("prism.analyses.replay"), "replay",
                        stand_in("replay", "replay"))  # fmt: skip
    monkeypatch.setattr(importlib.import_module("prism.analyses.validate"), "validate",
                        stand_in("validate", "validation"))  # fmt: skip
    made = ModuleType("prism.models.fit")
    vars(made).update({"fit": stand_in("fit", "model")})
    monkeypatch.setitem(sys.modules, "prism.models.fit", made)
    monkeypatch.setattr(fit_answers, "summarize_fit", lambda _: FIT)
    return seen


@pytest.fixture
def table(tmp_path):
    """Write a tidy table of ops."""
    path = tmp_path / "ops.csv"
    rows = [
        f"{kind},{step},{10.0 * step + i},0.5"
        for step in range(3)
        for i, kind in enumerate(("forward", "backward", "all_reduce"))
    ]
    path.write_text("op_kind,step,start_s,duration_s\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture
def step_times(tmp_path):
    """Write a file of step times."""
    path = tmp_path / "steps.csv"
    path.write_text("step,step_s\n" + "\n".join(f"{i},{1.0 + 0.1 * (i % 3)}" for i in range(9)))
    return path


@pytest.mark.parametrize("command", ["fit", "replay", "validate"])
def test_every_command_takes_the_common_options(run, command):
    status, out, _ = run(command, "--help")
    assert status == 0
    for option in ("--json", "--seed", "--threads", "-q, --quiet", "-o, --output"):
        assert option in out


# ----------------------------------------------------------------------------------------- fit
def test_fit_writes_a_model_that_can_be_shown(run, calls, table, tmp_path):
    model = tmp_path / "m.nc"
    status, out, err = run("fit", table, "-o", model, "--seed", "3", "--json")
    assert (status, out.count("\n")) == (0, 1)
    found = json.loads(out)
    assert {key: found[key] for key in FIT} == FIT
    assert calls == [("fit", ((str(table),),), {"seed": 3, "where": {}})]
    assert "warning: few steps" in err and str(model) in err
    status, out, _ = run("show", model, "--json")
    assert status == 0
    assert json.loads(out) == {"kind": "model", "model_kind": "trace", "summary": found}


def test_fit_prints_what_it_found(run, calls, table):
    status, out, err = run("fit", table)
    assert status == 0
    for text in (
        "forward stage 0",
        "gemm<float [4]>[/x]",  # a kernel's name is no markup
        "0.8 % to 2 %",
        "2.4 times",
        "9.900 s",
    ):
        assert text in out
    assert "-o MODEL.nc" in err
    reason = "taken from the library"
    assert reason not in out and reason in run("fit", table, "--details")[1]


def test_the_answer_of_a_fit_has_the_numbers_of_its_json():
    many = {"name": "k" * 80 + "0", "n": 5, "mean": 1e-3, "cv": 0.1, "p99_p50": 1.2}
    many |= {"law": "empirical", "ks": 0.1, "step_share": 0.01}
    kernels = [*FIT["kernels"], *(many | {"name": f"{'k' * 80}{i}"} for i in range(20))]
    answer = fit_answers.answer_of_figures(FIT | {"kernels": kernels})
    codes = [found.code for found in answer.findings]
    assert codes == ["largest_effects", "slow_workers", "not_identifiable"]
    tables = {table.title: table for table in answer.tables}
    assert len(tables["Kernels"].rows) == fit_answers.MOST_KERNELS
    shown = [table for table in answer.tables if not table.details]
    assert sum(len(table.rows) + 2 for table in shown) < 35
    names = [row[0] for title in ("Kernels", "Further kernels") for row in tables[title].rows]
    assert len(names) == 22 and max(map(len, names)) == fit_answers.LONGEST_NAME
    assert len(set(names)) == 22  # both ends of a long name are kept
    assert [row[0] for row in tables["Effects"].rows] == ["rank", "residual"]  # no row of zeros
    known = set(numbers_in(answer.json()))
    values = [c.value for t in answer.tables for row in t.rows for c in row if hasattr(c, "value")]
    assert values and set(values) <= known


def numbers_in(value):
    """Walk all numbers of a JSON."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "INPUT"),
        (("--calibrate", "job.yaml"), "job=steps"),
        (("ops.csv", "--calibrate", "job.yaml=steps.csv"), "leave ops.csv out"),
        (("--calibrate", "a=b", "--first-steps", "9"), "--first-steps belongs to INPUT"),
        (("ops.csv", "-o", "."), "is a folder"),
        (("ops.csv", "-o", "model"), "model.nc"),
        (("ops.csv", "-o", "missing/m.nc"), "no folder missing"),
        (("ops.csv", "-o", "taken/m.nc"), "taken"),
    ],
)
def test_fit_refuses_with_a_way_out(run, calls, table, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    before = sorted(tmp_path.iterdir())
    status, out, err = run("fit", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert not calls
    assert sorted(tmp_path.iterdir()) == before


def test_fit_never_replaces_its_input(run, calls, tmp_path):
    path = tmp_path / "ops.nc"
    path.write_text("mine")
    status, _, err = run("fit", path, "-o", path)
    assert status == 2
    assert "is an input" in err
    assert path.read_text() == "mine"


def test_step_times_are_refused_where_ops_are_needed(run, calls, step_times, monkeypatch):
    def refuse(*arguments, **options):
        raise PrismError("no ops there")

    monkeypatch.setattr(sys.modules["prism.analyses.replay"], "replay", refuse)
    status, out, err = run("replay", step_times)
    assert (status, out) == (2, "")
    assert "holds step times, not ops" in err
    assert f"--measured {step_times}" in err


def test_other_errors_of_a_trace_pass_through(run, calls, table, monkeypatch):
    def refuse(*arguments, **options):
        raise PrismError(f"{table}:3: no number")

    monkeypatch.setattr(sys.modules["prism.models.fit"], "fit", refuse)
    status, _, err = run("fit", table)
    assert (status, err) == (2, f"prism: {table}:3: no number\n")


# -------------------------------------------------------------------------------------- replay
def test_replay_writes_result_and_plots(run, calls, table, tmp_path):
    folder = tmp_path / "out"
    status, out, _ = run("replay", table, "-o", folder, "--json")
    assert (status, out.count("\n")) == (0, 1)
    numbers = json.loads(out)
    codes = [found["code"] for found in numbers["findings"]]
    assert codes == ["stragglers", "reproduction"]
    assert {key: numbers[key] for key in REPLAY} == REPLAY
    assert calls == [("replay", (str(table),), {})]
    names = {file.name for file in folder.iterdir()}
    assert names == {"result.nc", "summary.json", "replay.png", "replay.svg"}
    status, out, _ = run("show", folder / "result.nc", "--json")
    assert json.loads(out) == {"kind": "replay", "summary": numbers}


def test_replay_prints_what_it_found(run, calls, table):
    status, out, _ = run("replay", table, table, "--details")
    assert status == 0
    assert calls[0][1] == ([str(table), str(table)],)
    for text in ("-0.20 %", "1.1 %", "1.2475", "replica 1, stage 0"):
        assert text in out
    assert "[3] rows dropped" in out


# ------------------------------------------------------------------------------------ validate
def test_validate_trace_passes_its_options_on(run, calls, table, tmp_path):
    folder = tmp_path / "out"
    arguments = ("--train", "8", "--bootstrap", "20", "--replicates", "100", "--seed", "0")
    status, out, _ = run("validate", "--trace", table, *arguments, "-o", folder, "--json")
    assert (status, out.count("\n")) == (0, 1)
    numbers = json.loads(out)
    assert [found["code"] for found in numbers["findings"]] == ["distribution", "p95"]
    assert {key: numbers[key] for key in VALIDATION} == VALIDATION
    name, given, options = calls[0]
    assert (name, given) == ("validate", (None,))
    given = {key: value for key, value in options.items() if value is not None}
    assert given == {
        **{"trace": str(table), "train": "8", "quantity": "step_time"},
        **{"bootstrap": 20, "replicates": 100, "seed": 0},
    }
    names = {file.name for file in folder.iterdir()}
    assert names == {"result.nc", "summary.json", "validation.png", "validation.svg"}
    status, out, _ = run("show", folder / "result.nc", "--json")
    assert json.loads(out) == {"kind": "validation", "summary": numbers}


@pytest.mark.parametrize("train", ["first-half", "even"])
def test_validate_trace_takes_named_splits(run, calls, table, train):
    arguments = ("--train", train, "--dependence", "none")
    assert run("validate", "--trace", table, *arguments)[0] == 0
    assert calls[0][2]["train"] == train
    assert calls[0][2]["dependence"] == "none"


def test_validate_steps_passes_its_options_on(run, calls, step_times):
    arguments = ("--column", "step_s", "--where", "trace=AR", "--where", "k=a=b")
    arguments += ("--totals", "runs.csv:total_s", "--quantity", "time_to_train")
    status, _, _ = run("validate", "pipeline-8x32", "--measured", step_times, *arguments)
    assert status == 0
    name, given, options = calls[0]
    assert (name, given) == ("validate", ("pipeline-8x32",))
    assert (options["measured"], options["model"]) == (str(step_times), None)
    assert options["where"] == {"trace": "AR", "k": "a=b"}
    assert (options["column"], options["totals"]) == ("step_s", "runs.csv:total_s")
    assert options["quantity"] == "time_to_train"


def test_validate_takes_a_model_by_option(run, calls, step_times):
    assert run("validate", "--measured", step_times, "--model", "m.nc")[0] == 0
    assert calls[0][1] == (None,) and calls[0][2]["model"] == "m.nc"
    assert run("validate", "job", "--measured", step_times, "--model", "m.nc")[0] == 0
    assert calls[1][1] == ("job",) and calls[1][2]["model"] == "m.nc"


def test_validate_prints_all_side_by_side(run, calls, table):
    status, out, _ = run("validate", "--trace", table)
    assert status == 0
    for text in ("copy", "independent", "0.710", "+1.2 %", "12.4", "p = 0.43", "6.9 %"):
        assert text in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "--trace"),
        (("pipeline-8x32",), "--measured"),
        (("--measured", "s.csv"), "a job or a model"),
        (("job", "--trace", "t.csv"), "excludes"),
        (("--trace", "t.csv", "--measured", "s.csv"), "excludes"),
        (("--trace", "t.csv", "--train", "half"), "first-half"),
        (("--trace", "t.csv", "--train", "0"), "number of steps"),
        (("--trace", "t.csv", "--column", "a"), "--column"),
        (("--trace", "t.csv", "--where", "a=b"), "--where"),
        (("--trace", "t.csv", "--quantity", "time_to_train"), "holds steps, not runs"),
        (("--trace", "t.csv", "--totals", "a.csv:b"), "--totals"),
        (("job", "--measured", "s.csv", "--where", "trace"), "column=value"),
        (("job", "--measured", "s.csv", "--train", "even"), "--train"),
    ],
)
def test_validate_refuses_with_a_way_out(run, table, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    table.rename("t.csv")
    status, out, err = run("validate", *arguments)
    assert (status, out) == (2, "")
    assert message in err


def findings(numbers):
    attrs = {"kind": "validation", "summary": json.dumps(numbers)}
    return {found.code: found.text for found in prism.answer(xr.Dataset(attrs=attrs)).findings}


@pytest.mark.parametrize(
    "code, change, words",
    [
        ("distribution", {"ks_p_value": 0.05}, "differ"),
        ("distribution", {"ks_p_value": 0.051}, "indistinguishable"),
        ("distribution", {"ks_p_value": 1 / 6, "bootstrap": 5}, "20 or more"),
        ("distribution", {"ks_p_value": 2 / 6, "bootstrap": 5}, "indistinguishable"),
        ("distribution", {"ks_p_value": None}, "not above the 0.327"),
        ("distribution", {"ks_p_value": None, "ks": 0.4}, "is above the 0.327"),
        ("p95", {"p95_error": -0.07}, "-7.0 %, more than"),
        ("p95", {"p95_error": -0.06}, "-6.0 %, no more than"),
        ("p95", {"p95_error": -0.06}, "beyond two"),
        ("p95", {"p95_error": 0.009}, "within two standard errors of the measured p95 (0.5 %"),
        ("p95", {"p95_floor": None}, "+1.2 %; beyond two"),
    ],
)
def test_findings_say_what_the_figures_say(code, change, words):
    assert words in findings(VALIDATION | change)[code]


def test_few_figures_make_no_findings():
    assert findings({"n_measured": 1}) == {}


# ---------------------------------------------------------------------------------------- show
def test_show_trace_tells_its_kinds_of_op(run, table):
    status, out, _ = run("show", table, "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["kind"], found["format"], found["n_ops"]) == ("trace", "tidy", 9)
    assert (found["n_steps"], found["steps"]) == (3, [0, 2])
    assert found["step_span_mean"] == pytest.approx(2.5)
    rows = {row["op_kind"]: row for row in found["ops"]}
    assert rows["forward"]["mean"] == 0.5
    assert rows["forward"]["share"] == pytest.approx(1 / 3)
    assert rows["all_reduce"]["includes_waiting"] and not rows["forward"]["includes_waiting"]
    status, out, _ = run("show", table)
    assert "includes waiting" in out and "500.0 ms" in out


def test_show_step_times(run, step_times):
    found = json.loads(run("show", step_times, "--json")[1])
    assert (found["kind"], found["n"], found["n_runs"]) == ("step_times", 9, 1)
    assert found["mean"] == pytest.approx(1.1)
    status, out, _ = run("show", step_times)
    assert status == 0 and "1.1" in out


def test_show_chooses_among_step_times(run, tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text(
        "trace,step,step_s\n" + "".join(f"{t},{i},{i + 1}.5\n" for t in "ab" for i in (0, 1))
    )
    status, _, err = run("show", path)
    assert status == 2 and "--where" in err
    assert json.loads(run("show", path, "--where", "trace=a", "--json")[1])["n"] == 2
    status, _, err = run("show", "pipeline-8x32", "--column", "step_s")
    assert status == 2 and "which this is not" in err


def test_show_refuses_settings_of_a_trace(run, table):
    status, _, err = run("show", table, "--set", "a=b")
    assert status == 2 and "is not one" in err


def test_show_of_an_unknown_netcdf_file_names_what_it_holds(run, tmp_path):
    save(xr.Dataset({"what": ("x", [1.0])}), tmp_path / "a.nc")
    status, _, err = run("show", tmp_path / "a.nc")
    assert status == 2 and "what" in err and "prism fit" in err


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 99, b"{", b"a,b\n1,2\n", b"PAR1xx"])
@pytest.mark.parametrize("name", ["trace", "trace.csv", "trace.json"])
def test_show_of_garbage_is_status_2(run, tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    status, out, err = run("show", tmp_path / name)
    assert (status, out) == (2, "")
    assert name in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["show", "estimate", "timeline"])
def test_parquet_without_its_reader_is_not_called_text(run, tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    (tmp_path / "steps.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    status, out, err = run(command, tmp_path / "steps.parquet")
    assert (status, out) == (2, "") and "pip install 'pyarrow" in err
