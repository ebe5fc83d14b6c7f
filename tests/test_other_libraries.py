"""What an estimate says of the other libraries of its device."""

import prism

JOB = {
    "model": {"n_layers": 4, "hidden_size": 2048, "n_heads": 16, "ffn_size": 8192,
              "vocab_size": 32000, "seq_len": 2048},
    "parallelism": {"pp": 2, "dp": 4, "microbatches": 4},
    "cluster": {"nodes": 1, "device": "h100"},
}  # fmt: skip
MANY = 8192


def figures(job=JOB, replicates=MANY, **variability):
    given = {"variability": variability} if variability else {}
    return prism.summary(prism.estimate(prism.load_job(job | given), replicates=replicates, seed=1))


def test_the_others_are_about_what_their_own_estimate_says():
    found = figures()
    assert found["library"]["name"] == "h100-healthy"
    others = {row["kind"]: row for row in found["library"]["others"]}
    assert set(others) == {"production", "uncurated", "stressed"}
    for kind, row in others.items():
        own = figures(library=row["name"])["step_time"]
        low, high = row["p95_ci"]
        # few draws know little of rare slow GPUs: four half intervals, and 3 %
        assert abs(row["p95"] - own["p95"]) < 2.0 * (high - low) + 0.03 * own["p95"], kind
        assert abs(row["mean"] / own["mean"] - 1.0) < 0.03, kind
        assert row["p95"] > found["step_time"]["p95"]


def test_where_they_are_not_looked_for():
    assert figures(replicates=MANY // 2)["library"]["others"] == []
    own = {"library": "h100-healthy", "effects": {"step": {"cv": 0.01}}}
    assert figures(**own)["library"]["others"] == []
    assert not figures(library="none").get("library")
    two = figures(JOB | {"cluster": {"nodes": 1, "device": "b200"}})["library"]["others"]
    assert [row["name"] for row in two] == ["b200-production"]
