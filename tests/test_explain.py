"""`prism explain`: both readings of a gap add up, and name what was changed."""

import json

import pytest

import prism

SMALL = {
    "model": {"n_layers": 8, "hidden_size": 1024, "ffn_size": 4096, "n_heads": 16,
              "vocab_size": 32000, "seq_len": 2048},
    "parallelism": {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4},
    "cluster": {"nodes": 1, "gpus_per_node": 8, "device": "h100"},
}  # fmt: skip


def job(*changes):
    return prism.load_job(SMALL, *changes) if changes else prism.load_job(SMALL)


def explain(a, b, **more):
    return prism.explain(a, b, replicates=64, seed=1, **more)


def adds_up(found):
    """Check terms and changes against the costs of both jobs."""
    figures = found.figures()
    for side in "ab":
        own = figures[side]
        assert own["cost"] == pytest.approx(1e18 / own["flops_per_gpu"])
        total = sum(row[side] for row in figures["terms"])
        assert total == pytest.approx(own.get("measured_cost") or own["cost"], rel=1e-6)
    shares = [row["gap_share"] for row in figures["stages"][1:]]
    assert sum(shares) == pytest.approx(1.0) and figures["stages"][0]["gap_share"] is None
    assert [row["change"] for row in figures["terms"]] == sorted(
        (row["change"] for row in figures["terms"]), key=abs, reverse=True
    )
    return figures


@pytest.mark.parametrize(
    "change, kind, keys",
    [
        ({"parallelism.precision": "fp8"}, "software", {"parallelism.precision"}),
        ({"parallelism.microbatches": 8}, "batch", {"parallelism.microbatches"}),
        ({"model.hidden_size": 2048}, "model", {"model.hidden_size"}),
        ({"parallelism.pp": 1, "parallelism.dp": 4}, "layout and GPUs",
         {"parallelism.pp", "parallelism.dp"}),
        ({"cluster.device": "b200"}, "machine", {"cluster.device", "variability.library"}),
        ({"variability.library": "h100-production"}, "variability", {"variability.library"}),
    ],
)  # fmt: skip
def test_a_change_of_one_kind_is_all_of_the_gap(change, kind, keys):
    figures = adds_up(explain(job(), job(change)))
    (row,) = figures["stages"][1:]
    assert row["change"] == kind and keys <= set(row["keys"].split(", "))
    alone = prism.summary(prism.simulate(job(change), 64, seed=1))
    assert row["step_s"] == figures["b"]["step_s"] == alone["step_time"]["mean"]
    assert figures["b"]["flops_per_gpu"] == alone["model_flops_per_gpu"]


def test_changes_come_one_by_one_where_each_makes_a_job():
    many = {"cluster.device": "b200", "parallelism.precision": "fp8", "parallelism.microbatches": 8}
    found = explain(job(), job(many))
    figures = adds_up(found)
    assert [row["change"] for row in figures["stages"]] == ["A", "machine", "software", "batch"]
    made: dict[str, object] = {}
    for (key, value), row in zip(many.items(), figures["stages"][1:], strict=True):
        made[key] = value
        alone = prism.simulate(job(made), 64, seed=1).figures()
        assert row["flops_per_gpu"] == alone["model_flops_per_gpu"]
    assert found.terms.attrs["fields"]["a"]["unit"] == "s"


def test_what_makes_no_job_alone_goes_together():
    """Ten layers over five stages: neither the model nor the layout alone."""
    a = job({"model.n_layers": 8, "parallelism.vpp": 2})
    b = job({"model.n_layers": 10, "parallelism.pp": 5, "parallelism.dp": 1,
             "parallelism.tp": 1, "cluster.nodes": 1, "cluster.gpus_per_node": 5})  # fmt: skip
    figures = adds_up(explain(a, b))
    listed = [key for row in figures["stages"][1:] for key in row["keys"].split(", ")]
    assert len(listed) == len(set(listed))
    assert {"model.n_layers", "parallelism.pp", "cluster.gpus_per_node"} <= set(listed)


def test_a_job_on_the_way_that_cannot_be_simulated_goes_with_the_next():
    """4 bits on an H100: known only when its kernels are looked up."""
    figures = adds_up(explain(job({"cluster.device": "b200", "parallelism.precision": "nvfp4"}),
                              job()))  # fmt: skip
    assert [row["change"] for row in figures["stages"]] == ["A", "machine, software"]


def test_what_was_measured_leaves_what_is_not_predicted():
    a, b = job(), job({"parallelism.tp": 1, "parallelism.dp": 4})
    plain = explain(a, b).figures()
    step = plain["b"]["step_s"]
    found = explain(a, b, measured_a="100 TFLOP/s", measured_b=2.0 * step)
    figures = adds_up(found)
    assert figures["a"]["measured_flops_per_gpu"] == 1e14
    assert figures["b"]["measured_flops_per_gpu"] == pytest.approx(plain["b"]["flops_per_gpu"] / 2)
    left = found.terms.loc["not_predicted"]
    assert left.b == pytest.approx(plain["b"]["cost"])
    assert left.a == pytest.approx(1e4 - plain["a"]["cost"])
    own = {row["name"]: row for row in plain["terms"]}
    for name, row in found.terms.drop("not_predicted").iterrows():
        assert (row.a, row.b) == (own[name]["a"], own[name]["b"])


def test_two_jobs_that_are_one_have_no_gap():
    figures = explain(job(), job()).figures()
    assert len(figures["stages"]) == 2
    assert all(row["change"] == 0.0 and row["gap_share"] is None for row in figures["terms"])


def test_the_command_gives_the_same_and_its_result_can_be_shown(run, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(json.dumps(SMALL))
    words = ["explain", file, file, "--set-b", "parallelism.microbatches=8", "--measured-b", "9s",
             "--replicates", 64, "--seed", 1, "--json", "-q", "-o", tmp_path / "out"]  # fmt: skip
    status, out, err = run(*words)
    assert status == 0, err
    found = explain(job(), job({"parallelism.microbatches": 8}), measured_b=9.0).figures()
    printed = json.loads(out)
    assert printed["terms"] == found["terms"] and printed["b"]["cost"] == found["b"]["cost"]
    saved = prism.load(tmp_path / "out" / "result.nc")
    assert prism.summary(saved)["stages"] == printed["stages"]
    assert run("report", tmp_path / "out", "-o", tmp_path / "page.html")[0] == 0


@pytest.mark.parametrize(
    "words, place",
    [
        (("pipeline-8x32", "gpt3-175b-512"), "pipeline-8x32"),
        (("gpt3-175b-512", "pipeline-8x32"), "pipeline-8x32"),
        (("gpt3-175b-512", "gpt3-175b-512", "--measured-a", "fast"), "--measured-a"),
        (("gpt3-175b-512", "gpt3-175b-512", "--measured-b", "0TFLOP/s"), "--measured-b"),
        (("gpt3-175b-512", "nowhere.yaml"), "nowhere.yaml"),
        (("gpt3-175b-512", "gpt3-175b-512", "--set-b", "parallelism.tp=3"), "tp"),
    ],
)
def test_what_cannot_be_explained_is_refused(run, words, place):
    status, out, err = run("explain", *words)
    assert (status, out) == (2, "") and place in err and "Traceback" not in err
