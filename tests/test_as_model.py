"""A profile as a job with a table of ops: `prism import --as-model`."""

import gzip
import json
import os
from pathlib import Path

import msgspec
import profile_made
import pytest
import yaml
from drawn_steps import draw_steps

import prism

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
TRACE = DATA / "h100_device" / "eager_trace.json.gz"
measured = pytest.mark.skipif(not TRACE.is_file(), reason=f"no {TRACE}")


@pytest.fixture
def made(tmp_path, run):
    """Import a made-up profile; its answer and the job file's values."""

    def make(profile, *options, status=0):
        trace, job = tmp_path / "trace.json", tmp_path / "own.yaml"
        trace.write_text(json.dumps(profile))
        found, out, err = run("import", trace, "--as-model", "-o", job, "--json", *options)
        assert found == status, err
        return (json.loads(out), yaml.safe_load(job.read_text()), job) if not status else err

    return make


def ops_of(values, name="layer"):
    (layer,) = [x for x in values["model"]["layers"] if x["name"] == name]
    return layer["ops"]


@pytest.mark.parametrize(("layers", "microbatches"), [(2, 1), (4, 2), (9, 3)])
def test_equal_layers_with_their_shapes(made, layers, microbatches):
    answer, values, _ = made(profile_made.profile(layers, microbatches))
    assert [(x["name"], x["repeat"]) for x in answer["layers"]] == [
        ("first", 1), ("layer", layers), ("last", 1)
    ]  # fmt: skip
    norm, up, gelu, down = ops_of(values)
    assert (norm["op"], norm["width"]) == ("norm", "hidden")
    assert [(op["m"], op["n"], op["k"]) for op in (up, down)] == [
        ("batch * seq", 4096, "hidden"), ("batch * seq", "hidden", 4096)
    ]  # fmt: skip
    assert gelu["op"] == "elementwise" and gelu["backward"] == pytest.approx(
        2.0 * gelu["passes"], rel=0.1
    )
    assert (values["model"]["seq_len"], values["model"]["hidden_size"]) == (8192, 1024)
    parallelism = values["parallelism"]
    assert (parallelism["microbatches"], parallelism["microbatch_size"]) == (microbatches, 2)
    assert answer["parameters"]["total"] == layers * (2 * 1024 * 4096 + 1024) + 2 * 8000 * 1024


SHAPE, INSIDE = [2, 8, 8192, 128], [2, 8192, 8, 128]
SDPA = {
    "flash": ("_flash_attention_forward", INSIDE, ["", "", "", "0.", "{}", "False", ""]),
    "cudnn": ("_cudnn_attention_forward", SHAPE, ["", "", "", "", "True", "0.", "{}", "False"]),
    "efficient": ("_efficient_attention_forward", INSIDE, ["", "", "", "", "True", "0.", "{}"]),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", SDPA)
def test_attention_has_the_shapes_and_mask_of_the_op_that_was_called(made, backend, causal):
    """Not those of what it calls, whose axes and inputs are in another order."""
    inner, inside, inputs = SDPA[backend]
    inputs = [x.format(causal) for x in inputs]
    wrong = [str(not causal)] * 16
    ops = [(f"aten::_scaled_dot_product_{backend}_attention", [SHAPE] * 3, inputs),
           (f"aten::{inner}", [inside] * 3, wrong)]  # fmt: skip
    _, values, _ = made(profile_made.profile(attention=ops))
    (op,) = [op for op in ops_of(values) if op["op"] == "attention"]
    assert (op["heads"], op["head_dim"], op.get("queries")) == (8, 128, None)
    assert op.get("mask", "causal") == ("causal" if causal else "full")
    names = {"flash": "fa2", "cudnn": "cudnn", "efficient": "efficient"}
    assert values["parallelism"]["attention"] == names[backend]


def test_attention_of_another_package_keeps_its_duration(made):
    """The order of its axes is not known."""
    ops = [("flash_attn::_flash_attn_forward", [INSIDE] * 3)]
    answer, values, _ = made(profile_made.profile(attention=ops))
    (op,) = [op for op in ops_of(values) if op["op"] == "kernel"]
    assert float(op["seconds"]) == pytest.approx(50e-6)
    assert any("attention" in note for note in answer["notes"])


def test_elementwise_kernels_take_the_time_that_they_took(made):
    """Passes are such that a copy of their bytes takes as long on the same device."""
    _, values, _ = made(profile_made.profile())
    gelu = ops_of(values)[2]
    n_bytes = 2.0 * 16384 * 1024 * gelu["passes"]
    copy = prism.kernel("memory", device="h100", bytes=n_bytes)
    assert copy["mean"] == pytest.approx(profile_made.MUL_US * 1e-6, rel=0.01)


def test_without_shapes_kernels_keep_their_durations(made):
    answer, values, job = made(profile_made.profile(shapes=False))
    layers = {x["name"]: x["ops"] for x in values["model"]["layers"]}
    assert {op["op"] for ops in layers.values() for op in ops} == {"kernel"}
    seconds = [op["seconds"] for op in layers["layer"] if op["name"].startswith("mm")]
    assert seconds == pytest.approx([profile_made.MM_US * 1e-6] * 2)
    # all that runs in a step is in the table, the optimizer and sums of gradients too
    step = prism.summary(prism.estimate(job, replicates=64, seed=1))
    kernels = [e for e in profile_made.profile()["traceEvents"] if e["cat"] == "kernel"]
    busy = sum(e["dur"] for e in kernels) * 1e-6 / 4
    assert step["ideal_step_time"] == pytest.approx(busy, rel=0.06)
    assert any("record_shapes" in note for note in answer["notes"])


def test_a_table_moves_to_another_device_batch_and_layout(made, tmp_path):
    *_, job = made(profile_made.profile())

    def step(*changes):
        found = prism.estimate(prism.load_job(job, changes), replicates=64, seed=1)
        return prism.summary(found)["ideal_step_time"]

    own = step()
    assert step("cluster.device=b200", "variability.library=b200-healthy") < 0.8 * own
    # twice the sequences take nearly twice as long
    assert 1.7 < step("parallelism.microbatch_size=4") / own < 2.0
    gpus = ("cluster.nodes=2", "cluster.gpus_per_node=4")
    assert step("parallelism.pp=2", "parallelism.dp=4", *gpus) > 0.0
    with pytest.raises(prism.PrismError, match="split"):
        step("parallelism.tp=2", "parallelism.dp=4", *gpus)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda p: p["traceEvents"].clear(), "trace.json"),
        (lambda p: drop(p, "cpu_op"), "ProfilerActivity.CPU"),
        (lambda p: drop(p, "kernel"), "no device activity"),
        (lambda p: rename(p, "autograd::", "other::"), "no backward"),
        (lambda p: p["deviceProperties"][0].update(name="GPU 9000"), "--device"),
    ],
)
def test_what_makes_no_table_is_refused(made, change, part):
    profile = profile_made.profile(2, 1, 3)
    change(profile)
    err = made(profile, status=2)
    assert part in err and "Traceback" not in err


def drop(profile, category):
    profile["traceEvents"] = [e for e in profile["traceEvents"] if e["cat"] != category]


def rename(profile, old, new):
    for event in profile["traceEvents"]:
        event["name"] = event["name"].replace(old, new)


@pytest.mark.parametrize("options", [["--gpus", "8"], ["--set", "run.steps=3"], ["--from", "nemo"]])
def test_options_of_configurations_are_refused(run, options):
    status, _, err = run("import", "trace.json", "--as-model", *options)
    assert status == 2 and "--as-model" in err


@measured
def test_a_measured_profile_predicts_its_own_period_and_other_devices(tmp_path, run):
    job, bare = tmp_path / "own.yaml", tmp_path / "bare.json"
    status, out, _ = run("import", TRACE, "--as-model", "-o", job, "--json")
    assert status == 0
    assert [x["repeat"] for x in json.loads(out)["layers"]] == [1, 16, 1]
    period = json.loads(run("compare", TRACE, job, "--json")[1])["period"]
    assert period["predicted"] == pytest.approx(period["measured"], rel=0.02)
    nominal = float(draw_steps(job, 64, 1).ideal_step_time)
    assert nominal == pytest.approx(period["predicted"], rel=1e-5)
    known = yaml.safe_load((TRACE.parent / "job.yaml").read_text())
    known["parallelism"] |= yaml.safe_load(job.read_text())["parallelism"]
    for device in ("h200", "b200", "a100"):
        changes = [f"cluster.device={device}", f"variability.library={device}-healthy"]
        own, built_in = (
            float(draw_steps(x, 64, 1).step_time.mean())
            for x in (prism.load_job(job, changes), prism.load_job(known).replace(*changes))
        )
        assert own == pytest.approx(built_in, rel=0.10)
    with gzip.open(TRACE) as file:
        trace = msgspec.json.decode(file.read())
    for event in trace["traceEvents"]:
        for key in ("Input Dims", "Input type", "Concrete Inputs"):
            event.get("args", {}).pop(key, None)
    bare.write_bytes(msgspec.json.encode(trace))
    assert run("import", bare, "--as-model", "-o", job, "-q")[0] == 0
    nominal = float(draw_steps(job, 64, 1).ideal_step_time)
    assert nominal == pytest.approx(period["measured"], rel=0.03)
