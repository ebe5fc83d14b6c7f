"""The command line: exit statuses, messages, JSON on stdout and nothing else, files or none."""

import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import prism

SMALL = ("estimate", "pipeline-8x32", "--replicates", "128", "--run-replicates", "20")


def test_help_is_quick():
    """Under 0.3 s of the processor; the best of some, for other work may share the machine."""
    command = [sys.executable, "-m", "prism", "--help"]
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert "estimate" in done.stdout
    assert min(taken) < 0.3


def test_the_list_of_commands_fits_a_terminal():
    """Each first sentence is whole in 80 columns."""
    env = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-m", "prism", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    listed = done.stdout.split("Commands:\n")[1].splitlines()
    assert len(listed) > 10
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_help_loads_nothing_slow():
    code = (
        "import sys; from prism.__main__ import main; main(['--help']);"
        "slow = {'numpy', 'numba', 'scipy', 'xarray', 'matplotlib', 'pydantic', 'rich'};"
        "sys.exit(len(slow & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == 0


def test_every_command_takes_the_common_options_and_says_what_has_no_effect(run):
    listed = run("--help")[1].split("Commands:\n")[1].split("\n")
    commands = [line.split()[0] for line in listed if line.strip()]
    said = {}
    for name in commands:
        measured = ["gemm"] if name == "measure" else []
        status, text, _ = run(name, *measured, "--help")
        assert status == 0 and all(f"--{x}" in text for x in ("json", "seed", "threads", "quiet"))
        said[name] = " ".join(text.partition("--seed INTEGER")[2].partition("  --")[0].split())
    drawing_nothing = {name for name in commands if said[name] == said["show"]}
    assert drawing_nothing == {"import", "kernel", "replay", "report", "schedule", "show"}


def test_version(run):
    assert run("--version")[:2] == (0, f"prism, version {prism.__version__}\n")


def test_estimate_json_is_one_object_with_the_promised_keys(run):
    status, out, _ = run(*SMALL, "--seed", "0", "--deadline", "34h", "--json")
    answer = json.loads(out)
    assert status == 0
    assert out.count("\n") == 1
    assert answer["seed"] == 0
    assert (answer["replicates"], answer["run_replicates"], answer["world_size"]) == (128, 20, 8)
    assert answer["ideal_step_time"] == pytest.approx(117.0, rel=1e-6)
    for name in ("step_time", "time_to_train"):
        assert set(answer[name]) >= {
            *("mean", "std", "cv", "p5", "p50", "p90", "p95", "p99", "mean_se", "p95_ci"),
            *("within_cluster_std", "between_cluster_std"),
        }
    assert answer["step_time"]["p5"] <= answer["step_time"]["p50"] <= answer["step_time"]["p99"]
    assert list(answer["slowdown"]) == ["1.05", "1.1", "1.2"]
    assert answer["finish_by"]["deadline"] == 34 * 3600
    assert set(answer["engine"]) >= {"op_samples", "seconds", "ns_per_op_sample", "threads"}
    assert answer["wall_seconds"] > 0


def test_same_seed_same_answer_for_any_number_of_threads(run):
    answers = [json.loads(run(*SMALL, "--seed", "7", "--threads", n, "--json")[1]) for n in (1, 3)]
    for name in ("step_time", "time_to_train", "slowdown"):
        assert answers[0][name] == answers[1][name]


def drawing(folder):
    """Every command that draws, as short as it can be, by name."""
    rng = np.random.default_rng(1)
    for name in "ab":
        rows = [f"{i},{x:.6f}" for i, x in enumerate(rng.normal(1.0, 0.01, 20))]
        (folder / f"{name}.csv").write_text("\n".join(["step,step_s", *rows]) + "\n")
    a, b = folder / "a.csv", folder / "b.csv"
    pipeline = ("pipeline-8x32", "--set", "parallelism={pp: 2, microbatches: 2}")
    effects = "variability.effects.rank={cv: 0.01}"
    return {
        "estimate": SMALL,
        "rank": ("rank", *pipeline, "--set", effects),
        "place": ("place", *pipeline, "--set", "cluster={gpus_per_node: 1, nodes: 2}",
                  "--slow-nodes", "1", "--slowdown", "1.2"),
        "sweep": ("sweep", *pipeline, "--vary", "run.steps=1,2", "--replicates", "64"),
        "timeline": ("timeline", *pipeline, "--replicates", "64"),
        "fit": ("fit", a),
        "validate": ("validate", *pipeline[:1], "--measured", a, "--replicates", "64",
                     "--bootstrap", "1"),
        "compare": ("compare", a, b),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["estimate", "rank", "place", "sweep", "timeline", "fit", "validate", "compare"]
)
def test_a_fresh_seed_is_reported_and_repeats_the_answer(run, tmp_path, few_repeats, name):
    arguments = drawing(tmp_path)[name]
    shown = re.search(r"seed (\d+)", " ".join(run(*arguments, "-q")[1].split()))[1]
    first = json.loads(run(*arguments, "--json", "-q")[1])
    assert first["seed"] != int(shown)
    again = json.loads(run(*arguments, "--json", "-q", "--seed", first["seed"])[1])
    for of_machine in ("wall_seconds", "cpu_seconds", "engine"):
        first.pop(of_machine, None), again.pop(of_machine, None)
    assert first == again


def test_estimate_table_has_units(run):
    status, out, _ = run(*SMALL, "--seed", "1", "--price", "2.5")
    assert status == 0
    assert "117.00 s" in out
    heads = ("Step time", "Time-to-train", "Run", "Where the time of a step goes", "Accuracy")
    assert all(head in out for head in heads)
    details = run(*SMALL, "--seed", "1", "--details")[1]
    assert "op-samples" in details and "op-samples" not in out


def test_options_reach_the_job(run):
    arguments = ("--set", "variability.effects.residual.cv=0", "--steps", "10", "--seed", "1")
    answer = json.loads(run(*SMALL, *arguments, "--slowdown-thresholds", "1,1.5", "--json")[1])
    assert answer["step_time"]["mean"] == pytest.approx(117.0, rel=1e-6)
    assert answer["step_time"]["std"] == pytest.approx(0.0, abs=1e-6)
    assert answer["time_to_train"]["mean"] == pytest.approx(1170.0, rel=1e-6)
    assert list(answer["slowdown"]) == ["1", "1.5"]
    start = ("--start", "2026-01-31", "--probability", "0.5")
    answer = json.loads(run(*SMALL, *arguments, *start, "--json")[1])
    assert answer["finish_date"]["probability"] == 0.5
    assert answer["finish_date"]["date"].startswith("2026-01-31T00:19:30")


def test_dependence_none_is_an_option(run):
    status, out, _ = run(*SMALL, "--dependence", "none", "--seed", "1", "--json")
    assert status == 0
    assert json.loads(out)["step_time"]["mean"] > 117.0


def test_output_folder_is_complete_and_can_be_shown(run, tmp_path):
    folder = tmp_path / "new" / "out"
    status, out, err = run(*SMALL, "--seed", "1", "--json", "-o", folder)
    assert status == 0
    stems = ("step_time", "time_to_train", "progress")
    plots = {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg")}
    assert {file.name for file in folder.iterdir()} == plots | {"result.nc", "summary.json"}
    assert json.loads((folder / "summary.json").read_text()) == json.loads(out)
    assert str(folder) in err
    status, out, _ = run("show", folder / "result.nc", "--json")
    assert (status, out) == run("show", folder, "--json")[:2]
    assert status == 0
    assert json.loads(out)["summary"]["job"] == "pipeline-8x32"
    assert json.loads(out)["provenance"]["prism_version"] == prism.__version__


def test_quiet_says_nothing_else(run, tmp_path, empty_pictures):
    """Warnings stay: they are part of the answer."""
    _, _, err = run(*SMALL, "--seed", "1", "-q", "-o", tmp_path / "out")
    assert all(line.startswith("prism: warning:") for line in err.splitlines())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("estimate",), "'JOB'"),
        (("estimat", "pipeline-8x32"), "did you mean estimate"),
        (("estimate", "pipeline-8x32", "--replicate", "5"), "--replicates"),
        (("estimate", "pipeline-8x23"), "pipeline-8x32"),
        (("estimate", "missing.yaml"), "missing.yaml"),
        ((*SMALL, "--tensor-model-parallel-size", "8"), "--set parallelism.tp"),
        ((*SMALL, "--nodes", "8"), "--set cluster.nodes"),
        ((*SMALL, "--replicates", "0"), "--replicates"),
        ((*SMALL, "--replicates", "many"), "'many'"),
        ((*SMALL, "--deadline", "soon"), "60d"),
        ((*SMALL, "--deadline", "-3h"), "60d"),
        ((*SMALL, "--deadline", "45"), "45d"),
        ((*SMALL, "--deadline", "2027-01-15"), "--start"),
        ((*SMALL, "--deadline", "2027-13-45", "--start", "2027-01-01"), "2026-01-31"),
        ((*SMALL, "--deadline", "2027-01-15", "--start", "2027-02-01"), "not after"),
        ((*SMALL, "--slowdown-thresholds", "1.05;1.1"), "1.05,1.1,1.2"),
        ((*SMALL, "--slowdown-thresholds", "nan"), "above 0"),
        ((*SMALL, "--start", "tomorrow"), "tomorrow"),
        ((*SMALL, "--probability", "1.5"), "--probability"),
        ((*SMALL, "--price", "-1"), "--price"),
        ((*SMALL, "--seed", "-1"), "--seed"),
        ((*SMALL, "--threads", "0"), "--threads"),
        ((*SMALL, "--dependence", "some"), "none"),
        ((*SMALL, "--progress", "steps.csv"), "steps.csv: "),
        ((*SMALL, "--set", "parallelism.microbatch=3"), "microbatches"),
        ((*SMALL, "--set", "variability.effects.residual.cv=-0.1"), "residual.cv"),
        (("show",), "--jobs"),
        (("show", "pipeline-8x32", "--jobs"), "one of"),
        (("show", "missing.nc"), "missing.nc"),
        (("show", "h100-healthy", "--set", "a=b"), "h100-healthy: --set "),
        (("schedule", "1f1b"), "--stages"),
        (("schedule", "1f1d", "--stages", "2", "--microbatches", "4"), "1f1b"),
        (("schedule", "mine.csv", "--stages", "2", "--microbatches", "4"), "'mine.csv'"),
        (("schedule", "1f1b", "--stages", "2", "--microbatches", "4", "--plot", "a.bmp"), ".png"),
    ],
)
def test_bad_input_is_status_2_with_a_way_out(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"a: 1\na: 2\n", b"\x00\xff" * 5000, b"- 1\n- 2\n"])
def test_bad_files_are_status_2(run, tmp_path, content):
    for name in ("job.yaml", "result.nc"):
        (tmp_path / name).write_bytes(content)
        status, out, err = run("show", tmp_path / name)
        assert (status, out) == (2, "")
        assert name in err
        assert "Traceback" not in err


def test_output_that_is_a_file_is_refused_before_the_work(run, tmp_path):
    (tmp_path / "taken").write_text("mine")
    status, _, err = run(*SMALL, "-o", tmp_path / "taken")
    assert status == 2
    assert str(tmp_path / "taken") in err
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_failure_inside_leaves_no_files_and_no_traceback(run, tmp_path, monkeypatch):
    def broken(ax, path, *others):
        Path(path).write_text("half")
        raise error

    error = RuntimeError("no ink")
    monkeypatch.setattr("prism.plots.save_figure", broken)
    status, out, err = run(*SMALL, "-o", tmp_path / "out")
    assert (status, out) == (1, "")
    assert "internal error: RuntimeError: no ink" in err
    assert "PRISM_DEBUG=1" in err
    assert not list(tmp_path.iterdir())
    error = MemoryError()
    status, _, err = run(*SMALL, "-o", tmp_path / "out")
    assert status == 1 and "memory" in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("PRISM_DEBUG", "1")
    with pytest.raises(MemoryError):
        run(*SMALL, "-o", tmp_path / "out")


def processor_seconds(pid):
    """Processor time of a process: how far it is, whatever else the machine does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("after_s", [0.3, 2.5])  # while it is loaded, while it simulates
def test_interrupt_is_status_130_without_traceback(tmp_path, after_s):
    # not as a module: Python ends one by SIGINT itself where that has passed through exec of a text
    command = [Path(sys.executable).with_name("prism"), "estimate", "pipeline-8x32"]
    command += ["--replicates", "40000000", "-o", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and processor_seconds(process.pid) < after_s:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted" in err
    assert not list(tmp_path.iterdir())


def test_closed_pipe_is_no_error():
    read, write = os.pipe()
    os.close(read)
    asked = "schedule 1f1b --stages 4 --microbatches 8".split()
    command = [sys.executable, "-m", "prism", *asked]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_shipped_jobs_and_libraries_are_listed_and_can_be_shown(run):
    jobs = json.loads(run("show", "--jobs", "--json")[1])["jobs"]
    assert {"llama3-405b-16k", "pipeline-8x32"} <= {row["job"] for row in jobs}
    libraries = json.loads(run("show", "--libraries", "--json")[1])["libraries"]
    assert "h100-healthy" in {row["library"] for row in libraries}
    for name in ("llama3-405b-16k", "h100-healthy"):
        status, out, _ = run("show", name)
        assert status == 0
        assert name in out


def test_show_job_tells_where_each_value_comes_from(run):
    answer = json.loads(
        run("show", "llama3-405b-16k", "--set", "cluster.pod_gpus=1024", "--json")[1]
    )
    assert answer["world_size"] == 16_384
    assert answer["values"]["cluster"]["pod_gpus"] == 1024
    assert "--set" in answer["sources"]["cluster.pod_gpus"]
    assert "llama3-405b-16k.yaml:" in answer["sources"]["parallelism.tp"]
    assert sum(answer["layer_split"]) == 126


def test_show_library_gives_every_entry_its_source(run):
    answer = json.loads(run("show", "h100-healthy", "--json")[1])
    assert answer["kind"] == "library"
    assert all(entry["source"] for entry in answer["entries"])


def test_schedule_as_text_csv_json_and_picture(run, tmp_path):
    shape = ("--stages", "4", "--microbatches", "8", "--chunks", "2")
    csv, png = tmp_path / "a.csv", tmp_path / "a.png"
    status, out, err = run("schedule", "interleaved", *shape, "--csv", csv, "--plot", png)
    assert status == 0
    assert out.startswith("stage 0 | F0.0")
    assert str(csv) in err
    assert png.read_bytes().startswith(b"\x89PNG")
    generated = json.loads(run("schedule", "interleaved", *shape, "--json")[1])
    written = [line.split(",") for line in csv.read_text().splitlines()]
    assert [[re.sub(r"\d", "", cell) for cell in row] for row in written] == [
        [letter for letter, *_ in row] for row in generated["actions"]
    ]
    assert generated["idle_fraction"] == pytest.approx(9 / 57)


def test_schedule_json_tells_input_gradients_from_whole_backwards(run):
    shape = ("--stages", "4", "--microbatches", "8")
    for name in ("zb-h1", "dualpipe-v"):
        answer = json.loads(run("schedule", name, *shape, "--json")[1])
        lengths = [sum(answer["slots"][kind] for kind, *_ in row) for row in answer["actions"]]
        work = sum(lengths) / (len(lengths) * answer["slots"]["step"])
        assert 1.0 - work == pytest.approx(answer["idle_fraction"])


def test_package_names_are_functions_even_after_their_modules_are_imported():
    for module in ("analyses.estimate", "simulation.steps"):
        importlib.import_module(f"prism.{module}")
    assert callable(prism.estimate) and callable(prism.simulate)
    assert set(prism.__all__) <= set(dir(prism))
    for name in prism.__all__:
        assert getattr(prism, name) is not None


EVIL = "[bold]a[link] :smile: \x1b]0;x\x9b\u202ez"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def test_names_are_data_and_steer_nothing(tmp_path, run, empty_pictures):
    """No markup, no emoji, no control sequences, no change of direction; JSON keeps the name."""
    folder = tmp_path / "[old]" / "[y]"
    folder.mkdir(parents=True)
    job = folder / f"{EVIL}.yaml"
    job.write_text("base: pipeline-8x32\nparallelism: {dp: 2, pp: 2, microbatches: 2}\n")
    out = folder / "out"
    small = ("--replicates", "128", "--run-replicates", "20", "--seed", "1", "-o", out)
    status, answer, said = run("estimate", job, *small)
    assert status == 0, said
    assert "[bold]a[link] :smile: \\u001b]0;x\\u009b\\u202ez" in answer.splitlines()[0]
    assert "/[old]/[y]/out" in said
    status, shown, told = run("show", out / "result.nc")
    assert status == 0 and "[bold]a[link] :smile: " in shown
    status, numbers, _ = run("show", out / "result.nc", "--json")
    assert status == 0 and json.loads(numbers)["summary"]["job"] == EVIL
    status, _, refused = run("estimate", folder / f"[/y]{EVIL}no.yaml")
    assert status == 2 and "/[old]/[y]/[/y][bold]a[link] :smile: " in refused
    status, _, usage = run("estimate", f"--{EVIL}")
    assert status == 2
    page = prism.report(out)
    for text in (answer, said, shown, told, numbers, refused, usage, page):
        assert not STEERING.search(text)


def test_a_name_of_two_lines_is_shown_on_one(tmp_path, run, empty_pictures):
    """Each problem, answer and file written keeps to its lines."""
    job = tmp_path / "two\nlines.yaml"
    job.write_text("base: pipeline-8x32\nparallelism: {tp: x, cp: 0}\n")
    status, _, said = run("estimate", job)
    assert status == 2 and len(said.splitlines()) == 2 and said.count("two\\nlines.yaml") == 2
    for command in ("estimate", "import", "fit"):
        status, _, said = run(command, tmp_path / "not\nthere")
        assert status == 2 and "not\\nthere" in said.splitlines()[0], command
    job.write_text("base: pipeline-8x32\n")
    few = "--replicates", "128", "--run-replicates", "20", "--seed", "1"
    status, answer, said = run("estimate", job, *few, "-q", "-o", tmp_path / "o\nut")
    assert status == 0 and answer.startswith("two\\nlines, 8 GPUs")
    status, _, said = run("estimate", job, *few, "-o", tmp_path / "o\nut")
    assert f"wrote {tmp_path}/o\\nut: " in said
    with pytest.raises(prism.PrismError) as refused:
        prism.load_job("pipeline-8x32", ["a\nb=1", "parallelism.tp=0"])
    assert len(refused.value.args) == len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_stream_that_is_closed_is_no_error(tmp_path, closed):
    file, line = tmp_path / "s.csv", f"{sys.executable} -m prism schedule 1f1b --stages 4"
    line += f" --microbatches 8 --csv {file} {closed}"
    assert subprocess.run(["bash", "-c", line]).returncode == 0
    rows = file.read_text().splitlines()
    assert len(rows) == 4 and all(row.count(",") == 15 for row in rows)  # and nothing else


def test_a_job_file_may_have_any_name_and_all_streams_may_be_closed(run, tmp_path, empty_pictures):
    """No text, no formula of a picture's title, no steering of the terminal."""
    name = b"a\xff$x^{_\x1b]0;x\x07.yaml"
    file, out = os.fsencode(tmp_path) + b"/" + name, tmp_path / "out"
    with open(file, "w") as job:
        job.write("base: pipeline-8x32\n")
    asked = ["estimate", file, "--replicates", "64", "--run-replicates", "20"]
    status, told, err = run(*map(os.fsdecode, asked), "-o", tmp_path / "open")
    assert status == 0 and told and "\x1b" not in told + err
    line = [sys.executable, "-m", "prism", *asked, "-o", str(out)]  # with a picture of that title
    closed = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", *line]
    assert subprocess.run(closed).returncode == 0
    known, found = name[:-5].decode(errors="backslashreplace"), prism.load(out)
    assert found.attrs["job_name"] == known and found.step_time.size == 64
